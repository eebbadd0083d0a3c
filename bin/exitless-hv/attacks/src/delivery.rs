//! Events whose delivery faults: on a stack (e1stack), in a table (e1gate), in page tables
//! (e1tables); and one without a table, the guest's end (triple).
//!
//! The structures that delivery needs lie where a guest has no memory: it is no secret that the
//! hypervisor's memory is at 768 MiB. Each attack is an undefined instruction. Its exception cannot
//! be delivered, nor can an exception that results, and so the processor shuts down.

use core::arch::asm;

use crate::interrupts;
use crate::tables::{self, Page};
use crate::{Run, WINDOW_MS, time};

/// Address at which the hypervisor's memory begins.
pub const HIDDEN: u64 = 0x3000_0000;
/// Limits of an interrupt table of one page, and of none.
const PAGE_LIMIT: u16 = 4095;

/// Another page table, which is empty until a calm run fills it.
static CALM: Page = Page::new();

/// The exceptions' stack is in hidden memory.
pub fn e1stack(run: &Run) {
    undefined(run, || {
        let top = HIDDEN + 4096;
        tables::set_exceptions_stack(if run.is_calm {
            tables::exceptions_stack()
        } else {
            top
        });
    });
}

/// The interrupt table is there.
pub fn e1gate(run: &Run) {
    undefined(run, || {
        let table = if run.is_calm {
            tables::own_table()
        } else {
            HIDDEN
        };
        tables::load_interrupts(table, PAGE_LIMIT);
    });
}

/// The page table of the exceptions' stack is there.
pub fn e1tables(run: &Run) {
    undefined(run, || {
        if run.is_calm {
            // The stack's own pages, at another address.
            let stack = tables::exceptions_stack() - 8192;
            CALM.set(0, stack | 3);
            CALM.set(1, (stack + 4096) | 3);
            tables::set_exceptions_stack(tables::map_through(CALM.address()) + 8192);
        } else {
            tables::set_exceptions_stack(tables::map_through(HIDDEN) + 8192);
        }
    });
}

/// No table at all: a triple fault.
pub fn triple(run: &Run) {
    run.measured(|| {
        if !run.is_calm {
            tables::load_interrupts(tables::own_table(), 0);
            raise();
        }
        time::wait(WINDOW_MS);
    });
}

/// Prepares, raises one, and goes on where that is possible.
fn undefined(run: &Run, prepare: impl FnOnce()) {
    let raised = run.measured(|| {
        prepare();
        let raised = interrupts::attempt(raise);
        time::wait(WINDOW_MS);
        raised
    });
    run.result(format_args!("undefined={}", u8::from(raised == Err(6))));
}

fn raise() {
    // SAFETY: it has a handler, or that is what is to be shown.
    unsafe { asm!("ud2", options(nomem, nostack)) }
}
