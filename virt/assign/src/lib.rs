//! Physical PCI functions in a guest, behind an emulated VT-d unit.
//!
//! * [`config`]: configuration space of such a function, as the guest sees it.
//! * [`areas`]: which bytes of its BARs trap, and which the hypervisor may show to the guest as
//!   memory.
#![deny(unsafe_code)]

pub mod areas;
pub mod config;
