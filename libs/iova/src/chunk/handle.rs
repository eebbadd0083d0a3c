//! One core's handle: the paths that most operations take, without a lock and without a read-modify-write.

use alloc::sync::Arc;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;

use lines::{AtomicU64, CachePadded, Fences, Ordering};

use super::Shared;
use super::directory_cache::DirectoryCache;
use super::layout::{GIVER, MARKS, MAX_ORDER, OWNER, PENDING, lane_of, tag_in};
use super::ready::{Ready, Stack};
use super::remote_free::MEETINGS;
use super::search::Search;
use super::state::{State, exact_order, order_of, pages_of};
use super::zone::MAX_ZONES;
use crate::allocator::SpaceId;
use crate::{
    AllocError, CHUNK_PAGES, CoreAllocator, CoreId, FreeError, IovaPfn, IovaRange, Pinned, Request,
    RetiredChunk,
};

/// The handle of one core of a [`ChunkAllocator`](super::ChunkAllocator).
pub struct ChunkCore {
    pub(super) shared: Arc<Shared>,
    pub(super) local: Local,
    /// One thread at a time: makes the handle `Send` and not `Sync`.
    pub(super) alone: PhantomData<Cell<()>>,
}

/// What [`Published::changing`](super::Published) is while a core changes no range.
pub(super) const NO_PAGE: u64 = u64::MAX;

/// What one core has for itself.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) id: CoreId,
    /// The owner of this core's chunks.
    pub(super) owner: u64,
    /// The same if this core's frees need no fence of its CPU, and otherwise the owner of no chunk: then all frees are found to be
    /// [`Freed::Marked`], and the paths that follow make one.
    pub(super) unfenced_owner: u64,
    pub(super) space: SpaceId,
    pub(super) fences: Fences,
    /// See [`Published`](super::Published).
    pub(super) changing: Arc<CachePadded<AtomicU64>>,
    /// The last call for drains that was answered.
    pub(super) drained: u64,
    pub(super) hot: DirectoryCache,
    /// The last pages of the zones.
    pub(super) lasts: [u64; MAX_ZONES],
    pub(super) ready: Ready,
    pub(super) single: Single,
    /// Allocations that failed since the last call for drains, and how many must.
    pub(super) waited: u32,
    pub(super) patience: u32,
    /// Frees in chunks with marks since the last time such a chunk was collected.
    pub(super) meetings: u32,
    pub(super) search: Search,
    /// Whether the allocation that is under way has looked wherever something could be.
    pub(super) is_sure: bool,
}

/// Takes what was kept last.
#[inline(always)]
fn take_from(ready: &mut Stack, hot: &DirectoryCache, order: usize) -> Option<IovaRange> {
    let page = ready.newest()?;
    hot.known(page)?.hand_out(page, order);
    ready.take();
    Some(IovaRange::within_space(page, pages_of(order)))
}

/// What became of a free that looked only at what is at hand.
enum Freed {
    Done,
    /// It is allocated, in this state, in a chunk of ours that is cached and has marks of remote cores, or needs a fence.
    Marked(State),
    /// The same, in a chunk of another core, or of none.
    Remote(State),
    Unknown,
}

/// Which zone's pages have a place of their own ([`Ready::singles`]).
#[derive(Debug)]
pub(super) struct Single {
    /// What this core's chunks of that zone are tagged with that have no marks; no tag where its frees need a fence.
    tag: u64,
    /// The limit with which they were last asked for when there were none: a device's, which does not change.
    last: u64,
    /// The least limit for which it is the zone to take from, and from there to the greatest.
    least: u64,
    reach: u64,
}

impl Single {
    pub(super) fn of(lane: usize, owner: u64, lasts: &[u64; MAX_ZONES], last: u64) -> Self {
        let greatest = lane
            .checked_sub(1)
            .map_or(u64::MAX, |above| lasts[above] - 1);
        Self {
            tag: tag_in(lane, owner),
            last,
            least: lasts[lane],
            reach: greatest - lasts[lane],
        }
    }

    #[inline(always)]
    fn is_for(&self, last: u64) -> bool {
        last == self.last || last.wrapping_sub(self.least) <= self.reach
    }
}

