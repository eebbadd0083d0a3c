//! The IOTLB: results of table walks, tagged by domain.
//!
//! Three direct-mapped tables, one per page size, because a page-selective invalidation must find every
//! entry that overlaps its range: with one entry per mapping, an aligned range of 2^AM pages touches at
//! most one large entry per 2 MiB or 1 GiB.
//!
//! Entries are not tagged by DID but by an *epoch*, which stands for one domain between two flushes: the
//! context cache holds the epoch of each domain in use, and a flush of a domain drops its contexts, so
//! that the next walk begins a new epoch. No entry of an old epoch can match again: epochs are never
//! used twice (28 bits; before they run out everything is cleared). So a flush of a domain or of all
//! costs a pass over the contexts in use and never one over the tables, and a hit compares one word.
//!
//! Only present translations are kept, whatever `CAP.CM` says, and no entry covers the interrupt range.
//!
//! Cost of a hit: the line of the context, and the line of the entry.
//! Size: 4096 × 16 B + 2 × 256 × 16 B = 72 KiB per unit.

use guest_mem::{Gpa, Iova, PAGE_SIZE};

use super::walk::{Mapping, PageSize};

/// Entries for 4 KiB pages: 16 MiB of mappings, the buffers of about 4000 pages in flight.
const SMALL: usize = 4096;
/// Entries for each of the large sizes.
const LARGE: usize = 256;
/// Most pages of a page-selective flush; more are flushed as a whole domain, because 256 probes take
/// as long as a few refills.
pub(super) const MAX_PROBES: u64 = 256;
/// Bits of an epoch in a key; a 48-bit address has a page number of 36 bits.
const EPOCH_BITS: u32 = 28;

#[derive(Clone, Copy, Default)]
struct Entry {
    /// Page number in the table's size << 28 | epoch; epoch 0 is never given.
    key: u64,
    /// GPA of the page | permissions in bits 1:0, as in a table entry.
    page: u64,
}

/// A domain's epoch, and where its entries go; kept in the context cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DomainTag {
    epoch: u64,
    /// Spreads domains over the table: different domains use the same few IOVA pages.
    salt: u64,
}

impl DomainTag {
    /// Of no domain.
    pub(super) const NONE: Self = Self { epoch: 0, salt: 0 };

    fn key(self, number: u64) -> u64 {
        number << EPOCH_BITS | self.epoch
    }
}

pub(super) struct Iotlb {
    small: Box<[Entry; SMALL]>,
    two_m: Box<[Entry; LARGE]>,
    one_g: Box<[Entry; LARGE]>,
    last_epoch: u64,
}

fn empty<const N: usize>() -> Box<[Entry; N]> {
    let entries = vec![Entry::default(); N].into_boxed_slice();
    entries
        .try_into()
        .unwrap_or_else(|_| unreachable!("made with N entries"))
}

impl Iotlb {
    pub(super) fn new() -> Self {
        Self {
            small: empty(),
            two_m: empty(),
            one_g: empty(),
            last_epoch: 0,
        }
    }

    /// Whether no epoch is left: drop all contexts, then [`clear`](Self::clear).
    pub(super) fn is_exhausted(&self) -> bool {
        self.last_epoch == (1 << EPOCH_BITS) - 1
    }

    /// Empties the tables and begins the epochs anew. No tag given before may be used again.
    pub(super) fn clear(&mut self) {
        self.small.fill(Entry::default());
        self.two_m.fill(Entry::default());
        self.one_g.fill(Entry::default());
        self.last_epoch = 0;
    }

    /// A tag that no entry has.
    pub(super) fn begin_epoch(&mut self) -> DomainTag {
        assert!(
            !self.is_exhausted(),
            "the caller clears before epochs run out"
        );
        self.last_epoch += 1;
        DomainTag {
            epoch: self.last_epoch,
            salt: self.last_epoch.wrapping_mul(0x9e5) % SMALL as u64,
        }
    }

    /// A 4 KiB translation that has a permission of `need`: the GPA, if there is one.
    #[inline]
    pub(super) fn lookup(&self, tag: DomainTag, iova: Iova, need: u64) -> Option<Gpa> {
        let pfn = iova.raw() / PAGE_SIZE;
        let entry = &self.small[(pfn ^ tag.salt) as usize % SMALL];
        let hit = entry.key == tag.key(pfn) && entry.page & need != 0;
        hit.then(|| Gpa::new(entry.page & !(PAGE_SIZE - 1) | iova.offset_in(PAGE_SIZE)))
    }

    /// Whether the page behind `iova`'s is here and does not lie behind `gpa`'s: so that no run goes on there.
    #[inline]
    pub(super) fn parts_behind(&self, tag: DomainTag, iova: Iova, gpa: Gpa) -> bool {
        let pfn = iova.raw() / PAGE_SIZE + 1;
        let entry = &self.small[(pfn ^ tag.salt) as usize % SMALL];
        let next = (gpa.raw() & !(PAGE_SIZE - 1)).wrapping_add(PAGE_SIZE);
        entry.key == tag.key(pfn) && entry.page ^ next >= PAGE_SIZE
    }

