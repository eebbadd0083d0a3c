//! The guest's interrupt table: another in its place (e3), and a gate of its own that is not
//! present (gate).

use core::sync::atomic::Ordering::SeqCst;

use bare::apic;

use crate::interrupts::{self, OWN};
use crate::{Run, WINDOW_MS, tables, time};

/// For more than a second, the interrupt table's virtual page shows another, which takes what is
/// the host's. No LIDT, only INVLPG.
pub fn e3(run: &Run) {
    let own = run.measured(|| {
        if !run.is_calm {
            tables::show_thief(true);
        }
        // Its own interrupts meanwhile.
        for _ in 0..WINDOW_MS / 10 {
            interrupts::send(OWN);
            time::wait(10);
        }
        if !run.is_calm {
            tables::show_thief(false);
        }
        interrupts::count(OWN)
    });
    run.result(format_args!("stolen={} own={own}", interrupts::stolen()));
}

/// An interrupt for a gate that is not present: the guest's own fault, once, and nothing is lost
/// after its repair.
pub fn gate(run: &Run) {
    let ((faults, code), is_recovered) = run.measured(|| {
        if !run.is_calm {
            interrupts::IS_FAULT_EXPECTED.store(true, SeqCst);
            tables::set_present(OWN, false);
        }
        interrupts::send(OWN);
        time::until(1000, || {
            interrupts::faults().0 != 0 || interrupts::count(OWN) != 0
        });
        // Time for one too many.
        time::wait(WINDOW_MS);
        let faults = interrupts::faults();
        if !run.is_calm {
            tables::set_present(OWN, true);
            apic::eoi();
        }
        let is_recovered = interrupts::send_and_count(OWN, 1) == 1;
        interrupts::IS_FAULT_EXPECTED.store(false, SeqCst);
        (faults, is_recovered)
    });
    run.result(format_args!(
        "faults={faults} code={code:#x} recovered={}",
        u8::from(is_recovered)
    ));
}
