//! `MagazineAllocator`: free ranges kept in magazines by each core (*Utilizing the IOMMU Scalably*,
//! USENIX ATC 2015, §4.3, after Bonwick and Adams, *Magazines and Vmem*, USENIX ATC 2001).
//!
//! Sizes up to 2^9 pages are rounded up to a power of two and belong to a class per power; a range
//! asked for with more alignment than that is of the class of its alignment. A core has two
//! magazines of [`MagazineConfig::size`] ranges per class. `alloc` pops; `free` pushes, whichever
//! core allocated. When the loaded magazine is empty (full) it trades places with the other; when
//! both are, one is exchanged at the class's depot. So at least a magazine's worth of operations
//! lies between two visits of a depot (the replenishment guarantee; a magazine that the tree could
//! fill only in part near exhaustion is the exception). A depot with nothing to give sends the core
//! to the [tree](iova::TreeAllocator), which fills a magazine under one lock; a depot that is full
//! sends the magazine's ranges back there, so that caches are bounded. Larger ranges come from the
//! tree and go back to it.
//!
//! **Limits.** Classes exist twice: for ranges within 32 bits, and for the rest. A request that
//! allows the whole aperture takes from the upper ones, one that allows 32 bits or more from the
//! lower ones; no magazine is ever searched. A limit below 32 bits goes to the tree.
//!
//! **Checks.** One byte per page tells what starts there ([`states`](crate::states), which also
//! says what two buggy frees at the same instant can do). Freeing twice, in part, or what was never
//! allocated is an error.
//!
//! **Exhaustion.** The core gives its magazines and all depots back to the tree and tries again;
//! then it raises the flag of every core that holds cached ranges. They give everything back at
//! their next operation or when parked; the error says how many were asked.
//!
//! **Ownership.** Magazines belong to the handle, depots and the tree have a [`lines::Lock`] each,
//! of which no two are held at once. Counters are the core's, in a line of its own, stored relaxed
//! and summed by `stats`.
//!
//! Cost: `alloc` and `free` that hit a magazine touch only memory of their core and the page's
//! byte. Bound of cached ranges per class: `2 * size` per core and `size * depot` in the depot.
//!
//! Left out: magazines that shrink by age; chunk ownership (`retire` never has one).

mod depot;
#[cfg(all(test, loom))]
mod model;

use alloc::{boxed::Box, sync::Arc};
use core::fmt;

use depot::{Depot, Rack};
use lines::CachePadded;

use iova::parts::{Wanted, range_at};
use iova::{
    AllocError, Aperture, ApertureError, ClaimError, CoreAllocator, CoreId, FreeError,
    IovaAllocator, IovaPfn, IovaRange, Pinned, Request, ResetError, Stats,
};

use crate::backing::{Backing, Counts, SMALL_PAGES};
use crate::crew::Crew;
use crate::states::ORDERS;

/// Last page that a device with 32 address bits reaches.
const LOW_LAST: u64 = 0xf_ffff;
/// Classes: an order, within 32 bits or above.
const CLASSES: usize = 2 * ORDERS;

/// Bounds of what is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MagazineConfig {
    /// Ranges in a magazine, 1 to 4096. The paper's, and the default: 127.
    pub size: usize,
    /// Full magazines that a class's depot keeps, up to 4096. Default: 32.
    pub depot: usize,
}

impl Default for MagazineConfig {
    fn default() -> Self {
        Self {
            size: 127,
            depot: 32,
        }
    }
}

/// Per-core magazines of free ranges over a tree.
///
/// ```
/// use dma_peers::MagazineAllocator;
/// use iova::{Aperture, CoreAllocator, CoreId, IovaAllocator, Request};
///
/// let space = MagazineAllocator::new(Aperture::of_bits(48)?, 2)?;
/// let (mut rx, mut tx) = (space.claim(CoreId(0))?, space.claim(CoreId(1))?);
/// let buffer = rx.alloc(Request::pages(3))?;
/// assert_eq!(buffer.pages(), 4);
/// tx.free(buffer)?; // as cheap as if `rx` freed it
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct MagazineAllocator(Arc<Shared>);

