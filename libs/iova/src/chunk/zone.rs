//! A zone: the part of the aperture below one address limit that is handed out in chunks.
//!
//! Zones end at address limits (4, 64 and 512 GiB, the aperture's end), so that a device of 32 bits and one of 64 never search
//! each other's space, and are bounded in length, so that the directory is a plain array. What no zone covers (odd ends,
//! pieces between reserved regions, the rest of a huge aperture) is the tree's.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use lines::{AtomicBool, AtomicU64, CachePadded, Ordering};
use once_cell::race::OnceBox;

use super::bitmap::Bitmap;
use super::layout::{BLOCK_CHUNKS, BLOCK_SHIFT, Block, Chunk, chunk_of, new_block};
use crate::wanted::range_at;
use crate::{Aperture, CHUNK_PAGES, IovaPfn, IovaRange};

/// Most zones of a space: one per limit and one above; a power of two, for the fast path.
pub(super) const MAX_ZONES: usize = 4;

/// Last pages of the address limits that get zones of their own: 32 bits, 36, and 39 (the least a VT-d unit translates).
const LIMITS: [u64; MAX_ZONES - 1] = [
    (1 << (32 - 12)) - 1,
    (1 << (36 - 12)) - 1,
    (1 << (39 - 12)) - 1,
];

#[derive(Debug)]
pub(super) struct Zone {
    /// First page, a multiple of [`CHUNK_PAGES`].
    base: u64,
    /// The page of the chunk that has number 0, at or below `base`: a multiple of 64 chunks, so that a run of up to 64 chunks,
    /// which is aligned, lies in one word of a set.
    origin: u64,
    chunks: usize,
    /// Blocks by their number; the first one's is `first_key`. A block may reach past the zone's ends; the chunks there
    /// stay unused.
    blocks: Box<[OnceBox<Arc<Block>>]>,
    first_key: u64,
    /// Chunks that nobody has.
    pub(super) free: Bitmap,
    /// Chunks with ranges in use whose owner parked.
    pub(super) orphans: Bitmap,
    /// Chunks that nobody has, whose leaf tables wait to be reclaimed. Has room for none where they do not.
    pub(super) spent: Bitmap,
    /// A hint whether there are any.
    has_spent: AtomicBool,
    /// Calls for drains of this zone so far.
    pub(super) calls: CachePadded<AtomicU64>,
    /// Its number.
    lane: usize,
}

impl Zone {
    fn new(base: u64, chunks: usize, retires: bool) -> Self {
        let first_key = base >> BLOCK_SHIFT;
        let last_key = (base + chunks as u64 * CHUNK_PAGES - 1) >> BLOCK_SHIFT;
        let blocks = (first_key..=last_key).map(|_| OnceBox::new()).collect();
        let origin = base & !(64 * CHUNK_PAGES - 1);
        let numbers = ((base - origin) / CHUNK_PAGES) as usize + chunks;
        let zone = Self {
            base,
            origin,
            chunks,
            blocks,
            first_key,
            free: Bitmap::new(numbers),
            orphans: Bitmap::new(numbers),
            spent: Bitmap::new(if retires { numbers } else { 0 }),
            has_spent: AtomicBool::new(false),
            calls: CachePadded::new(AtomicU64::new(0)),
            lane: 0,
        };
        zone.fill();
        zone
    }

    /// Every chunk is free. Only while nobody else uses the zone.
    pub(super) fn fill(&self) {
        let first = self.index(self.base);
        self.free.fill(first, first + self.chunks);
        self.orphans.fill(0, 0);
        self.spent.fill(0, 0);
    }

    /// Last page, inclusive.
    pub(super) fn last(&self) -> u64 {
        self.base + self.chunks as u64 * CHUNK_PAGES - 1
    }

    pub(super) fn base(&self) -> u64 {
        self.base
    }

    pub(super) fn range(&self) -> IovaRange {
        range_at(self.base, self.chunks as u64 * CHUNK_PAGES)
    }

    #[inline]
    pub(super) fn contains(&self, page: u64) -> bool {
        page.wrapping_sub(self.base) < self.chunks as u64 * CHUNK_PAGES
    }

    /// The number of the chunk that holds a page of this zone.
    pub(super) fn index(&self, page: u64) -> usize {
        ((page - self.origin) / CHUNK_PAGES) as usize
    }

    /// First page of a chunk.
    pub(super) fn page(&self, index: usize) -> u64 {
        self.origin + index as u64 * CHUNK_PAGES
    }

    /// The highest chunk number whose pages are all at or below `bound`; `None` where not even the first is.
    pub(super) fn highest_below(&self, bound: u64) -> Option<usize> {
        let chunks = (bound.min(self.last()) + 1).checked_sub(self.base)? / CHUNK_PAGES;
        (chunks > 0).then(|| self.index(self.base) + chunks as usize - 1)
    }

