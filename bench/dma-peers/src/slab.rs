//! `SlabAllocator`: "IOVA-kmalloc" (*Utilizing the IOMMU Scalably*, USENIX ATC 2015, §4.2). The
//! paper lets a scalable memory allocator choose page numbers: it allocates one byte per page, and
//! the bytes' addresses are page numbers that no other allocation has.
//!
//! So here: the arena is the low end of the aperture, one byte per page, and the bytes are real:
//! they hold what [`states`](crate::states) says of each page. Sizes up to 2^9 pages are rounded up
//! to powers of two, one class each. A class cuts slabs of 4,096 pages (16 MiB of IOVA) into
//! objects and keeps a bitmap of free ones; cores keep lists of free objects per class, and
//! exchange half a list at a time with the class. Slabs, and ranges too large for them, come from a
//! [tree](iova::TreeAllocator) over the arena, as slabs come from a page allocator; a slab whose
//! last object comes back returns there.
//!
//! **Memory is bounded** where the paper's is not (kmalloc's bytes stay with it): an arena of `p`
//! pages costs at most `p` bytes of states (and 36 KiB of their directory), `p / 8` of bitmaps, 128
//! per slab, `cores * 10 * list * 8` of lists, and 112 per range that comes from the tree itself:
//! large ones, limited ones, and objects of slabs that were dissolved (at the very worst every page
//! of the arena). The default arena is 2^20 pages, 4 GiB of IOVA: 1.2 MiB before exhaustion.
//!
//! **Limits.** A request that allows the whole arena is served from lists; any other from the tree.
//!
//! **Exhaustion.** The core gives its lists back; then slabs with free objects dissolve: what is
//! free is the tree's again, what is in use becomes ranges of the tree, which return to it one by
//! one. Then other cores with lists are asked to give them up at their next operation.
//!
//! **Ownership.** Lists belong to the handle; classes and the tree have a [`lines::Lock`] each,
//! taken in that order (a class, then the tree). Checks are those of [`crate::MagazineAllocator`],
//! by the same bytes.
//!
//! Cost: as magazines while lists last; an exchange of half a list costs a lock and a bit per
//! object.
//!
//! Left out: slabs by core (objects freed elsewhere mix); pages above the arena are never given.

mod class;

use alloc::{boxed::Box, sync::Arc, vec::Vec};
use core::fmt;

use class::Class;
use lines::{CachePadded, Lock};

use iova::parts::{Wanted, range_at};
use iova::{
    AllocError, Aperture, ApertureError, ClaimError, CoreAllocator, CoreId, FreeError,
    IovaAllocator, IovaPfn, IovaRange, Pinned, Request, ResetError, Stats,
};

use crate::backing::{Backing, Counts, SMALL_PAGES};
use crate::crew::Crew;
use crate::states::ORDERS;

/// Pages of a slab, as a power of two.
const SLAB_ORDER: u8 = 12;

/// Size of the arena, and of what a core keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabConfig {
    /// Pages from the start of the aperture on, at least 1; clipped at its end. Default: 2^20.
    pub arena_pages: u64,
    /// Free objects in a core's list of one class, 2 to 4096. Default: 128.
    pub list: usize,
}

impl Default for SlabConfig {
    fn default() -> Self {
        Self {
            arena_pages: 1 << 20,
            list: 128,
        }
    }
}

/// Page numbers as offsets of objects in one arena.
///
/// ```
/// use dma_peers::SlabAllocator;
/// use iova::{Aperture, CoreAllocator, CoreId, IovaAllocator, IovaPfn, Request};
///
/// let space = SlabAllocator::new(Aperture::of_bits(48)?, 1)?;
/// let mut core = space.claim(CoreId(0))?;
/// let range = core.alloc(Request::pages(5))?;
/// assert!(range.pages() == 8 && range.last() <= IovaPfn::new(1 << 20));
/// core.free(range)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SlabAllocator(Arc<Shared>);

struct Shared {
    /// Aperture as the caller gave it; the backing's is the arena.
    aperture: Aperture,
    backing: Backing,
    config: SlabConfig,
    crew: Crew,
    classes: Box<[CachePadded<Lock<Class>>]>,
}

impl SlabAllocator {
    /// The default arena at the start of `aperture`, for `cores` cores (1 to
    /// [`MAX_CORES`](iova::MAX_CORES)).
    ///
    /// # Errors
    /// As [`Self::with_config`].
    pub fn new(aperture: Aperture, cores: usize) -> Result<Self, ApertureError> {
        Self::with_config(aperture, cores, SlabConfig::default())
    }

