//! The hypervisor's log: QEMU's debug console, or the second serial line. The first is the guest's.

use core::sync::atomic::{AtomicU8, Ordering};

use bare::text::{COM2, Output};

static CHOSEN: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const DEBUG: u8 = 1;
const SERIAL: u8 = 2;

/// Where it goes.
pub fn output() -> Output {
    // Relaxed: one core writes the log; the second only when the first is lost.
    match CHOSEN.load(Ordering::Relaxed) {
        DEBUG => Output::Debug,
        SERIAL => Output::Serial(COM2),
        _ => {
            let found = Output::find(COM2);
            let chosen = if found == Output::Debug {
                DEBUG
            } else {
                SERIAL
            };
            CHOSEN.store(chosen, Ordering::Relaxed);
            found
        }
    }
}

/// A line of the log.
macro_rules! say {
    ($($text:tt)*) => {{
        use core::fmt::Write as _;
        let _ = writeln!($crate::log::output(), $($text)*);
    }};
}
pub(crate) use say;

/// A number for people.
pub struct Hex(pub u64);

impl core::fmt::Display for Hex {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
