//! Descriptor chains: read once from the guest into a local list, checked, then used.
//!
//! Layout: virtio 1.2 §2.7.5 (`struct virtq_desc`), indirect tables §2.7.5.3.

use guest_mem::{Access, Dma, DmaFault, Iova};

/// VIRTQ_DESC_F_NEXT: the chain goes on at `next`.
pub const DESC_F_NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE: the device writes this buffer.
pub const DESC_F_WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT: the buffer is a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;

/// Longest indirect table, in entries. The specification's bound is the queue size (§2.7.5.3.1); drivers
/// exceed it where their segment limit does, so this is what QEMU takes: 1024 × 16 B = 16 KiB of scratch.
pub const MAX_INDIRECT: u32 = 1024;

/// Size of a descriptor in bytes.
pub const DESC_SIZE: u32 = 16;

/// A descriptor as the guest wrote it: an allegation, nothing checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawDescriptor {
    /// Buffer address.
    pub addr: u64,
    /// Buffer length in bytes.
    pub len: u32,
    /// `DESC_F_*`; other bits are ignored.
    pub flags: u16,
    /// Next descriptor, if `DESC_F_NEXT`.
    pub next: u16,
}

impl RawDescriptor {
    /// From the bytes in memory.
    pub fn from_bytes(bytes: &[u8; 16]) -> Self {
        Self::from_words(
            u64::from_le_bytes(bytes[..8].try_into().expect("8 of 16 bytes")),
            u64::from_le_bytes(bytes[8..].try_into().expect("8 of 16 bytes")),
        )
    }

    /// From the two little-endian words in memory.
    pub fn from_words(addr: u64, rest: u64) -> Self {
        Self {
            addr,
            len: rest as u32,
            flags: (rest >> 32) as u16,
            next: (rest >> 48) as u16,
        }
    }

    /// The bytes in memory.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// What a driver must not do with a ring (virtio 1.2 §2.7, driver requirements). Ends in DEVICE_NEEDS_RESET.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// More chains made available than the ring has entries.
    #[error("available index {idx} is more than the ring ahead of {next_avail}")]
    AvailTooFar {
        /// Index read.
        idx: u16,
        /// Where we are.
        next_avail: u16,
    },
    /// A descriptor index outside the table.
    #[error("descriptor index {0} outside the table")]
    Index(u16),
    /// More descriptors than the table has: a loop, or a chain longer than allowed.
    #[error("descriptor chain longer than its table")]
    TooLong,
    /// A device-readable descriptor behind a device-writable one (§2.7.4.2).
    #[error("readable descriptor behind a writable one")]
    Order,
    /// A buffer of no bytes.
    #[error("descriptor of zero length")]
    ZeroLength,
    /// A buffer that wraps around the address space.
    #[error("descriptor at {addr:#x} wraps")]
    Wraps {
        /// Its address.
        addr: u64,
    },
    /// Buffers of 4 GiB or more in one chain (§2.7.5.2).
    #[error("descriptor chain of 4 GiB or more")]
    TooManyBytes,
    /// An indirect descriptor that may not be: not negotiated, nested, or with NEXT set (§2.7.5.3.1).
    #[error("indirect descriptor where none is allowed")]
    Indirect,
    /// An indirect table whose length is no multiple of 16, or above [`MAX_INDIRECT`] entries.
    #[error("indirect table of {0} bytes")]
    IndirectLength(u32),
    /// A request without room for its header or status, found by the device.
    #[error("request without header or status byte")]
    Truncated,
    /// A request whose status byte cannot be written, found by the device.
    #[error("the request's status cannot be written")]
    Status,
}

/// A checked buffer: not empty, does not wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte.
    pub iova: Iova,
    /// Bytes, at least 1.
    pub len: u32,
}

/// A checked descriptor chain: readable segments, then writable ones. Reused from chain to chain.
#[derive(Debug, Default)]
pub struct Chain {
    head: u16,
    segments: Vec<Segment>,
    readable: usize,
    readable_len: u32,
    writable_len: u32,
}

