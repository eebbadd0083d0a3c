//! A thread that reports sidecores that have stopped sweeping.
//!
//! A guest whose sidecore is stuck hangs in ways that are hard to trace (Linux panics after 10 s on
//! a silent VT-d register and spins for ever on an invalidation wait), so the stall is reported
//! before that, with the poller it is stuck in. Every 1/8 of the limit the monitor samples each
//! sidecore. A sidecore is well if
//! - it has begun a sweep since the last sample, or
//! - it is asleep, no message waits for it, and no deadline of a poller has passed;
//!
//! It is reported once per stall, when it was not well in 8 samples in a row. Samples are counted,
//! and not time, so that a process that was stopped as a whole (SIGSTOP, a paused host) is not
//! reported when it continues.
//!
//! Limitation: a wake-up lost in a guest's queue is not detected. That sidecore sleeps, has no
//! message, and only the guest knows that it waits. The protocol in [`park`](crate::park) prevents
//! such a loss.

use std::{
    fmt, io,
    sync::{Condvar, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    thread,
    time::Duration,
};

use crate::{
    clock::Nanos,
    gate::Gate,
    stats::{SharedStats, Stats, ThreadState},
    sync::Arc,
    sys::EventFd,
};

/// Samples in a row in which a sidecore is unwell before it is reported.
const SAMPLES: u32 = 8;

/// A sidecore's heartbeat and statistics, for a [`Monitor`] and for reports; it outlives the
/// sidecore and keeps none of its pollers alive.
#[derive(Clone)]
pub struct Watch {
    shared_stats: Arc<SharedStats>,
    gate: Arc<Gate<EventFd>>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch")
            .field("name", &self.shared_stats.name)
            .finish_non_exhaustive()
    }
}

impl Watch {
    pub(crate) fn new(shared_stats: Arc<SharedStats>, gate: Arc<Gate<EventFd>>) -> Self {
        Watch { shared_stats, gate }
    }

    /// Returns the sidecore's statistics so far, or until it ended.
    pub fn stats(&self) -> Stats {
        self.shared_stats.snapshot()
    }

    /// Returns whether it is in its wait right now.
    pub fn is_asleep(&self) -> bool {
        self.shared_stats
            .heartbeat
            .0
            .is_asleep
            .load(Ordering::Relaxed)
    }

    fn sample(&self, now: Nanos) -> Sample {
        let heartbeat = &self.shared_stats.heartbeat.0;
        let may_sleep = now.0 < heartbeat.sleeps_until.load(Ordering::Relaxed)
            && self.gate.sent() == self.shared_stats.heartbeat.0.mail_taken.get();
        Sample {
            thread_state: heartbeat.thread_state(),
            sweeps: heartbeat.sweeps.get(),
            is_asleep: heartbeat.is_asleep.load(Ordering::Relaxed) && may_sleep,
        }
    }
}

/// Sample of a sidecore.
#[derive(Clone, Copy, Debug)]
struct Sample {
    thread_state: ThreadState,
    sweeps: u64,
    /// It is asleep, and no message or deadline should have woken it.
    is_asleep: bool,
}

/// Reason of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StallCause {
    /// No sweep has begun for the limit: a poller does not return, or the thread does not get a
    /// CPU.
    Silent,
    /// It sleeps although a message or a deadline should have woken it.
    Overslept,
    /// A poller panicked; the thread is gone.
    Panicked,
}

/// The monitor's report on one sidecore.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StallReport {
    /// The sidecore's name.
    pub name: String,
    /// Reason of the report.
    pub cause: StallCause,
    /// The name of the poller that was being called, if one was.
    pub in_poller: Option<String>,
    /// Its statistics at the time of the report.
    pub stats: Stats,
}

/// Samples of one sidecore that the monitor remembers. Pure, for tests without a clock.
#[derive(Debug, Default)]
struct History {
    sweeps: u64,
    unwell: u32,
    is_reported: bool,
}

impl History {
    /// Returns whether this sample is to be reported: the first at which the stall has lasted long
    /// enough.
    fn must_report(&mut self, sample: Sample) -> bool {
        if sample.thread_state != ThreadState::Panicked
            && (sample.sweeps != self.sweeps || sample.is_asleep)
        {
            *self = History {
                sweeps: sample.sweeps,
                ..History::default()
            };
            return false;
        }
        self.unwell += 1;
        let is_stuck = self.unwell >= SAMPLES || sample.thread_state == ThreadState::Panicked;
        let must_report = is_stuck && !self.is_reported;
        self.is_reported |= is_stuck;
        must_report
    }
}

