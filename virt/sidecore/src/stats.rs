//! Statistics of a sidecore, readable at any time from any thread.
//!
//! The counters have one writer, the sidecore's thread, which adds by a plain load and store (no
//! locked instruction). They are on separate cache lines: a read costs the writer one cache miss at
//! most. All accesses are `Relaxed`: they order nothing, and the figures of a snapshot may differ
//! in age by a sweep.

use std::{
    io,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{
    clock::Nanos,
    park::Wake,
    sync::{Arc, CachePadded},
    sys::ThreadClock,
};

/// A counter with a single writer.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.get().wrapping_add(n), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Declares the counters and their snapshot in one list.
macro_rules! counters {
    ($(#[$doc:meta])* $live:ident => $snapshot:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        #[derive(Debug, Default)]
        pub(crate) struct $live { $(pub(crate) $field: Counter,)* }

        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $snapshot { $($(#[$field_doc])* pub $field: u64,)* }

        impl $live {
            pub(crate) fn snapshot(&self) -> $snapshot {
                $snapshot { $($field: self.$field.get(),)* }
            }
        }
    };
}

counters! {
    /// Counters of a sidecore since it started. Times in nanoseconds.
    CoreCounters => CoreStats {
        /// Sweeps in which a poller or the mailbox had work.
        sweeps_busy,
        /// Sweeps in which none had work.
        sweeps_idle,
        /// Messages handed to pollers.
        messages,
        /// Sum of all costs charged, in cost units (nanoseconds, as estimated by the pollers).
        cost,
        /// Checks of the epoll descriptor while awake.
        looks,
        /// Times a poller was notified that a descriptor is readable.
        readies,
        /// Times a descriptor was muted because it fired repeatedly without work.
        mutes,
        /// Times the epoll was rebuilt because a descriptor was closed before it was removed.
        rebuilds,
        /// Pollers added since the start.
        attached,
        /// Pollers moved away or removed.
        detached,
        /// Idle sweeps followed by the next sweep at once.
        spins,
        /// Idle sweeps followed by a pause of about a microsecond.
        pauses,
        /// Idle sweeps followed by yielding the CPU: all of them with `shares_cpu`, otherwise some
        /// while requests are in progress elsewhere.
        yields,
        /// Times the thread entered the wait.
        sleeps,
        /// Sleeps caused only by `force_sleep_every`.
        sleeps_forced,
        /// Sleeps cancelled by the re-check after arming: work had come meanwhile.
        sleeps_refused,
        /// Wakes by a message (or a `Waker`).
        wakes_mailbox,
        /// Wakes by a descriptor of a poller, or by one that is no longer registered.
        wakes_fd,
        /// Wakes by a deadline of a poller.
        wakes_deadline,
        /// Wakes by a signal.
        wakes_interrupted,
        /// Wakes, not by a deadline, whose first sweep found nothing.
        wakes_spurious,
        /// Times a poller could not be armed; the sidecore kept polling.
        arm_failures,
        /// Time in sweeps that found work.
        busy_ns,
        /// Time in sweeps that found no work, and in the pauses after them.
        idle_ns,
        /// Time spent arming and disarming.
        arming_ns,
        /// Time spent in the wait.
        asleep_ns,
    }
}

counters! {
    /// Counters of one poller since it was first added; they move with it.
    PollerCounters => PollerActivity {
        /// Polls that answered `Busy`.
        polls_busy,
        /// Polls that answered `Idle` or `Waiting`.
        polls_idle,
        /// Messages handed to it.
        messages,
        /// Cost units charged for it.
        cost,
        /// Times one of its descriptors was readable.
        readies,
        /// Times one of its descriptors was muted.
        mutes,
    }
}

/// Statistics of one poller, a part of [`Stats`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PollerStats {
    /// Its number, unique in this process: [`Handle::id`](crate::Handle::id).
    pub id: u64,
    /// Its [`name`](crate::Poller::name) when it was added.
    pub name: String,
    /// State after its last poll.
    pub state: PollerState,
    /// Its counters.
    pub activity: PollerActivity,
}

/// State of a poller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollerState {
    /// Its last poll returned `Busy`, or it has not been polled yet.
    Busy,
    /// It is polled in each sweep, and waits for requests in progress.
    Waiting,
    /// It is not polled: sweeps check only its probe.
    Idle,
}

/// Statistics of a poller, for readers; they move with the poller.
#[derive(Debug)]
pub(crate) struct SharedPollerStats {
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) counters: CachePadded<PollerCounters>,
    state: AtomicU32,
}

impl SharedPollerStats {
    pub(crate) fn new(id: u64, name: &str) -> Self {
        SharedPollerStats {
            id,
            name: name.to_owned(),
            counters: CachePadded::default(),
            state: AtomicU32::new(0),
        }
    }

    pub(crate) fn set_state(&self, state: PollerState) {
        self.state.store(state as u32, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> PollerStats {
        PollerStats {
            id: self.id,
            name: self.name.clone(),
            state: match self.state.load(Ordering::Relaxed) {
                0 => PollerState::Busy,
                1 => PollerState::Waiting,
                _ => PollerState::Idle,
            },
            activity: self.counters.0.snapshot(),
        }
    }
}

impl CoreStats {
    /// Returns the share of the time since `earlier` (a snapshot of the same sidecore) in which it
    /// had work, 0 to 1.
    pub fn utilisation_since(&self, earlier: &CoreStats) -> f64 {
        let busy = self.busy_ns.wrapping_sub(earlier.busy_ns) as f64;
        let total = |stats: &CoreStats| {
            let parts = [stats.idle_ns, stats.arming_ns, stats.asleep_ns];
            parts
                .iter()
                .fold(stats.busy_ns, |sum, &ns| sum.wrapping_add(ns))
        };
        let total = total(self).wrapping_sub(total(earlier)) as f64;
        if total > 0.0 { busy / total } else { 0.0 }
    }
}

/// A snapshot of a sidecore's statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// The sidecore's name.
    pub name: String,
    /// Instruction used to pause on this CPU: `umwait`, `mwaitx` or `pause`.
    pub pause: &'static str,
    /// The sidecore as a whole.
    pub core: CoreStats,
    /// Its pollers at present, in the order in which they were added.
    pub pollers: Vec<PollerStats>,
    /// CPU time of its thread, user and kernel.
    pub cpu_time: Duration,
    /// Reason of the last failure to arm a poller.
    pub last_arm_error: Option<String>,
}

/// State of the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThreadState {
    Running,
    Ended,
    Panicked,
}

/// Value of [`Heartbeat::in_poller`] outside of pollers.
pub(crate) const NO_POLLER: u64 = u64::MAX;

/// Liveness data that the monitor samples. Written by the sidecore's thread.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    /// Number of sweeps.
    pub(crate) sweeps: Counter,
    /// The thread is in the wait.
    pub(crate) is_asleep: AtomicBool,
    /// Time at which the wait ends by itself, in nanoseconds; `u64::MAX` for never.
    pub(crate) sleeps_until: AtomicU64,
    /// Number of the poller being called, or [`NO_POLLER`].
    pub(crate) in_poller: AtomicU64,
    /// Number of messages and commands taken out of the mailbox.
    pub(crate) mail_taken: Counter,
    thread_state: AtomicU32,
}

impl Heartbeat {
    pub(crate) fn thread_state(&self) -> ThreadState {
        // Acquire: pairs with `end`, so the thread's last stores are visible.
        match self.thread_state.load(Ordering::Acquire) {
            0 => ThreadState::Running,
            1 => ThreadState::Ended,
            _ => ThreadState::Panicked,
        }
    }
}

/// Statistics of a sidecore, for readers: written by its thread, on separate cache lines.
#[derive(Debug)]
pub(crate) struct SharedStats {
    pub(crate) name: String,
    pub(crate) pause: &'static str,
    pub(crate) heartbeat: CachePadded<Heartbeat>,
    pub(crate) core: CachePadded<CoreCounters>,
    /// Locked to add or remove pollers, and by readers.
    pollers: Mutex<Vec<Arc<SharedPollerStats>>>,
    clock: OnceLock<ThreadClock>,
    cpu_ns_at_end: AtomicU64,
    last_arm_error: Mutex<Option<String>>,
}

impl SharedStats {
    pub(crate) fn new(name: String, pause: &'static str) -> Self {
        SharedStats {
            name,
            pause,
            heartbeat: CachePadded(Heartbeat {
                sweeps: Counter::default(),
                is_asleep: AtomicBool::new(false),
                sleeps_until: AtomicU64::new(u64::MAX),
                in_poller: AtomicU64::new(NO_POLLER),
                mail_taken: Counter::default(),
                thread_state: AtomicU32::new(0),
            }),
            core: CachePadded::default(),
            pollers: Mutex::default(),
            clock: OnceLock::new(),
            cpu_ns_at_end: AtomicU64::new(0),
            last_arm_error: Mutex::new(None),
        }
    }

    /// Returns the pollers that are here now.
    pub(crate) fn pollers(&self) -> MutexGuard<'_, Vec<Arc<SharedPollerStats>>> {
        // Nothing panics under the lock.
        self.pollers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the thread has started, and its clock.
    pub(crate) fn begin(&self, clock: ThreadClock) {
        // Set once: these statistics belong to one thread.
        let _ = self.clock.set(clock);
    }

    /// Records that the thread is about to end.
    pub(crate) fn end(&self, panicked: bool) {
        let cpu_ns = self.clock.get().and_then(|clock| clock.read().ok());
        self.cpu_ns_at_end
            .store(cpu_ns.unwrap_or(0), Ordering::Relaxed);
        // Release: pairs with `Heartbeat::thread_state`.
        self.heartbeat
            .0
            .thread_state
            .store(if panicked { 2 } else { 1 }, Ordering::Release);
    }

    /// Counts a wake, by cause.
    pub(crate) fn woken_by(&self, wake: Wake) {
        let core = &self.core.0;
        match wake {
            Wake::Mailbox => core.wakes_mailbox.add(1),
            Wake::Fd => core.wakes_fd.add(1),
            Wake::Deadline => core.wakes_deadline.add(1),
            Wake::Interrupted => core.wakes_interrupted.add(1),
        }
    }

    #[cold]
    pub(crate) fn arm_failed(&self, reason: String) {
        let mut last = self
            .last_arm_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *last = Some(reason);
        // Counted under the lock, as in a snapshot: a reader that sees the failure counted also has
        // its reason.
        self.core.0.arm_failures.add(1);
    }

    /// Returns the CPU time of the thread so far, or at its end.
    pub(crate) fn cpu_time(&self) -> io::Result<Duration> {
        let Some(clock) = self.clock.get() else {
            return Ok(Duration::ZERO);
        };
        if self.heartbeat.0.thread_state() == ThreadState::Running {
            match clock.read() {
                Ok(ns) => return Ok(Duration::from_nanos(ns)),
                // It may have ended just now.
                Err(error) if self.heartbeat.0.thread_state() == ThreadState::Running => {
                    return Err(error);
                }
                Err(_) => {}
            }
        }
        Ok(Duration::from_nanos(
            self.cpu_ns_at_end.load(Ordering::Relaxed),
        ))
    }

    pub(crate) fn snapshot(&self) -> Stats {
        let last_arm_error = self
            .last_arm_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Stats {
            name: self.name.clone(),
            pause: self.pause,
            core: self.core.0.snapshot(),
            pollers: self
                .pollers()
                .iter()
                .map(|shared_stats| shared_stats.snapshot())
                .collect(),
            cpu_time: self.cpu_time().unwrap_or_default(),
            last_arm_error: last_arm_error.clone(),
        }
    }

    /// Enters (or leaves, with `None`) the wait, for the monitor.
    pub(crate) fn asleep(&self, until: Option<Nanos>) {
        let heartbeat = &self.heartbeat.0;
        match until {
            Some(until) => {
                heartbeat.sleeps_until.store(until.0, Ordering::Relaxed);
                heartbeat.is_asleep.store(true, Ordering::Relaxed);
            }
            None => heartbeat.is_asleep.store(false, Ordering::Relaxed),
        }
    }
}
