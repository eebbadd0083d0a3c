//! A pause of about a microsecond between two sweeps, as cheap as the CPU can make it.
//!
//! | CPU | instruction | ends early at a store to the line given |
//! |---|---|---|
//! | WAITPKG (CPUID 7.0:ECX\[5\]) | `umonitor`, `umwait` in C0.1 | yes |
//! | MONITORX (CPUID 8000_0001:ECX\[29\]) | `monitorx`, `mwaitx` with its timer | yes |
//! | any x86 | 32 × `pause` | no |
//! | other | 32 × the standard library's spin hint | no |
//!
//! The first two leave the core's resources to its sibling thread and save power. One line can be
//! watched, and there are many sources: the mailbox's line is the one given, the rest is seen at
//! the latest when the pause ends. Detected once, at run time. `tpause` is `umwait` without a line:
//! not used.
//!
//! UNSAFETY: the instructions have no stable intrinsic. They read no memory the program can see,
//! write none, and are reached only if CPUID offers them.
#![expect(
    unsafe_code,
    reason = "instructions without stable intrinsics; see the head comment"
)]

use std::hint;

/// Longest duration of one pause, in nanoseconds.
#[cfg(target_arch = "x86_64")]
const PAUSE_NS: u64 = 1_000;
/// `pause` takes 14 to 45 ns.
const PLAIN_PAUSES: u32 = 32;

/// Instruction of this CPU for a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    #[cfg(target_arch = "x86_64")]
    Umwait {
        ticks: u32,
    },
    #[cfg(target_arch = "x86_64")]
    Mwaitx {
        ticks: u32,
    },
    Plain,
}

