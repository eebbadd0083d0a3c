//! Nanoseconds for less than a system call would cost.
//!
//! A request takes some 150 ns of the client at its ceiling, and `clock_gettime` 25 of them, so the
//! time-stamp counter is read directly where there is one. It is compared with the monotonic
//! clock once, when the clock is made.

use std::time::{Duration, Instant};

/// A calibrated clock; its zero is arbitrary.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Nanoseconds per cycle, times 2^32.
    #[cfg(target_arch = "x86_64")]
    scale: u64,
    start: Instant,
    #[cfg(target_arch = "x86_64")]
    zero: u64,
}

impl Clock {
    /// Compares the counter with the monotonic clock for 20 ms.
    #[cfg(target_arch = "x86_64")]
    pub fn new() -> Self {
        let start = Instant::now();
        let zero = crate::memory::cycles();
        while start.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        let (cycles, elapsed) = (crate::memory::cycles() - zero, start.elapsed());
        let scale = (elapsed.as_nanos() << 32) / u128::from(cycles.max(1));
        Self {
            scale: u64::try_from(scale).unwrap_or(u64::MAX),
            start,
            zero,
        }
    }

    /// The monotonic clock itself.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    /// Nanoseconds since the clock was made.
    #[inline]
    pub fn now(&self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        {
            let cycles = crate::memory::cycles().wrapping_sub(self.zero);
            ((u128::from(cycles) * u128::from(self.scale)) >> 32) as u64
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
        }
    }

    /// When the clock was made.
    pub const fn start(&self) -> Instant {
        self.start
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}
