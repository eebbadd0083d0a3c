//! Cores, requests, pages and ranges: sizes in pages of 4 KiB, ends inclusive.

use core::fmt;
use core::num::NonZeroU64;

use address::{Iova, PAGE_SHIFT, PAGE_SIZE};

/// Most cores one allocator serves.
pub const MAX_CORES: usize = 4096;

/// A core, or another unit that works by itself: a thread of a pool, an I/O queue, a simulated
/// core.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CoreId(pub usize);

impl fmt::Display for CoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "core {}", self.0)
    }
}

/// Number of an IOVA page: the address shifted right by [`PAGE_SHIFT`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct IovaPfn(u64);

impl IovaPfn {
    /// Highest page number of a 64-bit space.
    pub const MAX: Self = Self(u64::MAX >> PAGE_SHIFT);

    /// The page with this number; `raw` is at most [`Self::MAX`], higher bits are dropped.
    #[inline]
    pub const fn new(raw: u64) -> Self {
        Self(raw & Self::MAX.0)
    }

    /// The page that holds `iova`.
    #[inline]
    pub const fn of(iova: Iova) -> Self {
        Self(iova.raw() >> PAGE_SHIFT)
    }

    /// The number.
    #[inline]
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// First byte of the page.
    #[inline]
    pub const fn start(self) -> Iova {
        Iova::new(self.0 << PAGE_SHIFT)
    }
}

impl fmt::Debug for IovaPfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IovaPfn({:#x})", self.0)
    }
}

/// One or more whole IOVA pages that lie in the 64-bit space.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IovaRange {
    first: IovaPfn,
    pages: NonZeroU64,
}

impl IovaRange {
    /// `pages` pages from `first` on; `None` for no pages, or where the last one lies past the
    /// space.
    #[inline]
    pub const fn new(first: IovaPfn, pages: u64) -> Option<Self> {
        match NonZeroU64::new(pages) {
            Some(pages) if pages.get() - 1 <= IovaPfn::MAX.0 - first.0 => {
                Some(Self { first, pages })
            }
            _ => None,
        }
    }

    /// A range that its maker knows to lie in the space.
    #[inline]
    pub(crate) const fn within_space(first: u64, pages: NonZeroU64) -> Self {
        debug_assert!(pages.get() - 1 <= IovaPfn::MAX.0 - first);
        Self {
            first: IovaPfn(first),
            pages,
        }
    }

    /// First page.
    #[inline]
    pub const fn first(self) -> IovaPfn {
        self.first
    }

    /// Last page, inclusive.
    #[inline]
    pub const fn last(self) -> IovaPfn {
        IovaPfn(self.first.0 + (self.pages.get() - 1))
    }

    /// Number of pages, at least 1.
    #[inline]
    pub const fn pages(self) -> u64 {
        self.pages.get()
    }

    /// First byte.
    #[inline]
    pub const fn start(self) -> Iova {
        self.first.start()
    }

    /// Length in bytes; `None` for the whole 64-bit space.
    #[inline]
    pub const fn len(self) -> Option<u64> {
        self.pages.get().checked_mul(PAGE_SIZE)
    }

    /// Never: a range has at least one page.
    #[inline]
    pub const fn is_empty(self) -> bool {
        false
    }

    /// Whether a page lies in both.
    #[inline]
    pub const fn overlaps(self, other: Self) -> bool {
        self.first.0 <= other.last().0 && other.first.0 <= self.last().0
    }

    /// Whether every page of `other` lies in `self`.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.first.0 <= other.first.0 && other.last().0 <= self.last().0
    }
}

impl fmt::Display for IovaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:#x}; {} pages]", self.start().raw(), self.pages)
    }
}

impl fmt::Debug for IovaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Size, limit and alignment of a range to allocate.
///
/// A range of `pages` pages is aligned to the power of two that holds it unless more is asked for:
/// a device that is given 3 pages never sees them cross a 16 KiB boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub(crate) pages: u64,
    pub(crate) last: IovaPfn,
    pub(crate) align_order: u8,
    pub(crate) asks: bool,
}

/// Accesses that a device may make to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Access {
    /// The device reads (data goes to the device).
    Read = 1,
    /// The device writes (data comes from the device).
    Write = 2,
    /// Both.
    ReadWrite = 3,
}

impl Request {
    /// `pages` pages anywhere in the aperture.
    #[inline]
    pub const fn pages(pages: u64) -> Self {
        Self {
            pages,
            last: IovaPfn::MAX,
            align_order: 0,
            asks: true,
        }
    }

    /// Allows no page above `last`: the limit of the device's DMA mask.
    #[inline]
    pub const fn at_most(self, last: IovaPfn) -> Self {
        Self { last, ..self }
    }

    /// Where nothing is free, fails without asking the other cores to drain: for a caller that has
    /// another limit to try next.
    #[inline]
    pub const fn without_drain(self) -> Self {
        Self {
            asks: false,
            ..self
        }
    }

    /// Aligned to `2^order` pages, if that is more than the size's own alignment. `order` is at
    /// most 52. Where no whole block of that alignment is free, a place may be missed among gaps
    /// that lie otherwise (the tree looks at 64).
    #[inline]
    pub const fn aligned(self, order: u8) -> Self {
        Self {
            align_order: order,
            ..self
        }
    }
}

#[cfg(test)]
mod tests;
