//! Messages and shared state between the owner's thread and the pager's.
//!
//! The owner's side sends one sequence of messages. The other direction needs no order: shown pages
//! ([`ram`](crate::ram)), tickets that are done, requests that may be submitted, and the mode of
//! the disks' reports.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};

use sidecore::Reply;

use crate::report::Report;
use crate::residency::{Op, Page, Span, Ticket};
use crate::stopped::Stopped;

/// Message of other threads to the pager.
#[derive(Debug)]
pub enum Message {
    /// Event of the owner's side and the disks.
    Owner(OwnerMessage),
    /// Sets the number of pages that may be in memory.
    SetLimit(usize),
    /// Reports that the store has grown by so many slots.
    AddSlots(usize),
    /// Asks for the pager's state.
    Report(Reply<Report>),
    /// A vCPU has left the guest on request
    /// ([`Machine::stop_vcpus`](crate::pager::Machine::stop_vcpus)). The pager sends back the
    /// registers to continue with, if they are others.
    Stopped(Stopped),
    /// The memory is connected with the pager.
    Connected,
    /// The machine has ended: no processor enters the guest again, and none may wait for a page
    /// that cannot come.
    LetGo,
    /// The owner has ended as well. Nothing is started any more; the sender is notified when
    /// nothing is under way, so that the files can be closed on another thread.
    End(mpsc::Sender<()>),
}

/// Opaque event, which only this crate can make.
#[derive(Debug)]
pub struct OwnerMessage(pub(crate) OwnerEvent);

/// Event from the owner's side to the pager. Events arrive in the order in which they happened.
#[derive(Debug)]
pub(crate) enum OwnerEvent {
    /// The answer to [`Command::Ask`](crate::residency::Command::Ask).
    Answered { gone: u32, written: u32 },
    /// An access waits for these pages; for each, whether the access will overwrite all of it.
    Wanted(Ticket, Vec<(Page, bool)>),
    /// The guest has discarded these pages until it accesses them again. The ticket is done when
    /// they have been processed.
    Offered(Ticket, Vec<Page>),
    /// A request of a disk is about to be submitted.
    Began(Op, Kind, Span),
    /// A request has ended; whether it succeeded.
    Ended(Op, Kind, bool),
    /// Disks have seen this [`Reports::Draining`]: no request from now on makes a block back a
    /// page.
    Drains(ReportEpoch),
}

/// Direction of a disk's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
}

/// Mode of the disks' reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reports {
    /// Off: no block backs a page, and none will.
    Off,
    /// On, but no block comes to back a page.
    Draining,
    /// On.
    On,
}

/// Number of a change of the disks' mode, with the mode: distinguishes an answer from one to an
/// earlier change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReportEpoch(pub u64);

impl ReportEpoch {
    /// Returns the next change, to `reports`.
    pub fn next(self, reports: Reports) -> Self {
        Self((self.0 / 4 + 1) * 4 + reports as u64)
    }

    /// Returns the mode.
    pub fn reports(self) -> Reports {
        match self.0 % 4 {
            0 => Reports::Off,
            1 => Reports::Draining,
            _ => Reports::On,
        }
    }
}

/// Requests that may be submitted. The pager adds them and wakes the owner, which takes them.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    ops: Mutex<Vec<Op>>,
    is_open: AtomicBool,
}

impl Gate {
    /// Adds a request. Called by the pager, which then wakes the owner.
    pub fn open(&self, op: Op) {
        let mut ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        ops.push(op);
        // Relaxed: the lock orders the list, and the wake-up that follows is ordered with the
        // owner's re-check by its mailbox.
        self.is_open.store(true, Ordering::Relaxed);
    }

    /// Returns whether there are requests to take.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// Appends the requests that may be submitted. Called by the owner.
    pub fn take(&self, into: &mut Vec<Op>) {
        let mut ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_open.store(false, Ordering::Relaxed);
        into.append(&mut ops);
    }
}
