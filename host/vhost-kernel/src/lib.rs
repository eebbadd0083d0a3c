//! vhost-net of Linux (`drivers/vhost/net.c`, `include/uapi/linux/vhost.h`) over a TAP interface,
//! as a back end by which [`vhost_import`] serves a network device: system calls and layouts,
//! without a decision.
//!
//! Reading order: [`VhostNet`] (the device), `uapi` (numbers and structures of the header), `sys`
//! (the calls).
//!
//! **Memory.** The kernel accesses guest memory by the addresses at which this process has it
//! mapped, at any moment while the descriptor is open. Every address that it is given is computed
//! here from an address of the guest's, and lies in the [`guest_mem::GuestRam`] that the device
//! holds until the descriptor is closed.
//!
//! **Left out:** several pairs (each is a descriptor of its own), `experimental_zcopytx`, dirty
//! logging, memory that changes.

mod net;
mod sys;
mod uapi;

pub use net::{VhostNet, VhostNetError};
