//! Text output by a port: QEMU's debug console, or a serial line.

use core::fmt::{self, Write};

use crate::port;

/// Port of QEMU's debug console: each byte written is appended to its file, and a read returns
/// 0xe9.
const DEBUG_CONSOLE: u16 = 0xe9;
/// Port of the second serial line; the first belongs to the guest.
pub const COM2: u16 = 0x2f8;
/// Port of the first serial line.
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
        // SAFETY: reading this port has no side effect, with or without a debug console.
        if unsafe { port::in8(DEBUG_CONSOLE) } == 0xe9 {
            return Self::Debug;
        }
        Self::serial(serial)
    }

    /// Initializes a serial line and returns it.
    #[must_use]
    pub fn serial(line: u16) -> Self {
        for (register, value) in [(1, 0), (3, 0x80), (0, 1), (1, 0), (3, 3), (2, 7), (4, 3)] {
            // SAFETY: registers of a 16550 that this program owns.
            unsafe { port::out8(line + register, value) }
        }
        Self::Serial(line)
    }

    /// Returns the range of ports that it uses.
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
                // An absent line reads as all ones. A line that stays busy is not waited for any
                // longer.
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
