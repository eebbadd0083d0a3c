//! Result of an access to guest memory: `Ready`, `Pending` or `Fault`.
//!
//! `Ready` is [`Ok`]; the other two are [`Stop`], so that `?` carries them out of a device's code.
//! A caller that receives `Pending` leaves its state as it was before the access, parks the queue
//! or unit, and repeats the step once the ticket's completion message arrives. Every step that
//! touches guest memory is therefore idempotent.

use crate::addr::{Gpa, Iova};

/// Result of an access.
pub type Access<T> = Result<T, Stop>;

/// Name of one awaited event: a page being brought in, a miss being answered, a mapping being made.
/// Tickets of a [`DeviceTlb`](crate::DeviceTlb) have bit 63 set, tickets of memory have it clear.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Reason why an access gave no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Not now: park, and begin this step again when the ticket completes.
    Pending(Ticket),
    /// Not at all.
    Fault(DmaFault),
}

/// Reason why an access fails: repeating it will not help while the mappings and RAM are unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaFault {
    /// The IOMMU refused the access and has recorded the fault the guest will see.
    Blocked {
        /// First refused address.
        iova: Iova,
    },
    /// The address, translated if there is an IOMMU, is not guest RAM.
    NotRam {
        /// First address outside RAM.
        gpa: Gpa,
    },
    /// The range wraps around the address space, or is misaligned for an access that must be one
    /// load or store.
    BadRange,
}

impl From<DmaFault> for Stop {
    fn from(fault: DmaFault) -> Self {
        Stop::Fault(fault)
    }
}

/// Purpose of an access to memory that may be absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Intent {
    /// The memory is read.
    Read,
    /// Parts of the memory are written.
    Write,
    /// All of the memory is filled, as by a read from a disk: the content of whole pages need not
    /// be brought in. Absent pages become zeroes at once, so that a fill that fails or is short
    /// leaves zeroes, never the previous content.
    Overwrite,
}

impl From<Perm> for Intent {
    fn from(perm: Perm) -> Self {
        match perm {
            Perm::Read => Self::Read,
            Perm::Write => Self::Write,
        }
    }
}

impl Intent {
    /// Returns the access that the device makes for this purpose.
    pub const fn perm(self) -> Perm {
        match self {
            Self::Read => Perm::Read,
            Self::Write | Self::Overwrite => Perm::Write,
        }
    }
}

/// Kind of access to memory by a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Perm {
    /// The device reads guest memory.
    Read,
    /// The device writes guest memory.
    Write,
}