    /// How many 4 KiB translations are here, from page `iova` on and at most `pages`, that have a permission of `need` and
    /// follow each other in memory from page `gpa` on; and whether what ended them is a page that lies elsewhere, rather
    /// than one that is not known.
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
        for n in 0..pages {
            let pfn = first + n;
            let entry = &self.small[(pfn ^ tag.salt) as usize % SMALL];
            if entry.key != tag.key(pfn) || entry.page & need == 0 {
                return (n, false);
            }
            // But for its permissions, an entry is the address.
            if entry.page ^ (gpa.raw() + n * PAGE_SIZE) >= PAGE_SIZE {
                return (n, true);
            }
        }
        (pages, true)
    }

    /// A 4 KiB translation of `iova`, whatever its permissions.
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

    /// A 2 MiB or 1 GiB translation that covers `iova`, whatever its permissions.
    pub(super) fn lookup_large(&self, tag: DomainTag, iova: Iova) -> Option<Mapping> {
        for (size, table) in [(PageSize::TwoM, &self.two_m), (PageSize::OneG, &self.one_g)] {
            let number = iova.raw() >> size.shift();
            let entry = &table[(number ^ tag.salt) as usize % LARGE];
            if entry.key == tag.key(number) {
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
        let number = iova.raw() >> mapping.size.shift();
        let entry = Entry {
            key: tag.key(number),
            page: mapping.page.raw() | mapping.permissions,
        };
        let index = (number ^ tag.salt) as usize;
        match mapping.size {
            PageSize::FourK => self.small[index % SMALL] = entry,
            PageSize::TwoM => self.two_m[index % LARGE] = entry,
            PageSize::OneG => self.one_g[index % LARGE] = entry,
        }
    }

    /// Drops what overlaps `pages` 4 KiB pages from `iova`: a power of two, at most [`MAX_PROBES`], and
    /// aligned to it.
    pub(super) fn flush_pages(&mut self, tag: DomainTag, iova: Iova, pages: u64) {
        debug_assert!(pages <= MAX_PROBES);
        let first = iova.raw() / PAGE_SIZE;
        for pfn in first..first + pages {
            drop_entry(&mut self.small[(pfn ^ tag.salt) as usize % SMALL], pfn, tag);
        }
        // At most 256 pages, aligned: inside one 2 MiB page.
        let two_m = iova.raw() >> PageSize::TwoM.shift();
        let entry = &mut self.two_m[(two_m ^ tag.salt) as usize % LARGE];
        drop_entry(entry, two_m, tag);
        let one_g = iova.raw() >> PageSize::OneG.shift();
        let entry = &mut self.one_g[(one_g ^ tag.salt) as usize % LARGE];
        drop_entry(entry, one_g, tag);
    }
}

fn drop_entry(entry: &mut Entry, number: u64, tag: DomainTag) {
    if entry.key == tag.key(number) {
        *entry = Entry::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: Mapping = Mapping {
        page: Gpa::new(0x5000),
        size: PageSize::FourK,
        permissions: 1,
    };

    #[test]
    fn entries_are_tagged_by_epoch() {
        let mut tlb = Iotlb::new();
        let (one, two) = (tlb.begin_epoch(), tlb.begin_epoch());
        tlb.insert(one, Iova::new(0x1000), &PAGE);
        let gpa = Some(Gpa::new(0x5234));
        assert_eq!(tlb.lookup(one, Iova::new(0x1234), 1), gpa);
        assert_eq!(tlb.lookup(two, Iova::new(0x1234), 1), None);
        assert_eq!(tlb.lookup(one, Iova::new(0x1234), 2), None);
        tlb.flush_pages(two, Iova::new(0x1000), 1);
        assert_eq!(tlb.lookup(one, Iova::new(0x1234), 1), gpa);
        tlb.flush_pages(one, Iova::new(0), 2);
        assert_eq!(tlb.lookup(one, Iova::new(0x1234), 1), None);
    }

    #[test]
    fn epochs_run_out_before_one_is_used_twice() {
        let mut tlb = Iotlb::new();
        tlb.last_epoch = (1 << EPOCH_BITS) - 2;
        let last = tlb.begin_epoch();
        tlb.insert(last, Iova::new(0xffff_ffff_f000), &PAGE);
        // The highest page number and the highest epoch fill the key without touching each other.
        assert!(tlb.lookup(last, Iova::new(0xffff_ffff_f000), 1).is_some());
        assert!(tlb.is_exhausted());
        tlb.clear();
        assert_eq!(tlb.lookup(last, Iova::new(0xffff_ffff_f000), 1), None);
        assert!(!tlb.is_exhausted());
    }

    #[test]
    fn a_page_flush_drops_the_large_entry_around_it() {
        let mut tlb = Iotlb::new();
        let tag = tlb.begin_epoch();
        for size in [PageSize::TwoM, PageSize::OneG] {
            let mapping = Mapping {
                page: Gpa::new(0x4000_0000),
                size,
                permissions: 3,
            };
            tlb.insert(tag, Iova::new(0x8000_0000), &mapping);
            let inside = Iova::new(0x8000_0000 + size.bytes() - 1);
            assert_eq!(tlb.lookup_large(tag, inside), Some(mapping));
            tlb.flush_pages(tag, Iova::new(0x8001_0000), 16);
            assert_eq!(tlb.lookup_large(tag, Iova::new(0x8000_0000)), None);
        }
    }
}
