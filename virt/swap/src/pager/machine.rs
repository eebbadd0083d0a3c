//! What a pager is made of, and what it asks of the machine around it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use guest_mem::{Pages, SlotMapping};
use uffd::Source;
use vio::blk::BlockIo;

use super::Report;
use crate::book::Trouble;
use crate::ram::SwappedRam;

/// What the pager needs of the machine. No call waits for the owner or for a processor.
pub trait Machine: Send {
    /// Has the owner let go of as many of these pages as it can
    /// ([`PhysMem::let_go`](guest_mem::PhysMem::let_go)).
    fn evict(&self, pages: Pages);

    /// Tells the owner that the memory of a ticket is there.
    fn ticket_done(&self, ticket: guest_mem::Ticket);

    /// Has the owner look at its disks.
    fn wake(&self);

    /// Has every vCPU leave the guest, say where it stands
    /// ([`Message::Stopped`](super::Message::Stopped)), and go on with what it is answered.
    fn stop_vcpus(&self);

    /// Stops the guest, which cannot go on, before it notices: why, and how things stand, for its
    /// user.
    fn pause(&self, trouble: Trouble, report: &Report);

    /// Lets the guest go on; how things stand.
    fn resume(&self, report: &Report);

    /// Ends the guest: the kernel refused what the pager cannot do without.
    fn fail(&self, error: &io::Error);
}

/// What a pager is made of.
pub struct Parts {
    /// The memory, as the owner has it.
    pub ram: SwappedRam,
    /// The mappings that the guest's memory slots show, one for each region of memory, in order.
    pub slots: Vec<Arc<SlotMapping>>,
    /// Who serves faults: the kernel's are those of processors in a guest.
    pub faults: Source,
    /// Pages that may be in memory.
    pub limit: usize,
    /// Where pages go, and how many it holds.
    pub store: (Box<dyn BlockIo>, usize),
    /// Whether stores that overwrite a page are looked for: how many vCPUs there are, and how long
    /// they are waited for.
    pub preventer: Option<(usize, Duration)>,
    /// The images of disks, by their numbers: what was written to them by the disk is found there.
    pub images: Vec<Box<dyn BlockIo>>,
}
