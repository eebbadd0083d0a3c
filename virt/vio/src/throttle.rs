//! Rate limits of one device: operations and bytes per second, each with a burst.
//!
//! Each limit is a generic cell rate algorithm, the leaky bucket without a timer: a *theoretical
//! arrival time* that each operation moves on by what it costs at the limit's rate. A device may go
//! on while that time is no more than the burst ahead of now, so one operation may overdraw,
//! whatever its size, and none is ever refused. No drift, no rounding that adds up: times are in
//! units of 2^-16 ns.

/// A limit: at most `per_second` units (operations or bytes) each second, and `burst` units at once
/// after a quiet time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Units per second, at least 1.
    pub per_second: u64,
    /// Units that may come at once; 0: a hundredth of a second's worth, at least one.
    pub burst: u64,
}

/// The limits of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Requests of any kind.
    pub operations: Option<Rate>,
    /// Bytes read, written, zeroed and discarded.
    pub bytes: Option<Rate>,
}

/// Fraction bits of a nanosecond.
const FRACTION: u32 = 16;
const SECOND: u128 = 1_000_000_000 << FRACTION;

/// One limit at work.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    rate: u128,
    /// Time by which the arrival time may be ahead of now; a nanosecond is `1 << FRACTION`.
    tolerance: u128,
    arrival: u128,
}

impl Bucket {
    fn new(rate: Rate) -> Self {
        let per_second = u128::from(rate.per_second.max(1));
        let burst = match rate.burst {
            0 => (per_second / 100).max(1),
            burst => u128::from(burst),
        };
        Self {
            rate: per_second,
            tolerance: burst * SECOND / per_second,
            arrival: 0,
        }
    }

    fn opens_at(&self) -> u128 {
        self.arrival.saturating_sub(self.tolerance)
    }

    fn take(&mut self, now: u128, units: u64) {
        self.arrival = self.arrival.max(now) + u128::from(units) * SECOND / self.rate;
    }
}

/// The limits of one device at work. Without limits it costs one comparison per request.
#[derive(Clone, Debug, Default)]
pub struct Throttle {
    operations: Option<Bucket>,
    bytes: Option<Bucket>,
    /// Before this moment, in nanoseconds, nothing may begin.
    opens_at_ns: u64,
}

impl Throttle {
    /// Makes a throttle with these limits.
    pub fn new(limits: RateLimits) -> Self {
        Self {
            operations: limits.operations.map(Bucket::new),
            bytes: limits.bytes.map(Bucket::new),
            opens_at_ns: 0,
        }
    }

    /// Whether there is a limit at all.
    #[inline]
    pub fn is_limited(&self) -> bool {
        self.operations.is_some() || self.bytes.is_some()
    }

    /// Whether a request may begin now.
    #[inline]
    pub fn is_open(&self, now_ns: u64) -> bool {
        now_ns >= self.opens_at_ns
    }

    /// Returns the time at which the next request may begin, in nanoseconds of the clock given to
    /// [`charge`](Throttle::charge).
    pub fn opens_at_ns(&self) -> u64 {
        self.opens_at_ns
    }

    /// A request that moves `bytes` begins.
    #[inline]
    pub fn charge(&mut self, now_ns: u64, bytes: u64) {
        if self.is_limited() {
            self.charge_buckets(now_ns, bytes);
        }
    }

    #[cold]
    fn charge_buckets(&mut self, now_ns: u64, bytes: u64) {
        let now = u128::from(now_ns) << FRACTION;
        let mut opens_at = 0;
        for (bucket, units) in [(&mut self.operations, 1), (&mut self.bytes, bytes)] {
            if let Some(bucket) = bucket {
                bucket.take(now, units);
                opens_at = opens_at.max(bucket.opens_at());
            }
        }
        // Rounded up: open a nanosecond late rather than early.
        let ns = (opens_at + (1 << FRACTION) - 1) >> FRACTION;
        self.opens_at_ns = u64::try_from(ns).unwrap_or(u64::MAX);
    }
}

#[cfg(test)]
mod tests;
