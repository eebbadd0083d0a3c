//! Budget of one visit of a poller to a device, and its accounting.
//!
//! The unit is a nanosecond of the sidecore's time, estimated, not measured: a clock read per
//! request would cost as much as the request. The estimate decides who waits for whom, so it
//! charges everything that a guest can make the core do: a request, each byte copied, each
//! descriptor of an indirect table, a flush, a discard, a page dropped. Where a visit takes longer
//! than that, as a large discard in memory does, its sidecore charges the time if others of it have
//! work.

/// Costs of operations, in nanoseconds.
pub mod cost {
    /// A request, with its descriptors, header and status.
    pub const REQUEST: u64 = 200;
    /// A frame, with its descriptors and header: they come in bursts, whose misses overlap.
    pub const FRAME: u64 = 50;
    /// Each descriptor beyond the first four of a chain.
    pub const DESCRIPTOR: u64 = 5;
    /// A lease that is taken and given back, because the request needs more than there are.
    pub const LEASE: u64 = 10;
    /// Bytes moved for one nanosecond: 10 GB/s.
    pub const BYTES_PER_NS: u64 = 10;
    /// A flush, discard or write-zeroes request, on top of [`REQUEST`].
    pub const CONTROL: u64 = 2_000;
    /// A page of guest memory that is dropped. Holes punched one by one, 32 at a time, were
    /// measured at 1,200 each.
    pub const PAGE: u64 = 1_000;
}

/// Between two looks whether others on the core wait, in nanoseconds: two small requests, or a few
/// frames.
const ASK_EVERY: u64 = 200;

/// One visit to a device. A request that has begun is finished, so a visit may cost more than it
/// was allowed: the scheduler keeps the difference as a debt.
#[derive(Clone, Copy, Debug)]
pub struct PollBudget {
    now_ns: u64,
    budget: u64,
    spent: u64,
    /// Cost at which other devices are asked again whether they wait; at most `budget`.
    ask_at: u64,
    requests: u64,
}

impl PollBudget {
    /// A visit at `now_ns`, any monotonic clock, that may cost `budget` nanoseconds.
    pub fn new(now_ns: u64, budget: u64) -> Self {
        Self {
            now_ns,
            budget,
            spent: 0,
            ask_at: budget,
            requests: 0,
        }
    }

    /// A visit of a poller that has one device only: about 32 small requests.
    pub fn alone(now_ns: u64) -> Self {
        Self::new(now_ns, 32 * cost::REQUEST)
    }

    /// Returns the time of the visit, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Returns the cost so far, in nanoseconds.
    pub fn spent(&self) -> u64 {
        self.spent
    }

    /// Whether nothing new may be begun.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.spent >= self.budget
    }

    /// The same, where others on the core are asked meanwhile whether they wait.
    pub(crate) fn asks_others(&mut self) {
        self.ask_at = self.budget.min(self.spent.saturating_add(ASK_EVERY));
    }

    /// Whether nothing new may be begun, or it is time to ask others.
    #[inline]
    pub(crate) fn is_ask_due(&self) -> bool {
        self.spent >= self.ask_at
    }

    /// Ends it before its budget is spent.
    pub(crate) fn end(&mut self) {
        (self.budget, self.ask_at) = (self.spent, self.spent);
    }

    /// Adds to its cost, in nanoseconds.
    #[inline]
    pub fn charge(&mut self, cost: u64) {
        self.spent = self.spent.saturating_add(cost);
    }

    /// A request was taken, at that cost.
    #[inline]
    pub fn take_request(&mut self, cost: u64) {
        self.charge(cost);
        self.requests += 1;
    }

    /// Returns the cost that may still be spent before it is [over](Self::is_over), in nanoseconds.
    #[inline]
    pub fn left(&self) -> u64 {
        self.budget.saturating_sub(self.spent)
    }

    /// So many requests were taken, at that cost together.
    #[inline]
    pub fn take_requests(&mut self, requests: u64, cost: u64) {
        self.charge(cost);
        self.requests += requests;
    }

    /// Requests taken so far: those that the driver would have waited longer for, had the visit
    /// come later.
    pub fn requests(&self) -> u64 {
        self.requests
    }
}
