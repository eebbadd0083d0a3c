//! What a sidecore did, readable at any time from any thread.
//!
//! The counters have one writer, the sidecore's thread, which adds with a plain load and store (no
//! locked instruction), and stand on cache lines of their own: readers cost the writer a cache
//! miss, and nothing while nobody reads. All accesses are `Relaxed`: they order nothing, and a
//! snapshot's figures may be a sweep apart from each other.

use std::{
    io,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::{clock::Nanos, park::Wake, sync::CachePadded, sys::ThreadClock};

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
    /// What a sidecore did since it started. Times in nanoseconds.
    CoreCounters => CoreStats {
        /// Sweeps in which a poller or the mailbox had work.
        sweeps_busy,
        /// Sweeps in which none had.
        sweeps_idle,
        /// Messages handed to pollers.
        messages,
        /// Idle sweeps followed by the next at once.
        spins,
        /// Idle sweeps followed by a pause of about a microsecond.
        pauses,
        /// Idle sweeps followed by giving the CPU to others (`shares_cpu`).
        yields,
        /// Times it was asleep: the wait was entered.
        sleeps,
        /// Of these, those that only `force_sleep_every` asked for.
        sleeps_forced,
        /// Sleeps called off by the last look after arming: work had come meanwhile.
        sleeps_refused,
        /// Wakes by a message (or a `Waker`).
        wakes_mailbox,
        /// Wakes by a descriptor of a poller.
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
        /// Time in sweeps that found none, and in the pauses after them.
        idle_ns,
        /// Time in arming and disarming.
        arming_ns,
        /// Time in the wait.
        asleep_ns,
    }
}

counters! {
    /// What one poller did since its sidecore started.
    PollerCounters => PollerActivity {
        /// Polls that answered `Busy`.
        polls_busy,
        /// Polls that answered `Idle`.
        polls_idle,
        /// Messages handed to it.
        messages,
    }
}

/// One poller's share of [`Stats`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PollerStats {
    /// Its [`name`](crate::Poller::name) at the start.
    pub name: String,
    /// Its counters.
    pub activity: PollerActivity,
}

/// A snapshot of a sidecore's statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// The sidecore's name.
    pub name: String,
    /// How it pauses on this CPU: `umwait`, `mwaitx` or `pause`.
    pub pause: &'static str,
    /// The sidecore as a whole.
    pub core: CoreStats,
    /// Its pollers, in the order given to `spawn`.
    pub pollers: Vec<PollerStats>,
    /// CPU time of its thread, user and kernel.
    pub cpu_time: Duration,
    /// Why arming failed the last time it did.
    pub last_arm_error: Option<String>,
}

/// Whether the thread still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    Running,
    Ended,
    Panicked,
}

/// Not in a poller.
pub(crate) const NO_POLLER: usize = usize::MAX;

/// What the monitor looks at. Written by the sidecore's thread.
#[derive(Debug)]
pub(crate) struct Pulse {
    /// Counts sweeps.
    pub(crate) beats: Counter,
    /// In the wait.
    pub(crate) is_asleep: AtomicBool,
    /// The moment at which the wait ends by itself, in nanoseconds; `u64::MAX` for never.
    pub(crate) sleeps_until: AtomicU64,
    /// The index of the poller being called.
    pub(crate) in_poller: AtomicUsize,
    life: AtomicU32,
}

impl Pulse {
    pub(crate) fn life(&self) -> Life {
        // Acquire: pairs with `end`; what the thread published last is visible.
        match self.life.load(Ordering::Acquire) {
            0 => Life::Running,
            1 => Life::Ended,
            _ => Life::Panicked,
        }
    }
}

/// The part of a sidecore that others may read: written by its thread, in cache lines apart.
#[derive(Debug)]
pub(crate) struct Board {
    pub(crate) name: String,
    pub(crate) pause: &'static str,
    pub(crate) pulse: CachePadded<Pulse>,
    pub(crate) core: CachePadded<CoreCounters>,
    pub(crate) pollers: Vec<(String, CachePadded<PollerCounters>)>,
    clock: OnceLock<ThreadClock>,
    cpu_ns_at_end: AtomicU64,
    last_arm_error: Mutex<Option<String>>,
}

impl Board {
    pub(crate) fn new(name: String, pause: &'static str, pollers: Vec<String>) -> Self {
        Board {
            name,
            pause,
            pulse: CachePadded(Pulse {
                beats: Counter::default(),
                is_asleep: AtomicBool::new(false),
                sleeps_until: AtomicU64::new(u64::MAX),
                in_poller: AtomicUsize::new(NO_POLLER),
                life: AtomicU32::new(0),
            }),
            core: CachePadded::default(),
            pollers: pollers
                .into_iter()
                .map(|name| (name, CachePadded::default()))
                .collect(),
            clock: OnceLock::new(),
            cpu_ns_at_end: AtomicU64::new(0),
            last_arm_error: Mutex::new(None),
        }
    }

    /// The thread has started: its clock.
    pub(crate) fn begin(&self, clock: ThreadClock) {
        // Set once: one thread per board.
        let _ = self.clock.set(clock);
    }

    /// The thread is about to end.
    pub(crate) fn end(&self, panicked: bool) {
        let cpu_ns = self.clock.get().and_then(|clock| clock.read().ok());
        self.cpu_ns_at_end
            .store(cpu_ns.unwrap_or(0), Ordering::Relaxed);
        // Release: pairs with `Pulse::life`.
        self.pulse
            .0
            .life
            .store(if panicked { 2 } else { 1 }, Ordering::Release);
    }

    /// One wake, by cause.
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
        self.core.0.arm_failures.add(1);
        *self
            .last_arm_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(reason);
    }

    /// CPU time of the thread so far, or at its end.
    pub(crate) fn cpu_time(&self) -> io::Result<Duration> {
        let Some(clock) = self.clock.get() else {
            return Ok(Duration::ZERO);
        };
        if self.pulse.0.life() == Life::Running {
            match clock.read() {
                Ok(ns) => return Ok(Duration::from_nanos(ns)),
                // It may have ended just now.
                Err(error) if self.pulse.0.life() == Life::Running => return Err(error),
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
                .pollers
                .iter()
                .map(|(name, counters)| PollerStats {
                    name: name.clone(),
                    activity: counters.0.snapshot(),
                })
                .collect(),
            cpu_time: self.cpu_time().unwrap_or_default(),
            last_arm_error: last_arm_error.clone(),
        }
    }

    /// Enters (or leaves, with `None`) the wait, for the monitor.
    pub(crate) fn asleep(&self, until: Option<Nanos>) {
        let pulse = &self.pulse.0;
        match until {
            Some(until) => {
                pulse.sleeps_until.store(until.0, Ordering::Relaxed);
                pulse.is_asleep.store(true, Ordering::Relaxed);
            }
            None => pulse.is_asleep.store(false, Ordering::Relaxed),
        }
    }
}
