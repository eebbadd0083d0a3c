//! Parts of a pager, and its interface to the machine around it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use guest_mem::{Pages, SlotMapping};
use uffd::Source;
use vio::blk::BlockIo;

use super::Report;
use crate::ram::SwappedRam;
use crate::residency::PauseReason;

/// Operations that the pager needs of the machine. No call waits for the owner or for a processor.
pub trait Machine: Send {
    /// Makes the owner release as many of these pages as it can
    /// ([`PhysMem::let_go`](guest_mem::PhysMem::let_go)).
    fn evict(&self, pages: Pages);

    /// Notifies the owner that the memory of a ticket is there.
    fn ticket_done(&self, ticket: guest_mem::Ticket);

    /// Makes the owner poll its disks.
    fn wake(&self);

    /// Makes every vCPU leave the guest, report its registers
    /// ([`Message::Stopped`](super::Message::Stopped)), and continue with those of the answer.
    fn stop_vcpus(&self);

    /// Pauses the guest, which cannot continue, before it is affected. The reason and the pager's
    /// state are for its user.
    fn pause(&self, reason: PauseReason, report: &Report);

    /// Resumes the guest; `report` is the pager's state.
    fn resume(&self, report: &Report);

    /// Ends the guest: the kernel refused an operation that the pager needs.
    fn fail(&self, error: &io::Error);
}

/// Parts of a pager.
pub struct Parts {
    /// The memory, shared with the owner.
    pub ram: SwappedRam,
    /// Mappings of the guest's memory slots, one for each region of memory, in order.
    pub slots: Vec<Arc<SlotMapping>>,
    /// Accesses whose faults are served: the kernel's include those of processors in a guest.
    pub faults: Source,
    /// Number of pages that may be in memory.
    pub limit: usize,
    /// Swap store, and the number of its slots.
    pub store: (Box<dyn BlockIo>, usize),
    /// Number of vCPUs, and limit on the wait for them, if stores that overwrite a page are looked
    /// for.
    pub preventer: Option<(usize, Duration)>,
    /// Images of disks, by their numbers: they have the data that the disks have written.
    pub images: Vec<Box<dyn BlockIo>>,
}
