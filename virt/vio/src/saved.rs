//! What a device's state comes down to, for snapshots: plain, versioned, without live handles.
//!
//! *Derived, therefore absent*: cached windows (made anew on first use), whether a queue is parked (its
//! next access finds out), how far a chain in the available ring was worked off (it is begun again), a balloon's statistics
//! (they are in the available ring), counters. *Absent by precondition*: requests in flight, and ended ones
//! not yet in the used ring; a device is saved quiesced. *The owner's business*: the back end and its
//! configuration, a balloon's target, feature bits and registers that only the transport holds.
//!
//! Left out: making a device from it, which comes with restoring machines.

use serde::{Deserialize, Serialize};

/// Version of the types below; a change of meaning increments it.
pub const SAVED_VERSION: u32 = 3;

/// A quiesced device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedDevice {
    /// [`SAVED_VERSION`] when it was saved.
    pub version: u32,
    /// Device type number (virtio 1.2 §5).
    pub device_type: u16,
    /// Features the driver accepted; 0 before activation.
    pub features: u64,
    /// DEVICE_NEEDS_RESET.
    pub needs_reset: bool,
    /// The enabled queues; none before activation.
    pub queues: Vec<SavedQueue>,
    /// A frame received and not yet delivered (network devices).
    pub held_frame: Vec<u8>,
    /// Pages in the balloon, as its driver has written into the configuration space (balloons).
    pub balloon_actual: u32,
}

/// One queue between two polls, with nothing in flight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedQueue {
    /// Queue number.
    pub index: u16,
    /// Entries.
    pub size: u16,
    /// Layout: packed (§2.8), otherwise split (§2.7).
    pub is_packed: bool,
    /// IOVA of the descriptor table or ring.
    pub desc: u64,
    /// IOVA of the available ring or the driver's event suppression structure.
    pub avail: u64,
    /// IOVA of the used ring or the device's event suppression structure.
    pub used: u64,
    /// Split: the available entry to take next, modulo 2^16. Packed: the descriptor, with the wrap counter in bit 15.
    pub next_avail: u16,
    /// Split: the used entry to write next, modulo 2^16. Packed: the descriptor, with the wrap counter in bit 15.
    pub next_used: u16,
}
