//! Descriptor chains: read once from the guest into a local list, checked, then used.
//!
//! Layout: virtio 1.2 §2.7.5 (`struct virtq_desc`), indirect tables §2.7.5.3.

use core::fmt;

use address::Iova;

/// VIRTQ_DESC_F_NEXT: the chain continues at `next`.
pub const DESC_F_NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE: the device writes this buffer.
pub const DESC_F_WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT: the buffer is a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;

/// Longest indirect table, in entries. The specification's bound is the queue size (§2.7.5.3.1);
/// drivers exceed it where their segment limit does, so this is QEMU's bound: 1024 × 16 B = 16 KiB
/// of scratch.
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
    /// Split: next descriptor, if `DESC_F_NEXT`. Packed descriptors that were kept as they
    /// were: the buffer id.
    pub next: u16,
}

impl RawDescriptor {
    /// From the two little-endian words in memory.
    #[inline(always)]
    pub fn from_words(addr: u64, rest: u64) -> Self {
        Self {
            addr,
            len: rest as u32,
            flags: (rest >> 32) as u16,
            next: (rest >> 48) as u16,
        }
    }

    /// From the two little-endian words of a packed ring's descriptor (virtio 1.2 §2.8.5): its
    /// buffer id becomes `next`.
    #[inline(always)]
    pub fn from_packed_words(addr: u64, rest: u64) -> Self {
        Self {
            addr,
            len: rest as u32,
            flags: (rest >> 48) as u16,
            next: (rest >> 32) as u16,
        }
    }
}

/// Mistake of a driver's with a ring (virtio 1.2 §2.7, driver requirements). Ends in
/// DEVICE_NEEDS_RESET.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// More chains made available than the ring has entries.
    AvailTooFar {
        /// Index read.
        idx: u16,
        /// Index of the next available entry.
        next_avail: u16,
    },
    /// A descriptor index outside the table.
    Index(u16),
    /// More descriptors than the table has: a loop, or a chain longer than allowed.
    TooLong,
    /// A device-readable descriptor behind a device-writable one (§2.7.4.2).
    Order,
    /// A buffer of no bytes.
    ZeroLength,
    /// A buffer that wraps around the address space.
    Wraps {
        /// Its address.
        addr: u64,
    },
    /// Buffers of 4 GiB or more in one chain (§2.7.5.2).
    TooManyBytes,
    /// An indirect descriptor that may not be: not negotiated, nested, or with NEXT set
    /// (§2.7.5.3.1).
    Indirect,
    /// An indirect table whose length is no multiple of 16, or above [`MAX_INDIRECT`] entries.
    IndirectLength(u32),
    /// A head made available while it is in flight, seen where in-flight chains are recorded.
    InFlight(u16),
    /// The journal could not record a chain: not the driver's fault, but the ring cannot be served
    /// safely.
    Journal,
    /// A request without room for its header or status, found by the device.
    Truncated,
    /// A request whose status byte cannot be written, found by the device.
    Status,
    /// Not the driver's doing: a request that the back end can neither end nor cancel holds the
    /// guest's memory.
    NotCancellable,
    /// Not caused by the driver: the IOMMU that translates for the device does not answer.
    MissUnanswered,
    /// Not caused by the driver: an invalidation could not be answered, because requests hold the
    /// memory that it covers.
    NotReleased,
    /// Not caused by the driver: the process that is the device's model has ended, or has given an
    /// invalid answer.
    Worker,
    /// The addresses of a ring lead nowhere, where that is known before the ring is served.
    RingAddress(u16),
    /// Not the driver's doing: the device has written more into a chain than it has room for.
    Answer {
        /// Bytes written.
        len: u32,
        /// Bytes of its device-writable buffers.
        room: u32,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AvailTooFar { idx, next_avail } => write!(
                f,
                "available index {idx} is more than the ring ahead of {next_avail}"
            ),
            Self::Index(index) => write!(f, "descriptor index {index} outside the table"),
            Self::TooLong => f.write_str("descriptor chain longer than its table"),
            Self::Order => f.write_str("readable descriptor behind a writable one"),
            Self::ZeroLength => f.write_str("descriptor of zero length"),
            Self::Wraps { addr } => write!(f, "descriptor at {addr:#x} wraps"),
            Self::TooManyBytes => f.write_str("descriptor chain of 4 GiB or more"),
            Self::Indirect => f.write_str("indirect descriptor where none is allowed"),
            Self::IndirectLength(len) => write!(f, "indirect table of {len} bytes"),
            Self::InFlight(head) => write!(f, "descriptor chain {head} is in flight already"),
            Self::Journal => f.write_str("a chain could not be recorded as in flight"),
            Self::Truncated => f.write_str("request without header or status byte"),
            Self::Status => f.write_str("the request's status cannot be written"),
            Self::Worker => f.write_str("the process that serves the device has ended"),
            Self::NotCancellable => f.write_str("a request neither ends nor can be cancelled"),
            Self::MissUnanswered => {
                f.write_str("a translation that was asked for has not come in time")
            }
            Self::NotReleased => f.write_str("requests hold memory that was unmapped"),
            Self::RingAddress(ring) => write!(f, "ring {ring} lies at no address of memory"),
            Self::Answer { len, room } => {
                write!(f, "{len} bytes written into a chain with room for {room}")
            }
        }
    }
}

