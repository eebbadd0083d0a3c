//! Registers that control the guest's own processor: EFER, CR0 and CR4, by which its mode goes (APM
//! 2, §14.6), and DR7.
//!
//! The mode decides the format of the interrupt descriptor table: in long mode, compatibility mode
//! included, a gate has 16 bytes, else 8 or 4. The limit that keeps the host's class out of the
//! guest's table is computed for long mode, so a guest that is not in long mode is never in direct
//! mode, and the mode is re-checked whenever one of the three registers changes.

/// DR7 for a processor that must not meet data breakpoints: the guest's, with those that are not at
/// instructions switched off.
///
/// On hardware such a breakpoint that is met by its own exception's delivery recurs without an end,
/// and #DB exits for that. QEMU's emulation (10.0.2) ends itself when a data breakpoint is met by a
/// delivery: there the guest reads back the value that it wrote, and gets no breakpoint.
#[must_use]
pub const fn without_data_breakpoints(control: u64) -> u64 {
    let mut real = control;
    let mut number = 0;
    while number < 4 {
        let condition = control >> (16 + 4 * number) & 3;
        if condition != 0 {
            real &= !(3 << (2 * number));
        }
        number += 1;
    }
    real
}

/// In EFER: system calls.
const SCE: u64 = 1;
/// There: long mode is to be entered with paging.
const LME: u64 = 1 << 8;
/// There: long mode is active.
const LMA: u64 = 1 << 10;
/// There: pages may be marked as not executable.
const NXE: u64 = 1 << 11;
/// There: FXSAVE and FXRSTOR may leave out the SSE registers; a TLB entry's translation ends alone.
const FFXSR_TCE: u64 = 1 << 14 | 1 << 15;

/// In CR0: protection, paging.
const PE: u64 = 1;
const PG: u64 = 1 << 31;
/// In CR4: entries of 8 bytes, five levels.
const PAE: u64 = 1 << 5;
const LA57: u64 = 1 << 12;

/// EFER after a write of the guest's, to which SVM's own bit is not shown; `None`: #GP (APM 2,
/// §3.1.7).
///
/// With paging on, LME cannot change, and LMA is set by the processor.
#[must_use]
pub const fn efer(old: u64, new: u64, cr0: u64) -> Option<u64> {
    let changed = old ^ new;
    let is_reserved = new & !(SCE | LME | LMA | NXE | FFXSR_TCE) != 0;
    if is_reserved || changed & LMA != 0 || changed & LME != 0 && cr0 & PG != 0 {
        None
    } else {
        Some(new)
    }
}

