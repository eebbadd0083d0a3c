//! The hypervisor's log: QEMU's debug console, or the second serial line. The first is the guest's.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use bare::text::{COM2, Output};

static CHOSEN: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const DEBUG: u8 = 1;
const SERIAL: u8 = 2;

/// Returns the output of the log.
pub fn output() -> Output {
    // Relaxed: what is found is the same each time.
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

/// A core writes a line.
static IS_BUSY: AtomicBool = AtomicBool::new(false);

/// A line of the log, whole: dropped, the other core may write one.
pub struct Line(bool);

impl Line {
    /// Begins one. A core that has been lost in the middle of one, or faulted there, is not waited
    /// for.
    pub fn begin() -> Self {
        const TRIES: u32 = 10_000_000;
        // Acquire: pairs with `drop`'s Release, though a port has no order but the processor's.
        let takes = |_: &u32| {
            core::hint::spin_loop();
            !IS_BUSY.swap(true, Ordering::Acquire)
        };
        Self((0..TRIES).find(takes).is_some())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.0 {
            IS_BUSY.store(false, Ordering::Release);
        }
    }
}

impl core::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        output().write_str(text)
    }
}

/// A line of the log.
macro_rules! say {
    ($($text:tt)*) => {{
        use core::fmt::Write as _;
        let _ = writeln!($crate::log::Line::begin(), $($text)*);
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

/// Events that are still logged.
static TRACE: AtomicU32 = AtomicU32::new(0);

/// Sets the number of events that are logged (`trace=`).
pub fn set_trace(events: u32) {
    TRACE.store(events, Ordering::Relaxed);
}

/// Returns whether another event may be logged.
pub fn traces() -> bool {
    // Relaxed: a number, and nothing that is ordered by it.
    let less = |left: u32| left.checked_sub(1);
    TRACE
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
        .is_ok()
}
