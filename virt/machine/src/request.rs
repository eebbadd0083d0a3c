//! Requests of other threads to the owner.

use std::sync::mpsc::Sender;

use guest_mem::{Pages, Ticket};
use sidecore::Reply;

/// Destination of an access: a unit or a function.
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
        /// Bytes: 1, 2 or 4.
        len: u8,
    },
    /// Writes configuration space. The answer comes once the effect of the write, including a
    /// drain, is complete.
    ConfigWrite {
        /// Register, bytes.
        reg: u16,
        /// Bytes: 1, 2 or 4.
        len: u8,
        /// Value to write.
        value: u32,
    },
    /// Reads a register: of a BAR, or of a unit's register page (whose BAR is 0).
    Read {
        /// Number of the BAR.
        bar: u8,
        /// Offset in the BAR, bytes.
        offset: u64,
        /// Bytes: 1 to 8.
        len: u8,
    },
    /// Writes a register. The answer comes once everything that the write sets off and that need
    /// not wait for a device has been done.
    Write {
        /// Number of the BAR.
        bar: u8,
        /// Offset in the BAR, bytes.
        offset: u64,
        /// Bytes: 1 to 8.
        len: u8,
        /// Value to write.
        value: u64,
    },
}

/// Outcome of a ticket: the memory is there, or it never will be. In both cases a retried access to
/// memory ([`PhysMem`](guest_mem::PhysMem)) finds out which.
pub type TicketResult = Result<(), Absent>;

/// Memory that could not be brought in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent;

/// A question that only the owner `O` can answer, on its thread.
pub type Inspection<O> = Box<dyn FnOnce(&mut O) + Send>;

/// Request of another thread to the owner `O`.
pub enum Request<O> {
    /// A vCPU's access: the value read, or 0 when a write is done.
    Access {
        /// Unit or function accessed.
        target: Target,
        /// The access.
        op: Op,
        /// The answer.
        reply: Reply<u64>,
    },
    /// The memory that an access has waited for is there, or will never be.
    TicketDone(Ticket, TicketResult),
    /// Evicts pages. The owner refuses those that a lease or a window reaches. The others are
    /// absent for its functions and units from the answer on, which has a bit for each page: they
    /// may then be unmapped, and only after that written out.
    Evict {
        /// Pages to evict.
        pages: Box<Pages>,
        /// Receives the pages that are gone ([`PhysMem::let_go`](guest_mem::PhysMem::let_go)).
        reply: Reply<u32>,
    },
    /// Anything else: counters, a function plugged in or removed, state saved.
    Inspect(Inspection<O>),
    /// The machine has ended. Callers that wait for a stop are answered, functions stop for good,
    /// and the number of each is sent once nothing of it is in flight.
    End(Sender<usize>),
}

impl<O> Request<O> {
    /// Makes a request for a question with an answer.
    pub fn ask<R: Send + 'static>(
        reply: Reply<R>,
        question: impl FnOnce(&mut O) -> R + Send + 'static,
    ) -> Self {
        Self::Inspect(Box::new(move |owner| reply.send(question(owner))))
    }
}
