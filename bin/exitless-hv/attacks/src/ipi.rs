//! Interrupts that the guest sends itself: e1, e5 and `moved` are conformance, e6 fakes the host's.

use core::arch::asm;
use core::sync::atomic::Ordering::Relaxed;

use crate::interrupts::{self, HIGH, HOST, LOW, OWN};
use crate::{Run, WINDOW_MS, time};

/// 1000 of them on an assigned vector, each waited for.
pub fn e1(run: &Run) {
    let delivered = run.measured(|| interrupts::send_and_count(OWN, 1000));
    run.result(format_args!("delivered={delivered}"));
}

/// A handler that sends itself a lower and a higher one, with interrupts on.
pub fn e5(run: &Run) {
    run.measured(|| {
        interrupts::IS_NESTING.store(true, Relaxed);
        interrupts::send(OWN);
        time::until(2000, || {
            interrupts::count(LOW) != 0 && interrupts::count(HIGH) != 0
        });
        // Time for one too many.
        time::wait(1);
        interrupts::IS_NESTING.store(false, Relaxed);
    });
    run.result(format_args!("order={}", Order));
}

/// The order of the handlers, with commas between.
struct Order;

impl core::fmt::Display for Order {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for (index, vector) in interrupts::order().enumerate() {
            write!(f, "{}{vector:x}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// `INT n` with the host's vector, 600 times in a window: more than there are ticks.
pub fn e6(run: &Run) {
    let ran = run.measured(|| {
        let before = interrupts::count(HOST);
        for _ in 0..WINDOW_MS / 2 {
            if !run.is_calm {
                // SAFETY: all vectors have handlers, which save all registers, and have stacks of
                // their own.
                unsafe { asm!("int {}", const HOST) }
            }
            time::wait(2);
        }
        interrupts::count(HOST) - before
    });
    run.result(format_args!("ran={ran}"));
}

/// The host's vector, as the guest's own: 100 of them, each waited for. The host must have moved
/// its tick away.
pub fn moved(run: &Run) {
    let vector = if run.is_calm { OWN } else { HOST };
    let ran = run.measured(|| {
        let before = interrupts::count(vector);
        interrupts::send_and_count(vector, 100);
        interrupts::count(vector) - before
    });
    run.result(format_args!("ran={ran}"));
}
