//! The loop of a sidecore's thread.
//!
//! ```text
//! forever:  beat
//!           hand out mail         orders to receive or release pollers; `MAIL_BATCH` messages
//!           poll the epoll        every 100 µs, best after a busy sweep: `ready`
//!           scan the probes       1 ns for each poller; deadlines when the earliest has passed
//!           a round over the      deficit round robin (drr.rs): poll with a budget, charge; every
//!             active pollers      microsecond scan the probes: pollers that have got work come
//!                                 before those that had their turn
//!           one was busy? again   else as the idle policy says: spin, pause, or park
//! ```
//! Calls of pollers are in [`serve`](crate::serve), adding and removing them in
//! [`migrate`](crate::migrate).

use std::{
    collections::{HashMap, VecDeque},
    io,
    num::NonZeroU32,
    sync::{atomic::Ordering, mpsc},
    thread,
};

use crate::{
    clock::Nanos,
    drr::Drr,
    handle::Route,
    idle::{Hints, IdleState, Wait},
    mailbox::{AddressedMessage, MailboxReceiver},
    park::{Parked, Waiter, Wake, park},
    pause::Pause,
    poller::{Activity, Poller},
    pollers::Pollers,
    stats::{NO_POLLER, SharedPollerStats, SharedStats},
    sync::Arc,
    sys::{EpollFd, EventFd, ThreadClock},
    transit::{CoreCommand, Leaving},
    wake_calibration::WakeCalibration,
    wakes,
};

/// Time between two polls of the epoll while awake, in nanoseconds: each costs half a microsecond.
pub(crate) const LOOK_EVERY_NS: u64 = 100_000;
/// Longest time that a due poll of the epoll waits for the end of a busy sweep, in nanoseconds. A
/// guest that has just been notified takes longer than the poll to send its next request. At any
/// other time the poll may make a request wait, and its guest halt.
const LOOK_WAITS_NS: u64 = 50_000;
/// Time between two scans of the probes during a round whose turns are measured, in nanoseconds: a
/// scan takes 1 ns for each idle poller.
const SCAN_EVERY_NS: u64 = 1_000;
/// Descriptors taken from the epoll at a time.
pub(crate) const EVENTS: usize = 64;
/// While work is under way elsewhere, one of this many sweeps without work yields the CPU to other
/// threads.
const SWEEPS_PER_YIELD: u32 = 32;

/// Route and statistics of a poller.
#[derive(Debug)]
pub(crate) struct Member<M> {
    pub(crate) route: Arc<Route<M>>,
    pub(crate) shared_stats: Arc<SharedPollerStats>,
}

/// State of a sidecore's thread.
pub(crate) struct Core<P: Poller> {
    pub(crate) pollers: Pollers<P>,
    /// By slot.
    pub(crate) members: Vec<Option<Member<P::Message>>>,
    /// Poller number to slot.
    pub(crate) slots: HashMap<u64, usize>,
    pub(crate) drr: Drr,
    pub(crate) receiver: MailboxReceiver<P::Message, EventFd>,
    /// Messages taken out of the mailbox early, by a move; they are delivered first.
    pub(crate) stash: VecDeque<AddressedMessage<P::Message>>,
    pub(crate) commands: mpsc::Receiver<CoreCommand<P>>,
    pub(crate) leaving: Vec<Leaving<P>>,
    pub(crate) epoll: Arc<EpollFd>,
    pub(crate) events: [libc::epoll_event; EVENTS],
    /// Event of the last poll of the epoll that belongs to no descriptor registered.
    pub(crate) stray: Option<u64>,
    pub(crate) next_look: Nanos,
    pub(crate) shared_stats: Arc<SharedStats>,
    pub(crate) idle: IdleState,
    pub(crate) clock: ThreadClock,
    pub(crate) pause: Pause,
    pub(crate) shares_cpu: bool,
    pub(crate) force_sleep_every: Option<NonZeroU32>,
    /// End of the last sweep.
    pub(crate) now: Nanos,
    /// This is the sweep after a wake that was not by a deadline.
    pub(crate) is_first_after_wake: bool,
    pub(crate) idle_sweeps: u32,
    /// The last sweep found work.
    pub(crate) was_busy: bool,
    /// In this sweep a poller waited for work that is under way elsewhere.
    pub(crate) is_waiting: bool,
    /// Requests taken in this sweep.
    pub(crate) requests: u64,
    /// Kept for its allocation.
    pub(crate) due: Vec<usize>,
}

impl<P: Poller> Core<P> {
    /// Measures the cost of a wake on this core.
    pub(crate) fn calibrate_wakes(&mut self, calibration: &WakeCalibration) {
        if let Some((wake_ns, cpu_ns)) = calibration.sleep(self.clock) {
            self.idle.calibrated(wake_ns, cpu_ns);
        }
    }

