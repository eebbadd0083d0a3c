//! Interface between the builder of a machine and its devices and IOMMU.
//!
//! The builder calls `devices::attach` once, after KVM, RAM, interrupts and vCPU descriptors exist
//! and before the kernel is loaded or any vCPU runs.

use std::cell::OnceCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use guest_mem::{GuestRam, SlotMapping};

use kvm::Vm;
use kvm::control::Control;
use kvm::exits::ExitLedger;
use kvm::msi::KvmMsi;
use kvm::routes::KvmRoutes;
use kvm::zones::ZonedRing;
use pci::bus::PciBus;
use platform::bus::BusDevice;
use platform::power::{EjectSink, MarkerSink};

/// Parts of the machine from which devices are built.
pub struct Parts<'a> {
    /// The machine.
    pub vm: &'a Arc<Vm>,
    /// A vCPU's descriptor per vCPU: for statistics, and for the coalesced-MMIO ring.
    pub vcpus: &'a [BorrowedFd<'a>],
    /// Guest RAM; clone it to keep it.
    pub ram: &'a GuestRam,
    /// Mappings that its memory slots show, region by region.
    pub slots: &'a [Arc<SlotMapping>],
    /// Where interrupts go.
    pub msi: &'a Arc<KvmMsi>,
    /// Where eventfds become interrupts.
    pub routes: &'a Arc<KvmRoutes>,
    /// Pause and end.
    pub control: &'a Arc<Control>,
    /// Exits to user space by cause.
    pub exits: &'a ExitLedger,
    /// Where functions are plugged in.
    pub bus: &'a Arc<PciBus>,
    /// The reader of KVM's log of register writes, once a unit has wanted it.
    pub ring: OnceCell<Arc<ZonedRing>>,
}

impl Parts<'_> {
    /// Returns the machine's one reader of KVM's log of register writes.
    ///
    /// # Errors
    /// The kernel has none.
    pub fn ring(&self) -> io::Result<Arc<ZonedRing>> {
        if let Some(ring) = self.ring.get() {
            return Ok(ring.clone());
        }
        let ring = ZonedRing::map(self.vcpus[0].as_fd())?;
        Ok(self.ring.get_or_init(|| ring).clone())
    }
}

/// Parts that the devices add to the machine.
#[derive(Default)]
pub struct Attached {
    /// Handlers of exits on the VT-d register pages, by their addresses.
    pub iommu_pages: Vec<(u64, Arc<dyn BusDevice>)>,
    /// ACPI tables that describe it to the guest, each complete.
    pub tables: Vec<Vec<u8>>,
    /// Receives marker writes.
    pub marker: Option<Arc<dyn MarkerSink>>,
    /// Functions that the guest may eject, if there are any.
    pub ejectable: Option<Ejectable>,
    /// Threads and state that run beside the vCPUs.
    pub running: Option<Box<dyn Running>>,
}

/// Functions that the guest may eject.
pub struct Ejectable {
    /// Their slots.
    pub slots: Vec<u8>,
    /// Removes one.
    pub sink: Arc<dyn EjectSink>,
}

/// Sidecores, and all other threads beside the vCPUs.
pub trait Running {
    /// Called when memory has been loaded and the first vCPU is about to run.
    ///
    /// # Errors
    /// Nothing has been started.
    fn begin(&mut self) -> anyhow::Result<()>;

    /// Called when the machine has ended: no vCPU waits for a device from now on, and the devices
    /// begin to stop. Does not wait.
    fn end(&mut self);

    /// After [`end`](Self::end): waits for what is in flight, and reports that if it takes long;
    /// stops everything, after the last vCPU thread has returned; prints or writes what is left to
    /// report. `look` is called now and then while it waits, and may end the process.
    fn stop(self: Box<Self>, look: &dyn Fn()) -> anyhow::Result<()>;
}
