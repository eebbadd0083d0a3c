//! Times at which the link thread connects again, and the log lines about it.

use std::time::{Duration, Instant};

/// Between two tries to connect: at first, and at last.
const RETRY_FIRST: Duration = Duration::from_millis(5);
const RETRY_LAST: Duration = Duration::from_millis(200);
/// Lines of log about the connection at once, and the time for which each more has to wait.
const LINES: u32 = 20;
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Schedule of the attempts to connect again.
#[derive(Debug)]
pub(crate) struct Reconnect {
    pub at: Instant,
    delay: Duration,
    /// The last reason that was checked for the log.
    reason: String,
    /// Time at which all of [`LINES`] may be logged at once again: a back end that fails for ever,
    /// each time for another reason, fills no log.
    whole_at: Instant,
}

impl Reconnect {
    pub fn new() -> Self {
        Self {
            at: Instant::now(),
            delay: RETRY_FIRST,
            reason: String::new(),
            whole_at: Instant::now(),
        }
    }

    /// After a connection that was a good one.
    pub fn at_once(&mut self) {
        self.at = Instant::now();
        self.delay = RETRY_FIRST;
        self.reason.clear();
    }

    pub fn later(&mut self) {
        self.at = Instant::now() + self.delay;
        self.delay = (self.delay * 2).min(RETRY_LAST);
    }

    /// Whether this is to be logged.
    pub fn is_news(&mut self, reason: &str, now: Instant) -> bool {
        if self.reason == reason {
            return false;
        }
        reason.clone_into(&mut self.reason);
        self.admits(now)
    }

    /// Whether a line may be logged: some at once, then one each [`LINE_EVERY`].
    pub fn admits(&mut self, now: Instant) -> bool {
        let whole_at = self.whole_at.max(now);
        let admits = whole_at - now <= (LINES - 1) * LINE_EVERY;
        if admits {
            self.whole_at = whole_at + LINE_EVERY;
        }
        admits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_back_end_that_fails_for_ever_fills_no_log() {
        let mut reconnect = Reconnect::new();
        let start = Instant::now();
        let mut said = 0;
        // Alternately, each time after a connection that was a good one.
        for at in 0..1000 {
            let now = start + Duration::from_millis(100) * at;
            reconnect.at_once();
            said += u32::from(reconnect.is_news(["gone", "refused"][at as usize % 2], now));
            said += u32::from(reconnect.admits(now));
        }
        assert!((100..=LINES + 101).contains(&said), "{said}");
        // After a quiet time each is logged again, once.
        let now = start + Duration::from_secs(1000);
        reconnect.at_once();
        assert!(reconnect.is_news("gone", now));
        assert!(!reconnect.is_news("gone", now));
    }
}
