//! Descriptor chains: read once from the guest into a local list, checked, then used.
//!
//! Layout: virtio 1.2 §2.7.5 (`struct virtq_desc`), indirect tables §2.7.5.3.

use guest_mem::{Access, Dma, DmaFault, Intent, Iova, Wanted};

use super::counter::Counter;

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
    /// Split: next descriptor, if `DESC_F_NEXT`. Packed descriptors that a [`Journal`](super::Journal) is given or
    /// gave: the buffer id.
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

    /// From the two little-endian words of a packed ring's descriptor (virtio 1.2 §2.8.5): its buffer id becomes `next`.
    #[inline(always)]
    pub(super) fn from_packed_words(addr: u64, rest: u64) -> Self {
        Self {
            addr,
            len: rest as u32,
            flags: (rest >> 48) as u16,
            next: (rest >> 32) as u16,
        }
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
    /// A head made available while it is in flight, seen where in-flight chains are recorded.
    #[error("descriptor chain {0} is in flight already")]
    InFlight(u16),
    /// The journal could not record a chain: not the driver's fault, but the ring cannot be served safely.
    #[error("a chain could not be recorded as in flight")]
    Journal,
    /// A request without room for its header or status, found by the device.
    #[error("request without header or status byte")]
    Truncated,
    /// A request whose status byte cannot be written, found by the device.
    #[error("the request's status cannot be written")]
    Status,
    /// Not the driver's doing: a request that the back end can neither end nor cancel holds the guest's memory.
    #[error("a request neither ends nor can be cancelled")]
    NotCancellable,
    /// Not the driver's doing: the device has written more into a chain than it has room for.
    #[error("{len} bytes written into a chain with room for {room}")]
    Answer {
        /// Bytes written.
        len: u32,
        /// Bytes of its device-writable buffers.
        room: u32,
    },
}

/// A checked buffer: not empty, does not wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte.
    pub iova: Iova,
    /// Bytes, at least 1.
    pub len: u32,
}

/// Lengths of a chain; the two sums are below 4 GiB together once closed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sum {
    /// Segments.
    readable: usize,
    readable_len: u64,
    writable_len: u64,
}

/// A checked descriptor chain: readable segments, then writable ones. Reused from chain to chain.
#[derive(Debug, Default)]
pub struct Chain {
    head: Counter,
    /// Ring descriptors it takes up; 1 in a split ring.
    descs: Counter,
    segments: Vec<Segment>,
    sum: Sum,
    /// Packed rings with a journal: the ring descriptors as they were.
    raw: Vec<RawDescriptor>,
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
    #[inline(always)]
    pub(super) fn begin(&mut self, head: u16) {
        let Self {
            head: own,
            descs,
            segments,
            sum,
            raw,
        } = self;
        own.set(head);
        descs.set(1);
        segments.clear();
        *sum = Sum::default();
        raw.clear();
    }

    /// It ends here: a packed ring's chain is known by the buffer id in its last descriptor.
    #[inline]
    pub(super) fn end(&mut self, id: u16, descs: u16) {
        self.head.set(id);
        self.descs.set(descs);
    }

    #[inline]
    pub(super) fn keep_raw(&mut self, desc: RawDescriptor) {
        self.raw.push(desc);
    }

    #[inline]
    pub(super) fn raw(&self) -> &[RawDescriptor] {
        &self.raw
    }

    #[inline]
    pub(super) fn descs(&self) -> u16 {
        self.descs.get()
    }

    /// What was appended so far.
    #[inline]
    pub(super) fn sum(&self) -> Sum {
        self.sum
    }

    /// [`push_words`](Self::push_words) of a whole descriptor.
    pub(super) fn push(&mut self, sum: &mut Sum, desc: RawDescriptor) -> Result<(), Violation> {
        self.push_words(sum, desc.addr, desc.len, desc.flags)
    }

