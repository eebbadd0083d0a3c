//! Model-specific registers that a guest may use: a list. Any other register raises #GP, as one
//! that the processor does not have.
//!
//! Registers are direct that belong to the guest alone: its control block has them, or VMSAVE and
//! VMLOAD exchange them, or the hypervisor does not use the feature that they control. Those that
//! describe the machine's setup are read as they are, and writes to them are dropped: every kernel
//! reads them, and some write back the value read. The local APIC's, its base, and EFER are handled
//! elsewhere, regardless of their entries here.

use super::list::{self, range};

/// A register's treatment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The guest uses it without an exit.
    Direct,
    /// The guest reads it without an exit. Writes are dropped.
    ReadDirect,
    /// The guest reads the processor's value, or #GP where it has none. Writes are dropped.
    Shown,
    /// The guest reads 0. Writes are dropped.
    Zero,
    /// The hypervisor has its own answer.
    Own,
    /// #GP.
    Refused,
}

/// Registers, their treatment, and why.
pub type Range = list::Range<u32, Rule>;

/// The list (APM 2, appendix A; and registers that Linux 6.1 and 6.12 use without handling #GP).
pub const LIST: &[Range] = &[
    range(0x10, 0x10, Rule::ReadDirect, "time-stamp counter"),
    range(0x17, 0x17, Rule::Shown, "platform identifier"),
    range(0x1b, 0x1b, Rule::Own, "APIC base"),
    range(0x2a, 0x2a, Rule::Shown, "power-on configuration"),
    range(0x3b, 0x3b, Rule::Zero, "time-stamp adjustment"),
    range(
        0x48,
        0x49,
        Rule::Direct,
        "speculation control, prediction barrier",
    ),
    range(0x8b, 0x8b, Rule::Shown, "microcode's level"),
    range(0xe7, 0xe8, Rule::Shown, "performance clock counters"),
    range(0xfe, 0xfe, Rule::Shown, "memory types: capabilities"),
    range(0x174, 0x176, Rule::Direct, "SYSENTER"),
    range(0x179, 0x17b, Rule::Shown, "machine check"),
    range(0x1a0, 0x1a0, Rule::Shown, "miscellaneous features"),
    range(0x1d9, 0x1d9, Rule::Zero, "debug control"),
    range(0x1db, 0x1de, Rule::Zero, "last branch and exception"),
    range(0x200, 0x20f, Rule::Shown, "memory types: variable ranges"),
    range(0x250, 0x250, Rule::Shown, "memory types: fixed ranges"),
    range(0x258, 0x259, Rule::Shown, "memory types: fixed ranges"),
    range(0x268, 0x26f, Rule::Shown, "memory types: fixed ranges"),
    range(0x277, 0x277, Rule::Direct, "page attribute table"),
    range(0x2ff, 0x2ff, Rule::Shown, "memory types: default"),
    range(0x400, 0x47f, Rule::Shown, "machine check banks"),
    range(0x6a0, 0x6a8, Rule::Direct, "shadow stacks"),
    range(0x800, 0x8ff, Rule::Own, "local APIC"),
    range(0xda0, 0xda0, Rule::Direct, "extended state of supervisors"),
    range(0xc000_0080, 0xc000_0080, Rule::Own, "EFER"),
    range(0xc000_0081, 0xc000_0084, Rule::Direct, "SYSCALL"),
    range(
        0xc000_00e7,
        0xc000_00e8,
        Rule::Shown,
        "performance clock counters",
    ),
    range(0xc000_0100, 0xc000_0102, Rule::Direct, "bases of FS and GS"),
    range(
        0xc000_0103,
        0xc000_0103,
        Rule::Direct,
        "what RDTSCP says of the processor",
    ),
    range(
        0xc000_0408,
        0xc000_040a,
        Rule::Shown,
        "machine check thresholds",
    ),
    range(0xc000_2000, 0xc000_23ff, Rule::Shown, "machine check banks"),
    range(0xc001_0000, 0xc001_0007, Rule::Zero, "performance counters"),
    range(
        0xc001_0010,
        0xc001_0010,
        Rule::Shown,
        "SYSCFG: what memory is",
    ),
    range(0xc001_0015, 0xc001_0015, Rule::Shown, "HWCR"),
    range(0xc001_0016, 0xc001_0019, Rule::Shown, "I/O ranges"),
    range(0xc001_001a, 0xc001_001a, Rule::Shown, "TOP_MEM"),
    range(0xc001_001d, 0xc001_001d, Rule::Shown, "TOP_MEM2"),
    range(0xc001_001f, 0xc001_001f, Rule::Shown, "northbridge"),
    range(
        0xc001_0055,
        0xc001_0055,
        Rule::Shown,
        "message of idle processors",
    ),
    range(
        0xc001_0058,
        0xc001_0058,
        Rule::Zero,
        "base of configuration space in memory",
    ),
    range(0xc001_0061, 0xc001_006b, Rule::Shown, "performance states"),
    range(
        0xc001_0070,
        0xc001_0071,
        Rule::Shown,
        "frequency and voltage",
    ),
    range(
        0xc001_0111,
        0xc001_0113,
        Rule::Refused,
        "system management memory",
    ),
    range(0xc001_0114, 0xc001_0118, Rule::Refused, "SVM"),
    range(
        0xc001_011f,
        0xc001_011f,
        Rule::Direct,
        "speculation control",
    ),
    range(
        0xc001_0140,
        0xc001_0141,
        Rule::Shown,
        "errata that do not apply",
    ),
    range(0xc001_0200, 0xc001_020b, Rule::Zero, "performance counters"),
    range(0xc001_1002, 0xc001_1005, Rule::Shown, "CPUID's words"),
    range(0xc001_100c, 0xc001_100c, Rule::Shown, "node identifier"),
    range(0xc001_1020, 0xc001_102d, Rule::Shown, "units of the core"),
];

