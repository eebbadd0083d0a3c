//! PCI: one bus, one function per slot, configuration space through ECAM and ports CF8/CFC.
//!
//! * [`config`]: a function's configuration space: identification, BARs, capability lists, the
//!   legacy pin.
//! * [`msix`], [`msi`]: its interrupt messages: a table of them in a BAR, or one for a block of
//!   vectors.
//! * [`port`]: the interface by which a vCPU thread reaches a function, independent of its owner.
//! * [`bus`]: the bus: slots, configuration accesses, BAR decoding in a 32-bit and a 64-bit window.
//! * [`host_bridge`]: function 00:00.0.
//!
//! Specifications: PCI Local Bus 3.0 (configuration header, BARs, MSI, MSI-X), PCI Express Base 4.0
//! (ECAM, capabilities).
//!
//! **Threads.** vCPU threads enter by [`bus`]'s three bus devices; a function's own state
//! ([`config`], [`msi`], [`msix`]) is plain data of the function's owner.
//!
//! **Left out.** Bridges and other buses, expansion ROMs, power management.
#![forbid(unsafe_code)]

pub mod bars;
pub mod bus;
pub mod config;
pub mod host_bridge;
pub mod msi;
pub mod msix;
pub mod port;
