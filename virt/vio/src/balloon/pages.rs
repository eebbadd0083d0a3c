//! Pages that a guest names: which of them are RAM, and how they are handed on a batch at a time.

use guest_mem::{Gpa, PAGE_SIZE};

/// Most ranges of a batch: as many pages as the owner of a machine is asked to evict at a time.
pub const MAX_RANGES: usize = 32;
/// A batch with so many pages is full: 2 MiB. What is added at a time has no more.
pub(super) const MAX_PAGES: u64 = 512;

/// Whole pages of guest RAM that follow each other: at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// First byte of the first page.
    pub gpa: Gpa,
    /// Number of pages, of 4 KiB each.
    pub pages: u64,
}

impl PageRange {
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.pages * PAGE_SIZE
    }

    fn numbers(&self) -> Numbers {
        let first = self.gpa.raw() / PAGE_SIZE;
        let end = first + self.pages;
        Numbers { first, end }
    }
}

/// Pages by number, `end` exclusive. Numbers are guest-physical addresses divided by 4096, whatever
/// the guest's pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbers {
    pub(super) first: u64,
    pub(super) end: u64,
}

impl Numbers {
    /// The page of this number alone.
    pub(super) fn one(page: u32) -> Self {
        let first = u64::from(page);
        Self {
            first,
            end: first + 1,
        }
    }

    /// The pages that lie in `[gpa, gpa + len)` as a whole; those of an address space that ends
    /// within a page do not.
    pub(super) fn whole(gpa: Gpa, len: u64) -> Self {
        let end = gpa.raw().saturating_add(len) / PAGE_SIZE;
        let first = gpa.raw().div_ceil(PAGE_SIZE);
        Self {
            first: first.min(end),
            end,
        }
    }

    pub(super) fn count(self) -> u64 {
        self.end - self.first
    }

    fn range(self) -> PageRange {
        PageRange {
            gpa: Gpa::new(self.first * PAGE_SIZE),
            pages: self.count(),
        }
    }
}

/// Regions of guest RAM.
#[derive(Debug)]
pub(super) struct Ram {
    /// Sorted, apart from each other, not empty.
    regions: Box<[Numbers]>,
    pages: u64,
}

impl Ram {
    /// These regions, addresses and lengths in bytes, sorted; `None` if they are no such list of
    /// whole pages.
    pub(super) fn new(regions: &[(Gpa, u64)]) -> Option<Self> {
        let mut all: Vec<Numbers> = Vec::new();
        for &(gpa, len) in regions {
            let end = gpa.checked_add(len)?;
            let is_whole = gpa.is_aligned(PAGE_SIZE) && end.is_aligned(PAGE_SIZE) && len != 0;
            let pages = Numbers::whole(gpa, len);
            if !is_whole || all.last().is_some_and(|last| pages.first < last.end) {
                return None;
            }
            all.push(pages);
        }
        let pages = all.iter().map(|region| region.count()).sum();
        (pages != 0).then(|| Self {
            regions: all.into(),
            pages,
        })
    }

    /// Pages in all.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// The first of `pages` that are RAM, as many as follow each other in one region; `None` if
    /// none is.
    pub(super) fn first_of(&self, pages: Numbers) -> Option<Numbers> {
        let at = self
            .regions
            .partition_point(|region| region.end <= pages.first);
        let region = self.regions.get(at)?;
        let found = Numbers {
            first: pages.first.max(region.first),
            end: pages.end.min(region.end),
        };
        (found.first < found.end).then_some(found)
    }
}

/// Pages of one step, collected for one call of the back end.
#[derive(Debug)]
pub(super) struct Batch {
    ranges: Vec<PageRange>,
    pages: u64,
}

impl Batch {
    pub(super) fn new() -> Self {
        Self {
            ranges: Vec::with_capacity(MAX_RANGES),
            pages: 0,
        }
    }

    pub(super) fn clear(&mut self) {
        self.ranges.clear();
        self.pages = 0;
    }

    pub(super) fn ranges(&self) -> &[PageRange] {
        &self.ranges
    }

    /// Pages in all.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether more may be added.
    pub(super) fn has_room(&self) -> bool {
        self.ranges.len() < MAX_RANGES && self.pages < MAX_PAGES
    }

    /// Adds RAM, to the last range where it continues that in either direction: guests allocate
    /// both ways. Pages that lie in that range already add nothing.
    pub(super) fn add(&mut self, pages: Numbers) {
        debug_assert!(pages.count() != 0, "pages of RAM");
        if let Some(range) = self.ranges.last_mut() {
            let last = range.numbers();
            if pages.first <= last.end && last.first <= pages.end {
                let joined = Numbers {
                    first: last.first.min(pages.first),
                    end: last.end.max(pages.end),
                };
                self.pages += joined.count() - last.count();
                *range = joined.range();
                return;
            }
        }
        self.ranges.push(pages.range());
        self.pages += pages.count();
    }
}
