//! One core's handle: the paths that most operations take, without a lock and without a read-modify-write.

use alloc::sync::Arc;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;

use lines::Ordering;

use super::Shared;
use super::hot::Hot;
use super::lane::Lane;
use super::layout::{Chunk, MAX_ORDER, class_of};
use super::ready::Ready;
use super::state::pages_of;
use super::zone::MAX_ZONES;
use crate::allocator::SpaceId;
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

/// What one core has for itself.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) id: CoreId,
    /// The owner of this core's chunks.
    pub(super) owner: u64,
    pub(super) space: SpaceId,
    /// The last call for drains that was answered.
    pub(super) drained: u64,
    pub(super) hot: Hot,
    /// One lane per zone, highest first; those past the last zone are never reached.
    pub(super) lanes: [Lane; MAX_ZONES],
    /// The first and last pages of the zones.
    pub(super) bases: [u64; MAX_ZONES],
    pub(super) lasts: [u64; MAX_ZONES],
    pub(super) ready: Ready,
    /// Allocations that failed since the last call for drains, and how many must.
    pub(super) waited: u32,
    pub(super) patience: u32,
    /// Whether the allocation that is under way has looked wherever something could be.
    pub(super) is_sure: bool,
}

/// The class of a range of so many pages; past [`MAX_ORDER`] for 0 and for more than 256.
#[inline(always)]
pub(super) fn order_of(pages: u64) -> usize {
    // The logarithm of an odd number: that is one instruction.
    let order = (pages.wrapping_mul(2).wrapping_sub(1) | 1).ilog2() as usize;
    if pages <= 1 << MAX_ORDER {
        order
    } else {
        usize::MAX
    }
}

impl Local {
    /// A range that is kept ready in the highest zone all of which lies at or below `last`. It calls nothing, nor does
    /// [`Self::free_ready`]: what is inlined of them saves no registers.
    #[inline(always)]
    pub(super) fn take(&mut self, order: usize, last: u64) -> Option<IovaRange> {
        let lane = if last >= self.lasts[0] {
            0
        } else {
            self.lane_below(last)?
        };
        let ready = self.ready.of(class_of(lane, order));
        let page = ready.newest()?;
        self.hot.known(page)?.hand_out(page, order);
        ready.take();
        Some(IovaRange::within_space(page, pages_of(order)))
    }

    /// The highest zone all of which lies at or below a page.
    #[inline(always)]
    fn lane_below(&self, last: u64) -> Option<usize> {
        let lane = self.lasts.iter().filter(|end| last < **end).count();
        (lane < MAX_ZONES).then_some(lane)
    }

    /// Keeps a range of ours ready that `free` frees, which says whether it did.
    #[inline(always)]
    fn free_ready(&mut self, range: IovaRange, free: impl FnOnce(&Chunk) -> bool) -> bool {
        let page = range.first().raw();
        // Of the address and the size, not of what is found there: whoever allocates next waits for this.
        let lane = if page >= self.bases[0] {
            0
        } else {
            self.bases.iter().filter(|base| page < **base).count()
        };
        let order = (range.pages() | 1 << 63).trailing_zeros() as usize;
        let ready = self.ready.of(class_of(lane, order));
        let is_freed = ready.has_room() && self.hot.known(page).is_some_and(free);
        if is_freed {
            ready.keep(page);
        }
        is_freed
    }

    /// Makes ranges of the newest words with something free ready; whether there was one.
    #[inline(never)]
    fn refill(&mut self, shared: &Shared, lane: usize, order: usize) -> bool {
        let lane = lane % MAX_ZONES;
        let mut is_any = false;
        self.ready.of(class_of(lane, order)).grow(order);
        while self.ready.of(class_of(lane, order)).is_short(order)
            && let Some(newest) = self.lanes[lane].partial[order].len().checked_sub(1)
            && self.make_ready(shared, lane, order, newest)
        {
            is_any = true;
        }
        is_any
    }

    /// Keeps a freed range of ours ready for the next request of its class.
    #[inline]
    pub(super) fn keep(&mut self, shared: &Shared, page: u64, class: u8) {
        if !self.ready.of(class).keep(page) {
            self.spill(shared, page, class);
        }
    }

    /// A free that is not of a range of ours which may be kept ready.
    #[inline(never)]
    fn free_elsewhere(&mut self, shared: &Shared, range: IovaRange) -> Result<(), FreeError> {
        if self.hot.give(self.owner, range) {
            return Ok(());
        }
        let page = range.first().raw();
        if let Some(chunk) = self.hot.chunk(shared, page) {
            if chunk.free_marked(self.owner, range) {
                let class = chunk.class(order_of(range.pages()));
                self.keep(shared, page, class);
                return Ok(());
            }
            if self.hot.free_foreign(shared, self.owner, range) {
                return Ok(());
            }
        }
        self.free_slow(shared, range)
    }

    /// A pin in another core's chunk, or where strangers have marked something.
    #[inline(never)]
    fn pin_elsewhere(&mut self, shared: &Shared, range: IovaRange) -> Result<Pinned, FreeError> {
        if let Some(chunk) = self.hot.chunk(shared, range.first().raw())
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
        let order = order_of(pages);
        if order <= MAX_ORDER
            && usize::from(align_order) <= order
            && shared.drain.load(Ordering::Relaxed) == local.drained
            && let Some(lane) = local.lane_below(last.raw())
        {
            if local.ready.of(class_of(lane, order)).is_empty() {
                local.refill(shared, lane, order);
            }
            if let Some(page) = local.ready.of(class_of(lane, order)).newest() {
                local.hot.chunk(shared, page);
            }
            if let Some(range) = local.take(order, last.raw()) {
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
        let order = order_of(request.pages);
        if order <= MAX_ORDER
            && usize::from(request.align_order) <= order
            && shared.drain.load(Ordering::Relaxed) == local.drained
            && let Some(range) = local.take(order, request.last.raw())
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
        let owner = local.owner;
        if local.free_ready(range, |chunk| chunk.free_own(owner, range)) {
            return Ok(());
        }
        local.free_elsewhere(shared, range)
    }

    #[inline(always)]
    fn pin(&mut self, range: IovaRange) -> Result<Pinned, FreeError> {
        let Self { shared, local, .. } = self;
        if let Some(chunk) = local.hot.known(range.first().raw())
            && chunk.pin_own(local.owner, range)
        {
            return Ok(Pinned::new(range, local.space, false));
        }
        local.pin_elsewhere(shared, range)
    }

    #[inline(always)]
    fn free_pinned(&mut self, pinned: Pinned) {
        let Self { shared, local, .. } = self;
        let (range, owner) = (pinned.range(), local.owner);
        if !pinned.is_own(local.space)
            || !local.free_ready(range, |chunk| chunk.free_pinned_own(owner, range))
        {
            local.free_pinned_slow(shared, pinned, shared.retires);
        }
    }

    fn free_without_table(&mut self, pinned: Pinned) {
        self.local.free_pinned_slow(&self.shared, pinned, false);
    }

    #[inline(always)]
    fn unpin(&mut self, pinned: Pinned) {
        let Self { shared, local, .. } = self;
        let range = pinned.range();
        if !pinned.is_own(local.space)
            || !(local.hot.known(range.first().raw()))
                .is_some_and(|chunk| chunk.unpin_own(local.owner, range))
        {
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
