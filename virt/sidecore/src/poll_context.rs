//! A poller's turn: its budget, and the work charged to it.
//!
//! Work is measured in **cost units: nanoseconds of the sidecore's time**, as estimated by the
//! poller that does it (a clock reading per request would cost more than a small request). The
//! scheduler (`drr.rs`) evens out costs, not visits. A turn that took longer than its poller
//! charged, while another had work, is charged the time, up to a millisecond; any other turn is
//! charged the poller's estimate.
//!
//! A turn ends early for a poller that has got work meanwhile and has done less than its share. A
//! long turn asks for that ([`PollContext::others_wait`]), since only the poller knows where it may
//! stop, and continues after the other one.
//!
//! Only time of the sidecore's thread is charged. What the kernel and other threads do for a poller
//! at the same time (image threads, io_uring's workers, the storage itself) is charged to no
//! poller; rate limits are for that.

use std::{cell::Cell, fmt};

use crate::{clock::Nanos, wakes::Wakes};

/// Cost of a small request, in cost units, for pollers without a better estimate.
pub const REQUEST_COST: u64 = 200;

/// Longest time that a turn is charged by the clock, in nanoseconds: the core's thread may have
/// been off its CPU meanwhile, for which no poller is charged. Several times the time that a
/// mebibyte takes.
const MOST_MEASURED: u64 = 1_000_000;

/// Time in nanoseconds above which a poll that finds nothing is charged.
const LONG_LOOK: u64 = 1_600;

/// Returns the cost of moving `bytes`, in cost units, for pollers without a better estimate: 0.1 ns
/// per byte.
pub const fn bytes_cost(bytes: u64) -> u64 {
    bytes / 10
}

/// Probes of other pollers that are worth checking at each ask: a twentieth of a microsecond.
const OTHERS_PER_ASK: usize = 32;

/// The other pollers of the core, as a turn sees them.
pub(crate) trait Others {
    /// Returns whether one of them has got work and is to be served before the turn goes on.
    fn wait(&self) -> bool;
}

/// One call of a poller.
pub struct PollContext<'a> {
    now: Nanos,
    budget: u64,
    spent: u64,
    requests: u64,
    /// The part of the poller whose descriptor is readable.
    part: Option<usize>,
    wakes: &'a mut Wakes,
    others: Option<&'a dyn Others>,
    /// Asks per answer less one, and asks left before the next answer.
    asks: (u32, Cell<u32>),
    /// Time at which it has used up its budget by the clock, where another poller has had work
    /// since before it.
    ends_at: Option<Nanos>,
    end: Cell<Option<End>>,
    is_drained: bool,
}

/// Reason for a turn to end before its budget is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Another poller has got work, and comes first.
    Interrupted,
    /// It has taken longer than it has charged, and others wait.
    Late,
}

impl fmt::Debug for PollContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PollContext")
            .field("now", &self.now)
            .field("budget", &self.budget)
            .field("spent", &self.spent)
            .field("requests", &self.requests)
            .field("wakes", &self.wakes)
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}

impl<'a> PollContext<'a> {
    /// Creates a turn at `now` for `budget` cost units. Called by the runtime, and by tests that
    /// call a poller directly (with [`Wakes::by_hand`]).
    pub fn new(now: Nanos, budget: u64, wakes: &'a mut Wakes) -> Self {
        PollContext {
            now,
            budget,
            spent: 0,
            requests: 0,
            part: None,
            wakes,
            others: None,
            asks: (0, Cell::new(0)),
            ends_at: None,
            end: Cell::new(None),
            is_drained: false,
        }
    }

    /// Adds `count` other pollers, whose probes are checked when the turn asks, or less often if
    /// they are many.
    pub(crate) fn beside(mut self, others: &'a dyn Others, count: usize) -> Self {
        self.others = Some(others);
        self.asks.0 = (count / OTHERS_PER_ASK) as u32;
        self
    }