/// Levels of the page tables of long mode, 4 or 5; `None` where the processor is not in long mode,
/// or in a state that the manual does not have.
#[must_use]
pub const fn long_mode_levels(efer: u64, cr0: u64, cr4: u64) -> Option<u8> {
    let is_long = efer & (LME | LMA) == LME | LMA && cr0 & (PE | PG) == PE | PG && cr4 & PAE != 0;
    match (is_long, cr4 & LA57 != 0) {
        (false, _) => None,
        (true, false) => Some(4),
        (true, true) => Some(5),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A write to one of the registers.
    #[derive(Clone, Copy, Debug)]
    enum Write {
        Efer(u64),
        Cr0(u64),
        Cr4(u64),
    }

    /// Model of the guest's processor according to the manual: it sets LMA, and refuses invalid
    /// writes itself.
    #[derive(Clone, Copy, Debug, Default)]
    struct Processor {
        efer: u64,
        cr0: u64,
        cr4: u64,
    }

    impl Processor {
        /// Whether the write is #GP.
        fn write(&mut self, write: Write) -> bool {
            match write {
                Write::Efer(value) => match efer(self.efer, value, self.cr0) {
                    Some(value) => self.efer = value,
                    None => return true,
                },
                Write::Cr0(value) => {
                    let is_bad = value & PG != 0 && value & PE == 0
                        || value & PG != 0 && self.efer & LME != 0 && self.cr4 & PAE == 0;
                    if is_bad {
                        return true;
                    }
                    self.cr0 = value;
                    let is_long = self.efer & LME != 0 && value & PG != 0;
                    self.efer = self.efer & !LMA | if is_long { LMA } else { 0 };
                }
                Write::Cr4(value) => {
                    if self.efer & LMA != 0 && (value & PAE == 0 || (value ^ self.cr4) & LA57 != 0)
                    {
                        return true;
                    }
                    self.cr4 = value;
                }
            }
            false
        }

        fn levels(&self) -> Option<u8> {
            long_mode_levels(self.efer, self.cr0, self.cr4)
        }
    }

    #[test]
    fn the_modes_of_the_manual_are_walked_and_only_long_mode_has_a_shadow() {
        use Write::{Cr0, Cr4, Efer};
        const SMEP: u64 = 1 << 20;
        let walk = [
            // Real mode; EFER may be prepared anywhere without paging.
            (Efer(NXE | SCE), false, None),
            (Efer(LME), false, None),
            (Efer(0), false, None),
            (Efer(LMA), true, None),
            (Efer(LME | LMA), true, None),
            (Efer(1 << 12), true, None),
            (Efer(1 << 63), true, None),
            // Protected mode, without paging, with two levels, with PAE.
            (Cr0(PE), false, None),
            (Cr0(PE | PG), false, None),
            (Efer(LME), true, None),
            (Efer(NXE), false, None),
            (Cr0(PE), false, None),
            (Cr4(PAE), false, None),
            (Cr0(PE | PG), false, None),
            (Efer(NXE | LME), true, None),
            (Efer(NXE | LMA), true, None),
            (Cr0(PE), false, None),
            // Long mode: compatibility mode first, which has its gates; 64-bit mode is a matter of
            // segments.
            (Efer(NXE | LME), false, None),
            (Cr0(PE | PG), false, Some(4)),
            (Efer(NXE | LME | LMA | SCE), false, Some(4)),
            (Efer(LME | LMA), false, Some(4)),
            (Efer(LME | LMA | FFXSR_TCE), false, Some(4)),
            (Efer(0), true, Some(4)),
            (Efer(NXE), true, Some(4)),
            (Efer(LME), true, Some(4)),
            (Efer(LMA), true, Some(4)),
            (Efer(LME | LMA | 1 << 12), true, Some(4)),
            (Cr4(PAE | SMEP), false, Some(4)),
            (Cr4(SMEP), true, Some(4)),
            (Cr4(PAE | LA57), true, Some(4)),
            (Cr0(PE | PG | 1 << 16), false, Some(4)),
            // Out, by switching paging off, and in again with five levels.
            (Cr0(PE), false, None),
            (Cr4(PAE | LA57), false, None),
            (Cr0(PE | PG), false, Some(5)),
            (Cr0(PE), false, None),
            (Cr4(LA57), false, None),
            (Cr0(PE | PG), true, None),
            (Efer(0), false, None),
            (Cr0(PE | PG), false, None),
            (Cr0(0), false, None),
        ];
        let mut processor = Processor::default();
        for (step, (write, is_refused, levels)) in walk.into_iter().enumerate() {
            let before = processor.levels();
            assert_eq!(
                processor.write(write),
                is_refused,
                "step {step}: {write:x?}"
            );
            assert_eq!(processor.levels(), levels, "step {step}: {write:x?}");
            assert!(!is_refused || before == levels, "step {step}: {write:x?}");
        }
    }

    #[test]
    fn no_write_of_efer_leaves_or_enters_long_mode() {
        // For any write, from each state: under paging the mode is unchanged, and without it not
        // long.
        let bits = [SCE, LME, LMA, NXE, 1 << 12, 1 << 13, FFXSR_TCE];
        let sets = |index: usize| {
            let chosen = bits
                .iter()
                .enumerate()
                .filter(|(bit, _)| index >> bit & 1 != 0);
            chosen.fold(0, |all, (_, bit)| all | bit)
        };
        for (old, cr0) in [(0, PE), (LME, PE), (0, PE | PG), (LME | LMA, PE | PG)] {
            for new in (0..1 << bits.len()).map(sets) {
                let before = long_mode_levels(old, cr0, PAE);
                let Some(value) = efer(old, new, cr0) else {
                    continue;
                };
                assert_eq!(long_mode_levels(value, cr0, PAE), before, "{old:x} {new:x}");
                assert_eq!((value ^ old) & LMA, 0);
                assert_eq!(value & !(SCE | LME | LMA | NXE | FFXSR_TCE), 0);
            }
        }
    }

    #[test]
    fn states_that_the_manual_does_not_have_are_not_long_mode() {
        // QEMU lets a guest clear PAE in long mode; and values loaded in other ways are arbitrary.
        let long = (LME | LMA, PE | PG, PAE);
        assert_eq!(long_mode_levels(long.0, long.1, long.2), Some(4));
        for (efer, cr0, cr4) in [
            (LME | LMA, PE | PG, 0),
            (LMA, PE | PG, PAE),
            (LME, PE | PG, PAE),
            (LME | LMA, PE, PAE),
            (LME | LMA, PG, PAE),
        ] {
            assert_eq!(long_mode_levels(efer, cr0, cr4), None);
        }
    }

    #[test]
    fn breakpoints_at_instructions_alone_stay_enabled() {
        for number in 0..4 {
            for (condition, stays) in [(0, true), (1, false), (2, false), (3, false)] {
                let control = 0x400 | 3 << (2 * number) | condition << (16 + 4 * number);
                let enabled = without_data_breakpoints(control) >> (2 * number) & 3 == 3;
                assert_eq!(enabled, stays, "breakpoint {number}, condition {condition}");
                // The others, and the conditions, are as they were.
                let rest = !(3 << (2 * number));
                assert_eq!(without_data_breakpoints(control) & rest, control & rest);
            }
        }
        assert_eq!(without_data_breakpoints(0x400), 0x400);
    }
}
