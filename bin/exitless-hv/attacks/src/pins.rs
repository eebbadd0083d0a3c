//! The I/O APIC's pin of the timer chip: an interrupt that is a level (level_pin), or for all
//! processors (broadcast_pin, broadcast_beat).

use bare::port;

use crate::interrupts::{self, OWN};
use crate::service::held;
use crate::{Run, WINDOW_MS, time};

/// The I/O APIC's registers, as firmware puts them on QEMU's q35: which, and its value.
const SELECT: u64 = 0xfec0_0000;
const WINDOW: u64 = 0xfec0_0010;
/// The timer chip's pin, and its entry.
const PIN: u32 = 2;
const ENTRY: u32 = 0x10 + 2 * PIN;
/// In an entry: by logical identifier, a level, masked.
const LOGICAL: u32 = 1 << 11;
const LEVEL: u32 = 1 << 15;
const MASKED: u32 = 1 << 16;
/// Every processor.
const ALL: u32 = 0xff << 24;
/// The other processor's own beat.
const BEAT: u8 = 0x40;
/// The timer chip's channel 0 and command, its frequency.
const CHANNEL: u16 = 0x40;
const COMMAND: u16 = 0x43;
const PER_MS: u16 = 1193;

/// Mode in which the timer chip counts.
#[derive(Clone, Copy)]
enum Count {
    /// Once; its line stays up.
    Once,
    /// For ever.
    Periodic,
}

/// A level of the host's class, which the guest does not end.
pub fn level_pin(run: &Run) {
    held(run, |vector| {
        route(0, u32::from(vector) | if run.is_calm { 0 } else { LEVEL });
        start_chip(Count::Once);
    });
    route(0, MASKED);
}

/// A thousand a second to all processors, with a vector of the guest's choice.
pub fn broadcast_pin(run: &Run) {
    broadcast(run, OWN);
}

/// The same with the vector of the other processor's clock.
pub fn broadcast_beat(run: &Run) {
    broadcast(run, BEAT);
}

fn broadcast(run: &Run, vector: u8) {
    let vector = if run.is_calm { OWN } else { vector };
    let ran = run.measured(|| {
        let before = interrupts::count(vector);
        start_chip(Count::Periodic);
        let (destination, mode) = if run.is_calm { (0, 0) } else { (ALL, LOGICAL) };
        route(destination, mode | u32::from(vector));
        time::wait(WINDOW_MS);
        route(0, MASKED);
        interrupts::count(vector) - before
    });
    run.result(format_args!("ran={ran}"));
}

/// Sets the entry of the timer chip's pin.
fn route(destination: u32, low: u32) {
    for (register, value) in [(ENTRY, MASKED), (ENTRY + 1, destination), (ENTRY, low)] {
        for (address, word) in [(SELECT, register), (WINDOW, value)] {
            // SAFETY: the chip's registers, mapped as they are; all vectors have handlers.
            unsafe { (address as *mut u32).write_volatile(word) }
        }
    }
}

fn start_chip(count: Count) {
    let mode = match count {
        Count::Once => 0x30,
        Count::Periodic => 0x34,
    };
    let [low, high] = PER_MS.to_le_bytes();
    for (register, value) in [(COMMAND, mode), (CHANNEL, low), (CHANNEL, high)] {
        // SAFETY: the chip's own registers.
        unsafe { port::out8(register, value) }
    }
}
