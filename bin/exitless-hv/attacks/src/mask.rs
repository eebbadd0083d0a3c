//! Masking interrupts: for ever (e2, e2shadow, e2halt), by turns (e2turns, e2phase), by priority
//! (e7, e7tpr).

use core::arch::asm;

use bare::{apic, processor::cycles};

use crate::interrupts::{self, OWN};
use crate::{Run, WINDOW_MS, time};

/// The period of the host's watchdog, milliseconds.
const WATCHDOG_MS: u64 = 20;

/// Spins for ever with interrupts off.
pub fn e2(run: &Run) {
    spin(run, || {
        interrupts::set_enabled(false);
        loop {
            core::hint::spin_loop();
        }
    });
}

/// Spins for ever with interrupts on, as the flag says, but only in the shadow of the instruction
/// that sets it: none is ever taken.
pub fn e2shadow(run: &Run) {
    spin(run, || {
        // SAFETY: no register, memory or stack is touched, and it does not return.
        unsafe {
            asm!(
                "cli",
                "2: sti",
                "cli",
                "jmp 2b",
                options(noreturn, nomem, nostack)
            )
        }
    });
}

/// Halts for ever with interrupts off.
pub fn e2halt(run: &Run) {
    spin(run, || bare::processor::stop());
}

fn spin(run: &Run, for_ever: impl Fn()) {
    run.result(format_args!("spinning"));
    run.measured(|| {
        if run.is_calm {
            time::wait(WINDOW_MS);
        } else {
            for_ever();
        }
    });
    run.result(format_args!("ended=1"));
}

/// Masks them for less than five periods of the watchdog, again and again, with a moment between.
pub fn e2turns(run: &Run) {
    by_turns(run, || (9 * WATCHDOG_MS / 2, 1));
}

/// Masks them for the most of each period, and has them on when the watchdog looks.
pub fn e2phase(run: &Run) {
    const ON_MS: u64 = 4;
    let phase = watchdog_phase();
    by_turns(run, || {
        let now = time::now_ms() % WATCHDOG_MS;
        let until_look = (phase + WATCHDOG_MS - now) % WATCHDOG_MS;
        (until_look.saturating_sub(ON_MS / 2), ON_MS)
    });
}

/// At which millisecond of its period the watchdog looks: with interrupts masked, time is lost then
/// and not otherwise. Masked for less than five of its periods.
fn watchdog_phase() -> u64 {
    let mut lost = [0_u64; WATCHDOG_MS as usize];
    interrupts::set_enabled(false);
    let (start, mut last) = (time::now_ms(), cycles());
    while time::now_ms() - start < 4 * WATCHDOG_MS {
        let now = cycles();
        let bin = &mut lost[(time::now_ms() % WATCHDOG_MS) as usize];
        *bin += u64::from(now - last > time::cycles_per_ms() / 50);
        last = now;
    }
    interrupts::set_enabled(true);
    let most = lost.iter().enumerate().max_by_key(|(_, times)| **times);
    most.map_or(0, |(bin, _)| bin as u64)
}

/// For two windows. `turn`: milliseconds off, and on.
fn by_turns(run: &Run, turn: impl Fn() -> (u64, u64)) {
    let turns = run.measured(|| {
        let start = time::now_ms();
        let mut turns = 0;
        while time::now_ms() - start < 2 * WINDOW_MS {
            let (off, on) = turn();
            interrupts::set_enabled(run.is_calm);
            time::wait(off);
            interrupts::set_enabled(true);
            time::wait(on);
            turns += 1;
        }
        turns
    });
    run.result(format_args!("turns={turns}"));
}

/// A second at the highest priority, by its control register.
pub fn e7(run: &Run) {
    masked(run, |class| {
        // SAFETY: it keeps interrupts out, at most; all vectors have handlers.
        unsafe { asm!("mov cr8, {}", in(reg) class, options(nostack)) }
    });
}

/// The same, by the local APIC's register.
pub fn e7tpr(run: &Run) {
    masked(run, |class| {
        interrupts::try_write(apic::TPR, class << 4);
    });
}

/// An interrupt that is sent while masked must come afterwards, and not earlier. Calm, it comes at
/// once.
fn masked(run: &Run, set_class: impl Fn(u64)) {
    let has_come = || interrupts::count(OWN) != 0;
    let (is_early, is_late) = run.measured(|| {
        if !run.is_calm {
            set_class(15);
        }
        interrupts::send(OWN);
        time::wait(WINDOW_MS);
        let is_early = has_come();
        if !run.is_calm {
            set_class(0);
        }
        (is_early, time::until(1000, has_come) && !is_early)
    });
    let (early, late) = (u8::from(is_early), u8::from(is_late));
    run.result(format_args!("ended=1 early={early} late={late}"));
}
