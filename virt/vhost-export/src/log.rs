//! What an export says of its front end: no more than a bounded number of lines, whatever that does.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use sidecore::Nanos;

/// Lines at once, after a rest.
const BURST: u64 = 20;
/// Between two lines beyond those, in nanoseconds.
const EVERY_NS: u64 = 1_000_000_000;

/// The budget of one export. Used by the thread that has the export; atomics only because the export moves.
#[derive(Debug)]
pub(crate) struct Log {
    name: String,
    /// When the budget would be whole again, in nanoseconds (a leaky bucket: see `vio`'s throttle).
    whole_at: AtomicU64,
    /// Lines not said since the last that was.
    unsaid: AtomicU64,
}

impl Log {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            whole_at: AtomicU64::new(0),
            unsaid: AtomicU64::new(0),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether a line may be said now.
    pub(crate) fn admits(&self) -> bool {
        self.admits_at(Nanos::now().0)
    }

    fn admits_at(&self, now: u64) -> bool {
        let whole_at = self.whole_at.load(Relaxed).max(now);
        if whole_at - now > (BURST - 1) * EVERY_NS {
            self.unsaid.store(self.unsaid.load(Relaxed) + 1, Relaxed);
            return false;
        }
        self.whole_at.store(whole_at + EVERY_NS, Relaxed);
        let unsaid = self.unsaid.swap(0, Relaxed);
        if unsaid != 0 {
            tracing::warn!(export = %self.name, "{unsaid} lines about this front end were left out");
        }
        true
    }
}

/// A line of `tracing` at a level, about an export, if its budget allows.
macro_rules! say {
    ($log:expr, $level:ident, $($line:tt)+) => {{
        let log = &$log;
        if log.admits() {
            tracing::$level!(export = %log.name(), $($line)+);
        }
    }};
}
pub(crate) use say;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_lines_is_cut_to_a_trickle() {
        let log = Log::new("test");
        let start = 1 << 50;
        let said = |from: u64, until: u64| {
            let times = (from..until).step_by(1_000_000);
            times.filter(|&now| log.admits_at(start + now)).count() as u64
        };
        assert_eq!(said(0, EVERY_NS), BURST);
        let more = said(EVERY_NS, 11 * EVERY_NS);
        assert!((9..=11).contains(&more), "{more}");
        // And after a rest all of it is there again.
        assert_eq!(said(100 * EVERY_NS, 101 * EVERY_NS), BURST);
    }
}
