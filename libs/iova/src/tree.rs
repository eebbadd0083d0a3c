//! `TreeAllocator`: ranges packed to the top of the space, every operation logarithmic.
//!
//! The reference, and what [chunks](crate::ChunkAllocator) fall back to. Linux's allocator of 2015
//! walked along allocated ranges until a gap fitted: linear, and where lifetimes are random, every
//! time (*Utilizing the IOMMU Scalably*, USENIX ATC 2015, §4.1; *Efficient Intra-Operating System
//! Protection Against Harmful DMAs*, FAST 2015). Here the free gaps are in a tree that knows the
//! largest aligned request under each node ([`gaps`]), and allocated ranges are in a hash table by
//! first page ([`live`]).
//!
//! Flow: `alloc` finds the highest gap that fits at or below the request's limit, takes the highest
//! aligned place in it, and notes the range; `free` looks the range up exactly, removes it and
//! joins its pages with the gaps they touch. A range of `p` pages takes `p` pages: nothing is
//! rounded.
//!
//! Ownership: one [`lines::Lock`] guards everything, and is held for one operation. Handles own
//! nothing, so `park` does nothing.
//!
//! Cost: one contended line and three or four descents of the tree per allocation and free; for an
//! allocation that fails one, or 64 where it is aligned to more than its size. `tree_speed` in the
//! tests prints it. It does not scale with cores. Memory: 16 bytes per range out at up to 3/4 full
//! (powers of two), about 60 bytes per gap.
//!
//! Left out: chunks (`retire` never has one); a lower limit per request (reserve what a device must
//! not see).

mod gaps;
mod live;

use alloc::{sync::Arc, vec::Vec};
use core::fmt;

use gaps::Gaps;
use lines::Lock;
use live::Live;

use crate::allocator::SpaceId;
use crate::aperture;
use crate::claims::Claims;
use crate::wanted::{Wanted, order_of, range_at};
use crate::{
    AllocError, Aperture, ApertureError, CHUNK_PAGES, ClaimError, CoreAllocator, CoreId, FreeError,
    IovaAllocator, IovaPfn, IovaRange, Pinned, Request, ResetError, Stats,
};

/// In the size of a range that is pinned (sizes are at most 2^52).
const PINNED: u64 = 1 << 63;

/// The space itself, without a lock: for allocators that put caches before it.
pub struct Tree {
    gaps: Gaps,
    /// Sizes of the ranges out.
    live: Live,
    live_pages: u64,
    usable: Vec<IovaRange>,
}

impl Tree {
    /// All of `usable` free: ranges that ascend and do not touch, as
    /// [`Aperture::usable`](crate::Aperture::usable) has them.
    pub fn new(usable: &[IovaRange]) -> Self {
        Self {
            gaps: Gaps::new(usable),
            live: Live::new(),
            live_pages: 0,
            usable: usable.to_vec(),
        }
    }

    /// `pages` pages (1 to 2^52) at a multiple of `2^align_order` (at most 2^52; raised to the
    /// power of two that holds `pages`), none above `last`.
    pub fn alloc(&mut self, pages: u64, align_order: u8, last: IovaPfn) -> Option<IovaRange> {
        let range = self.take(pages, align_order, last)?;
        self.live.set(range.first().raw(), pages);
        Some(range)
    }

    /// As [`Self::alloc`], for an allocator that gives it back unchecked: no caller can free it.
    pub fn take(&mut self, pages: u64, align_order: u8, last: IovaPfn) -> Option<IovaRange> {
        let order = align_order.max(order_of(pages));
        let first = self.gaps.take(&Wanted { pages, order, last })?;
        self.live_pages += pages;
        Some(range_at(first, pages))
    }

    /// Gives back what [`Self::take`] gave.
    pub fn give(&mut self, range: IovaRange) {
        self.live_pages -= range.pages();
        self.gaps.give(range.first().raw(), range.last().raw());
    }

