//! A zone: the part of the aperture below one address limit that is handed out in chunks.
//!
//! Zones end at address limits (4, 64 and 512 GiB, the aperture's end), so that a device of 32 bits
//! and one of 64 never search each other's space, and are bounded in length, so that the directory
//! is a plain array. The parts that no zone covers (odd ends, pieces between reserved regions, the
//! rest of a huge aperture) are the tree's.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use lines::{AtomicBool, AtomicU64, CachePadded, Ordering};
use once_cell::race::OnceBox;

use super::bitmap::Bitmap;
pub(super) use super::layout::MAX_ZONES;
use super::layout::{BLOCK_CHUNKS, BLOCK_SHIFT, Block, Chunk, chunk_of, new_block};
use crate::wanted::range_at;
use crate::{Aperture, CHUNK_PAGES, IovaRange};

/// Ends of the zones, below which the next lower one may begin: the address limits of 39 bits (the
/// least a VT-d unit translates), 36 and 32 get zones of their own, and so does the space above
/// them.
const ENDS: [u64; MAX_ZONES + 1] = [1 << 52, 1 << (39 - 12), 1 << (36 - 12), 1 << (32 - 12), 0];

/// Blocks by which each zone begins further below its end than the one above it.
const APART: usize = 8;

/// Bytes that an [`Arc`] adds to a block: two counters, aligned as chunks are.
const BLOCK_HEADER: usize = align_of::<Block>();

#[derive(Debug)]
pub(super) struct Zone {
    /// First page, a multiple of [`CHUNK_PAGES`].
    base: u64,
    /// The page of the chunk that has number 0, at or below `base`: a multiple of 64 chunks, so
    /// that a run of up to 64 chunks, which is aligned, lies in one word of a set.
    origin: u64,
    chunks: usize,
    /// From number `first_key` on. A block may reach past the zone's ends; the chunks there stay
    /// unused.
    blocks: Box<[OnceBox<Arc<Block>>]>,
    first_key: u64,
    /// Chunks that no core has.
    pub(super) free: Bitmap,
    /// Chunks with ranges in use whose owner parked.
    pub(super) abandoned: Bitmap,
    /// Chunks that no core has, whose leaf tables wait to be reclaimed. Has no capacity in a space
    /// that does not reclaim them.
    pub(super) spent: Bitmap,
    /// A hint whether `spent` has any.
    has_spent: AtomicBool,
    /// Calls for drains of this zone so far.
    pub(super) calls: CachePadded<AtomicU64>,
    /// Its number.
    lane: usize,
}

impl Zone {
    fn new(lane: usize, base: u64, chunks: usize, retires: bool) -> Self {
        let end = base + chunks as u64 * CHUNK_PAGES;
        let first_key = base >> BLOCK_SHIFT;
        let keys = first_key..=(end - 1) >> BLOCK_SHIFT;
        let origin = base & !(64 * CHUNK_PAGES - 1);
        let numbers = ((end - origin) / CHUNK_PAGES) as usize;
        let zone = Self {
            base,
            origin,
            chunks,
            blocks: keys.map(|_| OnceBox::new()).collect(),
            first_key,
            free: Bitmap::new(numbers),
            abandoned: Bitmap::new(numbers),
            spent: Bitmap::new(if retires { numbers } else { 0 }),
            has_spent: AtomicBool::new(false),
            calls: CachePadded::new(AtomicU64::new(0)),
            lane,
        };
        zone.fill();
        zone
    }

