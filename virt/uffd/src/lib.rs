//! userfaultfd(2): a fault of this process becomes a message to whoever decides what the page
//! holds.
//!
//! * [`Uffd`]: the descriptor, the ranges registered with it, and the answers to faults.
//! * [`GuestMapping`]: a guest's memory, whose absent pages are faults, and whose stores to
//!   protected pages leave a trace.
//! * [`WriteGate`]: a register page whose stores wake a sleeping core;
//!   [`SlotMapping`](guest_mem::SlotMapping) is what it protects.
//! * [`probe`]: what of it the running kernel does, found out by doing it.
//!
//! Registered memory is meant to be a mapping of a memory file made for guests alone: faults belong
//! to one *mapping*, so that the same file mapped again is reached without any.
//!
//! Numbers are those of `linux/userfaultfd.h`. Shared memory needs Linux 5.19 for write protection;
//! what needs a later kernel says so. Left out: anonymous memory (`UFFDIO_MOVE`), huge pages, and
//! the events of a changing address space (fork, remap, remove), without which no request has to
//! wait for a message to be read.
//!
//! UNSAFETY: system calls on a descriptor this crate owns. No memory is read or written here but
//! the argument structures, and what the probe has mapped for itself.

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
