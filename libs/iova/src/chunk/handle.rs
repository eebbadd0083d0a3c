//! One core's handle: the paths that most operations take, without a lock and without a read-modify-write.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;

use lines::Ordering;

use super::Shared;
use super::lane::{Lane, Ready};
use super::layout::{Chunk, MARKS, MAX_ORDER, bit_of, get, set, word_of};
use super::zone::MAX_ZONES;
use crate::{
    AllocError, CHUNK_PAGES, CoreAllocator, CoreId, FreeError, IovaRange, Pinned, Request,
    RetiredChunk,
};

/// Chunks whose place the handle remembers.
const HOT: usize = if cfg!(loom) { 2 } else { 64 };

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
    /// How chunks of this core are tagged.
    pub(super) tag: u64,
    /// The last call for drains that was answered.
    pub(super) drained: u64,
    pub(super) hot: Hot,
    /// One lane per zone, highest first; those past the last zone are never reached.
    pub(super) lanes: [Lane; MAX_ZONES],
    /// The lane that is tried first.
    pub(super) preferred: usize,
    /// Its last page, and the class of its single pages.
    pub(super) top: u64,
    pub(super) first_class: u8,
    pub(super) ready: Ready,
    /// Freed runs whose chunks wait to be retired.
    pub(super) leaving_runs: Vec<u64>,
}

/// A direct-mapped cache of the directory.
#[derive(Debug)]
pub(super) struct Hot {
    keys: [u64; HOT],
    chunks: [Arc<Chunk>; HOT],
}

impl Hot {
    pub(super) fn new() -> Self {
        // Looked at by nobody: its key is no chunk's.
        let none = Arc::new(Chunk::new());
        Self {
            keys: [u64::MAX; HOT],
            chunks: core::array::from_fn(|_| Arc::clone(&none)),
        }
    }

    /// The chunk of `page`; `None` where the page is in no zone or its block was never used.
    #[inline(always)]
    pub(super) fn chunk(&mut self, shared: &Shared, page: u64) -> Option<&Chunk> {
        let key = page / CHUNK_PAGES;
        let slot = key as usize % HOT;
        if self.keys[slot] != key {
            self.load(shared, page, slot)?;
        }
        Some(&self.chunks[slot])
    }

    #[cold]
    #[inline(never)]
    fn load(&mut self, shared: &Shared, page: u64, slot: usize) -> Option<()> {
        let chunk = shared.zone_of(page)?.1.block(page)?.chunk(page);
        self.keys[slot] = page / CHUNK_PAGES;
        self.chunks[slot] = Arc::clone(chunk);
        Some(())
    }
}

/// The class of a range of so many pages; past [`MAX_ORDER`] for 0 and for more than 256.
#[inline]
fn order_of(pages: u64) -> usize {
    (u64::BITS - pages.wrapping_sub(1).leading_zeros()) as usize
}

impl Local {
    /// A range that is kept ready.
    #[inline(always)]
    fn take(&mut self, shared: &Shared, order: usize) -> Option<IovaRange> {
        let page = self.ready.of(self.first_class + order as u8).pop()?;
        let chunk = self.hot.chunk(shared, page)?;
        let word = word_of(page);
        set(chunk.out(word), get(chunk.out(word)) | bit_of(page));
        Some(IovaRange::within_space(page, 1 << order))
    }

    /// Makes ranges of the newest word with something free ready.
    #[inline(never)]
    fn refill(&mut self, shared: &Shared, order: usize) -> bool {
        let lane = self.preferred % MAX_ZONES;
        let words = self.lanes[lane].partial[order].len();
        words > 0 && self.make_ready(shared, lane, order, words - 1)
    }

    /// Keeps a freed range of ours ready for the next request of its class.
    #[inline(always)]
    pub(super) fn keep(&mut self, shared: &Shared, page: u64, class: u8) {
        if !self.ready.keep(class, page) {
            self.spill(shared, page, class);
        }
    }

    /// A free in another core's chunk. Out of line: its registers would cost a core's own frees a quarter.
    #[inline(never)]
    fn free_elsewhere(&mut self, shared: &Shared, range: IovaRange) -> Result<(), FreeError> {
        if let Some(chunk) = self.hot.chunk(shared, range.first().raw())
            && chunk.free_foreign(self.tag, range)
        {
            return Ok(());
        }
        self.free_slow(shared, range)
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
            && request.last.raw() >= local.top
            && shared.drain.load(Ordering::Relaxed) == local.drained
        {
            if let Some(range) = local.take(shared, order) {
                return Ok(range);
            }
            if local.refill(shared, order)
                && let Some(range) = local.take(shared, order)
            {
                return Ok(range);
            }
        }
        // A new one, without the memory, which means nothing here: were it the caller's, it would be passed by reference, and
        // so lie in memory on the common path too.
        let wanted = Request::pages(request.pages)
            .at_most(request.last)
            .aligned(request.align_order);
        local.alloc_slow(shared, wanted)
    }

    #[inline(always)]
    fn free(&mut self, range: IovaRange) -> Result<(), FreeError> {
        let Self { shared, local, .. } = self;
        let page = range.first().raw();
        if let Some(chunk) = local.hot.chunk(shared, page)
            && let Some(before) = chunk.own_unmarked(local.tag, range)
        {
            let word = word_of(page);
            set(chunk.out(word), before & !bit_of(page));
            let class = chunk.class(word);
            local.keep(shared, page, class);
            return Ok(());
        }
        local.free_elsewhere(shared, range)
    }

    #[inline(always)]
    fn pin(&mut self, range: IovaRange) -> Result<Pinned, FreeError> {
        let Self { shared, local, .. } = self;
        let page = range.first().raw();
        if let Some(chunk) = local.hot.chunk(shared, page)
            && chunk.pin_own(local.tag, range)
        {
            return Ok(Pinned::new(range, false));
        }
        local.pin_slow(shared, range)
    }

    #[inline(always)]
    fn free_pinned(&mut self, pinned: Pinned) {
        let Self { shared, local, .. } = self;
        let page = pinned.range().first().raw();
        if !pinned.is_foreign()
            && let Some(chunk) = local.hot.chunk(shared, page)
            && chunk.tag() & !MARKS == local.tag
        {
            let (word, bit) = (word_of(page), bit_of(page));
            let (class, pinned) = (chunk.class(word), get(chunk.pinned(word)));
            // Not pinned any more: a claim, since a park of ours.
            if pinned & bit != 0 {
                set(chunk.pinned(word), pinned & !bit);
                local.keep(shared, page, class);
                return;
            }
        }
        local.free_pinned_slow(shared, pinned);
    }

    #[inline(always)]
    fn unpin(&mut self, pinned: Pinned) {
        let Self { shared, local, .. } = self;
        let page = pinned.range().first().raw();
        if !pinned.is_foreign()
            && let Some(chunk) = local.hot.chunk(shared, page)
            && chunk.unpin_own(local.tag, page)
        {
            return;
        }
        local.unpin_slow(shared, pinned);
    }

    fn park(&mut self) {
        self.local.deposit(&self.shared);
    }

    fn retire(&mut self) -> Option<RetiredChunk> {
        self.local.retire_one(&self.shared)
    }

    fn recycle(&mut self, chunk: RetiredChunk) {
        let page = chunk.first.raw();
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
