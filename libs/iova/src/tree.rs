//! `TreeAllocator`: ranges packed to the top of the space, every operation logarithmic.
//!
//! The reference, and what [chunks](crate::ChunkAllocator) fall back to. Linux's allocator of 2015 walked along
//! allocated ranges until a gap fitted: linear, and where lifetimes are random, every time (*Utilizing the IOMMU
//! Scalably*, USENIX ATC 2015, §4.1; *Efficient Intra-Operating System Protection Against Harmful DMAs*, FAST 2015).
//! Here the free gaps are in a tree that knows the largest aligned request under each node
//! ([`gaps`]), and what is out is in a hash table by first page ([`live`]).
//!
//! Flow: `alloc` finds the highest gap that fits at or below the request's limit, takes the highest aligned place
//! in it, and notes the range; `free` looks the range up exactly, removes it and joins its pages with the gaps
//! they touch. A range of `p` pages takes `p` pages: nothing is rounded.
//!
//! Who owns what: one [`lines::Lock`] guards everything, and is held for one operation. Handles own nothing, so
//! that `park` does nothing.
//!
//! Cost: one contended line and three or four descents of the tree per allocation and free, one or two for an allocation that
//! fails; `tree_speed` in the tests prints it. It does not scale with cores. Memory: 16 bytes per range out
//! at up to 3/4 full (powers of two), about 60 bytes per gap.
//!
//! Left out: chunks (`retire` never has one); a lower limit per request (reserve what a device must not see).

mod allocator;
mod gaps;
mod live;

use alloc::vec::Vec;

pub use allocator::{TreeAllocator, TreeCore};
use gaps::Gaps;
use live::Live;

use crate::wanted::{order_of, range_at};
use crate::{CHUNK_PAGES, FreeError, IovaPfn, IovaRange, aperture};

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
    /// All of `usable` free: ranges that ascend and do not touch, as [`Aperture::usable`](crate::Aperture::usable) has them.
    pub fn new(usable: &[IovaRange]) -> Self {
        Self {
            gaps: Gaps::new(usable),
            live: Live::new(),
            live_pages: 0,
            usable: usable.to_vec(),
        }
    }

    /// `pages` pages (1 to 2^52) at a multiple of `2^align_order` (at most 2^52; raised to the power of two that
    /// holds `pages`), none above `last`.
    pub fn alloc(&mut self, pages: u64, align_order: u8, last: IovaPfn) -> Option<IovaRange> {
        let range = self.take(pages, align_order, last)?;
        self.live.set(range.first().raw(), pages);
        Some(range)
    }

    /// As [`Self::alloc`], for an allocator that gives it back unchecked: no caller can free it.
    pub fn take(&mut self, pages: u64, align_order: u8, last: IovaPfn) -> Option<IovaRange> {
        let order = align_order.max(order_of(pages));
        let first = self.gaps.take(pages, order, last.raw())?;
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
        self.check_out(range, range.pages())?;
        self.live.remove(range.first().raw());
        self.give(range);
        Ok(())
    }

    /// Pins what is allocated and not pinned, which keeps it from [`Self::free`], or the other way round.
    ///
    /// # Errors
    /// [`FreeError`]; nothing has changed then.
    pub fn set_pinned(&mut self, range: IovaRange, is_pinned: bool) -> Result<(), FreeError> {
        let (free, pinned) = (range.pages(), range.pages() | PINNED);
        let (from, to) = if is_pinned {
            (free, pinned)
        } else {
            (pinned, free)
        };
        self.check_out(range, from)?;
        self.live.set(range.first().raw(), to);
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
            // It is free, or pinned by somebody who is about to free it, or is to be unpinned and was not pinned.
            FreeError::NotAllocated { range }
        } else {
            FreeError::Mismatch { range }
        }
    }

    /// Panics where gaps and ranges out do not divide the usable pages (nothing may be [taken](Self::take)). Linear.
    #[cfg(any(all(test, not(loom)), debug_assertions))]
    pub fn check(&self) {
        let live = self.live.iter();
        let mut pieces: Vec<_> = live.map(|(first, size)| (first, size & !PINNED)).collect();
        let mut add = |first, last| pieces.push((first, last + 1 - first));
        self.gaps.for_each(&mut add);
        pieces.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (first, pages) in pieces {
            match joined.last_mut() {
                Some((start, sum)) if *start + *sum == first => *sum += pages,
                _ => joined.push((first, pages)),
            }
        }
        let usable = self.usable.iter();
        let usable = usable.map(|range| (range.first().raw(), range.pages()));
        assert!(usable.eq(joined), "a page is in no piece, or in two");
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
