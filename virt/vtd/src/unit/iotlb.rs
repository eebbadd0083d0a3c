//! The IOTLB: results of table walks, tagged by domain.
//!
//! Three direct-mapped tables, one per page size, because a page-selective invalidation must find every
//! entry that overlaps its range: with one entry per mapping, an aligned range of 2^AM pages touches at
//! most one large entry per 2 MiB or 1 GiB. An entry is valid while its *stamp* equals its domain's.
//! Domains share 256 stamps (by the low byte of DID; the tag holds the whole DID, so a collision costs
//! refills, never a wrong answer). So a domain flush is one store and a global flush 256; nothing is
//! scanned. Stamps come from one 64-bit counter that never returns a value twice.
//!
//! Only present translations are kept, whatever `CAP.CM` says, and no entry covers the interrupt range.
//!
//! Cost of a hit: one load from the caller's context, one of the stamp, one line of the table.
//! Size: 4096 × 24 B + 2 × 256 × 24 B = 108 KiB per unit.

use guest_mem::{Gpa, Iova, PAGE_SIZE};

use super::walk::{Mapping, PageSize};

/// Entries for 4 KiB pages: 16 MiB of mappings, the buffers of about 4000 pages in flight.
const SMALL: usize = 4096;
/// Entries for each of the large sizes.
const LARGE: usize = 256;
/// Above this many pages a page-selective flush invalidates the whole domain instead of probing:
/// 256 probes take as long as a few refills.
const MAX_PROBES: u64 = 256;

#[derive(Clone, Copy, Default)]
struct Entry {
    /// Page number in the table's size << 16 | DID.
    key: u64,
    /// Valid while equal to the domain's stamp; 0 is never valid.
    stamp: u64,
    /// GPA of the page | permissions in bits 1:0, as in a table entry.
    page: u64,
}

/// What the lookup needs to know of a domain; kept in the context cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct DomainTag {
    did: u64,
    /// Spreads domains over the table: different domains use the same few IOVA pages.
    salt: u64,
}

impl DomainTag {
    /// Of no domain in particular.
    pub(super) const ZERO: Self = Self { did: 0, salt: 0 };

    pub(super) fn new(did: u16) -> Self {
        Self {
            did: u64::from(did),
            salt: u64::from(did).wrapping_mul(0x9e5) & (SMALL as u64 - 1),
        }
    }

    fn stamp_index(self) -> usize {
        usize::from(self.did as u8)
    }
}

pub(super) struct Iotlb {
    small: Box<[Entry; SMALL]>,
    two_m: Box<[Entry; LARGE]>,
    one_g: Box<[Entry; LARGE]>,
    stamps: Box<[u64; 256]>,
    last_stamp: u64,
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
            stamps: Box::new([1; 256]),
            last_stamp: 1,
        }
    }

    /// A 4 KiB translation that has a permission of `need`: the GPA, if there is one.
    #[inline]
    pub(super) fn lookup(&self, tag: DomainTag, iova: Iova, need: u64) -> Option<Gpa> {
        let pfn = iova.raw() / PAGE_SIZE;
        let entry = &self.small[(pfn ^ tag.salt) as usize % SMALL];
        let hit = entry.key == (pfn << 16 | tag.did)
            && entry.stamp == self.stamps[tag.stamp_index()]
            && entry.page & need != 0;
        hit.then(|| Gpa::new(entry.page & !(PAGE_SIZE - 1) | iova.offset_in(PAGE_SIZE)))
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
            if entry.key == (number << 16 | tag.did)
                && entry.stamp == self.stamps[tag.stamp_index()]
            {
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
            key: number << 16 | tag.did,
            stamp: self.stamps[tag.stamp_index()],
            page: mapping.page.raw() | mapping.permissions,
        };
        let index = (number ^ tag.salt) as usize;
        match mapping.size {
            PageSize::FourK => self.small[index % SMALL] = entry,
            PageSize::TwoM => self.two_m[index % LARGE] = entry,
            PageSize::OneG => self.one_g[index % LARGE] = entry,
        }
    }

    pub(super) fn flush_all(&mut self) {
        self.last_stamp += 1;
        self.stamps.fill(self.last_stamp);
    }

    pub(super) fn flush_domain(&mut self, did: u16) {
        self.last_stamp += 1;
        self.stamps[DomainTag::new(did).stamp_index()] = self.last_stamp;
    }

    /// `pages` (a power of two) 4 KiB pages of a domain from `iova`, which is aligned to them.
    pub(super) fn flush_pages(&mut self, did: u16, iova: Iova, pages: u64) {
        if pages > MAX_PROBES {
            return self.flush_domain(did);
        }
        let tag = DomainTag::new(did);
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
    if entry.key == (number << 16 | tag.did) {
        entry.stamp = 0;
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
    fn entries_are_tagged_by_domain() {
        let mut tlb = Iotlb::new();
        let (one, two) = (DomainTag::new(1), DomainTag::new(2));
        tlb.insert(one, Iova::new(0x1000), &PAGE);
        assert_eq!(
            tlb.lookup(one, Iova::new(0x1234), 1),
            Some(Gpa::new(0x5234))
        );
        assert_eq!(tlb.lookup(two, Iova::new(0x1234), 1), None);
        assert_eq!(tlb.lookup(one, Iova::new(0x1234), 2), None);
    }

    #[test]
    fn a_domain_flush_leaves_other_domains() {
        let mut tlb = Iotlb::new();
        // 3 and 4 have stamps of their own; 3 and 0x103 share one.
        for did in [3, 4, 0x103] {
            tlb.insert(DomainTag::new(did), Iova::new(0x1000), &PAGE);
        }
        tlb.flush_domain(3);
        let hit = |tlb: &Iotlb, did| tlb.lookup(DomainTag::new(did), Iova::new(0x1000), 1);
        assert_eq!(hit(&tlb, 3), None);
        assert_eq!(hit(&tlb, 0x103), None);
        assert!(hit(&tlb, 4).is_some());
        tlb.flush_all();
        assert_eq!(hit(&tlb, 4), None);
    }

    #[test]
    fn a_page_flush_drops_the_large_entry_around_it() {
        let mut tlb = Iotlb::new();
        let tag = DomainTag::new(7);
        for size in [PageSize::TwoM, PageSize::OneG] {
            let mapping = Mapping {
                page: Gpa::new(0x4000_0000),
                size,
                permissions: 3,
            };
            tlb.insert(tag, Iova::new(0x8000_0000), &mapping);
            let inside = Iova::new(0x8000_0000 + size.bytes() - 1);
            assert_eq!(tlb.lookup_large(tag, inside), Some(mapping));
            tlb.flush_pages(7, Iova::new(0x8001_0000), 16);
            assert_eq!(tlb.lookup_large(tag, Iova::new(0x8000_0000)), None);
        }
    }
}
