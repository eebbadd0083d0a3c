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
        let (start, zero) = both(cycles);
        while start.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        let (end, last) = both(cycles);
        let (elapsed, cycles) = (end - start, last.wrapping_sub(zero));
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
            let cycles = cycles().wrapping_sub(self.zero);
            ((u128::from(cycles) * u128::from(self.scale)) >> 32) as u64
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
        }
    }

    /// Time at which the clock was made.
    pub const fn start(&self) -> Instant {
        self.start
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

/// The counter behind [`Clock`]: cycles of the time-stamp counter.
#[cfg(target_arch = "x86_64")]
#[must_use]
#[inline]
#[expect(unsafe_code, reason = "the intrinsic is declared so")]
pub fn cycles() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and the kernel lets user space use it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// The monotonic clock and the counter at the same time: of some tries the one with the least
/// between two readings of the counter, as the thread may be stopped in between. A millisecond
/// there would be five percent of everything measured.
#[cfg(target_arch = "x86_64")]
fn both(cycles: impl Fn() -> u64) -> (Instant, u64) {
    let tries = (0..16).map(|_| {
        let before = cycles();
        let now = Instant::now();
        (cycles().wrapping_sub(before), now, before)
    });
    let (_, now, before) = tries
        .min_by_key(|(between, ..)| *between)
        .expect("there are some");
    (now, before)
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_reading_that_was_interrupted_is_not_taken() {
        // Two readings a try, ten cycles apart, but a million in all tries except the third.
        let (reads, count) = (Cell::new(0), Cell::new(0));
        let (_, cycles) = both(|| {
            reads.set(reads.get() + 1);
            let gap = if matches!(reads.get(), 5 | 6) {
                10
            } else {
                1_000_000
            };
            count.set(count.get() + gap);
            count.get()
        });
        assert_eq!(cycles, 4_000_010);
    }
}
