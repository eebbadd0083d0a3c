//! Layouts and constants that driver and device share (virtio 1.2 §2.7, §2.8, §6). They are taken
//! from the specification and not from the device under test.

use guest_mem::Iova;

/// The buffer continues in the descriptor that `next` names (§2.7.5).
pub const DESC_F_NEXT: u16 = 1;
/// The device writes the buffer.
pub const DESC_F_WRITE: u16 = 2;
/// The buffer is a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;

/// VIRTIO_F_EVENT_IDX (29).
pub const EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_RING_PACKED (34).
pub const RING_PACKED: u64 = 1 << 34;
/// VIRTIO_F_IN_ORDER (35).
pub const IN_ORDER: u64 = 1 << 35;

/// Addresses of one queue, as the transport hands them to the device. If the device under test has
/// a type of its own for this, that type is the driver's parameter `Q`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rings {
    /// Queue number.
    pub index: u16,
    /// Number of entries.
    pub size: u16,
    /// Descriptor table; packed: the ring.
    pub desc: Iova,
    /// Available ring; packed: the driver's event suppression structure.
    pub avail: Iova,
    /// Used ring; packed: the device's event suppression structure.
    pub used: Iova,
}

impl From<Rings> for virtqueue::QueueConfig {
    fn from(rings: Rings) -> Self {
        Self {
            index: rings.index,
            size: rings.size,
            desc: rings.desc,
            avail: rings.avail,
            used: rings.used,
        }
    }
}

impl From<virtqueue::RawDescriptor> for Descriptor {
    fn from(desc: virtqueue::RawDescriptor) -> Self {
        Self {
            addr: desc.addr,
            len: desc.len,
            flags: desc.flags,
            next: desc.next,
        }
    }
}

/// Descriptor of a split ring (§2.7.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Buffer address.
    pub addr: u64,
    /// Buffer length in bytes.
    pub len: u32,
    /// `DESC_F_*`, or any other bits.
    pub flags: u16,
    /// Index of the next descriptor, with `DESC_F_NEXT`.
    pub next: u16,
}

impl Descriptor {
    /// Returns the bytes in memory.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// Position of a ring whose chains are all used, at which its device has to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// Both indices of a split ring, modulo 2^16.
    Split(u16),
    /// Descriptor index and wrap counter of a packed ring.
    Packed(u16, bool),
}
