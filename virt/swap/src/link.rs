//! Between the owner's thread and the pager's: what either tells the other.
//!
//! What the owner's side says is one sequence of messages. What goes the other way needs no order:
//! pages that are shown ([`ram`](crate::ram)), tickets that are done, requests that may go down,
//! and what disks are to report.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};

use sidecore::Reply;

use crate::book::{Op, Page, Span, Ticket};
use crate::report::Report;
use crate::stopped::Stopped;

/// What others tell the pager.
#[derive(Debug)]
pub enum Message {
    /// The owner's side, and the disks.
    Said(Spoken),
    /// So many pages may be in memory from now on.
    SetLimit(usize),
    /// The store has grown by so many slots.
    AddSlots(usize),
    /// How things stand.
    Report(Reply<Report>),
    /// A vCPU has left the guest as [`Machine::stop_vcpus`](crate::pager::Machine::stop_vcpus)
    /// asked. The registers that it is to go on with are sent back, if they are others.
    Stopped(Stopped),
    /// The memory is connected with the pager.
    Connected,
    /// The machine has ended: no processor enters the guest again, and none is to wait for what
    /// cannot come.
    LetGo,
    /// The owner has ended as well. Nothing is begun any more; told when nothing is under way, so
    /// that the files can be closed on another thread.
    End(mpsc::Sender<()>),
}

/// What only this crate can say.
#[derive(Debug)]
pub struct Spoken(pub(crate) Said);

/// What the owner's side tells the pager, in the order in which it happened.
#[derive(Debug)]
pub(crate) enum Said {
    /// The answer to [`Command::Ask`](crate::book::Command::Ask).
    Answered { gone: u32, written: u32 },
    /// An access waits for these; of each, whether it will overwrite all of it.
    Wanted(Ticket, Vec<(Page, bool)>),
    /// The guest does without these until it reaches them again; who waits for the ticket is told
    /// when that has been seen to.
    Offered(Ticket, Vec<Page>),
    /// A request of a disk is about to go down.
    Began(Op, Kind, Span),
    /// It is over; whether it did what was asked.
    Ended(Op, Kind, bool),
    /// Disks have seen this [`Reports::Draining`]: no request from now on lets a page stand for a
    /// block.
    Drains(Asked),
}

/// Which way a request of a disk goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
}

/// Whether disks report what they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reports {
    /// No page stands for a block, and none will.
    Off,
    /// They do, but no page comes to stand for a block.
    Draining,
    /// They do.
    On,
}

/// What the pager asked disks to do, the how-manieth time: an answer is told from one to an earlier
/// question.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked(pub u64);

impl Asked {
    /// The next question.
    pub fn next(self, reports: Reports) -> Self {
        Self((self.0 / 4 + 1) * 4 + reports as u64)
    }

    /// What was asked.
    pub fn reports(self) -> Reports {
        match self.0 % 4 {
            0 => Reports::Off,
            1 => Reports::Draining,
            _ => Reports::On,
        }
    }
}

/// Requests that may go down. The pager puts them in and wakes the owner, who takes them out.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    ops: Mutex<Vec<Op>>,
    is_open: AtomicBool,
}

impl Gate {
    /// For the pager, which wakes the owner behind it.
    pub fn open(&self, op: Op) {
        let mut ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        ops.push(op);
        // Relaxed: the lock orders the list, and the wake-up that follows is ordered with the
        // owner's last look by its mailbox.
        self.is_open.store(true, Ordering::Relaxed);
    }

    /// Whether there is something to take.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// What may go down, appended. For the owner.
    pub fn take(&self, into: &mut Vec<Op>) {
        let mut ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_open.store(false, Ordering::Relaxed);
        into.append(&mut ops);
    }
}