impl Local {
    /// The highest zone all of which lies at or below a limit.
    #[inline(always)]
    fn lane_below(&self, last: u64) -> Option<usize> {
        (0..MAX_ZONES).find(|lane| last >= self.lasts[*lane])
    }

    /// A range that is kept ready in the highest zone all of which lies within the limit. It calls nothing, nor does
    /// [`Self::free_ready`]: what is inlined of them saves no registers.
    #[inline(always)]
    pub(super) fn take(&mut self, request: &Request) -> Option<IovaRange> {
        let (align_order, last) = (usize::from(request.align_order), request.last.raw());
        if request.pages == 1 && align_order == 0 && self.single.is_for(last) {
            return take_from(&mut self.ready.singles, &self.hot, 0);
        }
        let order = order_of(request.pages).filter(|order| align_order <= *order)?;
        let lane = self.lane_below(last)?;
        take_from(self.ready.among_others(lane, order), &self.hot, order)
    }

    /// Keeps a range of ours ready that is allocated or, where the caller says that it `is_pinned`, pinned.
    #[inline(always)]
    fn free_ready(&mut self, range: IovaRange, is_pinned: bool) -> Freed {
        let page = range.first().raw();
        let Some(chunk) = self.hot.known(page) else {
            return Freed::Unknown;
        };
        let (state, tag) = (chunk.state(page), chunk.tag());
        let is_out = |order| match is_pinned {
            false => state.is_out(order),
            true => state.is_pinned_out(order),
        };
        let ready = if range.pages() == 1 && tag == self.single.tag {
            if !is_out(0) {
                return Freed::Unknown;
            }
            &mut self.ready.singles
        } else {
            match exact_order(range.pages()) {
                Some(order) if is_out(order) => {
                    if tag & (OWNER | MARKS) != self.unfenced_owner {
                        return match tag & OWNER == self.owner {
                            true => Freed::Marked(state),
                            false => Freed::Remote(state),
                        };
                    }
                    // In branches: whoever allocates next waits for what is kept, which must not wait for the tag.
                    if page > self.lasts[1] {
                        self.ready.among_others(0, order)
                    } else {
                        self.ready.among_others(lane_of(tag), order)
                    }
                }
                _ => return Freed::Unknown,
            }
        };
        if !ready.keep(page) {
            return Freed::Unknown;
        }
        chunk.set_state(page, state.none());
        Freed::Done
    }

    /// Makes the pages of a zone those that have a place of their own.
    fn single_out(&mut self, lane: usize, last: u64) {
        self.ready.single_out(lane);
        self.single = Single::of(lane, self.unfenced_owner, &self.lasts, last);
    }

    /// Makes ranges of the newest words with something free ready; whether there was one.
    #[inline(never)]
    fn refill(&mut self, shared: &Shared, lane: usize, order: usize) -> bool {
        let lane = lane % MAX_ZONES;
        let zones = &mut *shared.zones_of(self.id).lock();
        let mut is_any = false;
        self.ready.of(lane, order).grow(order);
        while self.ready.of(lane, order).is_short(order)
            && let Some(newest) = zones.zones[lane].partial[order].len().checked_sub(1)
            && self.make_ready(shared, zones, lane, order, newest)
        {
            is_any = true;
        }
        is_any
    }

    /// Keeps a freed range of ours ready for the next request of its class.
    #[inline]
    pub(super) fn keep(&mut self, shared: &Shared, lane: usize, range: IovaRange) {
        let order = exact_order(range.pages()).unwrap_or(MAX_ORDER);
        let page = range.first().raw();
        if !self.ready.of(lane, order).keep(page) {
            self.spill(shared, lane, page, order);
        }
    }

    /// Lets go of what this core has pinned; whether it had.
    fn unpin_known(&mut self, range: IovaRange) -> bool {
        let page = range.first().raw();
        exact_order(range.pages())
            .zip(self.hot.known(page))
            .is_some_and(|(order, chunk)| chunk.unpin_own(self.owner, page, order))
    }

