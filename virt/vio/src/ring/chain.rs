//! Descriptor chains of a device on an operating system: [`virtqueue`]'s walk into a list that is
//! reused from chain to chain, and its segments as rows of bytes.

use guest_mem::{Access, Dma, DmaFault, Intent, Wanted};
use virtqueue::SegmentList;
pub(super) use virtqueue::Sum;
pub use virtqueue::chain::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_SIZE, MAX_INDIRECT, RawDescriptor, Segment,
    Violation,
};

use super::counter::Counter;

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

    /// Returns the sums of what was appended so far.
    #[inline]
    pub(super) fn sum(&self) -> Sum {
        self.sum
    }

    /// [`push_words`](Self::push_words) of a whole descriptor.
    pub(super) fn push(&mut self, sum: &mut Sum, desc: RawDescriptor) -> Result<(), Violation> {
        self.push_words(sum, desc.addr, desc.len, desc.flags)
    }

    /// Checks and appends one descriptor, and adds it to `sum`, which the caller keeps in registers
    /// until [`close`](Self::close).
    #[inline(always)]
    pub(super) fn push_words(
        &mut self,
        sum: &mut Sum,
        addr: u64,
        bytes: u32,
        flags: u16,
    ) -> Result<(), Violation> {
        sum.push(self, addr, bytes, flags)
    }

    /// [`Sum::follow`], into this chain.
    #[inline(always)]
    pub(super) fn follow<S: From<Violation>>(
        &mut self,
        sum: &mut Sum,
        size: u16,
        first: u16,
        may_end: bool,
        fetch: impl FnMut(u16) -> Result<(u64, u64), S>,
    ) -> Result<Option<RawDescriptor>, S> {
        sum.follow(self, size, first, may_end, fetch)
    }

    /// Checks and keeps `sum`: all descriptors have been appended, or all but those of a table.
    #[inline(always)]
    pub(super) fn close(&mut self, sum: Sum) -> Result<(), Violation> {
        sum.check()?;
        self.sum = sum;
        Ok(())
    }

    /// Returns the identifier in the used ring: the index of the first descriptor (split) or the
    /// buffer id (packed).
    pub fn head(&self) -> u16 {
        self.head.get()
    }

    /// Bytes that the device may write.
    #[inline]
    pub(super) fn writable_len(&self) -> u32 {
        self.sum.writable_len() as u32
    }

    /// Bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        self.sum.readable_len() + self.sum.writable_len()
    }

    /// Descriptors of the chain, those of an indirect table included.
    pub fn descriptors(&self) -> usize {
        self.segments.len()
    }

    /// Returns the buffers that the device reads.
    #[inline]
    pub fn readable(&self) -> Buffers<'_> {
        Buffers {
            segments: &self.segments[..self.sum.readable()],
            len: self.sum.readable_len() as u32,
        }
    }

    /// Returns the buffers that the device writes.
    #[inline]
    pub fn writable(&self) -> Buffers<'_> {
        Buffers {
            segments: &self.segments[self.sum.readable()..],
            len: self.sum.writable_len() as u32,
        }
    }
}

impl SegmentList for Chain {
    #[inline(always)]
    fn push(&mut self, segment: Segment) -> Result<(), Violation> {
        self.segments.push(segment);
        Ok(())
    }
}

/// The pieces that make up bytes `offset` to `offset + len` of `segments`, clipped to what there
/// is.
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

    /// Copies bytes `offset..` out of the guest. The caller has checked the length: a short chain
    /// is a fault.
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
pub fn write_row<D: Dma>(
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
