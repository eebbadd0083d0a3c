//! Attacks by the I/O APIC's pin of the 8254 timer: a level-triggered interrupt (level_pin), or one
//! broadcast to all processors (broadcast_pin, broadcast_beat).

use bare::port;

use crate::interrupts::{self, OWN};
use crate::service::held;
use crate::{Run, WINDOW_MS, time};

/// The I/O APIC's index and data registers, at the addresses that firmware gives them on QEMU's
/// q35.
const SELECT: u64 = 0xfec0_0000;
const WINDOW: u64 = 0xfec0_0010;
/// The pin of the 8254 timer, and the index of its redirection entry.
const PIN: u32 = 2;
const ENTRY: u32 = 0x10 + 2 * PIN;
/// Fields of a redirection entry: logical destination mode, level-triggered, masked.
const LOGICAL: u32 = 1 << 11;
const LEVEL: u32 = 1 << 15;
const MASKED: u32 = 1 << 16;
/// Destination of all processors, in the high word of an entry.
const ALL: u32 = 0xff << 24;
/// Vector of the other processor's own timer.
const BEAT: u8 = 0x40;
/// Data port of channel 0 of the 8254 timer, its command port, and its counts in a millisecond.
const CHANNEL: u16 = 0x40;
const COMMAND: u16 = 0x43;
const PER_MS: u16 = 1193;

/// Mode in which the 8254 timer counts.
#[derive(Clone, Copy)]
enum Count {
    /// One-shot; the output stays high.
    Once,
    /// Periodic.
    Periodic,
}

/// Sends a level-triggered interrupt in the host's priority class, which the guest does not end.
pub fn level_pin(run: &Run) {
    held(run, |vector| {
        route(0, u32::from(vector) | if run.is_calm { 0 } else { LEVEL });
        start_chip(Count::Once);
    });
    route(0, MASKED);
}

/// Broadcasts about 1000 interrupts in a second to all processors, with one of the guest's own
/// vectors.
pub fn broadcast_pin(run: &Run) {
    broadcast(run, OWN);
}

/// Does the same with the vector of the other processor's timer.
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

/// Writes the redirection entry of the timer's pin.
fn route(destination: u32, low: u32) {
    for (register, value) in [(ENTRY, MASKED), (ENTRY + 1, destination), (ENTRY, low)] {
        for (address, word) in [(SELECT, register), (WINDOW, value)] {
            // SAFETY: the I/O APIC's registers, identity-mapped; all vectors have handlers.
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
        // SAFETY: registers of the 8254.
        unsafe { port::out8(register, value) }
    }
}
