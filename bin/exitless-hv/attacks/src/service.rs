//! Interrupts that are not ended: e4, e4turns, and of the host's class class_self, class_lvt. Two
//! honest guests whose handlers take long: longhandler, busyhandler.

use core::sync::atomic::Ordering::Relaxed;

use bare::apic;

use crate::interrupts::{self, HANDLER_MS, HIGH, LOW, OWN, STRANGE};
use crate::{Run, WINDOW_MS, time};

/// Time that a vector is held, by turns, milliseconds: six periods of the watchdog.
const HELD_MS: u64 = 120;

/// Ends no interrupt of an assigned vector, and waits for a lower one.
pub fn e4(run: &Run) {
    let is_blocked = run.measured(|| {
        interrupts::keep(OWN, !run.is_calm);
        interrupts::send_and_count(OWN, 1);
        interrupts::send(LOW);
        time::wait(WINDOW_MS);
        interrupts::count(LOW) == 0
    });
    interrupts::end_all();
    run.result(format_args!("blocked={}", u8::from(is_blocked)));
}

/// Holds two vectors by turns, so that one of them is always in service, and a lower one waits.
pub fn e4turns(run: &Run) {
    let is_blocked = run.measured(|| {
        let pair = [OWN, HIGH];
        for vector in pair {
            interrupts::keep(vector, !run.is_calm);
        }
        interrupts::send_and_count(OWN, 1);
        interrupts::send(LOW);
        for turn in 0..WINDOW_MS / HELD_MS {
            time::wait(HELD_MS);
            // The next waits before the other is ended, and is higher than what is kept out.
            interrupts::set_enabled(false);
            interrupts::send(pair[(turn as usize + 1) % 2]);
            if !run.is_calm {
                apic::eoi();
            }
            interrupts::set_enabled(true);
        }
        interrupts::count(LOW) == 0
    });
    interrupts::end_all();
    run.result(format_args!("blocked={}", u8::from(is_blocked)));
}

/// Holds a vector of the host's class that it sent itself.
pub fn class_self(run: &Run) {
    held(run, interrupts::send);
}

/// The same with its timer, which fires once.
pub fn class_lvt(run: &Run) {
    held(run, |vector| {
        for (register, value) in [
            (apic::LVT_TIMER, u64::from(vector)),
            (apic::TIMER_DIVIDE, 0xb),
            (apic::TIMER_INITIAL, 100_000),
        ] {
            interrupts::try_write(register, value);
        }
    });
}

/// Calm, it is ended.
pub fn held(run: &Run, send: impl FnOnce(u8)) {
    let ran = run.measured(|| {
        interrupts::keep(STRANGE, !run.is_calm);
        send(STRANGE);
        time::wait(WINDOW_MS);
        interrupts::count(STRANGE)
    });
    interrupts::end_all();
    run.result(format_args!("ran={ran}"));
}

/// A handler of 400 ms with interrupts on. The second window says whether it cost more than the
/// time it took.
pub fn longhandler(run: &Run) {
    honest(run, |is_calm| {
        HANDLER_MS.store(if is_calm { 0 } else { 400 }, Relaxed);
        interrupts::send_and_count(OWN, 1);
    });
}

/// A guest that is in its handler nine tenths of its time, for a second.
pub fn busyhandler(run: &Run) {
    honest(run, |is_calm| {
        HANDLER_MS.store(if is_calm { 0 } else { 18 }, Relaxed);
        for _ in 0..50 {
            interrupts::send_and_count(OWN, 1);
            time::wait(if is_calm { 20 } else { 2 });
        }
    });
}

/// `work`, a second's rest, and then 1000 interrupts to itself over another one, in a window of
/// their own.
fn honest(run: &Run, work: impl FnOnce(bool)) {
    run.measured(|| {
        work(run.is_calm);
        HANDLER_MS.store(0, Relaxed);
        time::wait(1000);
    });
    let delivered = run.measured(|| {
        let delivered = interrupts::send_and_count(OWN, 1000);
        time::wait(WINDOW_MS);
        delivered
    });
    run.result(format_args!("delivered={delivered}"));
}
