//! Virtio devices (virtio 1.2) as pollers, transport-neutral: rings, block, network, memory balloon
//! and entropy.
//!
//! ```text
//! transport (virtio-pci, vhost-user) ── queues, service, reset ─▶ Device ── DeviceClass (blk, …)
//! owner's loop ── visit, arm, has_work, ticket_done ────────────▶  │    │         │
//!                              guest_mem::Dma ◀── rings, chains ───┘    │         └── BlockIo, …
//!                                                 MSI-X ◀── Interrupt ──┘
//! ```
//! [`Device`] is the body of every device here: queues, service, waits, publishing, counters. A
//! [`DeviceClass`] adds the part that its section of the specification describes. [`QueueDevice`]
//! is the interface for a transport in the same process, of either a [`Device`] or one that another
//! process serves ([`Remote`]).
//!
//! Reading order: `device` (the life of a device), [`ring`] (virtqueues, split and packed),
//! `body` and its `class`, [`rng`] (the smallest one), [`net`], [`balloon`], [`blk`]; [`caged`], a
//! disk whose device model is in another process.
//!
//! The guest is hostile: what it writes into rings, descriptors and headers is copied once,
//! checked, then used; every loop it can drive is bounded; breaking the protocol ends in
//! DEVICE_NEEDS_RESET, a bad address in a fault of the IOMMU. Memory is reached through
//! [`guest_mem::Dma`] only, whose `Pending` answer parks a queue.
//!
//! This crate knows no VMM, no PCI and no IOMMU model.
#![deny(unsafe_code)]

pub mod balloon;
pub mod blk;
mod body;
pub mod caged;
mod device;
#[cfg(test)]
mod fake_driver;
mod log_rate_limit;
pub mod net;
pub mod poll_budget;
mod queue_config;
mod remote;
pub mod ring;
pub mod rng;
mod saved;
pub mod throttle;

pub use body::{Context, Device, DeviceClass, Environment, ServedQueue, Step};
pub use device::{
    Activity, CancelReason, DeviceStats, Interrupt, NetworkRequest, QueueDevice, Revoked, Service,
    StoppedQueue, read_space,
};
pub use log_rate_limit::LogRateLimit;
pub use poll_budget::PollBudget;
pub use queue_config::{ActivateError, QueueConfig, feature};
pub use remote::{Remote, RemoteDevice, RemoteMemory};
pub use saved::{SAVED_VERSION, SavedDevice, SavedQueue, SavedState};
pub use throttle::{Rate, RateLimits, Throttle};