struct Shared {
    backing: Backing,
    config: MagazineConfig,
    crew: Crew,
    depots: Box<[CachePadded<Depot>]>,
}

impl MagazineAllocator {
    /// All of `aperture` free, for `cores` cores (1 to [`MAX_CORES`](iova::MAX_CORES)).
    ///
    /// # Errors
    /// [`ApertureError::Cores`].
    pub fn new(aperture: Aperture, cores: usize) -> Result<Self, ApertureError> {
        Self::with_config(aperture, cores, MagazineConfig::default())
    }

    /// The same with other bounds of the caches; values outside their ranges are clamped.
    ///
    /// # Errors
    /// [`ApertureError::Cores`].
    pub fn with_config(
        aperture: Aperture,
        cores: usize,
        config: MagazineConfig,
    ) -> Result<Self, ApertureError> {
        let config = MagazineConfig {
            size: config.size.clamp(1, 4096),
            depot: config.depot.min(4096),
        };
        let depot = |_| CachePadded::new(Depot::new(config.depot));
        Ok(Self(Arc::new(Shared {
            crew: Crew::new(cores)?,
            backing: Backing::new(aperture),
            depots: (0..CLASSES).map(depot).collect(),
            config,
        })))
    }
}

impl Shared {
    fn class_of(&self, range_last: u64, order: u8) -> usize {
        usize::from(order) + if range_last <= LOW_LAST { 0 } else { ORDERS }
    }

    /// The class to serve a request of `order` from, whose limit is `last`; none below 32 bits.
    #[inline]
    fn class_for(&self, order: u8, last: u64) -> Option<usize> {
        let top = self.backing.aperture.last().raw();
        match (last >= top, last >= LOW_LAST) {
            (true, _) => Some(self.class_of(top, order)),
            (false, true) => Some(usize::from(order)),
            (false, false) => None,
        }
    }

    /// Highest page of a class's ranges.
    fn class_last(&self, class: usize) -> u64 {
        let top = self.backing.aperture.last().raw();
        if class < ORDERS {
            top.min(LOW_LAST)
        } else {
            top
        }
    }

    fn drain_depots(&self) {
        for (class, depot) in self.depots.iter().enumerate() {
            while let Some(magazine) = depot.pop_full() {
                self.backing
                    .give(magazine.into_iter(), (class % ORDERS) as u8);
            }
        }
    }
}

impl IovaAllocator for MagazineAllocator {
    type Core = MagazineCore;

    fn claim(&self, core: CoreId) -> Result<MagazineCore, ClaimError> {
        self.0.crew.claims.claim(core)?;
        Ok(MagazineCore {
            counts: self.0.crew.counters(core).load(),
            racks: core::array::from_fn(|_| Rack::default()),
            shared: Arc::clone(&self.0),
            core,
        })
    }

    fn cores(&self) -> usize {
        self.0.crew.claims.cores()
    }

    fn aperture(&self) -> &Aperture {
        &self.0.backing.aperture
    }

    fn stats(&self) -> Stats {
        let shared = &*self.0;
        let sum = shared.crew.sum();
        // Magazines that handles may have made; a bound.
        let racks = shared.crew.claimed() * CLASSES * 2 * shared.config.size * size_of::<u64>();
        let depots: usize = shared.depots.iter().map(|depot| depot.bytes()).sum();
        let lines = size_of_val(&*shared.depots) + shared.crew.bytes();
        let states = shared.backing.states.bytes();
        let tree = shared.backing.tree.lock();
        Stats {
            live_ranges: sum.ranges,
            live_pages: sum.pages,
            cached_pages: tree.live_pages().saturating_sub(sum.pages),
            chunks: tree.chunks(),
            bytes: tree.bytes() + states + depots + lines + racks,
            slow: sum.slow,
        }
    }

    fn reset(&self) -> Result<(), ResetError> {
        let shared = &*self.0;
        shared.crew.claims.while_idle(|| {
            shared.depots.iter().for_each(|depot| depot.clear());
            shared.backing.reset();
            shared.crew.clear();
        })
    }
}

