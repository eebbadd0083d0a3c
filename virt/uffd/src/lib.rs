//! userfaultfd(2): a fault of this process becomes a message to the thread that decides on the
//! page's content.
//!
//! * [`Uffd`]: the descriptor, the ranges registered with it, and the answers to faults.
//! * [`GuestMapping`]: a guest's memory, whose absent pages are faults, and whose stores to
//!   protected pages leave a trace.
//! * [`WriteGate`]: a register page whose stores wake a sleeping core; it protects a
//!   [`SlotMapping`](guest_mem::SlotMapping).
//! * [`probe`]: tests of these features on the running kernel.
//!
//! Registered memory is meant to be a mapping of a memory file made for guests alone: faults belong
//! to one *mapping*, so that another mapping of the same file is accessed without faults.
//!
//! Numbers are those of `linux/userfaultfd.h`. Shared memory needs Linux 5.19 for write protection;
//! items that need a later kernel say so. Left out: anonymous memory (`UFFDIO_MOVE`), huge pages,
//! and the events of a changing address space (fork, remap, remove), without which no request waits
//! until a message is read.
//!
//! UNSAFETY: system calls on a descriptor that this crate owns. Memory is read and written here
//! only in the argument structures, and in the probe's own mappings.

mod abi;
mod descriptor;
mod gate;
mod guest;
pub mod probe;
mod scan;

pub use abi::{Features, Modes};
pub use descriptor::{Fault, FaultKind, Protection, Source, Uffd};
pub use gate::WriteGate;
pub use guest::{GuestMapping, PageFault, Stores};
