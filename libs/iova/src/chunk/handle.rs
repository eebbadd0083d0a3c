//! One core's handle: the paths that most operations take, without a lock and without a
//! read-modify-write.
//!
//! The private state of a core is in four independent parts:
//!
//! | part | contents |
//! |---|---|
//! | `core_cache` | free lists, and the cached chunks |
//! | `owner_side` | the page that the core is changing, and the number of remote cores' marks it has met |
//! | `drains` | calls for drains, answered and made |
//! | `search` | credit for searches, and the last request for which none found anything |
//!
//! ```text
//! alloc: take ─▶ take_refilled ─▶ answer ─▶ alloc_in_zones ─▶ tree ─▶ find (search) ─▶ ask (drains)
//! free:  freeing ─▶ free_ready ─┬─▶ changed
//!                               ├ marks ─▶ keep_single ─▶ keep_marked, meet ─┐
//!                               ├ another's ─▶ give ─────────────────────────┼─▶ free_any ─▶ answer, free_slow ─▶ changed
//!                               └ unknown ───────────────────────────────────┘
//! pin:   changing ─▶ pin ─▶ pin_any ─▶ answer, pin_slow ─▶ changed
//! ```
//! Each is left at the first step that does it.

mod free;

use alloc::sync::Arc;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;

use super::Shared;
use super::core_cache::{CoreCache, Freed, Want};
use super::drains::Drains;
use super::layout::MAX_ORDER;
use super::owner_side::OwnerSide;
use super::search::Search;
use super::state::{State, order_of};
use crate::allocator::SpaceId;
use crate::wanted::Wanted;
use crate::{
    AllocError, CoreAllocator, CoreId, FreeError, IovaPfn, IovaRange, Pinned, Request, RetiredChunk,
};

/// The handle of one core of a [`ChunkAllocator`](super::ChunkAllocator).
pub struct ChunkCore {
    pub(super) shared: Arc<Shared>,
    pub(super) local: Local,
    /// One thread at a time: makes the handle `Send` and not `Sync`.
    pub(super) alone: PhantomData<Cell<()>>,
}

/// Private state of one core, apart from the words and chunks under its lock.
#[derive(Debug)]
pub(super) struct Local {
    space: SpaceId,
    cache: CoreCache,
    owner_side: OwnerSide,
    drains: Drains,
    search: Search,
}

impl Local {
    /// That of a core that owns nothing yet.
    pub(super) fn new(id: CoreId, shared: &Shared) -> Self {
        Self {
            space: shared.space,
            cache: CoreCache::new(id, shared),
            owner_side: OwnerSide::new(id, shared),
            drains: Drains::new(shared),
            search: Search::new(),
        }
    }

    #[cfg(any(test, all(feature = "testing", not(loom))))]
    pub(super) fn cache(&self) -> &CoreCache {
        &self.cache
    }

    /// An allocation for which no word was at hand: the other words, the tree, and at last a search
    /// of everything and a call to the other cores.
    #[cold]
    #[inline(never)]
    fn alloc_slow(&mut self, shared: &Shared, request: Request) -> Result<IovaRange, AllocError> {
        self.drains.answer(shared, &mut self.cache);
        let wanted = Wanted::of(&request)?;
        let want = Want {
            pages: wanted.pages,
            order: usize::from(wanted.order),
            last: request.last.min(shared.aperture.last()),
        };
        let is_vain = self.search.is_vain(shared, &self.cache, &want);
        // Whole chunks are in no list of this core's: no lock is taken for them where there are
        // some.
        if want.order > MAX_ORDER
            && !is_vain
            && let Some(range) = self.cache.alloc_run_in_zones(shared, &want)
        {
            return Ok(range);
        }
        let zones = &mut *shared.zones_of(self.cache.id()).lock();
        let in_tree = || shared.unzoned.alloc(want.pages, wanted.order, want.last);
        let found = match is_vain {
            true => in_tree(),
            false => self
                .cache
                .alloc_in_zones(shared, zones, &want, false)
                .or_else(in_tree)
                .or_else(|| self.search.find(shared, &mut self.cache, zones, &want)),
        };
        self.drains.relent(self.cache.take_fresh());
        found.ok_or_else(|| {
            let asked = if request.asks {
                self.drains.ask(shared, zones, want.last)
            } else {
                0
            };
            wanted.failure(
                &shared.aperture,
                asked + usize::from(!self.search.searched_all()),
            )
        })
    }

