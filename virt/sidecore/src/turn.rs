//! A poller's turn: how much it may do, and what it has done.
//!
//! Work is measured in **cost units: nanoseconds of the sidecore's time**, as estimated by the poller that does it (a
//! clock reading per request would cost more than a small request). The scheduler (`drr.rs`) evens out costs, not visits. A turn that
//! took longer than its poller said, while another had work, is charged the time, up to a millisecond; any other, what was said.
//!
//! It is the time of the sidecore's thread: what the kernel and other threads do for a poller at the same time (image threads, io_uring's
//! workers, the storage itself) is charged to nobody here. Rate limits are for that.

use crate::{clock::Nanos, drr, poller::Activity, wakes::Wakes};

/// What a small request costs, in cost units, for pollers that know no better.
pub const REQUEST_COST: u64 = 200;

/// The longest time that a turn is charged by the clock, in nanoseconds: the core's thread may have been off its CPU meanwhile, which
/// is nobody's doing. Several times what a mebibyte takes.
const MOST_MEASURED: u64 = 1_000_000;

/// What moving `bytes` costs, in cost units, for pollers that know no better: 0.1 ns per byte.
pub const fn bytes_cost(bytes: u64) -> u64 {
    bytes / 10
}

/// One call of a poller.
#[derive(Debug)]
pub struct Turn<'a> {
    now: Nanos,
    budget: u64,
    spent: u64,
    requests: u64,
    /// The part of the poller whose descriptor is readable.
    part: Option<usize>,
    wakes: &'a mut Wakes,
}

impl<'a> Turn<'a> {
    /// A turn at `now` for `budget` cost units. The runtime makes them; so do tests that call a poller by hand
    /// (with [`Wakes::by_hand`]).
    pub fn new(now: Nanos, budget: u64, wakes: &'a mut Wakes) -> Self {
        Turn {
            now,
            budget,
            spent: 0,
            requests: 0,
            part: None,
            wakes,
        }
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

    /// What a call of [`poll`](crate::Poller::poll) costs its poller: what it has said; or the time that it `took`, where that was
    /// measured and is more. A look that finds nothing is part of a sweep, unless it is a long one; whoever works without saying how
    /// much pays for a request.
    pub(crate) fn cost(&self, activity: Activity, took: Option<u64>) -> u64 {
        let mut cost = self.spent;
        if let Some(took) = took.map(|took| took.min(MOST_MEASURED))
            && (activity == Activity::Busy || took > drr::QUANTUM)
        {
            cost = cost.max(took);
        }
        match activity {
            Activity::Busy => cost.max(REQUEST_COST),
            Activity::Waiting | Activity::Idle => cost,
        }
    }

    /// Requests taken, as the idle policy counts them.
    pub(crate) fn counted_requests(&self, activity: Activity) -> u64 {
        self.requests.max(u64::from(activity == Activity::Busy))
    }

    /// The start of this sweep; the same for all pollers.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// Cost units left. It may be overdrawn by the last piece of work; the debt is deducted from later turns.
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

    /// Charged so far.
    pub fn spent(&self) -> u64 {
        self.spent
    }

    /// So many requests were taken from whoever waits for their answers. The idle policy weighs what a sleep before them
    /// would have cost; of a turn that works and says nothing it counts one.
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