    /// Takes `count` free chunks in a row, or ones whose leaf tables wait to be reclaimed, from a multiple of `2^order` chunks
    /// on and up to number `highest`.
    pub(super) fn take_run(&self, count: usize, order: u32, highest: usize) -> Option<usize> {
        let align = 1_u64.checked_shl(order)?;
        let offset = (align - self.origin / CHUNK_PAGES % align) % align;
        let take = |set: &Bitmap| set.take_run(count, order, offset as usize, highest);
        // Those first that still have their leaf tables. To find none costs a look at every word.
        if self.has_spent.load(Ordering::Relaxed) {
            if let Some(index) = take(&self.spent) {
                return Some(index);
            }
            // Hides one that is put in meanwhile, until the next is, or until the look below.
            self.has_spent.store(false, Ordering::Relaxed);
        }
        take(&self.free).or_else(|| take(&self.spent))
    }

    /// Puts a chunk among those whose leaf tables wait to be reclaimed.
    pub(super) fn put_spent(&self, index: usize) {
        self.spent.put(index);
        if !self.has_spent.load(Ordering::Relaxed) {
            self.has_spent.store(true, Ordering::Relaxed);
        }
    }

    /// The block of a page of this zone, if any chunk of it was ever used.
    #[inline]
    pub(super) fn block(&self, page: u64) -> Option<&Arc<Block>> {
        self.blocks
            .get(((page >> BLOCK_SHIFT) - self.first_key) as usize)?
            .get()
    }

    /// The block of a page of this zone, made if there is none.
    pub(super) fn make_block(&self, page: u64) -> &Block {
        let key = ((page >> BLOCK_SHIFT) - self.first_key) as usize;
        self.blocks[key].get_or_init(|| Box::new(new_block(self.lane)))
    }

    /// Chunks that were ever used, with their first pages.
    pub(super) fn known_chunks(&self) -> impl Iterator<Item = (u64, &Chunk)> {
        self.blocks
            .iter()
            .enumerate()
            .filter_map(|(i, block)| Some((i, block.get()?)))
            .flat_map(move |(i, block)| {
                let first = (self.first_key + i as u64) << BLOCK_SHIFT;
                (0..BLOCK_CHUNKS as u64)
                    .map(move |chunk| first + chunk * CHUNK_PAGES)
                    .filter(|page| self.contains(*page))
                    .map(|page| (page, chunk_of(block, page)))
            })
    }

    /// Bytes of the directory and of every block made.
    pub(super) fn bytes(&self) -> usize {
        let made = self
            .blocks
            .iter()
            .filter(|block| block.get().is_some())
            .count();
        2 * self.free.bytes()
            + self.spent.bytes()
            + size_of_val(&*self.blocks)
            + made * size_of::<Block>()
    }
}

/// Cuts the aperture into at most one zone per address limit, of at most `most` chunks each, highest first; and what
/// remains for the tree, ascending.
pub(super) fn cut(aperture: &Aperture, most: usize, retires: bool) -> (Vec<Zone>, Vec<IovaRange>) {
    let mut zones: Vec<Zone> = Vec::new();
    let mut from = 0;
    for limit in LIMITS.into_iter().chain([IovaPfn::MAX.raw()]) {
        let largest = aperture
            .usable()
            .iter()
            .filter_map(|usable| {
                // Whole blocks' chunks, and the topmost ones, where the piece has more than enough.
                let first = usable.first().raw().max(from).next_multiple_of(CHUNK_PAGES);
                let end = (usable.last().raw().min(limit) + 1) / CHUNK_PAGES * CHUNK_PAGES;
                let chunks = end.checked_sub(first)? / CHUNK_PAGES;
                let taken = chunks.min(most as u64);
                (taken > 0).then_some((taken as usize, end))
            })
            .max_by_key(|(taken, _)| *taken);
        zones
            .extend(largest.map(|(chunks, end)| {
                Zone::new(end - chunks as u64 * CHUNK_PAGES, chunks, retires)
            }));
        from = limit + 1;
    }
    let rest = Aperture::new(
        aperture.first(),
        aperture.last(),
        &aperture
            .reserved()
            .iter()
            .copied()
            .chain(zones.iter().map(Zone::range))
            .collect::<Vec<_>>(),
    );
    zones.reverse();
    for (lane, zone) in zones.iter_mut().enumerate() {
        zone.lane = lane;
    }
    (
        zones,
        rest.map(|rest| rest.usable().to_vec()).unwrap_or_default(),
    )
}

#[cfg(all(test, not(loom)))]
mod tests;