/// An access's direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// RDMSR.
    Read,
    /// WRMSR.
    Write,
}

/// Effect of an access that exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is made: a read.
    Real,
    /// The guest reads this.
    Value(u64),
    /// A write has no effect.
    Dropped,
    /// #GP.
    Refused,
    /// The hypervisor has its own answer.
    Own,
}

/// The treatment of a register.
#[must_use]
pub fn rule(register: u32) -> Rule {
    range_of(register).map_or(Rule::Refused, |range| range.rule)
}

/// The range of a register that is on the list.
#[must_use]
pub fn range_of(register: u32) -> Option<Range> {
    let mut ranges = LIST.iter().copied();
    ranges.find(|range| range.contains(register))
}

/// Whether an access to it needs no exit.
#[must_use]
pub fn is_direct(register: u32, access: Access) -> bool {
    match rule(register) {
        Rule::Direct => true,
        Rule::ReadDirect => access == Access::Read,
        _ => false,
    }
}

/// Decides about an access that exited.
#[must_use]
pub fn decide(register: u32, access: Access) -> Answer {
    match (rule(register), access) {
        (Rule::Own, _) => Answer::Own,
        (Rule::Refused, _) => Answer::Refused,
        (Rule::Zero, Access::Read) => Answer::Value(0),
        (_, Access::Read) => Answer::Real,
        // Direct ones do not exit: one that does nevertheless changes nothing.
        (_, Access::Write) => Answer::Dropped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e11c_no_write_that_exits_reaches_the_processor_and_few_do_without() {
        let direct: Vec<u32> = (0..0x1_0000)
            .chain(0xc000_0000..0xc002_0000)
            .filter(|register| is_direct(*register, Access::Write))
            .collect();
        let wanted: Vec<u32> = [
            0x48..=0x49,
            0x174..=0x176,
            0x277..=0x277,
            0x6a0..=0x6a8,
            0xda0..=0xda0,
            0xc000_0081..=0xc000_0084,
            0xc000_0100..=0xc000_0103,
            0xc001_011f..=0xc001_011f_u32,
        ]
        .into_iter()
        .flatten()
        .collect();
        assert_eq!(direct, wanted);
        for register in (0..0x1_0000).chain(0xc000_0000..0xc002_0000) {
            let answer = decide(register, Access::Write);
            assert!(
                matches!(answer, Answer::Dropped | Answer::Refused | Answer::Own),
                "{register:#x}: {answer:?}"
            );
        }
        for register in [0x3000, 0x4b56_4d00, 0x4000_0000, 0xbfff_ffff, u32::MAX] {
            assert_eq!(rule(register), Rule::Refused, "{register:#x}");
        }
    }

    #[test]
    fn each_register_that_is_the_hosts_too_gets_its_answer() {
        use Access::{Read, Write};
        for (register, read, write) in [
            // Debug control, SYSCFG, HWCR, TOP_MEM, memory types, time.
            (0x1d9, Answer::Value(0), Answer::Dropped),
            (0xc001_0010, Answer::Real, Answer::Dropped),
            (0xc001_0015, Answer::Real, Answer::Dropped),
            (0xc001_001a, Answer::Real, Answer::Dropped),
            (0x201, Answer::Real, Answer::Dropped),
            (0x2ff, Answer::Real, Answer::Dropped),
            (0x10, Answer::Real, Answer::Dropped),
            // System management's memory, SVM, microcode.
            (0xc001_0111, Answer::Refused, Answer::Refused),
            (0xc001_0114, Answer::Refused, Answer::Refused),
            (0xc001_0117, Answer::Refused, Answer::Refused),
            (0xc001_0020, Answer::Refused, Answer::Refused),
            // Traps of ports into system management.
            (0xc001_0050, Answer::Refused, Answer::Refused),
            // Counters whose interrupts may be non-maskable.
            (0xc001_0200, Answer::Value(0), Answer::Dropped),
            // The hypervisor's.
            (0xc000_0080, Answer::Own, Answer::Own),
            (0x1b, Answer::Own, Answer::Own),
            (0x830, Answer::Own, Answer::Own),
        ] {
            assert_eq!(decide(register, Read), read, "{register:#x} read");
            assert_eq!(decide(register, Write), write, "{register:#x} written");
        }
        assert!(is_direct(0x10, Read) && !is_direct(0x10, Write));
    }

    #[test]
    fn the_list_is_in_order_and_has_no_register_twice() {
        for pair in LIST.windows(2) {
            assert!(pair[0].last < pair[1].first, "{pair:x?}");
        }
        assert!(LIST.iter().all(|range| range.first <= range.last));
    }
}
