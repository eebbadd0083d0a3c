//! Attack surface of a guest that has real interrupt hardware: everything that it can use, the harm
//! that it could do by it, its containment, and the test that shows it. docs/eli.md has the same
//! table; a test compares the two.
//!
//! A row without a test is not contained, and a hypervisor counts those rows at its start. A test
//! is the name of a payload of `eli-attacks`, which is run without the row's defences, where it
//! must succeed, with them, and calm. Payloads of rows that only the architecture contains are
//! honest, and are run with all defences: they must succeed.

use core::fmt;

use crate::defence::Defence::{self, *};

/// Part of the surface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Control registers and flags.
    Control,
    /// Model-specific registers.
    Msrs,
    /// Descriptors, stacks and page tables, which the delivery of an event reads and writes.
    Delivery,
    /// Events that recur while they are delivered.
    Recurring,
    /// Instructions.
    Instructions,
    /// Interrupts, by source, trigger, delivery, destination, class and rate.
    Interrupts,
    /// Ports.
    Ports,
    /// Configuration space.
    Config,
    /// Devices' own accesses to memory.
    Dma,
}

impl Part {
    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Control => "control registers, flags",
            Self::Msrs => "model-specific registers",
            Self::Delivery => "descriptors, stacks, page tables",
            Self::Recurring => "recurring events",
            Self::Instructions => "instructions",
            Self::Interrupts => "interrupts",
            Self::Ports => "ports",
            Self::Config => "configuration space",
            Self::Dma => "DMA",
        }
    }
}

/// Containment of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contained {
    /// These defences; without all of them the tests' attacks succeed.
    By(&'static [Defence]),
    /// The architecture: the guest's own state alone, or virtual.
    Virtual(&'static str),
    /// Not contained, or without a test: the reason.
    Not(&'static str),
}

/// A row.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Part of the surface.
    pub part: Part,
    /// Feature that the guest uses.
    pub uses: &'static str,
    /// Harm that the guest could do by it.
    pub takes: &'static str,
    /// Its containment.
    pub contained: Contained,
    /// Names of the payloads that test it.
    pub tests: &'static [&'static str],
}

impl Row {
    /// Whether a test shows it.
    #[must_use]
    pub const fn is_tested(&self) -> bool {
        !self.tests.is_empty()
    }

    /// The defences that contain it.
    #[must_use]
    pub const fn defences(&self) -> &'static [Defence] {
        match self.contained {
            Contained::By(defences) => defences,
            Contained::Virtual(_) | Contained::Not(_) => &[],
        }
    }
}

/// The row as a line of docs/eli.md's table.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "| {} | {} | {} | ",
            self.part.name(),
            self.uses,
            self.takes
        )?;
        match self.contained {
            Contained::By(defences) => list(f, defences.iter().map(|one| one.name()))?,
            Contained::Virtual(how) => f.write_str(how)?,
            Contained::Not(why) => write!(f, "**not contained**: {why}")?,
        }
        f.write_str(" | ")?;
        list(f, self.tests.iter().copied())?;
        f.write_str(" |")
    }
}

fn list(f: &mut fmt::Formatter<'_>, names: impl Iterator<Item = &'static str>) -> fmt::Result {
    for (index, name) in names.enumerate() {
        write!(f, "{}`{name}`", if index == 0 { "" } else { " " })?;
    }
    Ok(())
}

/// The row that a payload tests.
#[must_use]
pub fn row_of(test: &str) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.tests.contains(&test))
}

/// Rows that have a test.
#[must_use]
pub fn tested() -> usize {
    ROWS.iter().filter(|row| row.is_tested()).count()
}

const fn by(
    part: Part,
    uses: &'static str,
    takes: &'static str,
    defences: &'static [Defence],
    tests: &'static [&'static str],
) -> Row {
    Row {
        part,
        uses,
        takes,
        contained: Contained::By(defences),
        tests,
    }
}

const fn virt(
    part: Part,
    uses: &'static str,
    takes: &'static str,
    how: &'static str,
    tests: &'static [&'static str],
) -> Row {
    Row {
        part,
        uses,
        takes,
        contained: Contained::Virtual(how),
        tests,
    }
}

const fn not(part: Part, uses: &'static str, takes: &'static str, why: &'static str) -> Row {
    Row {
        part,
        uses,
        takes,
        contained: Contained::Not(why),
        tests: &[],
    }
}

use Part::{Config, Control, Delivery, Dma, Instructions as Instruction, Interrupts, Msrs as Msr};

