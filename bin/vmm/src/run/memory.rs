//! Place of a machine's memory: all of it here, or some of it elsewhere. The devices are built over
//! it.

use std::sync::Arc;

use anyhow::Result;
use assign::reach::Reach;
use guest_mem::{GuestRam, LastWindow, PhysMem, SlotMapping};
use pv_iommu::populate::PopulateWindows;
use vio::balloon::BalloonIo;
use vio::blk::BlockIo;

use super::composed::Request;
use super::disk::DiskConfig;
use super::hints::HintsConfig;
use super::hole_punch::Holes;
use kvm::control::Control;
use sidecore::Handle;
use swap::pager::Report;

/// Handle by which other threads send requests to the owner.
pub type OwnerHandle<F, M> = Handle<Request<F, M>>;

/// Memory, before devices are built over it, of a machine with functions of this set.
pub trait Memory<F> {
    /// Memory as the owner reaches it.
    type Ram: PhysMem + Send + 'static;

    /// Returns a handle for the owner.
    fn ram(&self) -> Self::Ram;

    /// Wraps a disk's file, where the memory has to follow the disk's I/O.
    fn disk(&mut self, io: Box<dyn BlockIo>, disk: &DiskConfig) -> Result<Box<dyn BlockIo>> {
        let _ = disk;
        Ok(io)
    }

    /// Windows of it that may be populated ahead of devices, if any are to be.
    fn windows(&self) -> Option<Arc<PopulateWindows>> {
        None
    }

    /// Returns the handler of pages that the guest discards through its balloon. Pages that
    /// assigned devices reach stay.
    fn balloon(&self, reach: &Reach) -> Result<Box<dyn BalloonIo>>;

    /// Called when the owner runs. Returns the pager, if the memory has one.
    fn start(self, owner: OwnerHandle<F, Self::Ram>) -> Result<Option<Box<dyn Paging>>>;
}

/// State of a pager.
pub struct PagerStatus {
    /// In numbers.
    pub report: Report,
    /// Reason of the last pause of the machine, in the words of the message to its user.
    pub pause_reason: Option<String>,
}

/// A question to the pager, which may have ended.
pub type AskPager = Box<dyn Fn() -> Option<PagerStatus> + Send + Sync>;

/// Pager, which moves pages while the machine runs.
pub trait Paging {
    /// Called when the guest's memory has been loaded and it is about to run.
    fn begin(&mut self) -> Result<()>;

    /// Called when the machine has ended: no vCPU enters the guest again, and none may wait for a
    /// page that cannot come.
    fn end(&self);

    /// Returns the query of its state, for any thread.
    fn reporter(&self) -> Option<AskPager> {
        None
    }

    /// Ends it, after the last vCPU and the owner. Returns a report of its work, for the user.
    fn stop(self: Box<Self>) -> String;
}

/// All of it is here.
pub struct Plain {
    ram: GuestRam,
    windows: Option<Arc<PopulateWindows>>,
    hints: HintsConfig,
}

impl Plain {
    /// Takes this memory, of a machine with these hints.
    pub fn new(ram: GuestRam, hints: HintsConfig) -> Self {
        Self {
            windows: hints.windows(&ram),
            ram,
            hints,
        }
    }
}

impl<F> Memory<F> for Plain {
    type Ram = LastWindow;

    fn ram(&self) -> LastWindow {
        LastWindow::new(self.ram.clone(), self.hints.caches)
    }

    fn windows(&self) -> Option<Arc<PopulateWindows>> {
        self.windows.clone()
    }

    fn balloon(&self, reach: &Reach) -> Result<Box<dyn BalloonIo>> {
        let holes = Holes::new(self.ram.clone(), reach.clone());
        Ok(Box::new(holes.beside(self.windows.clone())))
    }

    fn start(self, _: OwnerHandle<F, LastWindow>) -> Result<Option<Box<dyn Paging>>> {
        Ok(None)
    }
}

/// Parts of a machine from which memory is built of which pages may be elsewhere.
pub struct Pieces {
    /// All of it.
    pub ram: GuestRam,
    /// Mappings that its memory slots show, region by region.
    pub slots: Vec<Arc<SlotMapping>>,
    /// To pause the guest, and to end it.
    pub control: Arc<Control>,
}
