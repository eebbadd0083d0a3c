//! Virtio over PCI, modern interface (Virtio 1.2, §4.1): registers, MSI-X, and the PCI function
//! that connects them to a device.
//!
//! * [`common`]: the common configuration structure. [`config`]: configuration space with its
//!   capabilities.
//! * [`function`]: [`VirtioFunction`], a [`Function`](machine::Function) of a machine's owner.
//!   `lifecycle`: its states, and how it stops.
//!
//! **Left out.** The legacy interface, the legacy interrupt pin (every driver here uses MSI-X),
//! reset of single queues, shared memory regions.
#![forbid(unsafe_code)]

pub mod common;
pub mod config;
pub mod function;
mod lifecycle;

pub use function::VirtioFunction;
