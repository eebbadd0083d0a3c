//! The loop of a sidecore's thread.
//!
//! ```text
//! forever:  beat
//!           hand out mail                 at most `MAIL_BATCH`
//!           poll every poller             each does a bounded batch
//!           busy? again                   else as the idle policy says: spin, pause, or park
//! ```
//! Fairness is round robin over pollers, each bounding its own batch. Left out: weights and
//! deficits between the queues of many VMs.

use std::{io, num::NonZeroU32, os::fd::RawFd, sync::atomic::Ordering, thread};

use crate::{
    clock::Nanos,
    gate::Sound,
    idle::{Hints, IdleState, Wait},
    mailbox::Inbox,
    park::{Parked, Waiter, Wake, park},
    pause::Pause,
    poller::{Activity, Poller},
    stats::{Board, NO_POLLER},
    sync::Arc,
    sys::{self, EventFd},
};

/// Messages handed out per sweep, so that a storm of them does not starve the queues.
const MAIL_BATCH: usize = 64;

/// A sidecore, as its own thread sees it.
pub(crate) struct Core<P: Poller> {
    pub(crate) pollers: Vec<P>,
    pub(crate) inbox: Inbox<P::Message, EventFd>,
    pub(crate) board: Arc<Board>,
    pub(crate) idle: IdleState,
    pub(crate) pause: Pause,
    pub(crate) shares_cpu: bool,
    pub(crate) force_sleep_every: Option<NonZeroU32>,
}

/// The counters of the loop that are its own.
struct Turn {
    /// The end of the last sweep.
    now: Nanos,
    /// The sweep after a wake that was not by a deadline.
    is_first_after_wake: bool,
    idle_sweeps: u32,
}

impl<P: Poller> Core<P> {
    /// Polls until told to stop; messages sent before that are delivered.
    pub(crate) fn run(mut self) -> Vec<P> {
        let gate = Arc::clone(self.inbox.gate());
        let mut waiter = PpollWaiter {
            fds: Vec::new(),
            bell: gate.bell(),
            board: Arc::clone(&self.board),
            asleep_ns: 0,
            is_forced: false,
        };
        let mut turn = Turn {
            now: Nanos::now(),
            is_first_after_wake: false,
            idle_sweeps: 0,
        };
        while !gate.is_stopping() {
            let activity = self.sweep(&mut turn);
            if activity == Activity::Busy {
                self.idle.busy(turn.now);
            } else {
                self.wait(&mut turn, &mut waiter);
            }
        }
        while self.hand_out_mail() == Activity::Busy {}
        self.pollers
    }

    /// One look at the mailbox and every poller.
    fn sweep(&mut self, turn: &mut Turn) -> Activity {
        let board = &*self.board;
        let pulse = &board.pulse.0;
        pulse.beats.add(1);
        let mut activity = self.hand_out_mail();
        let board = &*self.board;
        let pulse = &board.pulse.0;
        for (index, poller) in self.pollers.iter_mut().enumerate() {
            pulse.in_poller.store(index, Ordering::Relaxed);
            let counters = &board.pollers[index].1.0;
            match poller.poll(turn.now) {
                Activity::Busy => {
                    counters.polls_busy.add(1);
                    activity = Activity::Busy;
                }
                Activity::Idle => counters.polls_idle.add(1),
            }
        }
        pulse.in_poller.store(NO_POLLER, Ordering::Relaxed);
        let (start, core) = (turn.now, &board.core.0);
        turn.now = Nanos::now();
        let elapsed = turn.now.since(start);
        match activity {
            Activity::Busy => {
                core.sweeps_busy.add(1);
                core.busy_ns.add(elapsed);
            }
            Activity::Idle => {
                core.sweeps_idle.add(1);
                core.idle_ns.add(elapsed);
                core.wakes_spurious.add(u64::from(turn.is_first_after_wake));
            }
        }
        turn.is_first_after_wake = false;
        activity
    }

    fn hand_out_mail(&mut self) -> Activity {
        let mut activity = Activity::Idle;
        for _ in 0..MAIL_BATCH {
            let Some(envelope) = self.inbox.take() else {
                break;
            };
            let index = envelope.poller;
            self.board.pulse.0.in_poller.store(index, Ordering::Relaxed);
            self.board.core.0.messages.add(1);
            self.board.pollers[index].1.0.messages.add(1);
            self.pollers[index].message(envelope.message);
            activity = Activity::Busy;
        }
        activity
    }

