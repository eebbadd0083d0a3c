//! Where a machine's memory is: all of it here, or some of it elsewhere. What the devices are built
//! over.

use std::sync::Arc;

use anyhow::Result;
use assign::reach::Reach;
use guest_mem::{GuestRam, LastWindow, PhysMem, SlotMapping};
use pv_iommu::populate::Windows;
use vio::balloon::BalloonIo;
use vio::blk::BlockIo;

use super::composed::Request;
use super::disk::DiskConfig;
use super::hints::HintsConfig;
use super::holes::Holes;
use kvm::control::Control;
use sidecore::Handle;
use swap::pager::Report;

/// What others ask of the owner.
pub type OwnerHandle<F, M> = Handle<Request<F, M>>;

/// Memory, before devices are built over it, of a machine with functions of this set.
pub trait Memory<F> {
    /// How the owner reaches it.
    type Ram: PhysMem + Send + 'static;

    /// A handle for the owner.
    fn ram(&self) -> Self::Ram;

    /// What stands between a disk and its file, where the memory has to know what the disk does.
    fn disk(&mut self, io: Box<dyn BlockIo>, disk: &DiskConfig) -> Result<Box<dyn BlockIo>> {
        let _ = disk;
        Ok(io)
    }

    /// Windows of it that may be populated ahead of devices, if any are to be.
    fn windows(&self) -> Option<Arc<Windows>> {
        None
    }

    /// What becomes of pages that the guest does without, but for those that assigned devices
    /// reach.
    fn balloon(&self, reach: &Reach) -> Result<Box<dyn BalloonIo>>;

    /// The owner runs: who moves pages, if anybody does.
    fn start(self, owner: OwnerHandle<F, Self::Ram>) -> Result<Option<Box<dyn Paging>>>;
}

/// How a pager stands.
pub struct Standing {
    /// In numbers.
    pub report: Report,
    /// Why it paused the machine the last time, as its user was told.
    pub pause_reason: Option<String>,
}

/// A question to the pager, which may have ended.
pub type AskPager = Box<dyn Fn() -> Option<Standing> + Send + Sync>;

/// What moves pages while the machine runs.
pub trait Paging {
    /// The guest's memory has been loaded, and it is about to run.
    fn begin(&mut self) -> Result<()>;

    /// The machine has ended: no vCPU enters the guest again, and none is to wait for what cannot
    /// come.
    fn end(&self);

    /// How it stands, for whoever asks.
    fn reporter(&self) -> Option<AskPager> {
        None
    }

    /// Ends it, behind the last vCPU and the owner; what it has done, to be said.
    fn stop(self: Box<Self>) -> String;
}

/// All of it is here.
pub struct Plain {
    ram: GuestRam,
    windows: Option<Arc<Windows>>,
    hints: HintsConfig,
}

impl Plain {
    /// This memory, of a machine with these hints.
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

    fn windows(&self) -> Option<Arc<Windows>> {
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

/// What memory of which pages may be elsewhere is made of.
pub struct Pieces {
    /// All of it.
    pub ram: GuestRam,
    /// What its memory slots show, region by region.
    pub slots: Vec<Arc<SlotMapping>>,
    /// To pause the guest, and to end it.
    pub control: Arc<Control>,
}
