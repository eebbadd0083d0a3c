//! One core's handle: the paths that most operations take, without a lock and without a read-modify-write.

use alloc::sync::Arc;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;

use lines::Ordering;

use super::Shared;
use super::hot::Hot;
use super::lane::Lane;
use super::layout::{MARKS, MAX_ORDER, class_of, owner_of};
use super::ready::Ready;
use super::state::pages_of;
use super::zone::MAX_ZONES;
use crate::allocator::SpaceId;
use crate::{
    AllocError, CoreAllocator, CoreId, FreeError, IovaRange, Pinned, Request, RetiredChunk,
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
    /// The owner of this core's chunks, and how those of the highest zone are tagged that have no marks.
    pub(super) owner: u64,
    pub(super) space: SpaceId,
    /// The last call for drains that was answered.
    pub(super) drained: u64,
    pub(super) hot: Hot,
    /// One lane per zone, highest first; those past the last zone are never reached.
    pub(super) lanes: [Lane; MAX_ZONES],
    /// The last page of the highest zone.
    pub(super) top: u64,
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

/// The same of a range that is a power of two.
#[inline(always)]
fn order_of_power(pages: u64) -> usize {
    // A bit that is always there: of 0 the count would be another instruction.
    (pages | 1 << 63).trailing_zeros() as usize
}

impl Local {
    /// A range that is kept ready.
    #[inline(always)]
    fn take(&mut self, shared: &Shared, order: usize) -> Option<IovaRange> {
        let page = self.ready.highest(order).take()?;
        self.hot.chunk(shared, page)?.hand_out(page, order);
        Some(IovaRange::within_space(page, pages_of(order)))
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

    /// A range that is kept ready at or below a limit that cuts the highest zone: in the highest one all of which lies there.
    #[inline(never)]
    pub(super) fn take_below(
        &mut self,
        shared: &Shared,
        order: usize,
        last: u64,
    ) -> Option<IovaRange> {
        let lane = self.lanes.iter().position(|lane| lane.last <= last)?;
        let class = class_of(lane, order);
        if self.ready.of(class).is_empty() {
            self.refill(shared, lane, order);
        }
        let page = self.ready.of(class).take()?;
        self.hot.chunk(shared, page)?.hand_out(page, order);
        Some(IovaRange::within_space(page, pages_of(order)))
    }

    /// Keeps a freed range of ours ready for the next request of its class.
    #[inline]
    pub(super) fn keep(&mut self, shared: &Shared, page: u64, class: u8) {
        if !self.ready.of(class).keep(page) {
            self.spill(shared, page, class);
        }
    }

    /// The same of an order of the highest zone.
    #[inline(always)]
    fn keep_highest(&mut self, shared: &Shared, page: u64, order: usize) {
        if !self.ready.highest(order).keep(page) {
            self.spill(shared, page, class_of(0, order));
        }
    }

    /// A free in another core's chunk whose giver we are not, or where strangers have marked something. Out of line: its
    /// registers would cost a core's own frees a quarter.
    #[inline(never)]
    fn free_elsewhere(&mut self, shared: &Shared, range: IovaRange) -> Result<(), FreeError> {
        let page = range.first().raw();
        if let Some(chunk) = self.hot.chunk(shared, page) {
            let tag = chunk.tag();
            let is_unmarked = owner_of(tag) == self.owner && tag & MARKS == 0;
            if is_unmarked && chunk.free_own(tag, range) || chunk.free_marked(self.owner, range) {
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
        {
            if request.last.raw() < local.top {
                if let Some(range) = local.take_below(shared, order, request.last.raw()) {
                    return Ok(range);
                }
            } else if let Some(range) = local.take(shared, order) {
                return Ok(range);
            } else if local.refill(shared, 0, order)
                && let Some(range) = local.take(shared, order)
            {
                return Ok(range);
            }
        }
        // A new one, without the memory, which means nothing here: were it the caller's, it would be passed by reference, and
        // so lie in memory on the common path too.
        let wanted = Request {
            pages: request.pages,
            last: request.last,
            align_order: request.align_order,
            asks: request.asks,
        };
        local.alloc_slow(shared, wanted)
    }

    #[inline(always)]
    fn free(&mut self, range: IovaRange) -> Result<(), FreeError> {
        let Self { shared, local, .. } = self;
        let page = range.first().raw();
        if let Some(chunk) = local.hot.chunk(shared, page)
            && chunk.free_own(local.owner, range)
        {
            // Of the size and not of what was found there: whoever allocates next waits for this.
            local.keep_highest(shared, page, order_of_power(range.pages()));
            return Ok(());
        }
        if local.hot.give(local.owner, range) {
            return Ok(());
        }
        local.free_elsewhere(shared, range)
    }

    #[inline(always)]
    fn pin(&mut self, range: IovaRange) -> Result<Pinned, FreeError> {
        let Self { shared, local, .. } = self;
        let page = range.first().raw();
        if let Some(chunk) = local.hot.chunk(shared, page)
            && chunk.pin_own(local.owner, range)
        {
            return Ok(Pinned::new(range, local.space, false));
        }
        local.pin_elsewhere(shared, range)
    }

    #[inline(always)]
    fn free_pinned(&mut self, pinned: Pinned) {
        let Self { shared, local, .. } = self;
        let (range, page) = (pinned.range(), pinned.range().first().raw());
        if pinned.is_own(local.space)
            && let Some(chunk) = local.hot.chunk(shared, page)
            && chunk.free_pinned_own(local.owner, range)
        {
            local.keep_highest(shared, page, order_of_power(range.pages()));
            return;
        }
        local.free_pinned_slow(shared, pinned);
    }

    #[inline(always)]
    fn unpin(&mut self, pinned: Pinned) {
        let Self { shared, local, .. } = self;
        let range = pinned.range();
        if pinned.is_own(local.space)
            && let Some(chunk) = local.hot.chunk(shared, range.first().raw())
            && chunk.unpin_own(local.owner, range)
        {
            return;
        }
        local.unpin_slow(shared, pinned);
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