impl fmt::Debug for MagazineAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MagazineAllocator")
            .field("config", &self.0.config)
            .finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if cfg!(debug_assertions) {
            self.drain_depots();
            let sum = self.crew.sum();
            let tree = self.backing.tree.get_mut();
            // Every handle has parked: what the tree misses is what callers hold.
            debug_assert_eq!(
                tree.live_ranges(),
                sum.ranges,
                "ranges were lost or doubled"
            );
        }
    }
}

/// One core's magazines in a [`MagazineAllocator`]. Dropped, it gives them back.
pub struct MagazineCore {
    shared: Arc<Shared>,
    core: CoreId,
    racks: [Rack; CLASSES],
    counts: Counts,
}

impl MagazineCore {
    #[inline]
    fn count(&mut self, sign: i64, pages: u64) {
        let shared = self.shared.crew.counters(self.core);
        self.counts.count(sign, pages, shared);
    }

    fn count_slow(&mut self, pages: i64) {
        let shared = self.shared.crew.counters(self.core);
        self.counts.count_slow(pages, shared);
    }

    /// A large range went back to the tree.
    fn count_large_free(&mut self, range: IovaRange) {
        self.count(-1, range.pages());
        self.count_slow(-(range.pages() as i64));
    }

    /// Does what another core asked for.
    #[inline]
    fn answer(&mut self) {
        if self.shared.crew.is_asked(self.core) {
            self.park();
        }
    }

    /// A cached range of a class.
    #[inline]
    fn pop(&mut self, class: usize, order: u8) -> Option<u64> {
        loop {
            let first = self.racks[class].pop()?;
            if self.shared.backing.states.take(first, order) {
                return Some(first);
            }
            self.drop_copy(order);
        }
    }

    /// A second copy of a range that two cores freed at once: it is gone from the caches, and was
    /// counted free twice.
    #[cold]
    fn drop_copy(&mut self, order: u8) {
        self.count(1, 1 << order);
    }

    /// Both magazines are empty: from the depot, or from the tree.
    #[cold]
    fn refill(&mut self, class: usize, order: u8) -> Option<u64> {
        let size = self.shared.config.size;
        if self.racks[class].refill(&self.shared.depots[class]) {
            self.count_slow((size as i64) << order);
            return self.pop(class, order);
        }
        let shared = &*self.shared;
        let limit = IovaPfn::new(shared.class_last(class));
        let magazine = self.racks[class].filling(size);
        let mut direct = None;
        let mut tree = shared.backing.tree.lock();
        while magazine.len() < size {
            let Some(range) = tree.alloc(1 << order, order, limit) else {
                break;
            };
            let first = range.first().raw();
            if shared.class_of(range.last().raw(), order) != class {
                // The upper space has run out: this one belongs to the lower class when it comes
                // back.
                shared.backing.states.set_allocated(first, order);
                direct = Some(first);
                break;
            }
            shared.backing.states.set_cached(first, order);
            magazine.push(first);
        }
        drop(tree);
        let cached = magazine.len();
        // Handed out from the top down, as the tree gave them.
        magazine.reverse();
        let got = cached + usize::from(direct.is_some());
        self.count_slow((got as i64) << order);
        if cached == 0 {
            return direct;
        }
        if let Some(first) = direct {
            // It was taken beyond need; the magazine's come first.
            self.return_direct(first, order);
        }
        self.pop(class, order)
    }

    /// Returns to the tree an allocated range that no caller has.
    fn return_direct(&mut self, first: u64, order: u8) {
        let shared = &*self.shared;
        shared.backing.states.release(first, order);
        let pages = shared.backing.give(core::iter::once(first), order);
        self.count_slow(-(pages as i64));
    }

    /// From the tree, for this request alone.
    fn direct(&mut self, wanted: &Wanted) -> Option<IovaRange> {
        let range = self.shared.backing.direct(wanted)?;
        self.count_slow(wanted.pages as i64);
        Some(range)
    }

