//! Keeping interrupts out: by the flag (e2, e2shadow), by none being ended (e4), by priority (e7, e7tpr).

use core::arch::asm;
use core::sync::atomic::Ordering::Relaxed;

use bare::apic;

use crate::interrupts::{self, LOW, OWN};
use crate::{Run, time};

/// Spins for ever with interrupts off.
pub fn e2(run: &Run) {
    spin(run, || {
        interrupts::set_enabled(false);
        loop {
            core::hint::spin_loop();
        }
    });
}

/// Spins for ever with interrupts on, as the flag says, but only in the shadow of the instruction that sets it: none is ever taken.
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

fn spin(run: &Run, for_ever: impl Fn()) {
    run.result(format_args!("spinning"));
    run.measured(|| {
        if run.is_calm {
            time::wait(200);
        } else {
            for_ever();
        }
    });
    run.result(format_args!("ended=1"));
}

/// Ends no interrupt of an assigned vector, and waits for a lower one.
pub fn e4(run: &Run) {
    let is_blocked = run.measured(|| {
        interrupts::IS_LEFT_IN_SERVICE.store(!run.is_calm, Relaxed);
        interrupts::send_and_count(OWN, 1);
        interrupts::send(LOW);
        !time::until(2000, || interrupts::count(LOW) != 0)
    });
    interrupts::IS_LEFT_IN_SERVICE.store(false, Relaxed);
    end_own();
    run.result(format_args!("blocked={}", u8::from(is_blocked)));
}

/// Ends the interrupt of [`OWN`], if it is (still) in service.
pub fn end_own() {
    if apic::words(apic::ISR)[usize::from(OWN / 32)] & 1 << (OWN % 32) != 0 {
        apic::eoi();
    }
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

/// An interrupt that is sent while masked must come afterwards, and not earlier. Calm, it comes at once.
fn masked(run: &Run, set_class: impl Fn(u64)) {
    let has_come = || interrupts::count(OWN) != 0;
    let (is_early, is_late) = run.measured(|| {
        if !run.is_calm {
            set_class(15);
        }
        interrupts::send(OWN);
        time::wait(1000);
        let is_early = has_come();
        if !run.is_calm {
            set_class(0);
        }
        (is_early, time::until(1000, has_come) && !is_early)
    });
    let (early, late) = (u8::from(is_early), u8::from(is_late));
    run.result(format_args!("ended=1 early={early} late={late}"));
}
