//! Key of a mapping, and the range of a mapping, in one word each.

use core::fmt;
use core::num::NonZeroU64;

use address::{PAGE_SIZE, PhysAddr};
use iova::{Access, IovaPfn, IovaRange};

/// Bits of a packed word below the page number.
const LOW: u64 = PAGE_SIZE - 1;

/// Memory of a mapping with the accesses that the device may make: one 64-bit word.
///
/// The word is the address of the first page, with the number of pages in bits 2 to 11 and the
/// access in bits 0 and 1. So no two of (page, pages, access) share a key: a mapping for reading is
/// never found for writing, nor one for both for a lesser access.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key(NonZeroU64);

impl Key {
    /// Most pages of a mapping that is worth keeping here: the ten bits that a page-aligned address
    /// leaves beside the access. A larger mapping spreads its cost over its pages anyway.
    pub const MAX_PAGES: u64 = (1 << 10) - 1;

    /// Page 0 for reading, where a key has to stand for none.
    pub(super) const FIRST: Self = Self(NonZeroU64::new(1 << 2 | 1).expect("not 0"));

    /// The key of `pages` pages from `phys` on; `None` where `phys` is not a multiple of 4 KiB,
    /// `pages` is 0 or more than [`MAX_PAGES`](Self::MAX_PAGES), or the last page lies past the
    /// address space.
    #[inline]
    pub fn new(phys: PhysAddr, pages: u64, access: Access) -> Option<Self> {
        if !phys.is_aligned(PAGE_SIZE) || !(1..=Self::MAX_PAGES).contains(&pages) {
            return None;
        }
        phys.checked_add(pages * PAGE_SIZE - 1)?;
        // Never 0: every access has a bit. So an `Option<Key>` is one word too.
        NonZeroU64::new(phys.raw() | pages << 2 | access as u64).map(Self)
    }

    /// First byte of the memory.
    #[inline]
    pub const fn phys(self) -> PhysAddr {
        PhysAddr::new(self.0.get() & !LOW)
    }

    /// Number of pages, 1 to [`MAX_PAGES`](Self::MAX_PAGES).
    #[inline]
    pub const fn pages(self) -> u64 {
        (self.0.get() & LOW) >> 2
    }

    /// Accesses that the device may make.
    #[inline]
    pub const fn access(self) -> Access {
        match self.0.get() & 3 {
            1 => Access::Read,
            2 => Access::Write,
            _ => Access::ReadWrite,
        }
    }

    /// The word.
    #[inline]
    pub const fn word(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (phys, pages, access) = (self.phys(), self.pages(), self.access());
        write!(f, "Key({phys:#x}; {pages} pages, {access:?})")
    }
}

/// An IOVA range in one word: its start, and its pages in the twelve bits below.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackedRange(pub(super) u64);

impl Default for PackedRange {
    /// The first page, where a range has to stand for none.
    fn default() -> Self {
        Self(1)
    }
}

impl PackedRange {
    /// `None` for more than 4095 pages.
    #[inline]
    pub const fn new(range: IovaRange) -> Option<Self> {
        if range.pages() > LOW {
            return None;
        }
        Some(Self(range.start().raw() | range.pages()))
    }

    /// The range.
    #[inline]
    pub fn range(self) -> IovaRange {
        IovaRange::new(IovaPfn::of(address::Iova::new(self.0)), self.0 & LOW)
            .expect("packed from a range")
    }
}

#[cfg(test)]
mod tests;