    /// Takes back exactly what [`Self::alloc`] gave, if it is not pinned.
    ///
    /// # Errors
    /// [`FreeError`]; nothing has changed then.
    pub fn free(&mut self, range: IovaRange) -> Result<(), FreeError> {
        self.remove(range, range.pages())
    }

    /// Takes back what is pinned.
    ///
    /// # Errors
    /// [`FreeError`]; nothing has changed then.
    pub fn free_pinned(&mut self, range: IovaRange) -> Result<(), FreeError> {
        self.remove(range, range.pages() | PINNED)
    }

    /// Pins what is allocated and not pinned, which keeps it from [`Self::free`], or the other way
    /// round.
    ///
    /// # Errors
    /// [`FreeError`]; nothing has changed then.
    pub fn set_pinned(&mut self, range: IovaRange, is_pinned: bool) -> Result<(), FreeError> {
        let size = |is_pinned| range.pages() | if is_pinned { PINNED } else { 0 };
        self.check_out(range, size(!is_pinned))?;
        self.live.set(range.first().raw(), size(is_pinned));
        Ok(())
    }

    /// Size of the range out that starts at `first`.
    pub fn pages_at(&self, first: IovaPfn) -> Option<u64> {
        Some(self.live.get(first.raw())? & !PINNED)
    }

    /// Ranges out.
    pub fn live_ranges(&self) -> u64 {
        self.live.len() as u64
    }

    /// Pages of the ranges out, and of those that were [taken](Self::take).
    pub fn live_pages(&self) -> u64 {
        self.live_pages
    }

    /// Chunks of 512 pages in which any page is out. Linear in the number of gaps.
    pub fn chunks(&self) -> u64 {
        let (mut chunks, mut counted) = (0, 0);
        // Pages `first..end` are out; runs come in ascending order.
        let mut add = |first: u64, end: u64| {
            let (from, to) = (counted.max(first / CHUNK_PAGES), end.div_ceil(CHUNK_PAGES));
            if first < end && from < to {
                chunks += to - from;
                counted = to;
            }
        };
        let mut gaps = Vec::new();
        self.gaps
            .for_each(&mut |first, last| gaps.push((first, last)));
        let mut gaps = gaps.into_iter().peekable();
        for range in &self.usable {
            let (mut next, end) = (range.first().raw(), range.last().raw());
            while let Some((first, last)) = gaps.next_if(|&(first, _)| first <= end) {
                add(next, first);
                next = last + 1;
            }
            add(next, end + 1);
        }
        chunks
    }

    /// Bytes of bookkeeping.
    pub fn bytes(&self) -> usize {
        self.gaps.bytes() + self.live.bytes() + self.usable.capacity() * size_of::<IovaRange>()
    }

    fn remove(&mut self, range: IovaRange, size: u64) -> Result<(), FreeError> {
        self.check_out(range, size)?;
        self.live.remove(range.first().raw());
        self.give(range);
        Ok(())
    }

    fn check_out(&self, range: IovaRange, size: u64) -> Result<(), FreeError> {
        match self.live.get(range.first().raw()) == Some(size) {
            true => Ok(()),
            false => Err(self.refusal(range)),
        }
    }

    #[cold]
    fn refusal(&self, range: IovaRange) -> FreeError {
        let (first, last) = (range.first(), range.last());
        if !aperture::allows(&self.usable, range) {
            FreeError::Outside { range }
        } else if self.pages_at(first) == Some(range.pages())
            || self.gaps.holds(first.raw(), last.raw())
        {
            // It is free, or pinned by a core that is about to free it, or to be unpinned without
            // having been pinned.
            FreeError::NotAllocated { range }
        } else {
            FreeError::Mismatch { range }
        }
    }
}

/// Ranges packed to the top of the space in logarithmic time, behind one lock. A request gets the
/// highest place there is; one that is aligned to more than its size, the highest free block of
/// that alignment, or where none is free, a place in one of the 64 highest gaps that could hold it.
///
/// ```
/// use iova::{Aperture, CoreAllocator, CoreId, IovaAllocator, IovaPfn, Request, TreeAllocator};
///
/// let space = TreeAllocator::new(Aperture::of_bits(48)?, 1)?;
/// let mut core = space.claim(CoreId(0))?;
/// let ring = core.alloc(Request::pages(3).at_most(IovaPfn::new(0xf_ffff)))?;
/// assert_eq!((ring.first(), ring.pages()), (IovaPfn::new(0xf_fffc), 3));
/// core.free(ring)?;
/// assert!(core.free(ring).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TreeAllocator(Arc<Shared>);