    /// Creates a turn of part `at` of the poller, within this one: others wait for both.
    pub(crate) fn part_turn(&mut self, at: usize, budget: u64) -> PollContext<'_> {
        PollContext {
            others: self.others,
            asks: (self.asks.0, Cell::new(0)),
            ends_at: self.ends_at,
            ..PollContext::new(self.now, budget, self.wakes.part(at))
        }
    }

    /// Measures the turn from `start` on, because others have had work since.
    pub(crate) fn measured_from(mut self, start: Nanos) -> Self {
        self.ends_at = Some(start.after(self.budget));
        self
    }

    /// Sets the part of the poller to which the readable descriptor belongs.
    pub(crate) fn of_part(mut self, part: Option<usize>) -> Self {
        self.part = part;
        self
    }

    /// Returns the part whose descriptor is readable.
    pub(crate) fn part(&self) -> Option<usize> {
        self.part
    }

    /// Returns the charge for a call of [`poll`](crate::Poller::poll): the cost that the poller has
    /// charged, or the time that it `took`, where that was measured and is more. A poll that finds
    /// nothing is part of a sweep, unless it is a long one or others were interrupted for it. A
    /// poller that works without charging anything pays for a request.
    pub(crate) fn cost(&self, is_busy: bool, took: Option<u64>, is_interruption: bool) -> u64 {
        let mut cost = self.spent;
        if let Some(took) = took.map(|took| took.min(MOST_MEASURED))
            && (is_busy || took > LONG_LOOK || is_interruption)
        {
            cost = cost.max(took);
        }
        match is_busy {
            true => cost.max(REQUEST_COST),
            false => cost,
        }
    }

    /// Returns the requests taken, as the idle policy counts them.
    pub(crate) fn counted_requests(&self, is_busy: bool) -> u64 {
        self.requests.max(is_busy.into())
    }

    /// Returns the start of this sweep; the same for all pollers.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// Returns the cost units left. The last piece of work may overdraw them; the debt is deducted
    /// from later turns.
    pub fn budget(&self) -> u64 {
        self.budget.saturating_sub(self.spent)
    }

    /// Charges `cost` units for work done, at least. Before or after the work, but in the same
    /// turn.
    #[inline]
    pub fn charge(&mut self, cost: u64) {
        self.spent = self.spent.saturating_add(cost);
    }

    /// Returns whether the budget is spent: then stop, and answer `Busy` if there is more to do.
    #[inline]
    pub fn is_spent(&self) -> bool {
        self.spent >= self.budget
    }

    /// Returns whether there are other pollers on the core that may come to wait: without any, a
    /// turn need not [ask](Self::others_wait).
    pub fn has_others(&self) -> bool {
        self.others.is_some()
    }

    /// Returns whether another poller is to be served before this turn goes on: one that has got
    /// work since; or one that has had work all the time, once the turn has taken the time of its
    /// budget, whatever it has charged. To be called every microsecond or so by a turn that lasts
    /// longer. Once true it stays true: stop, and answer `Busy` if there is more to do. It costs
    /// about a nanosecond for each poller of the core that is idle, and a reading of the clock
    /// where others have work.
    pub fn others_wait(&self) -> bool {
        let (every, left) = &self.asks;
        if left.get() > 0 {
            left.set(left.get() - 1);
        } else if self.end.get().is_none() {
            left.set(*every);
            let is_late = || self.ends_at.is_some_and(|at| Nanos::now() >= at);
            if self.others.is_some_and(Others::wait) {
                self.end.set(Some(End::Interrupted));
            } else if is_late() {
                self.end.set(Some(End::Late));
            }
        }
        self.end.get().is_some()
    }

    /// Returns the reason for it to end early, if there is one.
    pub(crate) fn end(&self) -> Option<End> {
        self.end.get()
    }

    /// Declares that nothing is left to do, as after a turn that answers `Idle`, although this one
    /// answers `Busy`. The next turn then comes when the probe fires, and not before that to find
    /// nothing.
    #[inline]
    pub fn drained(&mut self) {
        self.is_drained = true;
    }

    /// Returns whether [`drained`](Self::drained) was called.
    pub(crate) fn is_drained(&self) -> bool {
        self.is_drained
    }

    /// Returns the cost charged so far.
    pub fn spent(&self) -> u64 {
        self.spent
    }

    /// Counts `requests` taken from senders that wait for the answers. The idle policy weighs the
    /// cost of a sleep before them. A turn that works and reports none counts as one.
    #[inline]
    pub fn took(&mut self, requests: u64) {
        self.requests = self.requests.saturating_add(requests);
    }

    /// Returns the requests taken so far.
    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// Returns the poller's descriptors.
    pub fn wakes(&mut self) -> &mut Wakes {
        self.wakes
    }
}
