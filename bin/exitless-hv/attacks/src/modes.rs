//! Processor modes: out of long mode against the rules (modes_efer, modes_compat), where gates have
//! 8 bytes and no limit that was made for 16 protects the host's; and by the rules (legacy), which
//! is conformance.
//!
//! A page is shown in the interrupt table's place that has 32-bit gates for every vector; the
//! host's are taken by it, if they come.

use core::arch::global_asm;
use core::cell::UnsafeCell;

use bare::processor::rdmsr;

use crate::interrupts::{self, OWN};
use crate::tables::{self, Page};
use crate::{Run, WINDOW_MS, time};

global_asm!(include_str!("modes.s"), options(att_syntax));

const EFER: u32 = 0xc000_0080;
/// In EFER: long mode is chosen; it is on.
const CHOSEN: u32 = 1 << 8;
const ON: u32 = 1 << 10;
/// Time between interrupts to itself, milliseconds.
const PAUSE_MS: u64 = 10;
const TIMES: u64 = WINDOW_MS / PAUSE_MS;

/// Parameters of modes.s, by offset, and its results.
#[repr(C)]
struct ModeParams {
    /// Page tables that are right in both modes, the 32-bit mode's, and those of before.
    root_both: u32,
    root_32: u32,
    root_64: u32,
    /// The page table entry of the interrupt table, its value in 32-bit mode, and otherwise (the
    /// low halves).
    slot: u32,
    slot_32: u32,
    slot_64: u32,
    /// EFER in 32-bit mode.
    efer: u32,
    /// Whether paging is switched off for the change.
    by_rules: u32,
    /// Interrupts to itself, and cycles between.
    times: u32,
    pause: u32,
    /// Interrupts that came: its own, and of the host's class.
    own: u32,
    stolen: u32,
    /// 1: it was in the mode; 2: until an exception.
    changed: u32,
    /// The code's own.
    _efer: u32,
    _stack: u32,
}

/// The order, where modes.s finds it.
#[repr(transparent)]
pub struct ModeParamsCell(UnsafeCell<ModeParams>);

// SAFETY: one processor, and only `change` accesses it.
unsafe impl Sync for ModeParamsCell {}

#[unsafe(no_mangle)]
static attacks_modes: ModeParamsCell = ModeParamsCell(UnsafeCell::new(ModeParams {
    root_both: 0,
    root_32: 0,
    root_64: 0,
    slot: 0,
    slot_32: 0,
    slot_64: 0,
    efer: 0,
    by_rules: 0,
    times: 0,
    pause: 0,
    own: 0,
    stolen: 0,
    changed: 0,
    _efer: 0,
    _stack: 0,
}));

unsafe extern "C" {
    fn attacks_other_mode() -> u32;
    static attacks_modes_own: u8;
    static attacks_modes_stolen: u8;
    static attacks_modes_fault: u8;
}

/// The root that is right in both modes, and its next level: a page that both take for a large one
/// at 0.
static ROOT_BOTH: Page = Page::new();
static NEXT_BOTH: Page = Page::new();
static ROOT_32: Page = Page::new();
/// The interrupt table of 32-bit mode.
static GATES: Page = Page::new();

/// EFER written under paging: long mode is neither chosen nor on.
pub fn modes_efer(run: &Run) {
    against_rules(run, CHOSEN | ON);
}

/// The same, but it stays chosen.
pub fn modes_compat(run: &Run) {
    against_rules(run, ON);
}

fn against_rules(run: &Run, without: u32) {
    let (changed, own, stolen) = run.measured(|| {
        if run.is_calm {
            let own = interrupts::send_and_count(OWN, 100);
            time::wait(WINDOW_MS);
            return (0, own, 0);
        }
        let start = time::now_ms();
        let came = change(without, false);
        // Refused, it is at once.
        let spent = time::now_ms() - start;
        time::wait(WINDOW_MS.saturating_sub(spent));
        came
    });
    run.result(format_args!("changed={changed} own={own} stolen={stolen}"));
}

/// Long mode left and entered again by the rules: its own interrupts come in both, and no other.
pub fn legacy(run: &Run) {
    let ((changed, own, stolen), after) = run.measured(|| {
        let came = if run.is_calm {
            time::wait(WINDOW_MS);
            (0, 0, 0)
        } else {
            change(CHOSEN | ON, true)
        };
        (came, interrupts::send_and_count(OWN, 100))
    });
    run.result(format_args!(
        "changed={changed} own={own} stolen={stolen} after={after}"
    ));
}

/// Changes the mode. Returns whether it was in 32-bit mode, and the interrupts that came there: its
/// own, the host's.
fn change(without: u32, by_rules: bool) -> (u32, u32, u32) {
    const LARGE: u64 = 1 << 7;
    for vector in 0..256 {
        let handler = match vector {
            0..0x20 => &raw const attacks_modes_fault,
            0x20..0xf0 => &raw const attacks_modes_own,
            _ => &raw const attacks_modes_stolen,
        } as u64;
        let gate = handler & 0xffff | tables::CODE_32 << 16 | 0x8e << 40 | (handler >> 16) << 48;
        GATES.set(vector, gate);
    }
    ROOT_BOTH.set(0, NEXT_BOTH.address() | 1);
    NEXT_BOTH.set(0, LARGE | 3);
    ROOT_32.set(0, tables::directory() | 1);
    let (slot, value) = tables::own_slot();
    // SAFETY: in long mode it is there.
    let efer = unsafe { rdmsr(EFER) } as u32;
    let order = ModeParams {
        root_both: ROOT_BOTH.address() as u32,
        root_32: ROOT_32.address() as u32,
        root_64: tables::root() as u32,
        slot: slot as u32,
        slot_32: GATES.address() as u32 | 3,
        slot_64: value as u32,
        efer: efer & !without,
        by_rules: by_rules.into(),
        times: TIMES as u32,
        pause: (time::cycles_per_ms() * PAUSE_MS).min(u64::from(u32::MAX)) as u32,
        own: 0,
        stolen: 0,
        changed: 0,
        _efer: 0,
        _stack: 0,
    };
    // SAFETY: one processor; handlers of the other mode alone write to it meanwhile. The code
    // leaves registers, stack and tables as they were.
    unsafe {
        attacks_modes.0.get().write_volatile(order);
        attacks_other_mode();
        let order = attacks_modes.0.get().read_volatile();
        (order.changed, order.own, order.stolen)
    }
}