    /// A free that was found to be [`Freed::Marked`]: one call, so that the common path saves no registers for a second.
    #[inline(never)]
    fn free_marked(
        &mut self,
        shared: &Shared,
        range: IovaRange,
        state: State,
    ) -> Result<(), FreeError> {
        // Nothing that was loaded before is relied on from here: where there was no fence, `keep_single` keeps nothing.
        self.fence_free();
        if self.keep_single(range, state) {
            self.say_changed();
            return Ok(());
        }
        self.free_met(shared, range, state)
    }

    /// Keeps a single page of the zone singled out ready, in a chunk of this core with a designated remote freer, which has not
    /// freed it, and no other marks; `false` where anything of this is not so. For as long as there is one, all frees in
    /// its chunk come here.
    #[inline(always)]
    fn keep_single(&mut self, range: IovaRange, state: State) -> bool {
        let page = range.first().raw();
        let Some(chunk) = self.hot.known(page) else {
            return false;
        };
        let is_single = range.pages() == 1 && chunk.tag() == self.single.tag | GIVER;
        if !is_single || chunk.is_given(page, state) || !self.ready.singles.keep(page) {
            return false;
        }
        chunk.set_state(page, state.none());
        true
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
            self.say_changed();
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

    /// Keeps a range ready in a chunk of this core with marks; `false` where a remote core has marked the range itself.
    #[inline(always)]
    fn keep_marked(&mut self, shared: &Shared, range: IovaRange, state: State) -> bool {
        let page = range.first().raw();
        let Some(chunk) = self.hot.known(page) else {
            return false;
        };
        let tag = chunk.tag();
        // The state again: a core that collects for this one clears it before the mark. The tag was read again, too: a chunk that has
        // been taken from this one meanwhile has no marks of what was freed in it.
        let is_own = tag & OWNER == self.owner;
        if !is_own || chunk.is_met(tag, page, state) || chunk.state(page) != state {
            return false;
        }
        chunk.set_state(page, state.none());
        self.keep(shared, lane_of(tag), range);
        self.meet(shared, tag, page);
        true
    }

    /// Counts a free of our own in a chunk with such a tag, and collects the chunk where marks were met often enough.
    pub(super) fn meet(&mut self, shared: &Shared, tag: u64, page: u64) {
        // A chunk that only a designated remote freer marks is not better for being collected.
        self.meetings += u32::from(tag & PENDING != 0);
        if self.meetings >= MEETINGS {
            self.collect_met(shared, page);
        }
    }

    /// A free that was found to be [`Freed::Remote`]. Apart from the other one, whose registers cost a designated remote freer as
    /// much as the work.
    #[inline(never)]
    fn free_remote(
        &mut self,
        shared: &Shared,
        range: IovaRange,
        state: State,
    ) -> Result<(), FreeError> {
        if self.hot.give(self.owner, range.first().raw(), state) {
            self.say_changed();
            return Ok(());
        }
        self.free_elsewhere(shared, range)
    }

    /// A free that is not of a range of ours which may be kept ready.
    #[inline(never)]
    fn free_elsewhere(&mut self, shared: &Shared, range: IovaRange) -> Result<(), FreeError> {
        // As in `free_marked`; most come from there or are refused.
        self.fence_free();
        let freed = self.free_any(shared, range);
        self.say_changed();
        freed
    }

    /// The same, as far as it is the allocator's.
    fn free_any(&mut self, shared: &Shared, range: IovaRange) -> Result<(), FreeError> {
        let page = range.first().raw();
        if range.pages() < CHUNK_PAGES
            && let Some(chunk) = self.hot.chunk(shared, page)
        {
            if chunk.free_marked(self.owner, range) {
                let lane = chunk.lane();
                self.keep(shared, lane, range);
                return Ok(());
            }
            if self.hot.free_foreign(shared, self.owner, range) {
                return Ok(());
            }
        }
        self.free_slow(shared, range)
    }

    /// Says that the range at a page is about to be pinned or freed: before anything is loaded that this depends on.
    #[inline(always)]
    pub(super) fn say_changing(&self, page: u64) {
        self.changing.store(page, Ordering::Relaxed);
        if !planted!(ChangesUnfenced) {
            self.fences.light();
        }
    }

    /// The same of a free. Where it needs a fence of the CPU, that is made by [`Self::free_marked`] and
    /// [`Self::free_elsewhere`]: to ask here would cost each free 3 % more.
    #[inline(always)]
    fn say_freeing(&self, page: u64) {
        if planted!(FreesUnsaid) {
            return;
        }
        self.changing.store(page, Ordering::Relaxed);
        if !planted!(ChangesUnfenced) {
            Fences::light_by_kernel();
        }
    }

    /// Makes the fence that [`Self::say_freeing`] left out, where a free needs one of the CPU.
    #[inline(always)]
    fn fence_free(&self) {
        if self.unfenced_owner != self.owner {
            self.fences.light();
        }
    }

    /// Says that what was about to be changed is changed, or was found to be another's.
    #[inline(always)]
    pub(super) fn say_changed(&self) {
        // Release: a core that collects and sees this sees what has become of the range.
        self.changing.store(NO_PAGE, Ordering::Release);
    }

    /// A pin in another core's chunk, or where strangers have marked something.
    #[inline(never)]
    fn pin_elsewhere(&mut self, shared: &Shared, range: IovaRange) -> Result<Pinned, FreeError> {
        let pinned = self.pin_any(shared, range);
        self.say_changed();
        pinned
    }

    fn pin_any(&mut self, shared: &Shared, range: IovaRange) -> Result<Pinned, FreeError> {
        if range.pages() < CHUNK_PAGES
            && let Some(chunk) = self.hot.chunk(shared, range.first().raw())
            && chunk.pin_marked(self.owner, range)
        {
            return Ok(Pinned::new(range, self.space, false));
        }
        self.pin_slow(shared, range)
    }
}

impl ChunkCore {
    /// An allocation for which nothing is at hand. In parts, because a request would go through memory.
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
            && shared.drain.load(Ordering::Relaxed) == local.drained
            && let Some(lane) = local.lane_below(last.raw())
        {
            if local.ready.of(lane, order).is_empty() {
                if order == 0 {
                    local.single_out(lane, last.raw());
                }
                local.refill(shared, lane, order);
            }
            if let Some(page) = local.ready.of(lane, order).newest() {
                local.hot.chunk(shared, page);
            }
            if let Some(range) = take_from(local.ready.of(lane, order), &local.hot, order) {
                return Ok(range);
            }
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
        self.local.id
    }

