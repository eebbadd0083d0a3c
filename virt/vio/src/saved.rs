//! Saved state of a device, for snapshots: plain, versioned, without live handles.
//!
//! *Derived, therefore absent*: cached windows (made anew on first use), whether a queue is parked
//! (its next access finds out), how far a chain in the available ring was worked off (it is begun
//! again), a balloon's statistics (they are in the available ring), counters. *Absent by
//! precondition*: requests in flight, and ended ones not yet in the used ring; a device is saved
//! quiesced. *The owner's business*: the back end and its configuration, a balloon's target,
//! feature bits and registers that only the transport holds.
//!
//! Decoding answers an error that names what was found and what is expected where the version, the
//! type of device, or the version of its class is another one. Left out: making a device from it,
//! which comes with restoring machines.

use std::fmt::Display;

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize};

/// Version of what all classes have in common; a change of meaning increments it.
pub const SAVED_VERSION: u32 = 4;

/// State of one class of devices.
pub trait SavedState: Serialize + DeserializeOwned {
    /// Device type number (virtio 1.2 §5).
    const TYPE: u16;
    /// Version of the type; a change of meaning increments it.
    const VERSION: u32;
}

/// A quiesced device, of a class whose state is `S`. What decoding checks comes first, in this
/// order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound = "S: SavedState")]
pub struct SavedDevice<S> {
    /// [`SAVED_VERSION`] when it was saved.
    #[serde(deserialize_with = "expect_version")]
    pub version: u32,
    /// Device type number (virtio 1.2 §5).
    #[serde(deserialize_with = "expect_type::<S, _>")]
    pub device_type: u16,
    /// [`SavedState::VERSION`] when it was saved.
    #[serde(deserialize_with = "expect_class_version::<S, _>")]
    pub class_version: u32,
    /// Features the driver accepted; 0 before activation.
    pub features: u64,
    /// DEVICE_NEEDS_RESET.
    pub needs_reset: bool,
    /// The enabled queues; none before activation.
    pub queues: Vec<SavedQueue>,
    /// State of its class.
    pub class: S,
}

fn expect_version<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    expect(from, SAVED_VERSION, "version of saved devices")
}

fn expect_type<'de, S: SavedState, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
    expect(from, S::TYPE, "type of device")
}

fn expect_class_version<'de, S, D>(from: D) -> Result<u32, D::Error>
where
    S: SavedState,
    D: Deserializer<'de>,
{
    let what = format_args!("version of saved devices of type {}", S::TYPE);
    expect(from, S::VERSION, what)
}

fn expect<'de, T, D>(from: D, expected: T, what: impl Display) -> Result<T, D::Error>
where
    T: Deserialize<'de> + Display + PartialEq,
    D: Deserializer<'de>,
{
    let found = T::deserialize(from)?;
    if found != expected {
        let message = format_args!("{what}: found {found}, expected {expected}");
        return Err(D::Error::custom(message));
    }
    Ok(found)
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
    /// Split: the available entry to take next, modulo 2^16. Packed: the descriptor, with the wrap
    /// counter in bit 15.
    pub next_avail: u16,
    /// Split: the used entry to write next, modulo 2^16. Packed: the descriptor, with the wrap
    /// counter in bit 15.
    pub next_used: u16,
}

#[cfg(test)]
mod tests;
