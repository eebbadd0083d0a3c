//! Time limits that know the load: a second counts as less while other programs have the
//! processors.
//!
//! An emulated host on a busy machine is slow, not dead. A `Limit` is in seconds of a machine that
//! has nothing else to do; with as many runnable threads for each processor as [`stretch`] says, it
//! lasts that many times longer.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// Longer than this no limit lasts, in times of itself: on any machine there is an end.
const STRETCH_MAX: f64 = 10.0;

/// The load is looked at this often.
const STEP: Duration = Duration::from_secs(1);

/// What is left of a limit.
#[derive(Debug)]
pub struct Limit {
    left: Duration,
    since: Instant,
}

impl Limit {
    /// So many seconds of an idle machine, from now on.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        Self {
            left: limit,
            since: Instant::now(),
        }
    }

    /// How long to wait before the next question; `None` when the limit has passed.
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

/// Runnable threads for each processor, over the last minute: 1 when there are no more than
/// processors, 10 at most.
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
