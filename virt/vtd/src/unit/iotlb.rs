//! The IOTLB: results of table walks, tagged by domain.
//!
//! Three direct-mapped tables, one per page size, because a page-selective invalidation must find
//! every entry that overlaps its range: with one entry per mapping, an aligned range of 2^AM pages
//! touches at most one large entry per 2 MiB or 1 GiB.
//!
//! Entries are not tagged by DID but by an *epoch*, which stands for one domain between two
//! flushes: the context cache holds the epoch of each domain in use, and a flush of a domain drops
//! its contexts, so that the next walk begins a new epoch. No entry of an old epoch can match
//! again: epochs are never used twice (12 bits; before they run out everything is cleared, 72 KiB
//! every 4,095 flushes of a domain). So a flush of a domain or of all costs a pass over the
//! contexts in use and never one over the tables, and a hit compares one word: the page number, all
//! 52 bits of it, and the epoch.
//!
//! Only present translations are kept, regardless of `CAP.CM`, and no entry covers the interrupt
//! range.
//!
//! Cost of a hit: the line of the source's tag, and the line of the entry.
//! Size: 4096 × 16 B + 2 × 256 × 16 B = 72 KiB per unit.

use guest_mem::{Gpa, Iova, PAGE_SIZE};
use zerocopy::FromZeros;

use super::walk::{Mapping, PageSize};

/// Entries for 4 KiB pages: 16 MiB of mappings, the buffers of about 4000 pages in flight.
const SMALL: usize = 4096;
/// Entries for each of the large sizes.
const LARGE: usize = 256;
/// Most pages of a page-selective flush; more are flushed as a whole domain, because 256 probes
/// take as long as a few refills.
pub(super) const MAX_PROBES: u64 = 256;
/// Bits of a page number in a key; the epoch is above them.
const PAGE_BITS: u32 = 64 - PAGE_SIZE.trailing_zeros();
/// The last epoch there is.
const LAST_EPOCH: u64 = (1 << (64 - PAGE_BITS)) - 1;

#[derive(Clone, Copy, Default, FromZeros)]
struct Entry {
    /// Page number and domain tag: see [`DomainTag::key`].
    key: u64,
    /// GPA of the page | permissions in bits 1:0, as in a table entry.
    page: u64,
}

/// Tag of a domain's entries; kept in the context cache. The epoch is in the bits above a page
/// number's, and is also spread over the low ones: different domains use the same few IOVA pages,
/// which must not collide in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromZeros)]
pub(super) struct DomainTag(u64);

impl DomainTag {
    /// Tag of no domain.
    pub(super) const NONE: Self = Self(0);

    fn of(epoch: u64) -> Self {
        let spread = epoch.wrapping_mul(0x9e5) % SMALL as u64;
        Self(epoch << PAGE_BITS | spread)
    }

    /// Returns the key of page `number`, unique among all pages of all epochs: the high bits give
    /// the epoch, the epoch gives its low bits, and these give the number. The index in a table is
    /// the low bits of the key.
    #[inline]
    fn key(self, number: u64) -> u64 {
        number ^ self.0
    }
}

pub(super) struct Iotlb {
    small: Box<[Entry; SMALL]>,
    two_m: Box<[Entry; LARGE]>,
    one_g: Box<[Entry; LARGE]>,
    /// Whether one of the two may hold something: most guests have no large page to invalidate.
    has_large: bool,
    last_epoch: u64,
}

/// Memory of `T` that is not there before it is written.
pub(super) fn zeroed<T: FromZeros>() -> Box<T> {
    T::new_box_zeroed().expect("memory is overcommitted or there")
}

impl Iotlb {
    pub(super) fn new() -> Self {
        Self {
            small: zeroed(),
            two_m: zeroed(),
            one_g: zeroed(),
            has_large: false,
            last_epoch: 0,
        }
    }

    /// Whether no epoch is left: drop all contexts, then [`clear`](Self::clear).
    pub(super) fn is_exhausted(&self) -> bool {
        self.last_epoch == LAST_EPOCH
    }

    /// Empties the tables and begins the epochs anew. No tag given before may be used again.
    pub(super) fn clear(&mut self) {
        self.small.fill(Entry::default());
        self.two_m.fill(Entry::default());
        self.one_g.fill(Entry::default());
        self.has_large = false;
        self.last_epoch = 0;
    }

    /// A tag that no entry has.
    pub(super) fn begin_epoch(&mut self) -> DomainTag {
        assert!(
            !self.is_exhausted(),
            "the caller clears before epochs run out"
        );
        self.last_epoch += 1;
        DomainTag::of(self.last_epoch)
    }

