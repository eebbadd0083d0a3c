//! PCI: one bus, one function per slot, configuration space through ECAM and ports CF8/CFC.
//!
//! * [`config`]: a function's configuration space: identification, BARs, capability list.
//! * [`port`]: how a vCPU thread reaches a function, whoever owns it.
//! * [`bus`]: the bus: slots, configuration accesses, BAR decoding.
//! * [`host_bridge`]: function 00:00.0.
//!
//! Specifications: PCI Local Bus 3.0 (configuration header, BARs, MSI-X), PCI Express Base 4.0 (ECAM, capability).

pub mod bars;
pub mod bus;
pub mod config;
pub mod host_bridge;
pub mod port;
pub mod virtio;
