//! The layer behind the caches: the tree of the ranges, and the byte per page that says which of
//! them are out.
//!
//! Small ranges (up to 2^9 pages, powers of two) have bytes; for the tree they are out whether a
//! caller or a cache holds them. Large ranges have none and are out as the tree says. Shared by the
//! allocators with caches.

use lines::{AtomicU64, Lock, Ordering};

use iova::parts::{Tree, Wanted, order_of, pinned, range_at};
use iova::{Aperture, FreeError, IovaRange, Pinned};

use crate::states::{ORDERS, State, States};

/// Pages of the largest small range.
pub(crate) const SMALL_PAGES: u64 = 1 << (ORDERS - 1);

pub(crate) struct Backing {
    pub(crate) aperture: Aperture,
    pub(crate) states: States,
    pub(crate) tree: Lock<Tree>,
}

impl Backing {
    pub(crate) fn new(aperture: Aperture) -> Self {
        Self {
            states: States::new(&aperture),
            tree: Lock::new(Tree::new(aperture.usable())),
            aperture,
        }
    }

    /// The order of a range that may have a byte.
    #[inline]
    pub(crate) fn small_order(range: IovaRange) -> Option<u8> {
        let pages = range.pages();
        (pages.is_power_of_two() && pages <= SMALL_PAGES).then(|| pages.trailing_zeros() as u8)
    }

    /// From the tree, for one request. Small sizes must be powers of two.
    pub(crate) fn direct(&self, wanted: &Wanted) -> Option<IovaRange> {
        let mut tree = self.tree.lock();
        let range = tree.alloc(wanted.pages, wanted.order, wanted.last)?;
        drop(tree);
        if wanted.pages <= SMALL_PAGES {
            let order = order_of(wanted.pages);
            self.states.set_allocated(range.first().raw(), order);
        }
        Some(range)
    }

    /// Cached ranges of one order back to the tree; how many pages they were.
    pub(crate) fn give(&self, ranges: impl Iterator<Item = u64>, order: u8) -> u64 {
        let mut tree = self.tree.lock();
        let mut pages = 0;
        for first in ranges {
            pages += 1 << order;
            self.give_one(&mut tree, first, order);
        }
        pages
    }

    /// A cached range back to the tree. The second copy of one that two cores freed at once is
    /// dropped.
    pub(crate) fn give_one(&self, tree: &mut Tree, first: u64, order: u8) {
        if self.states.clear(first, order) {
            let freed = tree.free(range_at(first, 1 << order));
            debug_assert_eq!(freed, Ok(()), "what is cached is the tree's");
        }
    }

    /// Frees an allocated range. A small one is marked cached, and its order given: it is the
    /// caller's to keep. A large one (`None`) is the tree's again.
    #[inline]
    pub(crate) fn release(&self, range: IovaRange) -> Result<Option<u8>, FreeError> {
        if let Some(order) = Self::small_order(range)
            && self.states.release(range.first().raw(), order)
        {
            return Ok(Some(order));
        }
        self.with_large(range, |tree| tree.free(range))?;
        Ok(None)
    }

    /// Pins an allocated range.
    pub(crate) fn pin(&self, range: IovaRange) -> Result<Pinned, FreeError> {
        let is_pinned = Self::small_order(range)
            .is_some_and(|order| self.states.pin(range.first().raw(), order));
        if !is_pinned {
            self.with_large(range, |tree| tree.set_pinned(range, true))?;
        }
        Ok(pinned(range))
    }

    /// Does the same as [`release`](Self::release), for a pinned range.
    pub(crate) fn release_pinned(&self, range: IovaRange) -> Option<u8> {
        if let Some(order) = Self::small_order(range) {
            self.states.release_pinned(range.first().raw(), order);
            return Some(order);
        }
        self.with_large(range, |tree| tree.free_pinned(range))
            .expect("what was pinned is allocated");
        None
    }

    /// Allocated and no longer pinned.
    pub(crate) fn unpin(&self, range: IovaRange) {
        match Self::small_order(range) {
            Some(order) => self.states.unpin(range.first().raw(), order),
            None => self
                .with_large(range, |tree| tree.set_pinned(range, false))
                .expect("what was pinned is allocated"),
        }
    }

