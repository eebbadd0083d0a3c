//! Limit of a rate: a token bucket.

/// Frames per second, and how many at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    per_second: u32,
    burst: u32,
}

impl Rate {
    /// Creates a limit of `per_second` frames on average, and at most `burst` at once.
    pub const fn new(per_second: u32, burst: u32) -> Self {
        Self { per_second, burst }
    }
}

const SECOND_NS: u64 = 1_000_000_000;

/// Token bucket. A frame costs a second's worth of nanoseconds; each nanosecond brings as many as
/// frames are allowed in a second, so that no time is rounded away.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bucket {
    rate: Rate,
    level: u64,
    at_ns: u64,
}

impl Bucket {
    /// A full one.
    pub fn new(rate: Rate, now_ns: u64) -> Self {
        Self {
            rate,
            level: u64::from(rate.burst) * SECOND_NS,
            at_ns: now_ns,
        }
    }

    /// Takes one frame's worth, if it is there.
    pub fn take(&mut self, now_ns: u64) -> bool {
        let passed = now_ns.saturating_sub(self.at_ns);
        self.at_ns = self.at_ns.max(now_ns);
        let gained = passed.saturating_mul(u64::from(self.rate.per_second));
        let full = u64::from(self.rate.burst) * SECOND_NS;
        self.level = self.level.saturating_add(gained).min(full);
        let is_there = self.level >= SECOND_NS;
        if is_there {
            self.level -= SECOND_NS;
        }
        is_there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_the_rate_however_often_it_is_asked() {
        let mut bucket = Bucket::new(Rate::new(1_000, 5), 0);
        assert_eq!((0..100).filter(|_| bucket.take(0)).count(), 5);
        // Asked each 7 ns for 10 ms: 10 frames.
        let asked = (0..10_000_000u64).step_by(7);
        assert_eq!(asked.filter(|now| bucket.take(*now)).count(), 9);
        assert!(bucket.take(10_000_000));
        assert_eq!((0..100).filter(|_| bucket.take(u64::MAX)).count(), 5);
        // A clock that goes back brings nothing.
        assert!(!bucket.take(0));
    }

    #[test]
    fn a_burst_of_0_lets_nothing_through() {
        let mut bucket = Bucket::new(Rate::new(1_000_000, 0), 0);
        assert!(!bucket.take(u64::MAX));
    }
}
