//! Text to a port: QEMU's debug console, or a serial line.

use core::fmt::{self, Write};

use crate::port;

/// QEMU's debug console: a byte written is a byte of its file, and what is read is its own number.
const DEBUG_CONSOLE: u16 = 0xe9;
/// The second serial line; the first is the guest's.
pub const COM2: u16 = 0x2f8;
/// The first.
pub const COM1: u16 = 0x3f8;

/// Destination of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// The debug console.
    Debug,
    /// A serial line, 115,200 baud, 8N1.
    Serial(u16),
}

impl Output {
    /// Returns the debug console if there is one, else this serial line, set up.
    #[must_use]
    pub fn find(serial: u16) -> Self {
        // SAFETY: where there is no debug console, nothing is at its port.
        if unsafe { port::in8(DEBUG_CONSOLE) } == 0xe9 {
            return Self::Debug;
        }
        Self::serial(serial)
    }

    /// Returns a serial line, set up.
    #[must_use]
    pub fn serial(line: u16) -> Self {
        for (register, value) in [(1, 0), (3, 0x80), (0, 1), (1, 0), (3, 3), (2, 7), (4, 3)] {
            // SAFETY: a 16550's registers; the line is ours.
            unsafe { port::out8(line + register, value) }
        }
        Self::Serial(line)
    }

    /// Returns its ports.
    pub fn ports(self) -> core::ops::Range<u16> {
        match self {
            Self::Debug => DEBUG_CONSOLE..DEBUG_CONSOLE + 1,
            Self::Serial(line) => line..line + 8,
        }
    }

    fn byte(self, byte: u8) {
        match self {
            // SAFETY: the debug console takes any byte.
            Self::Debug => unsafe { port::out8(DEBUG_CONSOLE, byte) },
            Self::Serial(line) => {
                // A line that is not there reads as all ones, and one that is stuck is not waited
                // for.
                // SAFETY: as above.
                let is_ready = |_: &u32| unsafe { port::in8(line + 5) } & 0x20 != 0;
                let _ = (0..100_000).find(is_ready);
                // SAFETY: as above.
                unsafe { port::out8(line, byte) }
            }
        }
    }
}

impl Write for Output {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| self.byte(byte));
        Ok(())
    }
}
