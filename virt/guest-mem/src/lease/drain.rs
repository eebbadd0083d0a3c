//! Timer of a wait for leases to end.

/// Default limit on the time that an invalidation or a mapping change waits for leases, in ns: one
/// second.
pub const DRAIN_LIMIT_NS: u64 = 1_000_000_000;

/// Start of a wait for leases, or for devices that follow the mappings; and whether the excess of
/// the limit has been reported.
#[derive(Clone, Copy, Debug, Default)]
pub struct DrainTimer {
    since: Option<u64>,
    is_reported: bool,
}

impl DrainTimer {
    /// Creates a timer that has run since `now_ns`, of any monotonic clock.
    pub fn since(now_ns: u64) -> Self {
        Self {
            since: Some(now_ns),
            is_reported: false,
        }
    }

    /// Starts the timer unless it runs; returns whether the limit has passed, true once.
    pub fn is_due(&mut self, now_ns: u64, limit_ns: u64) -> bool {
        let since = *self.since.get_or_insert(now_ns);
        let is_due = now_ns.saturating_sub(since) >= limit_ns && !self.is_reported;
        self.is_reported |= is_due;
        is_due
    }

    /// Latest time to call [`is_due`](Self::is_due), in ns: none when the timer does not run, or
    /// the excess has been reported.
    pub fn deadline(&self, limit_ns: u64) -> Option<u64> {
        let since = self.since.filter(|_| !self.is_reported)?;
        Some(since.saturating_add(limit_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_said_once_and_a_clock_that_ends_is_no_overflow() {
        let mut timer = DrainTimer::default();
        assert_eq!(timer.deadline(10), None, "it does not run");
        assert!(!timer.is_due(100, 10));
        assert_eq!(timer.deadline(10), Some(110));
        assert!(!timer.is_due(109, 10));
        assert!(timer.is_due(110, 10));
        assert!(!timer.is_due(200, 10), "a second time");
        assert_eq!(timer.deadline(10), None, "it has said so");
        assert_eq!(DrainTimer::since(5).deadline(u64::MAX), Some(u64::MAX));
    }
}
