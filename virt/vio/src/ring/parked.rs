//! Stops, parking and counters of a queue: the same for both layouts.

use guest_mem::{Dma, DmaFault, Stop, Ticket, Wanted};

use super::chain::Violation;

/// Reason why a step did not happen. The queue has parked itself accordingly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingStop {
    /// The access is pending, or faulted.
    Access(Stop),
    /// The driver broke the protocol.
    Violation(Violation),
}

impl From<Stop> for RingStop {
    fn from(stop: Stop) -> Self {
        Self::Access(stop)
    }
}

impl From<DmaFault> for RingStop {
    fn from(fault: DmaFault) -> Self {
        Self::Access(Stop::Fault(fault))
    }
}

impl From<Violation> for RingStop {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

/// Time after which a queue whose ring faulted tries again by itself, in nanoseconds. Each failed
/// try is one fault record and one wake-up: ten a second for each such queue.
pub const RETRY_NS: u64 = 100_000_000;

/// Reason why a queue is parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parked {
    /// Until this ticket completes.
    Ticket(Ticket),
    /// One of the ring's own addresses faulted: until a doorbell, a reset, or [`RETRY_NS`] later.
    /// (A driver with EVENT_IDX that has repaired its mappings need not ring: the fault came before
    /// the device could ask for it.)
    Fault,
    /// The driver broke the protocol: until a reset.
    Violation,
}

/// Counters of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingStats {
    /// Times used elements were published to the driver.
    pub publishes: u64,
    /// Times the queue parked because of a fault.
    pub faults: u64,
    /// Times the queue parked on a ticket.
    pub pends: u64,
    /// Protocol violations: at most one per activation.
    pub violations: u64,
}

impl RingStats {
    /// Adds `other`.
    pub fn add(&mut self, other: &Self) {
        let Self {
            publishes,
            faults,
            pends,
            violations,
        } = other;
        self.publishes += publishes;
        self.faults += faults;
        self.pends += pends;
        self.violations += violations;
    }
}

/// Parking state of a queue, and its counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ParkState {
    pub(super) parked: Option<Parked>,
    /// Of a queue parked by a fault: time of its next try, in nanoseconds, once a visit has set it.
    retry_at_ns: Option<u64>,
    pub(super) stats: RingStats,
}

impl ParkState {
    /// Whether the queue is parked because a ring address faulted or the protocol was broken.
    pub(super) fn is_faulted(&self) -> bool {
        matches!(self.parked, Some(Parked::Fault | Parked::Violation))
    }

    /// A doorbell: a faulted queue tries again.
    pub(super) fn kick(&mut self) {
        if self.parked == Some(Parked::Fault) {
            self.parked = None;
        }
    }

    /// A visit at `now_ns` begins: a faulted queue tries again when its time has come.
    #[inline]
    pub(super) fn retry(&mut self, now_ns: u64) {
        if self.parked == Some(Parked::Fault) {
            self.retry_faulted(now_ns);
        }
    }

    #[cold]
    fn retry_faulted(&mut self, now_ns: u64) {
        match self.retry_at_ns {
            None => self.retry_at_ns = Some(now_ns.saturating_add(RETRY_NS)),
            Some(at) if at <= now_ns => self.parked = None,
            Some(_) => {}
        }
    }

    /// Returns the time at which a faulted queue is to be visited again, in nanoseconds; 0, at
    /// once, while no visit has set the time of the next try.
    pub(super) fn retry_at_ns(&self) -> Option<u64> {
        let is_faulted = self.parked == Some(Parked::Fault);
        is_faulted.then(|| self.retry_at_ns.unwrap_or(0))
    }

    /// A ticket completed: a queue parked on it runs again.
    pub(super) fn ticket_done(&mut self, ticket: Ticket) {
        if self.parked == Some(Parked::Ticket(ticket)) {
            self.parked = None;
        }
    }

    /// Answers `result`, for which the queue is parked if it is a stop.
    #[inline(always)]
    pub(super) fn or_park<T>(
        &mut self,
        result: Result<T, impl Into<RingStop>>,
    ) -> Result<T, RingStop> {
        result.map_err(|stop| self.park(stop.into()))
    }

    /// Parks the queue for `stop`. Returns the stop.
    #[cold]
    pub(super) fn park(&mut self, stop: RingStop) -> RingStop {
        self.parked = Some(match stop {
            RingStop::Access(Stop::Pending(ticket)) => {
                self.stats.pends += 1;
                Parked::Ticket(ticket)
            }
            RingStop::Access(Stop::Fault(_)) => {
                self.stats.faults += 1;
                self.retry_at_ns = None;
                Parked::Fault
            }
            RingStop::Violation(_) => {
                self.stats.violations += 1;
                Parked::Violation
            }
        });
        stop
    }
}

/// Asks for all of `ranges`, one of which has answered `stop`: what to wait for instead.
#[cold]
pub(crate) fn wait_for_all<D: Dma>(
    dma: &mut D,
    stop: Stop,
    ranges: impl Iterator<Item = Wanted>,
) -> Stop {
    if let Stop::Pending(_) = stop
        && let Err(all @ Stop::Pending(_)) = dma.gather(ranges)
    {
        return all;
    }
    stop
}