    /// Does something to a range that only the tree knows. Small ones are in the tree too, cached
    /// and all, so they are refused here: their bytes decided already.
    fn with_large<R>(
        &self,
        range: IovaRange,
        work: impl FnOnce(&mut Tree) -> Result<R, FreeError>,
    ) -> Result<R, FreeError> {
        if range.pages() <= SMALL_PAGES {
            return Err(self.refusal(range));
        }
        let done = work(&mut self.tree.lock());
        done.map_err(|error| match error {
            // What the tree calls out may be cached.
            FreeError::Mismatch { range } => self.refusal(range),
            error => error,
        })
    }

    /// Returns the reason why a range is not taken back.
    #[cold]
    fn refusal(&self, range: IovaRange) -> FreeError {
        let (first, last) = (range.first(), range.last());
        if !self.aperture.allows(range) {
            return FreeError::Outside { range };
        }
        let is_out = match self.states.state(first.raw()) {
            // Pinned by another thread, which is about to free it.
            State::Pinned(order) if 1 << order == range.pages() => false,
            State::Allocated(_) | State::Pinned(_) => true,
            State::Cached | State::None => {
                let is_small = range.pages() <= SMALL_PAGES;
                let large = self.tree.lock().pages_at(first);
                let is_large_out = large.is_some_and(|pages| pages > SMALL_PAGES);
                is_large_out || is_small && self.states.is_any_out(first, last)
            }
        };
        match is_out {
            true => FreeError::Mismatch { range },
            false => FreeError::NotAllocated { range },
        }
    }

    /// Makes everything free. No other thread may use the space meanwhile.
    pub(crate) fn reset(&self) {
        self.states.clear_all();
        *self.tree.lock() = Tree::new(self.aperture.usable());
    }
}

/// Counts of one core, as differences: sums over all cores are exact, one core's may be negative
/// (modulo 2^64). Written by the core alone.
#[derive(Default)]
pub(crate) struct Counters {
    ranges: AtomicU64,
    pages: AtomicU64,
    taken: AtomicU64,
    slow: AtomicU64,
}

/// The core's own copy, so that the shared line is only stored to; or a sum.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counts {
    /// Ranges allocated less ranges freed.
    pub(crate) ranges: u64,
    /// The same in pages.
    pub(crate) pages: u64,
    /// Pages got from the others and the tree less pages given: less `pages`, what the core has
    /// cached.
    pub(crate) taken: u64,
    /// Operations that left the core's memory.
    pub(crate) slow: u64,
}

impl Counters {
    /// Relaxed, as all of these: each is a number of its own, and sums while others work are
    /// approximate.
    pub(crate) fn load(&self) -> Counts {
        Counts {
            ranges: self.ranges.load(Ordering::Relaxed),
            pages: self.pages.load(Ordering::Relaxed),
            taken: self.taken.load(Ordering::Relaxed),
            slow: self.slow.load(Ordering::Relaxed),
        }
    }

    /// Sum over cores.
    pub(crate) fn sum<'a>(all: impl Iterator<Item = &'a Self>) -> Counts {
        all.map(Self::load)
            .fold(Counts::default(), |sum, one| Counts {
                ranges: sum.ranges.wrapping_add(one.ranges),
                pages: sum.pages.wrapping_add(one.pages),
                taken: sum.taken.wrapping_add(one.taken),
                slow: sum.slow.wrapping_add(one.slow),
            })
    }

    pub(crate) fn clear(&self) {
        let Self {
            ranges,
            pages,
            taken,
            slow,
        } = self;
        for counter in [ranges, pages, taken, slow] {
            counter.store(0, Ordering::Relaxed);
        }
    }
}

impl Counts {
    /// Counts a range of `pages` pages out (`sign` 1) or back in (-1).
    #[inline]
    pub(crate) fn count(&mut self, sign: i64, pages: u64, shared: &Counters) {
        self.ranges = self.ranges.wrapping_add_signed(sign);
        self.pages = self.pages.wrapping_add_signed(sign * pages as i64);
        shared.ranges.store(self.ranges, Ordering::Relaxed);
        shared.pages.store(self.pages, Ordering::Relaxed);
    }

    /// Counts pages that came (or, negative, went) between this core and the others or the tree.
    pub(crate) fn count_slow(&mut self, pages: i64, shared: &Counters) {
        self.slow += 1;
        self.taken = self.taken.wrapping_add_signed(pages);
        shared.slow.store(self.slow, Ordering::Relaxed);
        shared.taken.store(self.taken, Ordering::Relaxed);
    }
}
