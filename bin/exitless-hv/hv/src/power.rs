//! The end of the machine.

use core::sync::atomic::{AtomicU16, Ordering};

/// PM1a control, or 0.
static PORT: AtomicU16 = AtomicU16::new(0);
/// In what is written there: sleep now.
pub const SLEEP: u16 = 1 << 13;

/// Power goes off at this port.
pub fn set_port(port: u16) {
    PORT.store(port, Ordering::Relaxed);
}

/// It.
pub fn port() -> u16 {
    PORT.load(Ordering::Relaxed)
}

/// Switches it off, or stops.
pub fn off() -> ! {
    if port() != 0 {
        // Sleep type 0: what QEMU and most chipsets call S5.
        // SAFETY: nothing runs any more.
        unsafe { bare::port::out16(port(), SLEEP) }
    }
    bare::processor::stop()
}
