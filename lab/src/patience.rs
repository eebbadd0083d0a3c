//! Time limits that take the load into account: a second counts as less while other programs use
//! the processors.
//!
//! An emulated host on a busy machine is slow, not dead. A `Limit` is in seconds of an otherwise
//! idle machine; it is stretched by the number of runnable threads for each processor, as given by
//! [`stretch`].

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// Largest factor by which a limit is stretched: on any machine it expires.
const STRETCH_MAX: f64 = 10.0;

/// Period of the samples of the load.
const STEP: Duration = Duration::from_secs(1);

/// Remaining part of a limit.
#[derive(Debug)]
pub struct Limit {
    left: Duration,
    since: Instant,
}

impl Limit {
    /// Creates a limit of this time of an idle machine, from now on.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        Self {
            left: limit,
            since: Instant::now(),
        }
    }

    /// Returns the time to wait before the next call; `None` if the limit has expired.
    pub fn step(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let stretch = stretch();
        self.take(now.duration_since(self.since), stretch);
        self.since = now;
        let wait = self.left.mul_f64(stretch).min(STEP);
        (!self.left.is_zero()).then_some(wait)
    }

    fn take(&mut self, elapsed: Duration, stretch: f64) {
        self.left = self.left.saturating_sub(elapsed.div_f64(stretch));
    }
}

/// Returns the number of runnable threads for each processor, over the last minute: at least 1, at
/// most 10.
#[must_use]
pub fn stretch() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    stretch_of(&text, processors)
}

fn stretch_of(loadavg: &str, processors: usize) -> f64 {
    let load = loadavg.split(' ').next().and_then(|text| text.parse().ok());
    let share = load.unwrap_or(0.0) / processors as f64;
    share.clamp(1.0, STRETCH_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_is_given_more_time() {
        assert_eq!(stretch_of("0.10 0.2 0.3 1/100 7\n", 2), 1.0);
        assert_eq!(stretch_of("2.00 0 0", 2), 1.0);
        assert_eq!(stretch_of("6.00 0 0", 2), 3.0);
        assert_eq!(stretch_of("900.0 0 0", 2), STRETCH_MAX);
        assert_eq!(stretch_of("", 2), 1.0);
    }

    #[test]
    fn a_limit_runs_out_by_what_counts() {
        let mut limit = Limit::new(Duration::from_secs(9));
        limit.take(Duration::from_secs(15), 3.0);
        assert_eq!(limit.left, Duration::from_secs(4));
        assert!(limit.step().is_some_and(|wait| wait <= STEP));
        limit.take(Duration::from_secs(15), 3.0);
        assert_eq!(limit.step(), None);
    }
}