    /// Checks and appends one descriptor, and adds it to `sum`, which the caller keeps in registers
    /// until [`close`](Self::close). Words instead of a [`RawDescriptor`], which compilers put
    /// together in memory: half of the time of a walk.
    #[inline(always)]
    pub(super) fn push_words(
        &mut self,
        sum: &mut Sum,
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
            sum.writable_len += len;
        } else {
            if sum.writable_len != 0 {
                return Err(Violation::Order);
            }
            sum.readable += 1;
            sum.readable_len += len;
        }
        self.segments.push(Segment {
            iova: Iova::new(addr),
            len: bytes,
        });
        Ok(())
    }

    /// Checks and appends descriptors of a table of `size`, linked by `next`, from `first` on;
    /// answers the indirect descriptor that they end in, which they may only if `may_end`. `fetch`
    /// answers a descriptor's words.
    #[inline(always)]
    pub(super) fn follow<S: From<Violation>>(
        &mut self,
        sum: &mut Sum,
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
            self.push_words(sum, addr, rest as u32, flags)?;
            if flags & DESC_F_NEXT == 0 {
                return Ok(None);
            }
            next = (rest >> 48) as u16;
        }
        Err(Violation::TooLong.into())
    }

    /// Checks and keeps `sum`: all descriptors have been appended, or all but those of a table.
    #[inline(always)]
    pub(super) fn close(&mut self, sum: Sum) -> Result<(), Violation> {
        // Neither has wrapped: at most 33,792 descriptors below 4 GiB.
        if sum.readable_len + sum.writable_len > u64::from(u32::MAX) {
            return Err(Violation::TooManyBytes);
        }
        self.sum = sum;
        Ok(())
    }

    /// What the used ring names: the index of the first descriptor (split) or the buffer id (packed).
    pub fn head(&self) -> u16 {
        self.head.get()
    }

    /// Bytes that the device may write.
    #[inline]
    pub(super) fn writable_len(&self) -> u32 {
        self.sum.writable_len as u32
    }

    /// Bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        self.sum.readable_len + self.sum.writable_len
    }

    /// Descriptors of the chain, those of an indirect table included.
    pub fn descriptors(&self) -> usize {
        self.segments.len()
    }

    /// What the device reads.
    #[inline]
    pub fn readable(&self) -> Buffers<'_> {
        Buffers {
            segments: &self.segments[..self.sum.readable],
            len: self.sum.readable_len as u32,
        }
    }

    /// What the device writes.
    #[inline]
    pub fn writable(&self) -> Buffers<'_> {
        Buffers {
            segments: &self.segments[self.sum.readable..],
            len: self.sum.writable_len as u32,
        }
    }
}

/// The pieces that make up bytes `offset` to `offset + len` of `segments`, clipped to what there is.
pub(crate) fn slice(
    segments: &[Segment],
    offset: u32,
    len: u32,
) -> impl Iterator<Item = Segment> + Clone + use<'_> {
    let mut skip = offset;
    let mut left = len;
    segments.iter().filter_map(move |segment| {
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
    pub fn slice(&self, offset: u32, len: u32) -> impl Iterator<Item = Segment> + Clone + use<'a> {
        slice(self.segments, offset, len)
    }

    /// [`slice`](Self::slice), as something to be asked for.
    pub fn wanted(
        &self,
        offset: u32,
        len: u32,
        intent: Intent,
    ) -> impl Iterator<Item = Wanted> + use<'a> {
        self.slice(offset, len)
            .map(move |segment| (segment.iova, segment.len, intent))
    }

    /// Copies bytes `offset..` out of the guest. The caller has checked the length: a short chain is a fault.
    pub fn read<D: Dma>(&self, dma: &mut D, offset: u32, buf: &mut [u8]) -> Access<()> {
        read_row(dma, self.slice(offset, buf.len() as u32), buf)
    }

    /// Copies `buf` into the guest from byte `offset` on. A short chain is a fault.
    pub fn write<D: Dma>(&self, dma: &mut D, offset: u32, buf: &[u8]) -> Access<()> {
        write_row(dma, self.slice(offset, buf.len() as u32), buf)
    }
}

/// Fills `row` from `segments`, which hold no more than that; fewer bytes are a fault.
#[inline]
pub(crate) fn read_row<D: Dma>(
    dma: &mut D,
    segments: impl Iterator<Item = Segment>,
    row: &mut [u8],
) -> Access<()> {
    let mut at = 0;
    for piece in segments {
        let end = at + piece.len as usize;
        dma.read(piece.iova, &mut row[at..end])?;
        at = end;
    }
    all_of(row, at)
}

/// Copies `row` into `segments`, which hold no more than that; fewer bytes are a fault.
#[inline]
pub(crate) fn write_row<D: Dma>(
    dma: &mut D,
    segments: impl Iterator<Item = Segment>,
    row: &[u8],
) -> Access<()> {
    let mut at = 0;
    for piece in segments {
        let end = at + piece.len as usize;
        dma.write(piece.iova, &row[at..end])?;
        at = end;
    }
    all_of(row, at)
}

/// A fault unless so many bytes are all of `row`.
#[inline]
fn all_of(row: &[u8], bytes: usize) -> Access<()> {
    match bytes == row.len() {
        true => Ok(()),
        false => Err(DmaFault::BadRange.into()),
    }
}
