//! The two 8259s.

use crate::port::out8;

/// Gives the first one vectors from `base` on, the second the eight behind, and masks all lines.
/// Firmware leaves them among the exceptions.
///
/// # Safety
/// Interrupts are off, and what comes later has handlers.
pub unsafe fn quiet(base: u8) {
    for (command, vector, wiring) in [(0x20, base, 4), (0xa0, base + 8, 2)] {
        let data = command + 1;
        for (port, value) in [
            (command, 0x11),
            (data, vector),
            (data, wiring),
            (data, 1),
            (data, 0xff),
        ] {
            // SAFETY: their four words of initialization, and their masks; else the caller's.
            unsafe { out8(port, value) }
        }
    }
}