    /// The same with another arena; values outside their ranges are clamped.
    ///
    /// # Errors
    /// [`ApertureError::Cores`]; [`ApertureError::Empty`] where the arena has no usable page.
    pub fn with_config(
        aperture: Aperture,
        cores: usize,
        config: SlabConfig,
    ) -> Result<Self, ApertureError> {
        let (first, last) = (aperture.first(), aperture.last());
        let pages = (last.raw() - first.raw() + 1).min(config.arena_pages.max(1));
        let arena_last = IovaPfn::new(first.raw() + (pages - 1));
        let arena = Aperture::new(first, arena_last, aperture.reserved())?;
        let class = |order| CachePadded::new(Lock::new(Class::new(order as u8)));
        Ok(Self(Arc::new(Shared {
            aperture,
            backing: Backing::new(arena),
            config: SlabConfig {
                arena_pages: pages,
                list: config.list.clamp(2, 4096),
            },
            crew: Crew::new(cores)?,
            classes: (0..ORDERS).map(class).collect(),
        })))
    }
}

fn slab_range(number: u64) -> IovaRange {
    range_at(number << SLAB_ORDER, 1 << SLAB_ORDER)
}

impl Shared {
    /// Free objects from lists back to their slabs, or to the tree where those have dissolved; how
    /// many pages.
    fn give(&self, objects: impl Iterator<Item = u64>, order: u8) -> u64 {
        let mut class = self.classes[usize::from(order)].lock();
        let mut pages = 0;
        for first in objects {
            pages += 1 << order;
            // The second copy of an object that two cores freed at once is dropped.
            if !class.has_slab_of(first) {
                let mut tree = self.backing.tree.lock();
                self.backing.give_one(&mut tree, first, order);
            } else if self.backing.states.clear(first, order)
                && let Some(number) = class.push(first)
            {
                self.backing.tree.lock().give(slab_range(number));
            }
        }
        pages
    }

    /// Fills a list by half from slabs, of which one may be new.
    fn take(&self, list: &mut Vec<u64>, order: u8) {
        let mut class = self.classes[usize::from(order)].lock();
        let last = self.backing.aperture.last();
        for _ in 0..self.config.list / 2 {
            let object = class.pop().or_else(|| {
                if !list.is_empty() {
                    return None;
                }
                let mut tree = self.backing.tree.lock();
                let slab = tree.take(1 << SLAB_ORDER, SLAB_ORDER, last)?;
                drop(tree);
                class.add(slab.first().raw() >> SLAB_ORDER);
                class.pop()
            });
            let Some(first) = object else { break };
            self.backing.states.set_cached(first, order);
            list.push(first);
        }
        // Handed out as the slab lies: upwards.
        list.reverse();
    }

    /// Makes the free objects of slabs the tree's, and ranges of their own of the others there.
    fn dissolve(&self) {
        for (order, class) in self.classes.iter().enumerate() {
            let mut class = class.lock();
            let mut tree = self.backing.tree.lock();
            for (number, used) in class.dissolve() {
                tree.give(slab_range(number));
                for first in used {
                    // The highest place at or below its own end is its own: it was freed just now.
                    let pages = 1 << order;
                    let got = tree.alloc(pages, order as u8, IovaPfn::new(first + (pages - 1)));
                    debug_assert_eq!(got, Some(range_at(first, pages)));
                }
            }
        }
    }
}

impl IovaAllocator for SlabAllocator {
    type Core = SlabCore;

    fn claim(&self, core: CoreId) -> Result<SlabCore, ClaimError> {
        self.0.crew.claims.claim(core)?;
        Ok(SlabCore {
            counts: self.0.crew.counters(core).load(),
            lists: core::array::from_fn(|_| Vec::new()),
            shared: Arc::clone(&self.0),
            core,
        })
    }

    fn cores(&self) -> usize {
        self.0.crew.claims.cores()
    }

    /// Returns the aperture as given. Ranges come from the arena at its start.
    fn aperture(&self) -> &Aperture {
        &self.0.aperture
    }

    /// `cached_pages` counts lists and the free objects of slabs.
    fn stats(&self) -> Stats {
        let shared = &*self.0;
        let sum = shared.crew.sum();
        // Lists that handles may have made; a bound.
        let lists = shared.crew.claimed() * ORDERS * shared.config.list * size_of::<u64>();
        let classes: usize = shared.classes.iter().map(|c| c.lock().bytes()).sum();
        let lines = size_of_val(&*shared.classes) + shared.crew.bytes();
        let tree = shared.backing.tree.lock();
        Stats {
            live_ranges: sum.ranges,
            live_pages: sum.pages,
            cached_pages: tree.live_pages().saturating_sub(sum.pages),
            chunks: tree.chunks(),
            bytes: tree.bytes() + shared.backing.states.bytes() + classes + lines + lists,
            slow: sum.slow,
        }
    }

