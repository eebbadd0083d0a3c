//! A bounded number of log lines, whatever a guest, a front end or a disk does.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Budget of log lines of one device or front end: 20 lines at once after a quiet time, then one a
/// second. No clock is read: the time is an argument.
///
/// Used by the thread that owns the device; atomics only because that moves between threads.
#[derive(Debug, Default)]
pub struct LogRateLimit {
    /// Time at which the budget would be whole again, in nanoseconds (a leaky bucket: see
    /// [`throttle`](crate::throttle)).
    whole_at: AtomicU64,
    /// Lines suppressed since the last one that was logged.
    suppressed: AtomicU64,
}

impl LogRateLimit {
    /// Lines at once, after a quiet time.
    pub const BURST: u64 = 20;
    /// Between two lines beyond those, in nanoseconds.
    pub const EVERY_NS: u64 = 1_000_000_000;

    /// Admits a line now, or counts it as suppressed and returns `None`. If it is admitted, returns
    /// the number of lines suppressed since the last one.
    pub fn admits_at(&self, now_ns: u64) -> Option<u64> {
        let whole_at = self.whole_at.load(Relaxed).max(now_ns);
        if whole_at - now_ns > (Self::BURST - 1) * Self::EVERY_NS {
            self.suppressed
                .store(self.suppressed.load(Relaxed) + 1, Relaxed);
            return None;
        }
        self.whole_at.store(whole_at + Self::EVERY_NS, Relaxed);
        Some(self.take_unsaid())
    }

    /// Returns the text behind a line that reports the number of lines suppressed before it; empty
    /// if there were none.
    pub fn left_out(suppressed: u64) -> String {
        match suppressed {
            0 => String::new(),
            suppressed => format!(" ({suppressed} more before it were not reported)"),
        }
    }

    /// Takes the number of lines suppressed since the last one that was logged: for the end, after
    /// which no line comes.
    pub fn take_unsaid(&self) -> u64 {
        self.suppressed.swap(0, Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BURST: u64 = LogRateLimit::BURST;
    const EVERY_NS: u64 = LogRateLimit::EVERY_NS;

    #[test]
    fn a_flood_of_lines_is_cut_to_a_trickle_and_counted() {
        let budget = LogRateLimit::default();
        let start = 1 << 50;
        let said = |from: u64, until: u64| {
            let times = (from..until).step_by(1_000_000);
            times
                .filter_map(|now| budget.admits_at(start + now))
                .collect()
        };
        let first: Vec<u64> = said(0, EVERY_NS);
        assert_eq!(first, [0; BURST as usize]);
        let more: Vec<u64> = said(EVERY_NS, 11 * EVERY_NS);
        assert!((9..=11).contains(&more.len()), "{more:?}");
        assert!(more.iter().all(|suppressed| *suppressed > 900), "{more:?}");
        // And after a quiet time all of it is there again.
        let again: Vec<u64> = said(100 * EVERY_NS, 101 * EVERY_NS);
        assert_eq!(again.len() as u64, BURST);
    }
}