    // Inlined whatever its size: out of line, the request and the answer would go through memory, which costs more than
    // everything else here.
    #[inline(always)]
    fn alloc(&mut self, request: Request) -> Result<IovaRange, AllocError> {
        let Self { shared, local, .. } = self;
        if shared.drain.load(Ordering::Relaxed) == local.drained
            && let Some(range) = local.take(&request)
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
        local.say_freeing(range.first().raw());
        match local.free_ready(range, false) {
            Freed::Done => {
                local.say_changed();
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
        let page = range.first().raw();
        local.say_changing(page);
        if let Some(order) = exact_order(range.pages())
            && let Some(chunk) = local.hot.known(page)
            && chunk.pin_own(local.owner, page, order)
        {
            local.say_changed();
            return Ok(Pinned::new(range, local.space, false));
        }
        local.pin_elsewhere(shared, range)
    }

    #[inline(always)]
    fn free_pinned(&mut self, pinned: Pinned) {
        let Self { shared, local, .. } = self;
        let range = pinned.range();
        if pinned.is_own(local.space) {
            match local.free_ready(range, true) {
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
        if !pinned.is_own(local.space) || !local.unpin_known(range) {
            local.unpin_slow(shared, pinned);
        }
    }

    fn park(&mut self) {
        self.local.deposit_all(&self.shared);
    }

    fn retire(&mut self) -> Option<RetiredChunk> {
        self.local.retire_one(&self.shared)
    }

    fn recycle(&mut self, chunk: RetiredChunk) {
        let page = chunk.first.raw();
        assert_eq!(chunk.space, self.local.space, "retired by another space");
        let (_, zone) = self
            .shared
            .zone_of(page)
            .expect("a retired chunk is one of a zone");
        zone.free.put(zone.index(page));
        self.shared.count_returned(self.local.id);
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
        self.shared.claims.release(self.local.id);
    }
}