    /// Polls until asked to stop; messages sent before that are delivered. Returns the pollers, in
    /// the order of their numbers.
    pub(crate) fn run(mut self) -> Vec<P> {
        let gate = Arc::clone(self.receiver.gate());
        self.now = Nanos::now();
        // The time it took to start is not idleness.
        self.idle.busy(self.now, 0);
        while !gate.is_stopping() {
            if self.sweep() == Activity::Busy {
                self.idle.busy(self.now, std::mem::take(&mut self.requests));
            } else {
                self.wait();
            }
        }
        while self.hand_out_mail() == Activity::Busy {}
        let mut ids: Vec<(u64, usize)> = self.slots.iter().map(|(&id, &at)| (id, at)).collect();
        ids.sort_unstable();
        ids.into_iter()
            .map(|(_, at)| self.pollers.remove(at))
            .collect()
    }

    /// Polls every source once.
    pub(crate) fn sweep(&mut self) -> Activity {
        self.shared_stats.heartbeat.0.sweeps.add(1);
        self.is_waiting = false;
        let mut activity = self.hand_out_mail();
        if self.is_look_due() && self.look(Some(0)) == Activity::Busy {
            activity = Activity::Busy;
        }
        self.wake_pollers();
        self.drr.begin_round();
        // The end of one turn is the beginning of the next, where turns are measured.
        let mut turned_at = None;
        let mut next_scan = self.now.after(SCAN_EVERY_NS);
        while let Some(visit) = self.drr.next() {
            let visited = self.visit(visit, turned_at);
            if visited.activity == Activity::Busy {
                activity = Activity::Busy;
            }
            turned_at = visited.end;
            if visited.is_cut || visited.end.is_some_and(|end| end >= next_scan) {
                let drr = &mut self.drr;
                self.pollers.scan(|at| drr.wake(at));
                next_scan = visited.end.unwrap_or(next_scan).after(SCAN_EVERY_NS);
            }
        }
        if !self.leaving.is_empty() && self.detach_leaving() == Activity::Busy {
            activity = Activity::Busy;
        }
        if self.drr.has_backlogged() {
            activity = Activity::Busy;
        }
        self.shared_stats
            .heartbeat
            .0
            .in_poller
            .store(NO_POLLER, Ordering::Relaxed);
        self.count_sweep(activity);
        activity
    }

    fn is_look_due(&self) -> bool {
        let wait_ns = match self.was_busy {
            true => 0,
            false => LOOK_WAITS_NS,
        };
        self.now >= self.next_look.after(wait_ns)
    }

    /// Puts the pollers into the ring whose probes fire or whose deadlines have passed.
    fn wake_pollers(&mut self) {
        let drr = &mut self.drr;
        self.pollers.scan(|at| drr.wake(at));
        if self.pollers.is_due(self.now) {
            let mut due = std::mem::take(&mut self.due);
            self.pollers.due(self.now, &mut due);
            due.drain(..).for_each(|at| self.drr.wake(at));
            self.due = due;
        }
    }

    fn count_sweep(&mut self, activity: Activity) {
        let (start, core) = (self.now, &self.shared_stats.core.0);
        self.now = Nanos::now();
        let elapsed = self.now.since(start);
        if activity == Activity::Busy {
            core.sweeps_busy.add(1);
            core.busy_ns.add(elapsed);
        } else {
            core.sweeps_idle.add(1);
            core.idle_ns.add(elapsed);
            core.wakes_spurious.add(u64::from(self.is_first_after_wake));
        }
        self.is_first_after_wake = false;
        self.was_busy = activity == Activity::Busy;
    }

    /// Waits after an idle sweep.
    fn wait(&mut self) {
        self.idle_sweeps = self.idle_sweeps.wrapping_add(1);
        let pollers = &self.pollers;
        let wait = self.idle.next(self.now, || Hints {
            arm_cost_ns: pollers.arm_cost_ns(),
            deadline: pollers.earliest(),
        });
        let is_forced = wait != Wait::Sleep
            && self
                .force_sleep_every
                .is_some_and(|n| self.idle_sweeps.is_multiple_of(n.get()))
            && pollers.earliest().is_none_or(|at| at > self.now);
        let core = &self.shared_stats.core.0;
        match wait {
            _ if is_forced => self.sleep(true),
            Wait::Sleep => self.sleep(false),
            _ if self.shares_cpu => {
                core.yields.add(1);
                thread::yield_now();
            }
            // The kernel's worker threads that the pollers wait for may have been placed on this
            // CPU.
            _ if self.is_waiting && self.idle_sweeps.is_multiple_of(SWEEPS_PER_YIELD) => {
                core.yields.add(1);
                thread::yield_now();
            }
            Wait::Spin => {
                core.spins.add(1);
                std::hint::spin_loop();
            }
            Wait::Pause => {
                core.pauses.add(1);
                let (gate, seen) = (self.receiver.gate(), self.receiver.seen());
                self.pause
                    .pause(gate.watched_line(), || gate.sent() == seen);
            }
        }
    }

