//! Why a queue stops, how it rests, and what it counts: the same for both layouts.

use guest_mem::{DmaFault, Stop, Ticket};

use super::chain::Violation;

/// Why a step did not happen. The queue has parked itself accordingly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingStop {
    /// Memory said not now, or not at all.
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

/// Why a queue rests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parked {
    /// Until this ticket completes.
    Ticket(Ticket),
    /// One of the ring's own addresses faulted: until a doorbell or a reset.
    Fault,
    /// The driver broke the protocol: until a reset.
    Violation,
}

/// What a queue counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingStats {
    /// Times used elements were shown to the driver.
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

/// Whether a queue rests, and its counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rest {
    pub(super) parked: Option<Parked>,
    pub(super) stats: RingStats,
}

impl Rest {
    /// Whether the queue rests because a ring address faulted or the protocol was broken.
    pub(super) fn is_faulted(&self) -> bool {
        matches!(self.parked, Some(Parked::Fault | Parked::Violation))
    }

    /// A doorbell: a faulted queue tries again.
    pub(super) fn kick(&mut self) {
        if self.parked == Some(Parked::Fault) {
            self.parked = None;
        }
    }

    /// A ticket completed: a queue parked on it runs again.
    pub(super) fn ticket_done(&mut self, ticket: Ticket) {
        if self.parked == Some(Parked::Ticket(ticket)) {
            self.parked = None;
        }
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