struct Shared {
    aperture: Aperture,
    claims: Claims,
    space: SpaceId,
    /// The tree, and how often it was asked: every operation leaves its core's memory.
    inner: Lock<(Tree, u64)>,
}

impl TreeAllocator {
    /// All of `aperture` free, for `cores` cores (1 to [`MAX_CORES`](crate::MAX_CORES)).
    ///
    /// # Errors
    /// [`ApertureError::Cores`].
    pub fn new(aperture: Aperture, cores: usize) -> Result<Self, ApertureError> {
        Ok(Self(Arc::new(Shared {
            claims: Claims::new(cores)?,
            space: SpaceId::next(),
            inner: Lock::new((Tree::new(aperture.usable()), 0)),
            aperture,
        })))
    }
}

impl IovaAllocator for TreeAllocator {
    type Core = TreeCore;

    fn claim(&self, core: CoreId) -> Result<TreeCore, ClaimError> {
        self.0.claims.claim(core)?;
        let shared = Arc::clone(&self.0);
        Ok(TreeCore { shared, core })
    }

    fn cores(&self) -> usize {
        self.0.claims.cores()
    }

    fn aperture(&self) -> &Aperture {
        &self.0.aperture
    }

    fn stats(&self) -> Stats {
        let (tree, slow) = &*self.0.inner.lock();
        Stats {
            live_ranges: tree.live_ranges(),
            live_pages: tree.live_pages(),
            chunks: tree.chunks(),
            bytes: tree.bytes() + size_of::<Shared>() + self.cores(),
            slow: *slow,
            ..Stats::default()
        }
    }

    fn reset(&self) -> Result<(), ResetError> {
        let usable = self.0.aperture.usable();
        let reset = || *self.0.inner.lock() = (Tree::new(usable), 0);
        self.0.claims.while_idle(reset)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// One core's handle of a [`TreeAllocator`]. It owns nothing but its number.
#[derive(Debug)]
pub struct TreeCore {
    shared: Arc<Shared>,
    core: CoreId,
}

impl TreeCore {
    fn with<R>(&self, work: impl FnOnce(&mut Tree) -> R) -> R {
        let mut inner = self.shared.inner.lock();
        inner.1 += 1;
        work(&mut inner.0)
    }
}

impl CoreAllocator for TreeCore {
    fn core(&self) -> CoreId {
        self.core
    }

    fn alloc(&mut self, request: Request) -> Result<IovaRange, AllocError> {
        let wanted = Wanted::of(&request)?;
        self.with(|tree| tree.alloc(wanted.pages, wanted.order, wanted.last))
            .ok_or_else(|| wanted.failure(&self.shared.aperture, 0))
    }

    fn free(&mut self, range: IovaRange) -> Result<(), FreeError> {
        self.with(|tree| tree.free(range))
    }

    fn pin(&mut self, range: IovaRange) -> Result<Pinned, FreeError> {
        self.with(|tree| tree.set_pinned(range, true))?;
        Ok(Pinned::new(range, self.shared.space, false))
    }

    fn free_pinned(&mut self, pinned: Pinned) {
        pinned.check(self.shared.space);
        self.with(|tree| tree.free_pinned(pinned.range()))
            .expect("what this allocator pinned is allocated");
    }

    fn unpin(&mut self, pinned: Pinned) {
        pinned.check(self.shared.space);
        self.with(|tree| tree.set_pinned(pinned.range(), false))
            .expect("what this allocator pinned is allocated");
    }

    fn park(&mut self) {}
}

impl Drop for TreeCore {
    fn drop(&mut self) {
        self.shared.claims.release(self.core);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