#[derive(Debug, Default)]
struct WatchList {
    list: Vec<(Watch, History)>,
    is_stopping: bool,
}

#[derive(Debug, Default)]
struct Shared {
    watched: Mutex<WatchList>,
    stop: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, WatchList> {
        // Nothing panics under the lock.
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The monitor thread; it ends when this is dropped.
#[derive(Debug)]
pub struct Monitor {
    shared: Arc<Shared>,
    /// Taken when joined.
    thread: Option<thread::JoinHandle<()>>,
}

impl Monitor {
    /// Default limit: 2 s.
    pub const LIMIT: Duration = Duration::from_secs(2);

    /// Starts the thread. `report` runs on it, once per stall, after between `limit` and 9/8 of it
    /// (at once for a panic). It may block and may call [`watch`](Self::watch).
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn spawn(
        limit: Duration,
        mut report: impl FnMut(&StallReport) + Send + 'static,
    ) -> io::Result<Monitor> {
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("monitor".to_owned())
            .spawn(move || monitor(&of_thread, limit / SAMPLES, &mut report))?;
        Ok(Monitor {
            shared,
            thread: Some(thread),
        })
    }

    /// Watches one more sidecore, until it ends.
    pub fn watch(&self, watch: Watch) {
        self.shared.lock().list.push((watch, History::default()));
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.lock().is_stopping = true;
        self.shared.stop.notify_all();
        if let Some(thread) = self.thread.take() {
            // If `report` panicked it has been printed; a panic in a drop would abort.
            let _ = thread.join();
        }
    }
}

fn monitor(shared: &Shared, interval: Duration, report: &mut dyn FnMut(&StallReport)) {
    let mut watched = shared.lock();
    while !watched.is_stopping {
        let now = Nanos::now();
        watched.list.retain(|(watch, _)| {
            watch.shared_stats.heartbeat.0.thread_state() != ThreadState::Ended
        });
        let stuck: Vec<StallReport> = watched
            .list
            .iter_mut()
            .filter_map(|(watch, history)| {
                let sample = watch.sample(now);
                history.must_report(sample).then(|| describe(watch, sample))
            })
            .collect();
        // Reported after unlocking: `report` may call `watch`.
        drop(watched);
        stuck.iter().for_each(&mut *report);
        watched = shared.lock();
        if !watched.is_stopping {
            let waited = shared.stop.wait_timeout(watched, interval);
            watched = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn describe(watch: &Watch, sample: Sample) -> StallReport {
    let heartbeat = &watch.shared_stats.heartbeat.0;
    let id = heartbeat.in_poller.load(Ordering::Relaxed);
    // In a statement of its own: the list is unlocked at its end.
    let in_poller = watch
        .shared_stats
        .pollers()
        .iter()
        .find(|poller| poller.id == id)
        .map(|poller| poller.name.clone());
    StallReport {
        name: watch.shared_stats.name.clone(),
        cause: match sample.thread_state {
            ThreadState::Panicked => StallCause::Panicked,
            _ if heartbeat.is_asleep.load(Ordering::Relaxed) => StallCause::Overslept,
            _ => StallCause::Silent,
        },
        in_poller,
        stats: watch.shared_stats.snapshot(),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn sample(sweeps: u64, is_asleep: bool) -> Sample {
        Sample {
            thread_state: ThreadState::Running,
            sweeps,
            is_asleep,
        }
    }

    #[test]
    fn a_silent_sidecore_is_reported_once_per_stall() {
        let mut history = History::default();
        assert!(!history.must_report(sample(5, false)));
        let reports: Vec<bool> = (0..20)
            .map(|_| history.must_report(sample(5, false)))
            .collect();
        assert_eq!(reports.iter().position(|&must_report| must_report), Some(7));
        assert_eq!(
            reports.iter().filter(|&&must_report| must_report).count(),
            1
        );
        assert!(!history.must_report(sample(6, false)));
        assert!((0..8).any(|_| history.must_report(sample(6, false))));
    }

    #[test]
    fn one_that_sleeps_or_beats_is_never_reported() {
        let mut history = History::default();
        assert!((0..100).all(|_| !history.must_report(sample(0, true))));
        assert!((0..100).all(|beat| !history.must_report(sample(beat, false))));
    }

    #[test]
    fn one_that_panicked_is_reported_at_once_and_once() {
        let mut history = History::default();
        let sample = Sample {
            thread_state: ThreadState::Panicked,
            sweeps: 9,
            is_asleep: false,
        };
        assert!(history.must_report(sample));
        assert!(!history.must_report(sample));
    }
}
