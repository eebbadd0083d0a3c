//! The closed sets this program composes: which remapping units and which functions a machine's owner may have. A new
//! system is a crate, and an arm here.

use std::convert::Infallible;

use guest_mem::NoIommu;
use machine::{functions, units};
use vio::Remote;
use vio::balloon::Balloon;
use vio::blk::Blk;
use vio::net::Net;
use vio::rng::Rng;
use vio_faults::RogueDisk;
use virtio_pci::VirtioFunction;
use vtd_port::VtdPort;

units! {
    /// The remapping unit of a machine. None takes commands from functions.
    pub enum Units: Infallible {
        /// Devices see guest-physical addresses.
        None(NoIommu),
        /// An emulated VT-d unit.
        Vtd(VtdPort),
    }
}

functions! {
    /// The functions of a machine.
    pub enum Functions: Infallible {
        /// A disk.
        Disk(VirtioFunction<Blk>),
        /// A disk that does wrong, for tests of the IOMMU.
        Rogue(VirtioFunction<RogueDisk>),
        /// A network card.
        Net(VirtioFunction<Net>),
        /// An entropy device.
        Rng(VirtioFunction<Rng>),
        /// A disk that another process serves.
        Remote(VirtioFunction<Remote>),
        /// A balloon.
        Balloon(VirtioFunction<Balloon>),
    }
}

/// The owner of a machine's unit and functions, over its memory.
pub type Owner<M> = machine::Owner<Units, Functions, M>;

/// What other threads ask of it.
pub type Request<M> = machine::Request<Owner<M>>;