impl core::error::Error for Violation {}

/// A checked buffer: not empty, does not wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte.
    pub iova: Iova,
    /// Bytes, at least 1.
    pub len: u32,
}

/// List that takes the segments of a chain, in order.
pub trait SegmentList {
    /// Appends one.
    ///
    /// # Errors
    /// There is no room: [`Violation::TooLong`].
    fn push(&mut self, segment: Segment) -> Result<(), Violation>;
}

/// Lengths of a chain; the two sums are below 4 GiB together once closed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// Segments.
    readable: usize,
    readable_len: u64,
    writable_len: u64,
}

impl Sum {
    /// Segments that the device reads; they come first.
    #[inline(always)]
    #[must_use]
    pub const fn readable(self) -> usize {
        self.readable
    }

    /// Bytes that the device reads.
    #[inline(always)]
    #[must_use]
    pub const fn readable_len(self) -> u64 {
        self.readable_len
    }

    /// Bytes that the device writes.
    #[inline(always)]
    #[must_use]
    pub const fn writable_len(self) -> u64 {
        self.writable_len
    }

    /// Checks and appends one descriptor. Words instead of a [`RawDescriptor`], which compilers put
    /// together in memory: half of the time of a walk.
    ///
    /// # Errors
    /// The driver's mistake.
    #[inline(always)]
    pub fn push(
        &mut self,
        list: &mut impl SegmentList,
        addr: u64,
        bytes: u32,
        flags: u16,
    ) -> Result<(), Violation> {
        let len = u64::from(bytes);
        if len == 0 {
            return Err(Violation::ZeroLength);
        }
        if addr.checked_add(len - 1).is_none() {
            return Err(Violation::Wraps { addr });
        }
        if flags & DESC_F_WRITE != 0 {
            self.writable_len += len;
        } else {
            if self.writable_len != 0 {
                return Err(Violation::Order);
            }
            self.readable += 1;
            self.readable_len += len;
        }
        list.push(Segment {
            iova: Iova::new(addr),
            len: bytes,
        })
    }

    /// Checks and appends descriptors of a table of `size`, linked by `next`, from `first` on.
    /// Returns the indirect descriptor in which they end, which is permitted only if `may_end`.
    /// `fetch` returns a descriptor's words.
    ///
    /// # Errors
    /// The driver's mistake, or that of `fetch`.
    #[inline(always)]
    pub fn follow<S: From<Violation>>(
        &mut self,
        list: &mut impl SegmentList,
        size: u16,
        first: u16,
        may_end: bool,
        mut fetch: impl FnMut(u16) -> Result<(u64, u64), S>,
    ) -> Result<Option<RawDescriptor>, S> {
        let mut next = first;
        // A chain visits each descriptor of the table at most once: more hops are a loop.
        for _ in 0..size {
            if next >= size {
                return Err(Violation::Index(next).into());
            }
            let (addr, rest) = fetch(next)?;
            let flags = (rest >> 32) as u16;
            if flags & DESC_F_INDIRECT != 0 {
                if !may_end || flags & DESC_F_NEXT != 0 {
                    return Err(Violation::Indirect.into());
                }
                return Ok(Some(RawDescriptor::from_words(addr, rest)));
            }
            self.push(list, addr, rest as u32, flags)?;
            if flags & DESC_F_NEXT == 0 {
                return Ok(None);
            }
            next = (rest >> 48) as u16;
        }
        Err(Violation::TooLong.into())
    }

    /// Checks the sums: all descriptors have been appended, or all but those of a table.
    ///
    /// # Errors
    /// [`Violation::TooManyBytes`].
    #[inline(always)]
    pub fn check(self) -> Result<(), Violation> {
        // Neither has wrapped: at most 33,792 descriptors below 4 GiB.
        if self.readable_len + self.writable_len > u64::from(u32::MAX) {
            return Err(Violation::TooManyBytes);
        }
        Ok(())
    }
}
