//! Rate limits of one device: operations and bytes per second, each with a burst.
//!
//! Each limit is a generic cell rate algorithm, the leaky bucket without a timer: a *theoretical arrival time* that each
//! operation moves on by what it costs at the limit's rate. A device may go on while that time is no more than the
//! burst ahead of now, so one operation may overdraw, whatever its size, and none is ever refused. No drift, no rounding
//! that adds up: times are in units of 2^-16 ns.

/// A limit: at most `per_second` units (operations or bytes) each second, and `burst` units at once after a rest.
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
    /// Bytes read and written.
    pub bytes: Option<Rate>,
}

/// Fraction bits of a nanosecond.
const FRACTION: u32 = 16;
const SECOND: u128 = 1_000_000_000 << FRACTION;

/// One limit at work.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    rate: u128,
    /// How far the arrival time may be ahead of now.
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
    /// With these limits.
    pub fn new(limits: RateLimits) -> Self {
        Self {
            operations: limits.operations.map(Bucket::new),
            bytes: limits.bytes.map(Bucket::new),
            opens_at_ns: 0,
        }
    }

    /// Whether a request may begin now.
    #[inline]
    pub fn is_open(&self, now_ns: u64) -> bool {
        now_ns >= self.opens_at_ns
    }

    /// When the next request may begin, in nanoseconds of the clock given to [`charge`](Throttle::charge).
    pub fn opens_at_ns(&self) -> u64 {
        self.opens_at_ns
    }

    /// A request that moves `bytes` begins.
    #[inline]
    pub fn charge(&mut self, now_ns: u64, bytes: u64) {
        if self.operations.is_some() || self.bytes.is_some() {
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
mod tests {
    use super::*;

    /// How many requests of `bytes` begin in `window_ns`, asked for as fast as they can be.
    fn begun(limits: RateLimits, bytes: u64, window_ns: u64, step_ns: u64) -> u64 {
        let mut throttle = Throttle::new(limits);
        let start = 1 << 40;
        let mut count = 0;
        let mut now = start;
        while now < start + window_ns {
            while throttle.is_open(now) {
                throttle.charge(now, bytes);
                count += 1;
            }
            now += step_ns;
        }
        count
    }

    #[test]
    fn operations_come_at_their_rate_after_the_burst() {
        let limits = RateLimits {
            operations: Some(Rate {
                per_second: 1000,
                burst: 50,
            }),
            bytes: None,
        };
        let count = begun(limits, 4096, 2_000_000_000, 10_000);
        assert!((2045..=2055).contains(&count), "{count}");
    }

    #[test]
    fn bytes_come_at_their_rate_whatever_the_request_size() {
        let rate = 100 << 20;
        let limits = RateLimits {
            operations: None,
            bytes: Some(Rate {
                per_second: rate,
                burst: 1 << 20,
            }),
        };
        for bytes in [512, 4096, 1 << 20] {
            let moved = begun(limits, bytes, 1_000_000_000, 1_000) * bytes;
            let fair = (rate + (1 << 20)) as f64;
            assert!(
                (moved as f64 - fair).abs() <= fair * 0.02 + bytes as f64,
                "{bytes}: {moved}"
            );
        }
    }

    #[test]
    fn the_tighter_of_two_limits_holds() {
        let limits = RateLimits {
            operations: Some(Rate {
                per_second: 10_000,
                burst: 1,
            }),
            bytes: Some(Rate {
                per_second: 4096 * 500,
                burst: 4096,
            }),
        };
        let count = begun(limits, 4096, 1_000_000_000, 1_000);
        assert!((498..=503).contains(&count), "{count}");
    }

    #[test]
    fn a_rest_is_not_saved_beyond_the_burst() {
        let mut throttle = Throttle::new(RateLimits {
            operations: Some(Rate {
                per_second: 10,
                burst: 3,
            }),
            bytes: None,
        });
        for start in [1 << 40, 1 << 50] {
            let mut count = 0;
            while throttle.is_open(start) {
                throttle.charge(start, 0);
                count += 1;
            }
            // The last one overdraws.
            assert!((3..=4).contains(&count), "{count}");
        }
    }

    #[test]
    fn without_limits_it_is_always_open() {
        let mut throttle = Throttle::default();
        throttle.charge(5, u64::MAX);
        assert!(throttle.is_open(0));
    }
}