    #[cold]
    fn alloc_slow(
        &mut self,
        class: Option<usize>,
        wanted: &Wanted,
    ) -> Result<IovaRange, AllocError> {
        if let Some(class) = class
            && let Some(first) = self.refill(class, wanted.order)
        {
            return Ok(range_at(first, wanted.pages));
        }
        if let Some(range) = self.direct(wanted) {
            return Ok(range);
        }
        self.park();
        self.shared.drain_depots();
        self.direct(wanted).ok_or_else(|| {
            let asked = self.shared.crew.ask_others(self.core);
            wanted.failure(&self.shared.backing.aperture, asked)
        })
    }

    /// A range that is marked cached, into a magazine.
    #[inline]
    fn push(&mut self, range: IovaRange, order: u8) {
        let first = range.first().raw();
        let class = self.shared.class_of(range.last().raw(), order);
        self.count(-1, range.pages());
        if !self.racks[class].push(first) {
            self.push_slow(first, class);
        }
    }

    #[cold]
    fn push_slow(&mut self, first: u64, class: usize) {
        let Self { shared, racks, .. } = self;
        let (depot, size) = (&shared.depots[class], shared.config.size);
        let slots = racks[class].bytes();
        let overflow = racks[class].make_room(depot, size);
        // A magazine made for the first time gives nothing away.
        if racks[class].bytes() == slots {
            self.count_slow(-((size as i64) << (class % ORDERS)));
        }
        if let Some(magazine) = overflow {
            self.shared
                .backing
                .give(magazine.into_iter(), (class % ORDERS) as u8);
        }
        let has_room = self.racks[class].push(first);
        debug_assert!(has_room, "an empty magazine is loaded");
    }
}

impl CoreAllocator for MagazineCore {
    fn core(&self) -> CoreId {
        self.core
    }

    fn alloc(&mut self, request: Request) -> Result<IovaRange, AllocError> {
        let mut wanted = Wanted::of(&request)?;
        self.answer();
        let mut class = None;
        if usize::from(wanted.order) < ORDERS {
            wanted.pages = 1 << wanted.order;
            class = self.shared.class_for(wanted.order, wanted.last.raw());
        } else if wanted.pages <= SMALL_PAGES {
            wanted.pages = wanted.pages.next_power_of_two();
        }
        let hit = class.and_then(|class| self.pop(class, wanted.order));
        let range = match hit {
            Some(first) => range_at(first, wanted.pages),
            None => self.alloc_slow(class, &wanted)?,
        };
        self.count(1, range.pages());
        Ok(range)
    }

    fn free(&mut self, range: IovaRange) -> Result<(), FreeError> {
        self.answer();
        match self.shared.backing.release(range)? {
            Some(order) => self.push(range, order),
            None => self.count_large_free(range),
        }
        Ok(())
    }

    fn pin(&mut self, range: IovaRange) -> Result<Pinned, FreeError> {
        self.answer();
        self.shared.backing.pin(range)
    }

    fn free_pinned(&mut self, pinned: Pinned) {
        let range = pinned.range();
        match self.shared.backing.release_pinned(range) {
            Some(order) => self.push(range, order),
            None => self.count_large_free(range),
        }
    }

    fn unpin(&mut self, pinned: Pinned) {
        self.shared.backing.unpin(pinned.range());
    }

    fn park(&mut self) {
        // Before the caches are emptied: what is freed later is not part of what was asked for.
        self.shared.crew.answered(self.core);
        for class in 0..CLASSES {
            let ranges = self.racks[class].drain();
            let pages = self.shared.backing.give(ranges, (class % ORDERS) as u8);
            if pages > 0 {
                self.count_slow(-(pages as i64));
            }
        }
    }
}

impl fmt::Debug for MagazineCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MagazineCore")
            .field("core", &self.core)
            .finish_non_exhaustive()
    }
}

impl Drop for MagazineCore {
    fn drop(&mut self) {
        self.park();
        self.shared.crew.claims.release(self.core);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
