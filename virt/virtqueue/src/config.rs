//! Configuration of a queue by its driver, and the feature bits that all devices treat alike.

use address::Iova;

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
    /// Features that every device of `vio` offers.
    pub const COMMON: u64 = INDIRECT_DESC | EVENT_IDX | VERSION_1 | ACCESS_PLATFORM;
}

/// Configuration of one queue. In packed rings `avail` is the driver's event suppression structure
/// and `used` the device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Queue number.
    pub index: u16,
    /// Entries: a power of two (packed: any number from 1 to 32768), at most the device's maximum
    /// for this queue.
    pub size: u16,
    /// Descriptor table (or ring), 16-byte aligned.
    pub desc: Iova,
    /// Driver area: available ring, 2-byte aligned; packed: 4-byte aligned.
    pub avail: Iova,
    /// Device area: used ring, 4-byte aligned, as in packed rings.
    pub used: Iova,
}