    /// A free that was found to be [`Freed::Marked`]: one call, so that the common path saves no
    /// registers for a second.
    #[inline(never)]
    fn free_marked(
        &mut self,
        shared: &Shared,
        range: IovaRange,
        state: State,
    ) -> Result<(), FreeError> {
        // Nothing that was loaded before is relied on from here: where there was no fence,
        // `keep_single` keeps nothing.
        self.owner_side.fence_free();
        if self.cache.keep_single(range, state) {
            self.owner_side.changed();
            return Ok(());
        }
        self.free_met(shared, range, state)
    }

    /// Any other such free.
    #[inline(never)]
    fn free_met(
        &mut self,
        shared: &Shared,
        range: IovaRange,
        state: State,
    ) -> Result<(), FreeError> {
        if self.keep_marked(shared, range, state) {
            self.owner_side.changed();
            return Ok(());
        }
        self.free_elsewhere(shared, range)
    }

    /// The same of a range that this core has pinned.
    #[inline(never)]
    fn free_pinned_marked(&mut self, shared: &Shared, pinned: Pinned, state: State) {
        if !self.keep_marked(shared, pinned.range(), state) {
            self.free_pinned_slow(shared, pinned, shared.retires);
        }
    }

    /// Keeps a range ready in a chunk of this core with marks; `false` where a remote core has
    /// marked the range itself.
    #[inline(always)]
    fn keep_marked(&mut self, shared: &Shared, range: IovaRange, state: State) -> bool {
        let Some(tag) = self.cache.keep_marked(shared, range, state) else {
            return false;
        };
        self.owner_side
            .meet(shared, &self.cache, tag, range.first().raw());
        true
    }

    /// A free that was found to be [`Freed::Remote`]. Apart from the other one, whose registers
    /// cost a designated remote freer as much as the work.
    #[inline(never)]
    fn free_remote(
        &mut self,
        shared: &Shared,
        range: IovaRange,
        state: State,
    ) -> Result<(), FreeError> {
        if self.cache.give(range.first().raw(), state) {
            self.owner_side.changed();
            return Ok(());
        }
        self.free_elsewhere(shared, range)
    }

    /// A free that is not of a range of ours which may be kept ready.
    #[inline(never)]
    fn free_elsewhere(&mut self, shared: &Shared, range: IovaRange) -> Result<(), FreeError> {
        // As in `free_marked`; most come from there or are refused.
        self.owner_side.fence_free();
        let freed = match self.cache.free_any(shared, range) {
            true => Ok(()),
            false => self.free_slow(shared, range),
        };
        self.owner_side.changed();
        freed
    }

    /// A pin in another core's chunk, or where remote cores have marked something.
    #[inline(never)]
    fn pin_elsewhere(&mut self, shared: &Shared, range: IovaRange) -> Result<Pinned, FreeError> {
        let pinned = match self.cache.pin_any(shared, range) {
            true => Ok(Pinned::new(range, self.space, false)),
            false => self.pin_slow(shared, range),
        };
        self.owner_side.changed();
        pinned
    }
}

/// Access for tests.
#[cfg(test)]
impl Local {
    #[cfg(not(shuttle))]
    pub(super) fn cache_mut(&mut self) -> &mut CoreCache {
        &mut self.cache
    }

    #[cfg(not(any(loom, shuttle)))]
    pub(super) fn owner_side(&self) -> &OwnerSide {
        &self.owner_side
    }

    #[cfg(not(any(loom, shuttle)))]
    pub(super) fn search(&self) -> &Search {
        &self.search
    }
}

