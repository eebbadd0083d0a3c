//! The two 8259 interrupt controllers.

use crate::port::out8;

/// Sets the vectors of the first to `base` and of the second to `base + 8`, and masks all lines.
/// Firmware leaves them at vectors of exceptions.
///
/// # Safety
/// Interrupts are off, and these vectors have handlers before they are turned on.
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
            // SAFETY: the four initialization words and the mask of an 8259; for the rest the
            // caller vouches.
            unsafe { out8(port, value) }
        }
    }
}
