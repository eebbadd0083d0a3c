//! A poller's turn: how much it may do, and what it has done.
//!
//! Work is measured in **cost units: nanoseconds of the sidecore's time**, as estimated by the
//! poller that does it (a clock reading per request would cost more than a small request). The
//! scheduler (`drr.rs`) evens out costs, not visits. A turn that took longer than its poller said,
//! while another had work, is charged the time, up to a millisecond; any other, what was said.
//!
//! A turn ends early for a poller that has got work meanwhile and has done less than its share: a
//! turn that lasts asks ([`Turn::others_wait`]), since only it knows where it may stop, and goes on
//! behind that one.
//!
//! It is the time of the sidecore's thread: what the kernel and other threads do for a poller at
//! the same time (image threads, io_uring's workers, the storage itself) is charged to nobody here.
//! Rate limits are for that.

use std::{cell::Cell, fmt};

use crate::{clock::Nanos, wakes::Wakes};

/// What a small request costs, in cost units, for pollers that know no better.
pub const REQUEST_COST: u64 = 200;

/// The longest time that a turn is charged by the clock, in nanoseconds: the core's thread may have
/// been off its CPU meanwhile, which is nobody's doing. Several times what a mebibyte takes.
const MOST_MEASURED: u64 = 1_000_000;

/// A look that finds nothing is charged if it takes longer than this, in nanoseconds.
const LONG_LOOK: u64 = 1_600;

/// What moving `bytes` costs, in cost units, for pollers that know no better: 0.1 ns per byte.
pub const fn bytes_cost(bytes: u64) -> u64 {
    bytes / 10
}

/// Probes of other pollers for which one ask is worth while: a twentieth of a microsecond.
const OTHERS_PER_ASK: usize = 32;

/// The other pollers of the core, as a turn sees them.
pub(crate) trait Others {
    /// Whether one of them has got work and is to be served before the turn goes on.
    fn wait(&self) -> bool;
}

/// One call of a poller.
pub struct Turn<'a> {
    now: Nanos,
    budget: u64,
    spent: u64,
    requests: u64,
    /// The part of the poller whose descriptor is readable.
    part: Option<usize>,
    wakes: &'a mut Wakes,
    others: Option<&'a dyn Others>,
    /// Times that it may ask before it gets an answer, and how many are left.
    asks: (u32, Cell<u32>),
    /// When it has taken the time of its budget, where another has had work since before it.
    ends_at: Option<Nanos>,
    end: Cell<Option<End>>,
    is_drained: bool,
}

/// Why a turn is to end before its budget is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Another poller has got work, and comes first.
    Interrupted,
    /// It has taken longer than it has charged, and others wait.
    Late,
}

impl fmt::Debug for Turn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn")
            .field("now", &self.now)
            .field("budget", &self.budget)
            .field("spent", &self.spent)
            .field("requests", &self.requests)
            .field("wakes", &self.wakes)
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}

impl<'a> Turn<'a> {
    /// A turn at `now` for `budget` cost units. The runtime makes them; so do tests that call a
    /// poller by hand (with [`Wakes::by_hand`]).
    pub fn new(now: Nanos, budget: u64, wakes: &'a mut Wakes) -> Self {
        Turn {
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

    /// The same beside `count` other pollers, whose probes are looked at when the turn asks; if
    /// they are many, less often.
    pub(crate) fn beside(mut self, others: &'a dyn Others, count: usize) -> Self {
        self.others = Some(others);
        self.asks.0 = (count / OTHERS_PER_ASK) as u32;
        self
    }

    /// A turn of part `at` of the poller, within this one: others wait for both.
    pub(crate) fn part_turn(&mut self, at: usize, budget: u64) -> Turn<'_> {
        Turn {
            others: self.others,
            asks: (self.asks.0, Cell::new(0)),
            ends_at: self.ends_at,
            ..Turn::new(self.now, budget, self.wakes.part(at))
        }
    }

    /// The same, measured from `start` on because others have had work since.
    pub(crate) fn measured_from(mut self, start: Nanos) -> Self {
        self.ends_at = Some(start.after(self.budget));
        self
    }

    /// Of which part of the poller the readable descriptor is.
    pub(crate) fn of_part(mut self, part: Option<usize>) -> Self {
        self.part = part;
        self
    }

    /// The part whose descriptor is readable.
    pub(crate) fn part(&self) -> Option<usize> {
        self.part
    }

    /// What a call of [`poll`](crate::Poller::poll) costs its poller: what it has said; or the time
    /// that it `took`, where that was measured and is more. A look that finds nothing is part of a
    /// sweep, unless it is a long one or others were interrupted for it; whoever works without
    /// saying how much pays for a request.
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

    /// Requests taken, as the idle policy counts them.
    pub(crate) fn counted_requests(&self, is_busy: bool) -> u64 {
        self.requests.max(is_busy.into())
    }

    /// The start of this sweep; the same for all pollers.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// Cost units left. It may be overdrawn by the last piece of work; the debt is deducted from
    /// later turns.
    pub fn budget(&self) -> u64 {
        self.budget.saturating_sub(self.spent)
    }

    /// Work for `cost` units was done, at least. Before or after the work, but in the same turn.
    #[inline]
    pub fn charge(&mut self, cost: u64) {
        self.spent = self.spent.saturating_add(cost);
    }

    /// Nothing is left: stop, and answer `Busy` if there is more to do.
    #[inline]
    pub fn is_spent(&self) -> bool {
        self.spent >= self.budget
    }

    /// Whether there are others on the core that may come to wait: without any, a turn need not
    /// [ask](Self::others_wait).
    pub fn has_others(&self) -> bool {
        self.others.is_some()
    }

    /// Whether another poller is to be served before this turn goes on: one that has got work
    /// since; or one that has had work all the time, and the turn has taken the time of its budget,
    /// whatever it has charged. To be asked every microsecond or so by a turn that lasts longer.
    /// Once it is so it stays so: stop, and answer `Busy` if there is more to do. About a
    /// nanosecond for each poller of the core that is idle, and a reading of the clock where others
    /// have work.
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

    /// Why it was told to end, if it was.
    pub(crate) fn end(&self) -> Option<End> {
        self.end.get()
    }

    /// For a turn that answers `Busy`: it has left nothing to do, as after one that answers `Idle`.
    /// The next turn then comes when the probe fires, and not before that to find nothing.
    #[inline]
    pub fn drained(&mut self) {
        self.is_drained = true;
    }

    /// Whether it said so.
    pub(crate) fn is_drained(&self) -> bool {
        self.is_drained
    }

    /// Charged so far.
    pub fn spent(&self) -> u64 {
        self.spent
    }

    /// So many requests were taken from whoever waits for their answers. The idle policy weighs
    /// what a sleep before them would have cost; of a turn that works and says nothing it counts
    /// one.
    #[inline]
    pub fn took(&mut self, requests: u64) {
        self.requests = self.requests.saturating_add(requests);
    }

    /// Requests taken so far.
    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// The poller's descriptors.
    pub fn wakes(&mut self) -> &mut Wakes {
        self.wakes
    }
}