    /// A 4 KiB translation that has a permission of `need`: the GPA, if there is one.
    #[inline]
    pub(super) fn lookup(&self, tag: DomainTag, iova: Iova, need: u64) -> Option<Gpa> {
        let key = tag.key(iova.raw() / PAGE_SIZE);
        let entry = &self.small[key as usize % SMALL];
        let hit = entry.key == key && entry.page & need != 0;
        hit.then(|| Gpa::new(entry.page & !(PAGE_SIZE - 1) | iova.offset_in(PAGE_SIZE)))
    }

    /// Returns whether the page after that of `iova` is cached and does not follow that of `gpa` in
    /// memory: no run continues there.
    #[inline]
    pub(super) fn parts_behind(&self, tag: DomainTag, iova: Iova, gpa: Gpa) -> bool {
        let key = tag.key(iova.raw() / PAGE_SIZE + 1);
        let entry = &self.small[key as usize % SMALL];
        let next = (gpa.raw() & !(PAGE_SIZE - 1)).wrapping_add(PAGE_SIZE);
        entry.key == key && entry.page ^ next >= PAGE_SIZE
    }

    /// Counts the cached 4 KiB translations, from page `iova` on and at most `pages`, that have a
    /// permission of `need` and follow each other in memory from page `gpa` on. Also returns
    /// whether they end at a page that lies elsewhere, rather than at one that is not cached.
    #[inline]
    pub(super) fn follow(
        &self,
        tag: DomainTag,
        iova: Iova,
        gpa: Gpa,
        pages: u64,
        need: u64,
    ) -> (u64, bool) {
        let first = iova.raw() / PAGE_SIZE;
        let (mut number, mut page) = (first, gpa.raw());
        while number < first + pages {
            let key = tag.key(number);
            let entry = &self.small[key as usize % SMALL];
            if entry.key != key || entry.page & need == 0 {
                return (number - first, false);
            }
            // But for its permissions, an entry is the address.
            if entry.page ^ page >= PAGE_SIZE {
                return (number - first, true);
            }
            (number, page) = (number + 1, page + PAGE_SIZE);
        }
        (pages, true)
    }

    /// Returns the 4 KiB translation of `iova`, regardless of its permissions.
    pub(super) fn lookup_small(&self, tag: DomainTag, iova: Iova) -> Option<Mapping> {
        let gpa = self.lookup(tag, iova, 3)?;
        let allowed = [1, 2].into_iter();
        let permissions = allowed.filter(|need| self.lookup(tag, iova, *need).is_some());
        let permissions = permissions.sum();
        Some(Mapping {
            page: gpa.align_down(PAGE_SIZE),
            size: PageSize::FourK,
            permissions,
        })
    }

    /// Returns a 2 MiB or 1 GiB translation that covers `iova`, regardless of its permissions.
    pub(super) fn lookup_large(&self, tag: DomainTag, iova: Iova) -> Option<Mapping> {
        for (size, table) in [(PageSize::TwoM, &self.two_m), (PageSize::OneG, &self.one_g)] {
            let key = tag.key(iova.raw() >> size.shift());
            let entry = &table[key as usize % LARGE];
            if entry.key == key {
                return Some(Mapping {
                    page: Gpa::new(entry.page & !(size.bytes() - 1)),
                    size,
                    permissions: entry.page & 3,
                });
            }
        }
        None
    }

    pub(super) fn insert(&mut self, tag: DomainTag, iova: Iova, mapping: &Mapping) {
        let key = tag.key(iova.raw() >> mapping.size.shift());
        let entry = Entry {
            key,
            page: mapping.page.raw() | mapping.permissions,
        };
        self.has_large |= mapping.size != PageSize::FourK;
        match mapping.size {
            PageSize::FourK => self.small[key as usize % SMALL] = entry,
            PageSize::TwoM => self.two_m[key as usize % LARGE] = entry,
            PageSize::OneG => self.one_g[key as usize % LARGE] = entry,
        }
    }

    /// Drops the entries that overlap `pages` 4 KiB pages from `iova`: a power of two, at most
    /// [`MAX_PROBES`], and aligned to it.
    #[inline]
    pub(super) fn flush_pages(&mut self, tag: DomainTag, iova: Iova, pages: u64) {
        debug_assert!(pages <= MAX_PROBES);
        let first = iova.raw() / PAGE_SIZE;
        for pfn in first..first + pages {
            drop_entry(&mut self.small, tag.key(pfn));
        }
        if self.has_large {
            // At most 256 pages, aligned: inside one 2 MiB page.
            drop_entry(
                &mut self.two_m,
                tag.key(iova.raw() >> PageSize::TwoM.shift()),
            );
            drop_entry(
                &mut self.one_g,
                tag.key(iova.raw() >> PageSize::OneG.shift()),
            );
        }
    }
}

#[inline]
fn drop_entry<const N: usize>(table: &mut [Entry; N], key: u64) {
    let entry = &mut table[key as usize % N];
    if entry.key == key {
        *entry = Entry::default();
    }
}

#[cfg(test)]
mod tests;
