//! The split virtqueue (virtio 1.2 §2.7), device side.
//!
//! [`chain`]: descriptors, checked once. [`split`]: the two rings and the notification protocol.
//! Left out: the packed ring (§2.8), which the features here do not offer.

mod area;
pub mod chain;
pub mod split;

pub use chain::{Buffers, Chain, Segment, Violation};
pub use split::{Parked, RingStop, SplitQueue};

#[cfg(test)]
mod tests;
