//! The end of the machine.

use core::sync::atomic::{AtomicU16, Ordering};

/// PM1a and PM1b control, or 0.
static PORTS: [AtomicU16; 2] = [AtomicU16::new(0), AtomicU16::new(0)];
/// In what is written there: sleep now.
const SLEEP: u16 = 1 << 13;

/// Sets the ports at which power goes off; 0 is none.
pub fn set_ports(ports: [u16; 2]) {
    for (slot, port) in PORTS.iter().zip(ports) {
        slot.store(port, Ordering::Relaxed);
    }
}

/// Switches it off, or stops.
pub fn off() -> ! {
    let ports = [0, 1].map(|index: usize| PORTS[index].load(Ordering::Relaxed));
    for port in ports.into_iter().filter(|port| *port != 0) {
        // Sleep type 0: QEMU's S5. A machine that has another stays on, stopped.
        // SAFETY: nothing runs any more.
        unsafe { bare::port::out16(port, SLEEP) }
    }
    bare::processor::stop()
}
