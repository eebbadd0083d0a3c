//! Monotonic time in nanoseconds, one clock for all cores.
//!
//! Map and unmap never read a precise clock: their time stamps may be as old as the last
//! [`Clock::advance`]. A coarse time lags and never leads, so whatever is stamped with it looks
//! older than it is: windows close early, never late, and the durations reported are too long by at
//! most the period of `DmaMapper::tick`, never too short.
//!
//! Called by every core and by the threads that call `DmaMapper::tick`. Left out: wall-clock time,
//! and timers; something outside (a thread, the owner of an event loop) calls `tick`. A timer
//! interrupt must not, since `tick` waits and allocates: it asks `DmaMapper::is_due`, and wakes a
//! thread that may. Cost: [`Clock::coarse`] of a [`TickClock`] is one load of a line that changes
//! once per tick.

use core::ops::Deref;

use lines::{AtomicU64, CachePadded, Ordering};

/// A monotonic clock that all cores share.
pub trait Clock: Send + Sync {
    /// Nanoseconds since a moment that does not change, exact.
    fn now(&self) -> u64;

    /// A moment not after [`now`](Self::now) that is cheap to read, in nanoseconds.
    #[inline]
    fn coarse(&self) -> u64 {
        self.now()
    }

    /// Reports that it is `now` nanoseconds, so that [`coarse`](Self::coarse) may return this. May
    /// be called in an interrupt: never waits.
    #[inline]
    fn advance(&self, now: u64) {
        let _ = now;
    }
}

/// A reference to a clock, or an [`Arc`](alloc::sync::Arc) of one, is that clock.
impl<P: Deref<Target: Clock> + Send + Sync> Clock for P {
    #[inline]
    fn now(&self) -> u64 {
        (**self).now()
    }

    #[inline]
    fn coarse(&self) -> u64 {
        (**self).coarse()
    }

    fn advance(&self, now: u64) {
        (**self).advance(now);
    }
}

/// A precise clock (a closure) with a coarse one that [`advance`](Clock::advance) sets.
///
/// ```
/// use dma_map::{Clock, TickClock};
/// let start = std::time::Instant::now();
/// let clock = TickClock::new(move || start.elapsed().as_nanos() as u64);
/// assert_eq!(clock.coarse(), 0);
/// clock.advance(1_000_000);
/// assert_eq!(clock.coarse(), 1_000_000);
/// ```
pub struct TickClock<F> {
    precise: F,
    /// Written by the threads that tick, read by all.
    coarse: CachePadded<AtomicU64>,
}

impl<F: Fn() -> u64 + Send + Sync> TickClock<F> {
    /// A clock whose exact time is `precise()`, in nanoseconds, never going back.
    pub fn new(precise: F) -> Self {
        Self {
            precise,
            coarse: CachePadded::new(AtomicU64::new(0)),
        }
    }
}

impl<F: Fn() -> u64 + Send + Sync> Clock for TickClock<F> {
    #[inline]
    fn now(&self) -> u64 {
        (self.precise)()
    }

    #[inline]
    fn coarse(&self) -> u64 {
        // Relaxed: an old value is an earlier time, which is allowed.
        self.coarse.load(Ordering::Relaxed)
    }

    fn advance(&self, now: u64) {
        self.coarse.fetch_max(now, Ordering::Relaxed);
    }
}

/// Clock that stands still until it is advanced: for tests and simulations.
#[derive(Debug, Default)]
pub struct ManualClock(CachePadded<AtomicU64>);

impl ManualClock {
    /// A clock at 0 ns.
    pub fn new() -> Self {
        Self(CachePadded::new(AtomicU64::new(0)))
    }

    /// Lets `ns` nanoseconds pass.
    pub fn pass(&self, ns: u64) {
        self.0.fetch_add(ns, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    #[inline]
    fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn advance(&self, now: u64) {
        self.0.fetch_max(now, Ordering::Relaxed);
    }
}
