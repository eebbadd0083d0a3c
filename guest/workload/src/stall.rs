//! Times in which a device acknowledged nothing.
//!
//! All threads of a run share one [`Acks`]. Each acknowledgement is an atomic maximum of the time
//! of the last one: the difference is the gap that it ends. A gap is therefore reported once, by
//! the thread that ends it. A gap that never ends is not reported here: it shows as progress that
//! has stopped.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The acknowledgements of a run.
#[derive(Debug)]
pub struct Acks {
    start: Instant,
    /// Nanoseconds from `start` to the latest acknowledgement.
    last_ns: AtomicU64,
    count: AtomicU64,
    limit: Option<Duration>,
}

/// A time without acknowledgements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stall {
    /// Its length.
    pub length: Duration,
    /// Its end, from the start of the run.
    pub end: Duration,
}

impl Acks {
    /// Starts the clock. Gaps of at least `limit` are stalls; without a limit none is.
    #[must_use]
    pub fn new(limit: Option<Duration>) -> Self {
        Self {
            start: Instant::now(),
            last_ns: AtomicU64::new(0),
            count: AtomicU64::new(0),
            limit,
        }
    }

    /// Notes an acknowledgement, now. Returns the stall that it ends.
    pub fn note(&self) -> Option<Stall> {
        self.note_at(self.start.elapsed())
    }

    fn note_at(&self, end: Duration) -> Option<Stall> {
        // Relaxed: the numbers order nothing else.
        self.count.fetch_add(1, Ordering::Relaxed);
        let now = u64::try_from(end.as_nanos()).unwrap_or(u64::MAX);
        // The maximum, not the latest store: a thread may be delayed between its clock and this.
        let before = self.last_ns.fetch_max(now, Ordering::Relaxed);
        let length = Duration::from_nanos(now.saturating_sub(before));
        (length >= self.limit?).then_some(Stall { length, end })
    }

    /// Returns the number of acknowledgements.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the time since the start of the run.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_gap_is_reported_once_by_what_ends_it() {
        let acks = Acks::new(Some(100 * MS));
        assert_eq!(acks.note_at(50 * MS), None);
        let stall = Stall {
            length: 950 * MS,
            end: 1000 * MS,
        };
        assert_eq!(acks.note_at(1000 * MS), Some(stall));
        assert_eq!(acks.note_at(1001 * MS), None);
        assert_eq!(acks.count(), 3);
    }

    #[test]
    fn a_late_thread_ends_no_gap() {
        let acks = Acks::new(Some(MS));
        assert!(acks.note_at(500 * MS).is_some());
        assert_eq!(acks.note_at(499 * MS), None);
        assert_eq!(acks.note_at(500 * MS), None);
    }

    #[test]
    fn without_a_limit_nothing_is_a_stall() {
        assert_eq!(Acks::new(None).note_at(3600 * 1000 * MS), None);
    }
}