    /// Waits after an idle sweep.
    fn wait(&mut self, turn: &mut Turn, waiter: &mut PpollWaiter<'_>) {
        turn.idle_sweeps = turn.idle_sweeps.wrapping_add(1);
        let pollers = &self.pollers;
        let wait = self.idle.next(turn.now, || Hints {
            arm_cost_ns: pollers
                .iter()
                .fold(0, |sum: u64, p| sum.saturating_add(p.arm_cost())),
            deadline: earliest(pollers),
        });
        let is_forced = wait != Wait::Sleep
            && self
                .force_sleep_every
                .is_some_and(|n| turn.idle_sweeps.is_multiple_of(n.get()))
            && earliest(pollers).is_none_or(|at| at > turn.now);
        let core = &self.board.core.0;
        match wait {
            _ if is_forced => self.sleep(turn, waiter, true),
            Wait::Sleep => self.sleep(turn, waiter, false),
            _ if self.shares_cpu => {
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
    fn sleep(&mut self, turn: &mut Turn, waiter: &mut PpollWaiter<'_>, is_forced: bool) {
        let seen = self.inbox.seen();
        let gate = Arc::clone(self.inbox.gate());
        waiter.asleep_ns = 0;
        waiter.is_forced = is_forced;
        let parked = park::<Sound, P, EventFd>(&mut self.pollers, &gate, seen, waiter);
        let (start, core) = (turn.now, &self.board.core.0);
        turn.now = Nanos::now();
        core.asleep_ns.add(waiter.asleep_ns);
        core.arming_ns
            .add(turn.now.since(start).saturating_sub(waiter.asleep_ns));
        match parked {
            Parked::WorkFound => {
                core.sleeps_refused.add(1);
                self.idle.armed();
            }
            Parked::NotArmed(error) => {
                self.board.arm_failed(chain(&error));
                self.idle.arm_failed(turn.now);
            }
            Parked::Slept(wake) => {
                self.board.woken_by(wake);
                turn.is_first_after_wake = wake != Wake::Deadline;
                self.idle.armed();
            }
        }
    }
}

fn earliest<P: Poller>(pollers: &[P]) -> Option<Nanos> {
    pollers.iter().filter_map(P::deadline).min()
}

fn not_open(fd: RawFd) -> io::Error {
    io::Error::other(format!("wake descriptor {fd} is not open"))
}

/// An error and its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line = format!("{line}: {error}");
        cause = error.source();
    }
    line
}

/// Sleeps in `ppoll` on the bell and all descriptors of all pollers.
struct PpollWaiter<'a> {
    /// Kept for its allocation.
    fds: Vec<libc::pollfd>,
    bell: &'a EventFd,
    board: Arc<Board>,
    /// What the last wait took, if it was entered.
    asleep_ns: u64,
    /// The coming wait is one that `force_sleep_every` asks for.
    is_forced: bool,
}

impl Waiter for PpollWaiter<'_> {
    fn wait<P: Poller>(&mut self, pollers: &[P]) -> io::Result<Wake> {
        let wanted = |fd: RawFd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        self.fds.clear();
        self.fds.push(wanted(self.bell.as_raw_fd()));
        self.fds.extend(
            pollers
                .iter()
                .flat_map(|p| p.wake_fds())
                .map(|&fd| wanted(fd)),
        );
        if let Some(bad) = self.fds.iter().find(|f| f.fd < 0) {
            // The kernel would pass over it in silence.
            return Err(not_open(bad.fd));
        }
        let deadline = earliest(pollers);

        let start = Nanos::now();
        self.board.core.0.sleeps.add(1);
        self.board
            .core
            .0
            .sleeps_forced
            .add(u64::from(self.is_forced));
        self.board.asleep(Some(deadline.unwrap_or(Nanos(u64::MAX))));
        let ready = sys::ppoll(&mut self.fds, deadline.map(|at| at.since(start)));
        self.board.asleep(None);
        self.asleep_ns = Nanos::now().since(start);

        match ready {
            Ok(0) => return Ok(Wake::Deadline),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                return Ok(Wake::Interrupted);
            }
            Err(error) => return Err(error),
        }
        if let Some(bad) = self.fds.iter().find(|f| f.revents & libc::POLLNVAL != 0) {
            // It will never wake anybody: poll on instead.
            return Err(not_open(bad.fd));
        }
        if self.fds[0].revents != 0 {
            self.bell.drain();
            return Ok(Wake::Mailbox);
        }
        Ok(Wake::Fd)
    }
}
