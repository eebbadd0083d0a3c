//! Devices and disks that do wrong, or are slow, on purpose: wrapped around those of `vio`, from
//! outside, so that nothing of it is in a device that serves a guest in earnest.
//!
//! [`Rogue`] attacks its guest, to show that the IOMMU stops it. [`LatencyDisk`] answers no sooner
//! than a disk would, [`SlowDisk`] when a test lets it, [`PanicDisk`] never, [`FaultyStore`] fails
//! once. [`ScanDisk`](scan::ScanDisk) attacks the memory of its process. For tests, demonstrations
//! and measurements only; `exitless` puts them together on request.
#![deny(unsafe_code)]

mod late;
mod latency;
mod panic;
mod rogue;
pub mod scan;
mod slow;
mod store;

pub use late::{Attempts, Clock, LateOptions, LateStats, ROGUE_BYTES};
pub use latency::LatencyDisk;
pub use panic::PanicDisk;
pub use rogue::{Fault, Rogue, RogueDisk, RogueRecord, RogueStats};
pub use slow::{SlowControl, SlowDisk};
pub use store::{FaultyStore, StoreFault};