impl Pause {
    /// Asks CPUID; measures the TSC (about 0.2 ms) if there is something to use it for.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if x86::has_waitpkg() {
                return Pause::Umwait {
                    ticks: x86::tsc_ticks(PAUSE_NS),
                };
            }
            if x86::has_monitorx() {
                return Pause::Mwaitx {
                    ticks: x86::tsc_ticks(PAUSE_NS),
                };
            }
        }
        Pause::Plain
    }

    /// Pauses until `line` is written, where the CPU can watch it, and for about 1 µs at most.
    pub(crate) fn pause<T>(self, line: &T, is_still_idle: impl FnOnce() -> bool) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Pause::Umwait { ticks } => {
                // SAFETY: `detect` saw WAITPKG; `line` is a live reference.
                unsafe { x86::umonitor(std::ptr::from_ref(line).cast()) };
                // A store before the monitor was set does not end the wait: re-check.
                if is_still_idle() {
                    // SAFETY: as above.
                    unsafe { x86::umwait(ticks) };
                }
            }
            #[cfg(target_arch = "x86_64")]
            Pause::Mwaitx { ticks } => {
                // SAFETY: `detect` saw MONITORX; `line` is a live reference.
                unsafe { x86::monitorx(std::ptr::from_ref(line).cast()) };
                if is_still_idle() {
                    // SAFETY: as above.
                    unsafe { x86::mwaitx(ticks) };
                }
            }
            Pause::Plain => {
                let _ = (line, is_still_idle);
                (0..PLAIN_PAUSES).for_each(|_| hint::spin_loop());
            }
        }
    }

    /// Returns the instruction's name, for reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Pause::Umwait { .. } => "umwait",
            #[cfg(target_arch = "x86_64")]
            Pause::Mwaitx { .. } => "mwaitx",
            Pause::Plain => "pause",
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::{
        arch::{
            asm,
            x86_64::{__cpuid, __cpuid_count, _rdtsc},
        },
        hint,
    };

    use crate::clock::Nanos;

    #[allow(
        unused_unsafe,
        reason = "CPUID is a safe function in newer compilers only"
    )]
    pub(super) fn has_waitpkg() -> bool {
        // SAFETY: every x86-64 CPU has CPUID.
        unsafe { __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ecx & (1 << 5) != 0 }
    }

    #[allow(
        unused_unsafe,
        reason = "CPUID is a safe function in newer compilers only"
    )]
    pub(super) fn has_monitorx() -> bool {
        // SAFETY: every x86-64 CPU has CPUID.
        unsafe {
            __cpuid(0x8000_0000).eax >= 0x8000_0001 && __cpuid(0x8000_0001).ecx & (1 << 29) != 0
        }
    }

    /// Returns the TSC ticks in `ns`, measured over 0.2 ms: accurate to a percent, which suffices
    /// here.
    pub(super) fn tsc_ticks(ns: u64) -> u32 {
        const WINDOW_NS: u64 = 200_000;
        // SAFETY: every x86-64 CPU has RDTSC, and Linux lets ring 3 use it.
        let tsc = || unsafe { _rdtsc() };
        let (start, start_tsc) = (Nanos::now(), tsc());
        let elapsed = loop {
            hint::spin_loop();
            let elapsed = Nanos::now().since(start);
            if elapsed >= WINDOW_NS {
                break elapsed;
            }
        };
        let ticks =
            u128::from(tsc().wrapping_sub(start_tsc)) * u128::from(ns) / u128::from(elapsed);
        u32::try_from(ticks).unwrap_or(u32::MAX)
    }

    /// # Safety
    /// The CPU has WAITPKG; `line` points to mapped memory.
    pub(super) unsafe fn umonitor(line: *const u8) {
        // SAFETY: the caller's; the instruction only sets up the monitor.
        unsafe { asm!("umonitor {}", in(reg) line, options(nostack, preserves_flags)) };
    }

    /// # Safety
    /// The CPU has WAITPKG.
    pub(super) unsafe fn umwait(ticks: u32) {
        // SAFETY: every x86-64 CPU has RDTSC.
        let deadline = unsafe { _rdtsc() }.wrapping_add(u64::from(ticks));
        // SAFETY: the caller's. Bit 0 set: C0.1, the shallow state. Changes only the flags.
        unsafe {
            asm!(
                "umwait {control:e}",
                control = in(reg) 1u32,
                in("eax") deadline as u32,
                in("edx") (deadline >> 32) as u32,
                options(nostack),
            );
        }
    }

    /// # Safety
    /// The CPU has MONITORX; `line` points to mapped memory.
    pub(super) unsafe fn monitorx(line: *const u8) {
        // SAFETY: the caller's. ECX and EDX carry extensions and hints: none.
        unsafe {
            asm!(
                "monitorx",
                in("rax") line,
                in("ecx") 0u32,
                in("edx") 0u32,
                options(nostack, preserves_flags),
            );
        }
    }

    /// # Safety
    /// The CPU has MONITORX.
    pub(super) unsafe fn mwaitx(ticks: u32) {
        // SAFETY: the caller's. EAX = 0xf0: stay in C0; ECX bit 1: the timer in EBX, which the
        // compiler keeps for itself, hence the exchange.
        unsafe {
            asm!(
                "xchg {timer:r}, rbx",
                "mwaitx",
                "xchg {timer:r}, rbx",
                timer = inout(reg) u64::from(ticks) => _,
                in("eax") 0xf0u32,
                in("ecx") 2u32,
                options(nostack, preserves_flags),
            );
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::clock::Nanos;

    #[test]
    fn a_pause_of_this_cpu_ends_within_a_millisecond() {
        let pause = Pause::detect();
        let line = 0u64;
        let best = (0..100)
            .map(|_| {
                let start = Nanos::now();
                pause.pause(&line, || true);
                Nanos::now().since(start)
            })
            .min();
        println!("{}: {best:?} ns", pause.name());
        assert!(best < Some(1_000_000), "{best:?}");
    }

    #[test]
    fn a_pause_is_skipped_when_the_line_has_changed_already() {
        let mut asked = false;
        let pause = Pause::detect();
        pause.pause(&0u64, || {
            asked = true;
            false
        });
        assert!(asked || pause == Pause::Plain);
    }
}