impl ChunkCore {
    /// An allocation for which nothing is at hand. In parts, because a request would go through
    /// memory.
    #[inline(never)]
    fn alloc_elsewhere(
        &mut self,
        pages: u64,
        last: IovaPfn,
        align_order: u8,
        asks: bool,
    ) -> Result<IovaRange, AllocError> {
        let Self { shared, local, .. } = self;
        if let Some(order) = order_of(pages)
            && usize::from(align_order) <= order
            && local.drains.is_answered(shared)
            && let Some(range) = local.cache.take_refilled(shared, order, last.raw())
        {
            return Ok(range);
        }
        let request = Request {
            pages,
            last,
            align_order,
            asks,
        };
        local.alloc_slow(shared, request)
    }
}

impl CoreAllocator for ChunkCore {
    fn core(&self) -> CoreId {
        self.local.cache.id()
    }

    // Inlined whatever its size: out of line, the request and the answer would go through memory,
    // which costs more than everything else here.
    #[inline(always)]
    fn alloc(&mut self, request: Request) -> Result<IovaRange, AllocError> {
        let Self { shared, local, .. } = self;
        if local.drains.is_answered(shared)
            && let Some(range) = local.cache.take(&request)
        {
            return Ok(range);
        }
        self.alloc_elsewhere(
            request.pages,
            request.last,
            request.align_order,
            request.asks,
        )
    }

    #[inline(always)]
    fn free(&mut self, range: IovaRange) -> Result<(), FreeError> {
        let Self { shared, local, .. } = self;
        local.owner_side.freeing(range.first().raw());
        match local.cache.free_ready(range, false) {
            Freed::Done => {
                local.owner_side.changed();
                Ok(())
            }
            Freed::Marked(state) => local.free_marked(shared, range, state),
            Freed::Remote(state) => local.free_remote(shared, range, state),
            Freed::Unknown => local.free_elsewhere(shared, range),
        }
    }

    #[inline(always)]
    fn pin(&mut self, range: IovaRange) -> Result<Pinned, FreeError> {
        let Self { shared, local, .. } = self;
        local.owner_side.changing(range.first().raw());
        if local.cache.pin(range) {
            local.owner_side.changed();
            return Ok(Pinned::new(range, local.space, false));
        }
        local.pin_elsewhere(shared, range)
    }

    #[inline(always)]
    fn free_pinned(&mut self, pinned: Pinned) {
        let Self { shared, local, .. } = self;
        let range = pinned.range();
        if pinned.is_own(local.space) {
            match local.cache.free_ready(range, true) {
                Freed::Done => return,
                Freed::Marked(state) => return local.free_pinned_marked(shared, pinned, state),
                Freed::Remote(_) | Freed::Unknown => {}
            }
        }
        local.free_pinned_slow(shared, pinned, shared.retires);
    }

    fn free_without_table(&mut self, pinned: Pinned) {
        self.local.free_pinned_slow(&self.shared, pinned, false);
    }

    #[inline(always)]
    fn unpin(&mut self, pinned: Pinned) {
        let Self { shared, local, .. } = self;
        let range = pinned.range();
        if !pinned.is_own(local.space) || !local.cache.unpin(range) {
            local.unpin_slow(shared, pinned);
        }
    }

    fn park(&mut self) {
        self.local.cache.deposit_all(&self.shared);
    }

    fn retire(&mut self) -> Option<RetiredChunk> {
        self.local.cache.retire_one(&self.shared)
    }

    fn recycle(&mut self, chunk: RetiredChunk) {
        let page = chunk.first.raw();
        assert_eq!(chunk.space, self.local.space, "retired by another space");
        let (_, zone) = self
            .shared
            .zone_of(page)
            .expect("a retired chunk is one of a zone");
        zone.free.put(zone.index(page));
        self.shared.count_returned(self.local.cache.id());
    }
}

impl fmt::Debug for ChunkCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkCore")
            .field("local", &self.local)
            .finish_non_exhaustive()
    }
}

impl Drop for ChunkCore {
    fn drop(&mut self) {
        self.park();
        self.shared.claims.release(self.local.cache.id());
    }
}
