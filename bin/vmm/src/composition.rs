//! Composition of a program's machines and daemons, beyond the parts that all have.
//!
//! A program is one [`Composition`], which is called while a machine or a daemon is built, and
//! never for a request: it may wrap disks, the swap store and sidecores. Every method has the
//! identity as its default, which is what the product has. Of machines it names the closed set of
//! functions as well, and may replace memory
//! ([`MachineComposition`](crate::run::MachineComposition)).

use std::sync::Arc;

use anyhow::Result;
use exit_ledger::report;
use guest_mem::GuestRam;
use sidecore::{FleetBuilder, SidecoreBuilder};
use swap::residency::{AvoidAll, IoPolicy};
use vio::blk::BlockIo;

/// Reads what a program's own parts have found, at the end of a run. Its keys name the parts.
pub type Findings = Arc<dyn Fn() -> report::Findings + Send + Sync>;

/// The parts of a program's machines and daemons.
pub trait Composition: Send + Sync {
    /// Refuses a machine that this program cannot compose.
    ///
    /// # Errors
    /// Names the option, and why not.
    fn check_machine(&self, machine: &MachineOutline<'_>) -> Result<()> {
        let _ = machine;
        Ok(())
    }

    /// Refuses a daemon of so many devices that this program cannot compose.
    ///
    /// # Errors
    /// Names the option, and why not.
    fn check_daemon(&self, devices: usize) -> Result<()> {
        let _ = devices;
        Ok(())
    }

    /// Wraps the disk of this number, from 0 in the order in which they are given.
    ///
    /// # Errors
    /// Names what the host refuses.
    fn disk(&self, number: usize, io: Box<dyn BlockIo>) -> Result<Box<dyn BlockIo>> {
        let _ = number;
        Ok(io)
    }

    /// Wraps the swap store of a guest with this memory.
    fn store(&self, io: Box<dyn BlockIo>, ram: &GuestRam) -> Box<dyn BlockIo> {
        let _ = ram;
        io
    }

    /// Returns the policy on I/O that the swapper could avoid.
    fn io_policy(&self) -> Box<dyn IoPolicy> {
        Box::new(AvoidAll)
    }

    /// Sets up the sidecore of a machine's devices.
    fn sidecore(&self, builder: SidecoreBuilder) -> SidecoreBuilder {
        builder
    }

    /// Sets up the cores of a daemon.
    fn fleet(&self, builder: FleetBuilder) -> FleetBuilder {
        builder
    }

    /// Returns whether pages of guest memory come and go one by one, also without `--resident`.
    fn moves_pages(&self) -> bool {
        false
    }

    /// Returns whether a guest is offered no more of KVM's paravirtual features than one whose
    /// pages come and go, also if its own do not.
    fn hides_paravirtual_features(&self) -> bool {
        false
    }

    /// Returns the entries that the parts of a machine that only this program has add to the
    /// ledger. Called once, after the machine is built.
    fn findings(&self) -> Option<Findings> {
        None
    }
}

/// A machine that is asked for, as far as a program may have to refuse it.
#[derive(Clone, Copy, Debug)]
pub struct MachineOutline<'a> {
    /// Of each disk: whether it is in a file, and not behind a socket.
    pub disks_in_files: &'a [bool],
    /// Memory is in a file.
    pub is_memory_shared: bool,
    /// Only some of the memory is there (`--resident`).
    pub has_pager: bool,
    /// Pages may be backed by blocks of disks (`--mapper on`).
    pub has_mapper: bool,
    /// There is a balloon.
    pub has_balloon: bool,
    /// There are physical devices, which pin pages (`--device`).
    pub has_devices: bool,
    /// There is a paravirtual IOMMU (`--iommu virtio`).
    pub has_virtio_iommu: bool,
}