/// The table.
pub const ROWS: &[Row] = &[
    by(
        Control,
        "IF clear for ever, halted or not; IF set only in the shadow of STI",
        "the processor",
        &[Watchdog],
        &["e2", "e2shadow", "e2halt"],
    ),
    by(
        Control,
        "IF clear by turns, and set whenever the watchdog looks",
        "most of the host's ticks",
        &[Masking],
        &["e2turns", "e2phase"],
    ),
    by(
        Control,
        "CR8, the task priority register",
        "the host's ticks",
        &[Priority],
        &["e7", "e7tpr"],
    ),
    by(
        Control,
        "EFER written under paging: long mode is off, or neither on nor off",
        "the host's interrupts: gates of 8 bytes lie below a limit for 16",
        &[Modes],
        &["modes_efer", "modes_compat"],
    ),
    virt(
        Control,
        "CR0, CR4, EFER by the rules: long mode left and entered again",
        "nothing",
        "injection while there is no table to shadow",
        &["legacy"],
    ),
    not(
        Control,
        "TF, RF, the shadow of MOV SS",
        "a single step of the hypervisor's",
        "no test",
    ),
    by(
        Msr,
        "debug control, SYSCFG, memory types, the time-stamp counter, and all that are on no list",
        "what memory is for the host, its clock, its branch records",
        &[Msrs],
        &["msr_debugctl", "msr_syscfg", "msr_mtrr", "msr_tsc"],
    ),
    virt(
        Msr,
        "APIC base, SVM's, EFER.SVME",
        "the local APIC, the hypervisor's own instructions",
        "refused, or kept as it is",
        &["fixed"],
    ),
    by(
        Delivery,
        "an event whose stack, gate or page tables lie where the guest has no memory",
        "the processor: the exit repeats without end, and nothing of the host's is taken",
        &[Combine, Window],
        &["e1stack", "e1gate", "e1tables"],
    ),
    by(
        Delivery,
        "page tables: another page in the interrupt table's place, without LIDT",
        "the host's interrupts",
        &[Limit],
        &["e3"],
    ),
    by(
        Delivery,
        "gates: INT of the host's vector; the own gate of an assigned vector absent",
        "forged ticks; reflected and injected for ever",
        &[Reflection],
        &["e6", "gate"],
    ),
    by(
        Delivery,
        "no interrupt table: a triple fault",
        "the other core's work, with the machine",
        &[End],
        &["triple"],
    ),
    by(
        Part::Recurring,
        "a data breakpoint in the frame of its own exception",
        "the processor, which stays in microcode; this emulator ends",
        &[Recurring],
        &["db"],
    ),
    not(
        Part::Recurring,
        "#AC while it is delivered",
        "the processor, likewise",
        "it exits, but this emulator raises none, so no test",
    ),
    by(
        Instruction,
        "INVD; MONITOR and MWAIT",
        "what the caches hold of the host's; a sleep of the guest's choice",
        &[Instructions],
        &["invd", "mwait"],
    ),
    virt(
        Instruction,
        "SVM's, RSM",
        "the hypervisor's place",
        "undefined, as CPUID says",
        &["fixed"],
    ),
    not(
        Instruction,
        "task switches (32-bit mode)",
        "nothing known",
        "this emulator does not exit on one, so no test",
    ),
    virt(
        Instruction,
        "WBINVD, HLT",
        "time, until the next interrupt of the host's",
        "allowed; interrupts of the host's end a halt",
        &["halts"],
    ),
    by(
        Interrupts,
        "commands: INIT, NMI, to another processor",
        "the other core",
        &[Commands],
        &["e8init", "e8nmi"],
    ),
    by(
        Interrupts,
        "commands of one of two processors: fixed, NMI, INIT, SMI, at a core or an identifier that \
         is not the guest's",
        "the other core, its clock",
        &[Commands],
        &["ipi_watcher", "ipi_init"],
    ),
    by(
        Interrupts,
        "commands at its other processor: a vector of the host's class",
        "forged ticks; the host's messages",
        &[Messages],
        &["ipi_other"],
    ),
    by(
        Interrupts,
        "messages by memory: a write where local APICs have registers",
        "NMIs on the other core",
        &[Pages],
        &["e8memory"],
    ),
    virt(
        Interrupts,
        "to oneself and the local timer's, of the host's class, edges, never ended",
        "the host's ticks",
        "ended at the real local APIC when they are acknowledged, in service virtually",
        &["class_self", "class_lvt"],
    ),
    by(
        Interrupts,
        "the local vector table: LINT0 as NMI",
        "forged NMIs; the host's ticks, whose place they take",
        &[Lvt],
        &["e9lint0"],
    ),
    by(
        Interrupts,
        "the local timer with the host's vector",
        "forged ticks",
        &[Messages],
        &["e9timer"],
    ),
    by(
        Interrupts,
        "the local timer with a period of next to nothing",
        "the host's ticks, on this emulator the other core's too",
        &[Period],
        &["period"],
    ),
    virt(
        Interrupts,
        "the 8254 with a period of next to nothing",
        "the host's ticks, where this emulator has no processor for its timers",
        "a least period",
        &["period_chip"],
    ),
    by(
        Interrupts,
        "I/O APIC: levels of the host's class, broadcasts, the other core's vector",
        "the host's ticks; interrupts on the other core, its clock",
        &[Messages],
        &["level_pin", "broadcast_pin", "broadcast_beat"],
    ),
    by(
        Interrupts,
        "MSI-X: levels, the host's vector, the other core, broadcasts",
        "the host's ticks, forged ticks; interrupts on the other core",
        &[Messages],
        &["level_message", "e10vector", "e10cpu", "broadcast_message"],
    ),
    by(
        Interrupts,
        "assigned vectors never ended, one or by turns",
        "what is of a lower class",
        &[Service],
        &["e4", "e4turns"],
    ),
    virt(
        Interrupts,
        "honest use: to oneself, nested, the host's vector; handlers that take long",
        "nothing; direct again within a second",
        "delivered as on a machine",
        &["e1", "e5", "moved", "ipi", "longhandler", "busyhandler"],
    ),
    virt(
        Interrupts,
        "8259: vectors of the host's class, as external interrupts",
        "forged ticks, the host's ticks",
        "its vectors are looked at where they are set",
        &["pic"],
    ),
    by(
        Part::Ports,
        "system management",
        "the guest's processor in firmware's hands, and an exit that nothing answers",
        &[Ports, Instructions],
        &["smi"],
    ),
    by(
        Part::Ports,
        "resets, keyboard controller, A20",
        "the machine; with A20 hidden memory, and the host's clock",
        &[Ports],
        &["fastreset", "resetport", "kbd", "a20"],
    ),
    by(
        Part::Ports,
        "firmware's configuration device, which copies to any address",
        "the hypervisor's memory",
        &[Ports],
        &["fwcfg"],
    ),
    by(
        Part::Ports,
        "power off",
        "the other core's work, with the machine",
        &[End],
        &["poweroff"],
    ),
    by(
        Config,
        "bridges: the window of configuration space, the base of the power ports",
        "the hypervisor's memory; its last word",
        &[Defence::Config],
        &["ecam", "powerbase"],
    ),
    by(
        Config,
        "devices: BARs moved, messages of one that is not assigned",
        "NMIs on the other core",
        &[Defence::Config],
        &["bar", "otherdevice"],
    ),
    by(
        Dma,
        "addresses in the assigned device's commands; messages that name an entry",
        "the hypervisor's memory; NMIs on the other core",
        &[Defence::Dma],
        &["e11", "e12"],
    ),
    by(
        Dma,
        "addresses in the block function's ring, whose data a core of the host's copies",
        "the hypervisor's memory",
        &[Ring],
        &["ring_memory"],
    ),
    virt(
        Dma,
        "rings that loop, jump, wrap, overflow, or lie where the guest has no memory",
        "the core that polls",
        "each step of a walk is bounded and checked; the function wants a reset",
        &["ring_bounds"],
    ),
    not(
        Dma,
        "messages of the device as they are (compatibility format)",
        "NMIs on the other core",
        "blocked in x2APIC mode by hardware; this emulator's IOMMU lets them pass, as its HPET's",
    ),
    not(
        Dma,
        "firmware: its handlers of system management",
        "the machine",
        "trusted",
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A file of the repository's.
    fn file(path: &str) -> String {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        std::fs::read_to_string(std::format!("{root}/{path}")).unwrap()
    }

    #[test]
    fn documentation_shows_this_table_and_no_other_row() {
        let docs = file("docs/eli.md");
        let shown: Vec<&str> = docs
            .lines()
            .skip_while(|line| *line != "<!-- surface -->")
            .skip(3)
            .take_while(|line| line.starts_with('|'))
            .collect();
        let rows: Vec<String> = ROWS.iter().map(ToString::to_string).collect();
        if shown != rows {
            println!("{}", rows.join("\n"));
        }
        assert_eq!(shown, rows, "docs/eli.md shows another table than this one");
    }

    #[test]
    fn every_test_of_a_row_is_a_payload_and_every_payload_tests_a_row() {
        let payloads = file("bin/exitless-hv/attacks/src/main.rs");
        let list = payloads.split("const PAYLOADS").nth(1).unwrap();
        let list = list.split("];").next().unwrap();
        let payloads: BTreeSet<&str> = list
            .lines()
            .filter_map(|line| line.trim().strip_prefix("(\"")?.split('"').next())
            .collect();
        let tests: BTreeSet<&str> = ROWS.iter().flat_map(|row| row.tests).copied().collect();
        assert!(payloads.len() > 40);
        assert_eq!(tests, payloads);
    }

    #[test]
    fn every_defence_contains_a_row_that_is_tested() {
        for defence in Defence::ALL {
            let shows = |row: &&Row| row.is_tested() && row.defences().contains(&defence);
            assert!(ROWS.iter().any(|row| shows(&row)), "{defence:?}");
        }
    }

    #[test]
    fn a_row_without_a_test_says_that_it_is_not_contained() {
        for row in ROWS {
            let is_not = matches!(row.contained, Contained::Not(_));
            assert_eq!(row.is_tested(), !is_not, "{row}");
        }
        assert!(tested() < ROWS.len());
    }
}