impl Chain {
    /// An empty chain with room for the longest one.
    pub fn new() -> Self {
        Self {
            segments: Vec::with_capacity(MAX_INDIRECT as usize),
            ..Self::default()
        }
    }

    /// Forgets the chain before, for one that starts at `head`.
    pub(super) fn begin(&mut self, head: u16) {
        let Self {
            head: own,
            segments,
            readable,
            readable_len,
            writable_len,
        } = self;
        *own = head;
        segments.clear();
        *readable = 0;
        *readable_len = 0;
        *writable_len = 0;
    }

    /// Checks and appends one descriptor.
    pub(super) fn push(&mut self, desc: RawDescriptor) -> Result<(), Violation> {
        if desc.len == 0 {
            return Err(Violation::ZeroLength);
        }
        if desc.addr.checked_add(u64::from(desc.len) - 1).is_none() {
            return Err(Violation::Wraps { addr: desc.addr });
        }
        let total = self.readable_len.checked_add(self.writable_len);
        if total.and_then(|sum| sum.checked_add(desc.len)).is_none() {
            return Err(Violation::TooManyBytes);
        }
        if desc.flags & DESC_F_WRITE != 0 {
            self.writable_len += desc.len;
        } else {
            if self.writable_len != 0 {
                return Err(Violation::Order);
            }
            self.readable += 1;
            self.readable_len += desc.len;
        }
        self.segments.push(Segment {
            iova: Iova::new(desc.addr),
            len: desc.len,
        });
        Ok(())
    }

    /// Index of the first descriptor: what the used ring names.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// What the device reads.
    pub fn readable(&self) -> Buffers<'_> {
        Buffers {
            segments: &self.segments[..self.readable],
            len: self.readable_len,
        }
    }

    /// What the device writes.
    pub fn writable(&self) -> Buffers<'_> {
        Buffers {
            segments: &self.segments[self.readable..],
            len: self.writable_len,
        }
    }
}

/// One direction of a chain, as one row of bytes however the driver cut it.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    segments: &'a [Segment],
    len: u32,
}

impl<'a> Buffers<'a> {
    /// Bytes in all.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The segments as the driver cut them.
    pub fn segments(&self) -> &'a [Segment] {
        self.segments
    }

    /// The pieces that make up bytes `offset` to `offset + len`, clipped to what there is.
    pub fn slice(&self, offset: u32, len: u32) -> impl Iterator<Item = Segment> + use<'a> {
        let mut skip = offset;
        let mut left = len;
        self.segments.iter().filter_map(move |segment| {
            if skip >= segment.len {
                skip -= segment.len;
                return None;
            }
            let take = (segment.len - skip).min(left);
            if take == 0 {
                return None;
            }
            // A segment does not wrap, so neither does a step inside it.
            let iova = segment.iova.checked_add(u64::from(skip))?;
            skip = 0;
            left -= take;
            Some(Segment { iova, len: take })
        })
    }

    /// Copies bytes `offset..` out of the guest. The caller has checked the length: a short chain is a fault.
    pub fn read<D: Dma>(&self, dma: &mut D, offset: u32, buf: &mut [u8]) -> Access<()> {
        let mut at = 0;
        for piece in self.slice(offset, buf.len() as u32) {
            let end = at + piece.len as usize;
            dma.read(piece.iova, &mut buf[at..end])?;
            at = end;
        }
        if at == buf.len() {
            Ok(())
        } else {
            Err(DmaFault::BadRange.into())
        }
    }

    /// Copies `buf` into the guest from byte `offset` on. A short chain is a fault.
    pub fn write<D: Dma>(&self, dma: &mut D, offset: u32, buf: &[u8]) -> Access<()> {
        let mut at = 0;
        for piece in self.slice(offset, buf.len() as u32) {
            let end = at + piece.len as usize;
            dma.write(piece.iova, &buf[at..end])?;
            at = end;
        }
        if at == buf.len() {
            Ok(())
        } else {
            Err(DmaFault::BadRange.into())
        }
    }
}