    #[cold]
    fn sleep(&mut self, is_forced: bool) {
        let seen = self.receiver.seen();
        let gate = Arc::clone(self.receiver.gate());
        let mut waiter = EpollWaiter {
            epoll: &self.epoll,
            events: &mut self.events,
            notifier: gate.notifier(),
            shared_stats: &self.shared_stats,
            ready: 0,
            asleep_ns: 0,
            late_ns: None,
            is_forced,
        };
        let before = self.idle.wants_cost().then(|| self.clock.read());
        let parked = park(&mut self.pollers, &gate, seen, &mut waiter);
        let (ready, asleep_ns, late_ns) = (waiter.ready, waiter.asleep_ns, waiter.late_ns);
        let (start, core) = (self.now, &self.shared_stats.core.0);
        self.now = Nanos::now();
        core.asleep_ns.add(asleep_ns);
        core.arming_ns
            .add(self.now.since(start).saturating_sub(asleep_ns));
        match parked {
            Parked::WorkFound => {
                core.sleeps_refused.add(1);
                self.idle.armed();
                for at in self.pollers.take_found() {
                    self.drr.activate(at);
                }
            }
            Parked::NotArmed(error) => {
                self.shared_stats.arm_failed(chain(&error));
                self.idle.arm_failed(self.now);
            }
            Parked::Slept(wake) => {
                self.shared_stats.woken_by(wake);
                self.is_first_after_wake = wake != Wake::Deadline;
                self.idle.armed();
                let before = before.and_then(Result::ok);
                let cpu_ns =
                    before.and_then(|before| Some(self.clock.read().ok()?.saturating_sub(before)));
                self.idle.slept(asleep_ns, cpu_ns, late_ns);
                if self.idle.wants_use(self.now)
                    && let Ok(cpu_ns) = self.clock.read()
                {
                    self.idle.used(self.now, cpu_ns);
                }
                self.take_events(ready);
            }
        }
    }
}

/// Returns an error and its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    let lines: Vec<_> = causes.map(ToString::to_string).collect();
    lines.join(": ")
}

/// Sleeps in `epoll_wait`.
struct EpollWaiter<'a> {
    epoll: &'a EpollFd,
    events: &'a mut [libc::epoll_event; EVENTS],
    notifier: &'a EventFd,
    shared_stats: &'a SharedStats,
    /// Events of the last wait.
    ready: usize,
    /// Duration of the last wait, if it was entered.
    asleep_ns: u64,
    /// Delay of the wake by a deadline.
    late_ns: Option<u64>,
    /// The coming wait is one that `force_sleep_every` asks for.
    is_forced: bool,
}

impl Waiter for EpollWaiter<'_> {
    fn wait(&mut self, deadline: Option<Nanos>) -> io::Result<Wake> {
        let start = Nanos::now();
        let core = &self.shared_stats.core.0;
        core.sleeps.add(1);
        core.sleeps_forced.add(u64::from(self.is_forced));
        self.shared_stats
            .asleep(Some(deadline.unwrap_or(Nanos(u64::MAX))));
        let ready = self
            .epoll
            .wait(self.events, deadline.map(|at| at.since(start)));
        self.shared_stats.asleep(None);
        self.asleep_ns = Nanos::now().since(start);

        self.ready = match ready {
            Ok(0) => {
                self.late_ns = deadline.map(|at| Nanos::now().since(at));
                return Ok(Wake::Deadline);
            }
            Ok(ready) => ready,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                return Ok(Wake::Interrupted);
            }
            Err(error) => return Err(error),
        };
        let is_notifier = |event: &libc::epoll_event| event.u64 == wakes::NOTIFIER;
        if self.events[..self.ready].iter().any(is_notifier) {
            self.notifier.drain();
            return Ok(Wake::Mailbox);
        }
        Ok(Wake::Fd)
    }
}

/// Returns a core's epoll, with its notifier in it.
pub(crate) fn epoll_with(notifier: &EventFd) -> io::Result<Arc<EpollFd>> {
    let epoll = EpollFd::new()?;
    epoll.add(notifier.as_raw_fd(), wakes::NOTIFIER)?;
    Ok(Arc::new(epoll))
}