    /// Makes every chunk free. The caller must be the zone's only user.
    pub(super) fn fill(&self) {
        let first = self.index(self.base);
        self.free.fill(first, first + self.chunks);
        self.abandoned.fill(0, 0);
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

    /// The highest chunk number whose pages are all at or below `bound`; `None` where not even the
    /// first is.
    pub(super) fn highest_below(&self, bound: u64) -> Option<usize> {
        let chunks = (bound.min(self.last()) + 1).checked_sub(self.base)? / CHUNK_PAGES;
        (chunks > 0).then(|| self.index(self.base) + chunks as usize - 1)
    }

    /// Takes `count` free chunks in a row, or ones whose leaf tables wait to be reclaimed, from a
    /// multiple of `2^order` chunks on and up to number `highest`.
    pub(super) fn take_run(&self, count: usize, order: u32, highest: usize) -> Option<usize> {
        let align = 1_u64.checked_shl(order)?;
        let offset = (align - self.origin / CHUNK_PAGES % align) % align;
        let take = |set: &Bitmap| set.take_run(count, order, offset as usize, highest);
        // First those that still have their leaf tables. Finding none costs a scan of every word.
        if self.has_spent.load(Ordering::Relaxed) {
            if let Some(index) = take(&self.spent) {
                return Some(index);
            }
            // Hides one that is put in meanwhile, until the next is put, or until the search below.
            self.has_spent.store(false, Ordering::Relaxed);
        }
        take(&self.free).or_else(|| take(&self.spent))
    }

    /// Takes a free chunk up to number `highest`. Zones end at multiples of 4 GiB, and a core that
    /// works in two of them must not have the blocks of both in one place of
    /// [`DirectoryCache`](super::directory_cache::DirectoryCache): each begins some blocks below
    /// its end.
    pub(super) fn take_chunk(&self, highest: usize) -> Option<usize> {
        let below = self.lane * APART * BLOCK_CHUNKS;
        let apart = highest.checked_sub(below).filter(|_| below > 0);
        apart
            .and_then(|highest| self.take_run(1, 0, highest))
            .or_else(|| self.take_run(1, 0, highest))
    }

    /// Puts a chunk among those whose leaf tables wait to be reclaimed.
    pub(super) fn put_spent(&self, index: usize) {
        self.spent.put(index);
        if !self.has_spent.load(Ordering::Relaxed) {
            self.has_spent.store(true, Ordering::Relaxed);
        }
    }

    fn block_number(&self, page: u64) -> usize {
        ((page >> BLOCK_SHIFT) - self.first_key) as usize
    }

    /// The block of a page of this zone, if any chunk of it was ever used.
    #[inline]
    pub(super) fn block(&self, page: u64) -> Option<&Arc<Block>> {
        self.blocks.get(self.block_number(page))?.get()
    }

    /// A chunk of this zone that was used before, by any of its pages.
    pub(super) fn known(&self, page: u64) -> &Chunk {
        let block = self.block(page);
        chunk_of(block.expect("a chunk in use is in the directory"), page)
    }

    /// The block of a page of this zone, made if there is none.
    pub(super) fn make_block(&self, page: u64) -> &Block {
        self.blocks[self.block_number(page)].get_or_init(|| Box::new(new_block(self.lane)))
    }

    /// Chunks that were ever used, with their first pages.
    pub(super) fn known_chunks(&self) -> impl Iterator<Item = (u64, &Chunk)> {
        let keys = (self.first_key..).zip(&self.blocks);
        let made = keys.filter_map(|(key, block)| Some((key << BLOCK_SHIFT, block.get()?)));
        made.flat_map(move |(first, block)| {
            let pages = (0..BLOCK_CHUNKS as u64).map(move |chunk| first + chunk * CHUNK_PAGES);
            let pages = pages.filter(|page| self.contains(*page));
            pages.map(move |page| (page, chunk_of(block, page)))
        })
    }

    /// Bytes of the directory and of every block made.
    pub(super) fn bytes(&self) -> usize {
        let made = self.blocks.iter().filter_map(OnceBox::get).count();
        2 * self.free.bytes()
            + self.spent.bytes()
            + size_of_val(&*self.blocks)
            + made * (size_of::<Block>() + BLOCK_HEADER)
    }
}

/// Cuts the aperture into at most one zone per address limit, of at most `most` chunks each,
/// highest first; and what remains for the tree, ascending.
pub(super) fn cut(aperture: &Aperture, most: usize, retires: bool) -> (Vec<Zone>, Vec<IovaRange>) {
    let mut zones: Vec<Zone> = Vec::new();
    for ends in ENDS.windows(2) {
        // The topmost chunks of the piece that has most, up to what is enough; of such pieces the
        // highest.
        let pieces = aperture.usable().iter().filter_map(|usable| {
            let first = usable.first().raw().max(ends[1]).div_ceil(CHUNK_PAGES);
            let end = (usable.last().raw() + 1).min(ends[0]) / CHUNK_PAGES;
            Some((end.checked_sub(first)?.min(most as u64), end))
        });
        if let Some((chunks @ 1.., end)) = pieces.max() {
            let base = (end - chunks) * CHUNK_PAGES;
            zones.push(Zone::new(zones.len(), base, chunks as usize, retires));
        }
    }
    let mut taken = aperture.reserved().to_vec();
    taken.extend(zones.iter().map(Zone::range));
    let rest = Aperture::new(aperture.first(), aperture.last(), &taken);
    (
        zones,
        rest.map_or(Vec::new(), |rest| rest.usable().to_vec()),
    )
}

#[cfg(all(test, not(loom)))]
mod tests;
