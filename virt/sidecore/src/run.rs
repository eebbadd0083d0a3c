//! The loop of a sidecore's thread.
//!
//! ```text
//! forever:  beat
//!           hand out mail                   at most `MAIL_BATCH`; orders to take on or give away pollers first
//!           look at the epoll               every 100 µs, best after a busy sweep: `ready`
//!           scan the probes                 1 ns for each poller; deadlines when the earliest has passed
//!           a round over the active ones    deficit round robin (drr.rs): poll with a budget, charge; the probes again each
//!                                           microsecond: who has got work meanwhile comes before those that have had their turn
//!           anybody busy? again             else as the idle policy says: spin, pause, or park
//! ```
//! What a call of a poller involves is in [`serve`](crate::serve), coming and going in
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
    mailbox::{Envelope, Inbox},
    park::{Parked, Waiter, Wake, park},
    pause::Pause,
    poller::{Activity, Poller},
    pollers::Pollers,
    stats::{Board, NO_POLLER, PollerBoard},
    sync::Arc,
    sys::{EpollFd, EventFd, ThreadClock},
    transit::{Leaving, Order},
    wake_calibration::WakeCalibration,
    wakes,
};

/// Between two looks at the epoll while awake, in nanoseconds: a look costs half a microsecond.
pub(crate) const LOOK_EVERY_NS: u64 = 100_000;
/// Longest time that a look that is due waits for the end of a busy sweep, in nanoseconds. A guest
/// that has just been called takes longer than a look to come with its next request; at any other
/// time the look may make a request wait, and its guest halt.
const LOOK_WAITS_NS: u64 = 50_000;
/// Between two scans of the probes during a round whose turns are measured, in nanoseconds: a scan
/// takes one for each idle poller.
const SCAN_EVERY_NS: u64 = 1_000;
/// Descriptors taken from the epoll at a time.
pub(crate) const EVENTS: usize = 64;
/// While work is under way elsewhere: of so many sweeps without work one gives the CPU to whoever
/// else wants it.
const SWEEPS_PER_YIELD: u32 = 32;

/// What belongs to a poller besides itself.
#[derive(Debug)]
pub(crate) struct Member<M> {
    pub(crate) route: Arc<Route<M>>,
    pub(crate) board: Arc<PollerBoard>,
}

/// A sidecore, as its own thread sees it.
pub(crate) struct Core<P: Poller> {
    pub(crate) pollers: Pollers<P>,
    /// By slot.
    pub(crate) members: Vec<Option<Member<P::Message>>>,
    /// Poller number to slot.
    pub(crate) slots: HashMap<u64, usize>,
    pub(crate) drr: Drr,
    pub(crate) inbox: Inbox<P::Message, EventFd>,
    /// Messages taken out of the mailbox early, by a move; they come first.
    pub(crate) stash: VecDeque<Envelope<P::Message>>,
    pub(crate) orders: mpsc::Receiver<Order<P>>,
    pub(crate) leaving: Vec<Leaving<P>>,
    pub(crate) epoll: Arc<EpollFd>,
    pub(crate) events: [libc::epoll_event; EVENTS],
    /// An event of nobody in the last look.
    pub(crate) stray: Option<u64>,
    pub(crate) next_look: Nanos,
    pub(crate) board: Arc<Board>,
    pub(crate) idle: IdleState,
    pub(crate) clock: ThreadClock,
    pub(crate) pause: Pause,
    pub(crate) shares_cpu: bool,
    pub(crate) force_sleep_every: Option<NonZeroU32>,
    /// The end of the last sweep.
    pub(crate) now: Nanos,
    /// The sweep after a wake that was not by a deadline.
    pub(crate) is_first_after_wake: bool,
    pub(crate) idle_sweeps: u32,
    /// The last sweep found work.
    pub(crate) was_busy: bool,
    /// In this sweep a poller waited for work that is under way elsewhere.
    pub(crate) is_waiting: bool,
    /// Taken in this sweep.
    pub(crate) requests: u64,
    /// Kept for its allocation.
    pub(crate) due: Vec<usize>,
}

impl<P: Poller> Core<P> {
    /// Learns what a wake takes here.
    pub(crate) fn calibrate_wakes(&mut self, calibration: &WakeCalibration) {
        if let Some((wake_ns, cpu_ns)) = calibration.sleep(self.clock) {
            self.idle.calibrated(wake_ns, cpu_ns);
        }
    }

    /// Polls until told to stop; messages sent before that are delivered. The pollers, in the order
    /// of their numbers.
    pub(crate) fn run(mut self) -> Vec<P> {
        let gate = Arc::clone(self.inbox.gate());
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

    /// One look at every source.
    pub(crate) fn sweep(&mut self) -> Activity {
        self.board.pulse.0.beats.add(1);
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
        if self.drr.has_hungry() {
            activity = Activity::Busy;
        }
        self.board
            .pulse
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

    /// Puts those into the ring whose probes fire or whose deadlines have passed.
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
        let (start, core) = (self.now, &self.board.core.0);
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
        let core = &self.board.core.0;
        match wait {
            _ if is_forced => self.sleep(true),
            Wait::Sleep => self.sleep(false),
            _ if self.shares_cpu => {
                core.yields.add(1);
                thread::yield_now();
            }
            // The worker threads of the kernel that do what is waited for may have been put onto
            // this CPU.
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
                let (gate, seen) = (self.inbox.gate(), self.inbox.seen());
                self.pause
                    .pause(gate.watched_line(), || gate.sent() == seen);
            }
        }
    }

    #[cold]
    fn sleep(&mut self, is_forced: bool) {
        let seen = self.inbox.seen();
        let gate = Arc::clone(self.inbox.gate());
        let mut waiter = EpollWaiter {
            epoll: &self.epoll,
            events: &mut self.events,
            notifier: gate.notifier(),
            board: &self.board,
            ready: 0,
            asleep_ns: 0,
            late_ns: None,
            is_forced,
        };
        let before = self.idle.wants_cost().then(|| self.clock.read());
        let parked = park(&mut self.pollers, &gate, seen, &mut waiter);
        let (ready, asleep_ns, late_ns) = (waiter.ready, waiter.asleep_ns, waiter.late_ns);
        let (start, core) = (self.now, &self.board.core.0);
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
                self.board.arm_failed(chain(&error));
                self.idle.arm_failed(self.now);
            }
            Parked::Slept(wake) => {
                self.board.woken_by(wake);
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

/// An error and its causes, in one line.
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
    board: &'a Board,
    /// Events of the last wait.
    ready: usize,
    /// What the last wait took, if it was entered.
    asleep_ns: u64,
    /// How late a deadline was met.
    late_ns: Option<u64>,
    /// The coming wait is one that `force_sleep_every` asks for.
    is_forced: bool,
}

impl Waiter for EpollWaiter<'_> {
    fn wait(&mut self, deadline: Option<Nanos>) -> io::Result<Wake> {
        let start = Nanos::now();
        let core = &self.board.core.0;
        core.sleeps.add(1);
        core.sleeps_forced.add(u64::from(self.is_forced));
        self.board.asleep(Some(deadline.unwrap_or(Nanos(u64::MAX))));
        let ready = self
            .epoll
            .wait(self.events, deadline.map(|at| at.since(start)));
        self.board.asleep(None);
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

/// A core's epoll, with its notifier in it.
pub(crate) fn epoll_with(notifier: &EventFd) -> io::Result<Arc<EpollFd>> {
    let epoll = EpollFd::new()?;
    epoll.add(notifier.as_raw_fd(), wakes::NOTIFIER)?;
    Ok(Arc::new(epoll))
}