    fn reset(&self) -> Result<(), ResetError> {
        let shared = &*self.0;
        shared.crew.claims.while_idle(|| {
            for (order, class) in shared.classes.iter().enumerate() {
                *class.lock() = Class::new(order as u8);
            }
            shared.backing.reset();
            shared.crew.clear();
        })
    }
}

impl fmt::Debug for SlabAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlabAllocator")
            .field("config", &self.0.config)
            .finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if cfg!(debug_assertions) {
            self.dissolve();
            let sum = self.crew.sum();
            let tree = self.backing.tree.get_mut();
            // Every handle has parked: what the tree misses is what callers hold.
            debug_assert_eq!(tree.live_pages(), sum.pages, "pages were lost or doubled");
        }
    }
}

/// One core's lists in a [`SlabAllocator`]. Dropped, it gives them back.
pub struct SlabCore {
    shared: Arc<Shared>,
    core: CoreId,
    /// Free objects by order; nothing is allocated before the first.
    lists: [Vec<u64>; ORDERS],
    counts: Counts,
}

impl SlabCore {
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

    #[inline]
    fn pop(&mut self, order: u8) -> Option<u64> {
        loop {
            let first = self.lists[usize::from(order)].pop()?;
            if self.shared.backing.states.take(first, order) {
                return Some(first);
            }
            // The second copy of one that two cores freed at once: it was counted free twice.
            self.count(1, 1 << order);
        }
    }

    #[cold]
    fn refill(&mut self, order: u8) -> Option<u64> {
        let Self { shared, lists, .. } = self;
        let list = &mut lists[usize::from(order)];
        if list.capacity() == 0 {
            list.reserve_exact(shared.config.list);
        }
        shared.take(list, order);
        let pages = (list.len() as i64) << order;
        self.count_slow(pages);
        self.pop(order)
    }

    fn direct(&mut self, wanted: &Wanted) -> Option<IovaRange> {
        let range = self.shared.backing.direct(wanted)?;
        self.count_slow(wanted.pages as i64);
        Some(range)
    }

    #[cold]
    fn alloc_slow(&mut self, is_listed: bool, wanted: &Wanted) -> Result<IovaRange, AllocError> {
        if is_listed && let Some(first) = self.refill(wanted.order) {
            return Ok(range_at(first, wanted.pages));
        }
        if let Some(range) = self.direct(wanted) {
            return Ok(range);
        }
        self.park();
        self.shared.dissolve();
        self.direct(wanted).ok_or_else(|| {
            let asked = self.shared.crew.ask_others(self.core);
            wanted.failure(&self.shared.backing.aperture, asked)
        })
    }

    /// An object that is marked cached, into its list.
    #[inline]
    fn push(&mut self, range: IovaRange, order: u8) {
        self.count(-1, range.pages());
        let list = &mut self.lists[usize::from(order)];
        if list.len() == list.capacity() {
            self.make_room(order);
        }
        self.lists[usize::from(order)].push(range.first().raw());
    }

    #[cold]
    fn make_room(&mut self, order: u8) {
        let Self { shared, lists, .. } = self;
        let list = &mut lists[usize::from(order)];
        if list.capacity() == 0 {
            list.reserve_exact(shared.config.list);
            return;
        }
        // The older half goes; what was freed last is warm.
        let pages = shared.give(list.drain(..list.len().div_ceil(2)), order);
        self.count_slow(-(pages as i64));
    }
}

impl CoreAllocator for SlabCore {
    fn core(&self) -> CoreId {
        self.core
    }

    fn alloc(&mut self, request: Request) -> Result<IovaRange, AllocError> {
        let mut wanted = Wanted::of(&request)?;
        self.answer();
        let mut is_listed = false;
        if usize::from(wanted.order) < ORDERS {
            wanted.pages = 1 << wanted.order;
            is_listed = wanted.last >= self.shared.backing.aperture.last();
        } else if wanted.pages <= SMALL_PAGES {
            wanted.pages = wanted.pages.next_power_of_two();
        }
        let hit = match is_listed {
            true => self.pop(wanted.order),
            false => None,
        };
        let range = match hit {
            Some(first) => range_at(first, wanted.pages),
            None => self.alloc_slow(is_listed, &wanted)?,
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
        // Before the lists are emptied: what is freed later is not part of what was asked for.
        self.shared.crew.answered(self.core);
        for order in 0..ORDERS {
            let list = &mut self.lists[order];
            if list.is_empty() {
                continue;
            }
            let pages = self.shared.give(list.drain(..), order as u8);
            self.count_slow(-(pages as i64));
        }
    }
}

impl fmt::Debug for SlabCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlabCore")
            .field("core", &self.core)
            .finish_non_exhaustive()
    }
}

impl Drop for SlabCore {
    fn drop(&mut self) {
        self.park();
        self.shared.crew.claims.release(self.core);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
