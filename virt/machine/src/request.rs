//! What other threads ask of the owner.

use std::sync::mpsc::Sender;

use guest_mem::{Pages, Ticket};
use sidecore::Reply;

/// What an access is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A remapping unit's registers: the number that [`Owner::add_unit`](crate::Owner::add_unit)
    /// gave.
    Unit(usize),
    /// A function: the number that [`Owner::add`](crate::Owner::add) gave.
    Function(usize),
}

/// One access of a vCPU. Values are little-endian, in the low bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads 1, 2 or 4 bytes of configuration space.
    ConfigRead {
        /// Register, bytes.
        reg: u16,
        /// How many.
        len: u8,
    },
    /// Writes configuration space; answered when its effect, a drain included, is over.
    ConfigWrite {
        /// Register, bytes.
        reg: u16,
        /// 1, 2 or 4.
        len: u8,
        /// What.
        value: u32,
    },
    /// Reads a register: of a BAR, or of a unit's register page (whose BAR is 0).
    Read {
        /// Which BAR.
        bar: u8,
        /// Offset in it, bytes.
        offset: u64,
        /// 1 to 8 bytes.
        len: u8,
    },
    /// Writes a register; answered when all that it sets off has been done which needs not wait for
    /// a device.
    Write {
        /// Which BAR.
        bar: u8,
        /// Offset in it, bytes.
        offset: u64,
        /// 1 to 8 bytes.
        len: u8,
        /// What.
        value: u64,
    },
}

/// How a ticket ended: the memory is there, or it never will be, which it says itself to whoever
/// asks again ([`PhysMem`](guest_mem::PhysMem)).
pub type TicketResult = Result<(), Absent>;

/// Memory that could not be brought in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent;

/// A question that only the owner `O` can answer, on its thread.
pub type Inspection<O> = Box<dyn FnOnce(&mut O) + Send>;

/// What other threads ask of the owner `O`.
pub enum Request<O> {
    /// A vCPU's access: the value read, or 0 when a write is done.
    Access {
        /// For whom.
        target: Target,
        /// What.
        op: Op,
        /// The answer.
        reply: Reply<u64>,
    },
    /// Memory that an access has waited for is there, or will never be.
    TicketDone(Ticket, TicketResult),
    /// These pages are to be evicted. The owner refuses those that a lease or a window reaches; the
    /// rest is gone for its functions and units with the answer, which has a bit for each: they may
    /// be unmapped, and only then written out.
    Evict {
        /// Which.
        pages: Box<Pages>,
        /// Which of them are gone ([`PhysMem::let_go`](guest_mem::PhysMem::let_go)).
        reply: Reply<u32>,
    },
    /// Anything else: counters, a function plugged in or removed, state saved.
    Inspect(Inspection<O>),
    /// The machine has ended. Whoever waits for a stop is let go, functions stop for good, and the
    /// number of each is sent once nothing of it is in flight.
    End(Sender<usize>),
}

impl<O> Request<O> {
    /// A question with an answer.
    pub fn ask<R: Send + 'static>(
        reply: Reply<R>,
        question: impl FnOnce(&mut O) -> R + Send + 'static,
    ) -> Self {
        Self::Inspect(Box::new(move |owner| reply.send(question(owner))))
    }
}
