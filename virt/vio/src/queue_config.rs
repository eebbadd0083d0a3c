//! What a driver asks of a device and its queues, and why it is refused.

use guest_mem::Iova;

/// Feature bit numbers of virtio 1.2 §6 and §2.7 that every device here treats alike.
pub mod feature {
    /// VIRTIO_F_INDIRECT_DESC (28): a descriptor may point at a table of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// VIRTIO_F_EVENT_IDX (29): `used_event` and `avail_event` instead of flags.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// VIRTIO_F_VERSION_1 (32): not a legacy device.
    pub const VERSION_1: u64 = 1 << 32;
    /// VIRTIO_F_ACCESS_PLATFORM (33): ring and buffer addresses go through the platform's IOMMU.
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// VIRTIO_F_RING_PACKED (34): the packed layout instead of the split one.
    pub const RING_PACKED: u64 = 1 << 34;
    /// VIRTIO_F_IN_ORDER (35): buffers come back in the order in which they were made available.
    pub const IN_ORDER: u64 = 1 << 35;
    /// What every device here offers.
    pub const COMMON: u64 = INDIRECT_DESC | EVENT_IDX | VERSION_1 | ACCESS_PLATFORM;
}

/// One queue as the driver has set it up; in packed rings `avail` is the driver's event suppression structure
/// and `used` the device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Queue number.
    pub index: u16,
    /// Entries: a power of two (packed: any number from 1 to 32768), at most the device's maximum for this queue.
    pub size: u16,
    /// Descriptor table (or ring), 16-byte aligned.
    pub desc: Iova,
    /// Driver area: available ring, 2-byte aligned; packed: 4-byte aligned.
    pub avail: Iova,
    /// Device area: used ring, 4-byte aligned, as in packed rings.
    pub used: Iova,
}

/// Why a device refuses DRIVER_OK. The transport answers with DEVICE_NEEDS_RESET.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActivateError {
    /// Features that were not offered, or VERSION_1 missing.
    #[error("the driver accepted features {features:#x} where {offered:#x} are offered")]
    Features {
        /// Accepted by the driver.
        features: u64,
        /// Offered by the device.
        offered: u64,
    },
    /// A size that is zero, no power of two (packed: above 32768), or above the maximum.
    #[error("queue {index} has size {size}, the maximum is {max}")]
    QueueSize {
        /// Queue number.
        index: u16,
        /// Size written by the driver.
        size: u16,
        /// The device's maximum.
        max: u16,
    },
    /// A ring address that is misaligned or wraps.
    #[error("queue {index} has a misaligned or wrapping ring address")]
    QueueAddress {
        /// Queue number.
        index: u16,
    },
    /// A ring that does not lie in guest memory, of a device that is served elsewhere and could not fault later.
    #[error("queue {index} has a ring outside guest memory")]
    QueueMemory {
        /// Queue number.
        index: u16,
    },
    /// A queue number the device does not have, or one given twice.
    #[error("queue {index} does not exist or is given twice")]
    QueueIndex {
        /// Queue number.
        index: u16,
    },
    /// Requests of the life before are still in flight.
    #[error("{in_flight} requests are still in flight")]
    NotQuiesced {
        /// How many.
        in_flight: u32,
    },
}

/// Whether a device may have queues of at most `size` entries, of which it needs `least`.
pub(crate) fn is_queue_size(size: u16, least: u16) -> bool {
    size.is_power_of_two() && (least..=1024).contains(&size)
}

/// Checks the features that a driver has accepted.
pub(crate) fn check_features(offered: u64, features: u64) -> Result<(), ActivateError> {
    if features & !offered != 0 || features & feature::VERSION_1 == 0 {
        return Err(ActivateError::Features { features, offered });
    }
    Ok(())
}
