//! Arguments and results of mapping.

use core::num::NonZeroU64;

use address::{Iova, PAGE_SHIFT, PAGE_SIZE, PhysAddr};
use iova::{Access, IovaPfn, IovaRange};

use crate::reuse::Key;

/// Memory that is contiguous for the CPU's side of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte; need not begin a page. An address in the back end's terms
    /// ([`IoMap`](crate::IoMap)): over a page table what the IOMMU puts on the bus, over a kernel's
    /// interface the virtual address at which this process has the memory.
    pub phys: PhysAddr,
    /// Bytes, at least 1.
    pub len: u64,
}

impl Segment {
    /// `len` bytes from `phys` on.
    #[inline]
    pub const fn new(phys: PhysAddr, len: u64) -> Self {
        Self { phys, len }
    }

    /// Pages that it touches; `None` for no bytes, or where the last page lies past the space.
    #[inline]
    pub(super) fn pages(self) -> Option<u64> {
        let last = self.phys.checked_add(self.len.checked_sub(1)?)?;
        Some((last.raw() >> PAGE_SHIFT) - (self.phys.raw() >> PAGE_SHIFT) + 1)
    }
}

/// A stretch of IOVAs that a device is given as one element of its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSegment {
    /// First byte.
    pub iova: Iova,
    /// Bytes.
    pub len: u64,
}

/// Direction of the data: the accesses that the device may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The device reads.
    ToDevice,
    /// The device writes.
    FromDevice,
    /// Both.
    Bidirectional,
}

impl Direction {
    /// The permission of the entries.
    #[inline]
    pub const fn access(self) -> Access {
        match self {
            Self::ToDevice => Access::Read,
            Self::FromDevice => Access::Write,
            Self::Bidirectional => Access::ReadWrite,
        }
    }
}

/// A mapping: the right to unmap it, once. It is not `Clone`; one that is dropped stays mapped, and
/// [`unmap_at`](super::MapperCore::unmap_at) still ends it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a mapping that is dropped stays mapped"]
pub struct Mapping {
    pub(super) iova: Iova,
    /// Not 0, so that a slot that may hold a mapping is no larger than one.
    pub(super) len: NonZeroU64,
    /// Pages allocated from the page of `iova` on: at least those mapped. 0: not known here, or
    /// none (`off`).
    pub(super) allocated: u64,
    /// Number of the mapper that made it: no later one has the same number.
    pub(super) domain: u64,
    /// Key in a reuse cache.
    pub(super) key: Option<Key>,
}

impl Mapping {
    /// Address for the device: the first byte, with the memory's offset inside the page.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Bytes from [`iova`](Self::iova) on. For a list with gaps, up to its last byte; without
    /// translation, of its first segment.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len.get()
    }

    /// Never: a mapping has at least one byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The pages it touches.
    #[inline]
    pub fn range(&self) -> IovaRange {
        range_within(self.iova, self.len.get()).expect("a mapping lies in the space")
    }
}

/// The pages of `len` bytes from `iova` on; `None` for no bytes, or past the end of the space.
#[inline]
pub(super) fn range_of(iova: Iova, len: u64) -> Option<IovaRange> {
    let segment = Segment::new(PhysAddr::new(iova.raw()), len);
    IovaRange::new(IovaPfn::of(iova), segment.pages()?)
}

/// The same for bytes that are known to lie in the space.
#[inline(always)]
pub(super) fn range_within(iova: Iova, len: u64) -> Option<IovaRange> {
    let pages = ((iova.offset_in(PAGE_SIZE) + (len - 1)) >> PAGE_SHIFT) + 1;
    IovaRange::new(IovaPfn::of(iova), pages)
}
