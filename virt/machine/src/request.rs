//! Requests of other threads to the owner: the thread that owns the machine's units and functions.

use std::sync::mpsc::Sender;

use guest_mem::{Pages, Ticket};
use sidecore::Reply;

/// Destination of an access: a unit or a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Registers of the remapping unit with the number that
    /// [`Owner::add_unit`](crate::Owner::add_unit) returned.
    Unit(usize),
    /// The function with the number that [`Owner::add`](crate::Owner::add) returned.
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
    /// Writes configuration space. The answer comes once the effect of the write is complete,
    /// including a drain of requests in flight.
    ConfigWrite {
        /// Register, bytes.
        reg: u16,
        /// Bytes: 1, 2 or 4.
        len: u8,
        /// Value to write.
        value: u32,
    },
    /// Reads a register of a BAR, or of a unit's register page (as BAR 0).
    Read {
        /// Number of the BAR.
        bar: u8,
        /// Offset in the BAR, bytes.
        offset: u64,
        /// Bytes: 1 to 8.
        len: u8,
    },
    /// Writes a register. The answer comes once all consequences of the write are done that need
    /// not wait for a device.
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

/// Outcome of a ticket: the memory is present, or will never be. In both cases a retried access to
/// memory ([`PhysMem`](guest_mem::PhysMem)) finds out which.
pub type TicketResult = Result<(), Absent>;

/// Error of a page-in: the memory stays absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent;

/// A function that the owner `O` runs on its thread, with exclusive access to its state.
pub type Inspection<O> = Box<dyn FnOnce(&mut O) + Send>;

/// Request of another thread to the owner `O`.
pub enum Request<O> {
    /// A vCPU's access: the value read, or 0 when a write is done.
    Access {
        /// Unit or function accessed.
        target: Target,
        /// The access.
        op: Op,
        /// Receives the answer.
        reply: Reply<u64>,
    },
    /// The memory that an access waits for is present, or will never be.
    TicketDone(Ticket, TicketResult),
    /// Evicts pages. The owner refuses those that a lease or a window reaches. The others are
    /// absent for its functions and units from the answer on, which has a bit for each of them.
    /// They may then be unmapped, and after that written out.
    Evict {
        /// Pages to evict.
        pages: Box<Pages>,
        /// Receives the bits of the evicted pages
        /// ([`PhysMem::let_go`](guest_mem::PhysMem::let_go)).
        reply: Reply<u32>,
    },
    /// Runs a function on the owner, for everything else: counters, a function plugged in or
    /// removed, state saved.
    Inspect(Inspection<O>),
    /// The machine has ended. Callers that wait for a function to stop are answered, and functions
    /// stop for good. The number of each is sent once none of its requests is in flight.
    End(Sender<usize>),
}

impl<O> Request<O> {
    /// Makes a request that runs `question` on the owner and sends its result to `reply`.
    pub fn ask<R: Send + 'static>(
        reply: Reply<R>,
        question: impl FnOnce(&mut O) -> R + Send + 'static,
    ) -> Self {
        Self::Inspect(Box::new(move |owner| reply.send(question(owner))))
    }
}
