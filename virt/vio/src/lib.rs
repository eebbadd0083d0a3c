//! Virtio devices (virtio 1.2) as pollers: rings, block, network and memory balloon, transport-neutral.
//!
//! ```text
//! transport (virtio-pci, vhost-user) ── queues, service, reset ─▶ QueueDevice ── BlockIo ──▶ io_uring
//! owner's loop ── visit, arm, has_work, ticket_done ────────────▶  │    │
//!                              guest_mem::Dma ◀── rings, chains ───┘    └── Interrupt ──▶ MSI-X
//! ```
//! Reading order: [`QueueDevice`] (what a device is, and its life), [`ring`] (virtqueues, split and packed), [`blk`], [`net`],
//! [`balloon`].
//!
//! The guest is hostile: what it writes into rings, descriptors and headers is copied once, checked, then
//! used; every loop it can drive is bounded; breaking the protocol ends in DEVICE_NEEDS_RESET, a bad
//! address in a fault of the IOMMU. Memory is reached through [`guest_mem::Dma`] only, whose `Pending`
//! answer parks a queue.
//!
//! This crate knows no VMM, no PCI and no IOMMU model.
#![deny(unsafe_code)]

pub mod balloon;
pub mod blk;
mod device;
#[cfg(test)]
mod fake_driver;
mod line_budget;
pub mod net;
mod queue_config;
mod remote;
pub mod ring;
mod saved;
pub mod throttle;
pub mod visit;

pub use device::{
    Activity, CancelReason, DeviceStats, Interrupt, QueueDevice, Service, StoppedQueue, read_space,
};
pub use line_budget::LineBudget;
pub use queue_config::{ActivateError, QueueConfig, feature};
pub use remote::{Remote, RemoteDevice};
pub use saved::{SAVED_VERSION, SavedDevice, SavedQueue};
pub use throttle::{Rate, RateLimits, Throttle};
pub use visit::Visit;
