//! The answer to every access to guest memory: `Ready`, `Pending` or `Fault`.
//!
//! `Ready` is [`Ok`]; the other two are [`Stop`], so that `?` carries them out of a device's code.
//! A caller that meets `Pending` leaves its state as it was before the access, parks the queue or
//! unit, and starts the same step again once the ticket's completion message arrives: every step
//! that touches guest memory is written so that doing it twice is the same as doing it once.

use crate::addr::{Gpa, Iova};

/// What an access answers.
pub type Access<T> = Result<T, Stop>;

/// Names one awaited event: a page being brought in, a miss being answered, a mapping being made.
/// Those of a [`DeviceTlb`](crate::DeviceTlb) have bit 63 set, and those of memory have not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Why an access gave no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Not now: park, and begin this step again when the ticket completes.
    Pending(Ticket),
    /// Not at all.
    Fault(DmaFault),
}

/// Why an access will never succeed as things stand.
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

/// What memory is wanted for, where it may be absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Intent {
    /// To be read.
    Read,
    /// To be written here and there.
    Write,
    /// To be filled as a whole, as by a read from a disk: what whole pages hold need not be brought
    /// in. Absent ones become zeroes at once, so that a fill that fails or is short leaves zeroes,
    /// never what they held before.
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
    /// What the device does then.
    pub const fn perm(self) -> Perm {
        match self {
            Self::Read => Perm::Read,
            Self::Write | Self::Overwrite => Perm::Write,
        }
    }
}

/// What the device does to the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Perm {
    /// The device reads guest memory.
    Read,
    /// The device writes guest memory.
    Write,
}
