//! A zone: the part of the aperture below one address limit that is handed out in chunks.
//!
//! Zones end at address limits (4 GiB, 512 GiB, the aperture's end), so that a device of 32 bits and one of 64 never search
//! each other's space, and are bounded in length, so that the directory is a plain array. What no zone covers (odd ends,
//! pieces between reserved regions, the rest of a huge aperture) is the tree's.

use alloc::boxed::Box;
use alloc::vec::Vec;

use once_cell::race::OnceBox;

use super::bitmap::Bitmap;
use super::layout::{BLOCK_CHUNKS, BLOCK_SHIFT, Block, Chunk};
use crate::{Aperture, CHUNK_PAGES, IovaPfn, IovaRange};

/// Most zones of a space: one per limit and one above; a power of two, for the fast path.
pub(super) const MAX_ZONES: usize = 4;

/// Last pages of the address limits that get zones of their own: 32 bits, and 39 (the least a VT-d unit translates).
const LIMITS: [u64; 2] = [(1 << (32 - 12)) - 1, (1 << (39 - 12)) - 1];

#[derive(Debug)]
pub(super) struct Zone {
    /// First page, a multiple of [`CHUNK_PAGES`].
    base: u64,
    chunks: usize,
    /// Blocks by their number; the first one's is `first_key`. A block may reach past the zone's ends; the chunks there
    /// stay unused.
    blocks: Box<[OnceBox<Block>]>,
    first_key: u64,
    /// Chunks that nobody has.
    pub(super) free: Bitmap,
    /// Chunks with ranges in use whose owner parked.
    pub(super) orphans: Bitmap,
    /// Chunks that nobody has, whose leaf tables wait to be reclaimed.
    pub(super) spent: Bitmap,
    /// Its number.
    lane: usize,
}

impl Zone {
    fn new(base: u64, chunks: usize) -> Self {
        let first_key = base >> BLOCK_SHIFT;
        let last_key = (base + chunks as u64 * CHUNK_PAGES - 1) >> BLOCK_SHIFT;
        let blocks = (first_key..=last_key).map(|_| OnceBox::new()).collect();
        let zone = Self {
            base,
            chunks,
            blocks,
            first_key,
            free: Bitmap::new(chunks),
            orphans: Bitmap::new(chunks),
            spent: Bitmap::new(chunks),
            lane: 0,
        };
        zone.fill();
        zone
    }

    /// Every chunk is free. Only while nobody else uses the zone.
    pub(super) fn fill(&self) {
        self.free.fill(self.chunks);
        self.orphans.fill(0);
        self.spent.fill(0);
    }

    /// Last page, inclusive.
    pub(super) fn last(&self) -> u64 {
        self.base + self.chunks as u64 * CHUNK_PAGES - 1
    }

    pub(super) fn base(&self) -> u64 {
        self.base
    }

    pub(super) fn range(&self) -> IovaRange {
        IovaRange::within_space(self.base, self.chunks as u64 * CHUNK_PAGES)
    }

    #[inline]
    pub(super) fn contains(&self, page: u64) -> bool {
        page.wrapping_sub(self.base) < self.chunks as u64 * CHUNK_PAGES
    }

    /// The number of the chunk that holds a page of this zone.
    pub(super) fn index(&self, page: u64) -> usize {
        ((page - self.base) / CHUNK_PAGES) as usize
    }

    /// First page of a chunk.
    pub(super) fn page(&self, index: usize) -> u64 {
        self.base + index as u64 * CHUNK_PAGES
    }

    /// The highest chunk number whose pages are all at or below `bound`; `None` where not even the first is.
    pub(super) fn highest_below(&self, bound: u64) -> Option<usize> {
        let chunks = (bound.min(self.last()) + 1).checked_sub(self.base)? / CHUNK_PAGES;
        (chunks as usize).checked_sub(1)
    }

    /// The block of a page of this zone, if any chunk of it was ever used.
    #[inline]
    pub(super) fn block(&self, page: u64) -> Option<&Block> {
        self.blocks
            .get(((page >> BLOCK_SHIFT) - self.first_key) as usize)?
            .get()
    }

    /// The block of a page of this zone, made if there is none.
    pub(super) fn make_block(&self, page: u64) -> &Block {
        let key = ((page >> BLOCK_SHIFT) - self.first_key) as usize;
        self.blocks[key].get_or_init(|| Box::new(Block::new(self.lane)))
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
                    .map(|page| (page, &**block.chunk(page)))
            })
    }

    /// Bytes of the directory and of every block made.
    pub(super) fn bytes(&self) -> usize {
        let made = self
            .blocks
            .iter()
            .filter(|block| block.get().is_some())
            .count();
        3 * self.free.bytes()
            + size_of_val(&*self.blocks)
            + made * (size_of::<Block>() + BLOCK_CHUNKS * size_of::<Chunk>())
    }
}

/// Cuts the aperture into at most one zone per address limit, of at most `most` chunks each, highest first; and what
/// remains for the tree, ascending.
pub(super) fn cut(aperture: &Aperture, most: usize) -> (Vec<Zone>, Vec<IovaRange>) {
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
        zones.extend(
            largest.map(|(chunks, end)| Zone::new(end - chunks as u64 * CHUNK_PAGES, chunks)),
        );
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
mod tests {
    use super::*;

    #[test]
    fn zones_end_at_address_limits_and_the_tree_has_the_rest() {
        let aperture = Aperture::of_bits(48).expect("valid");
        let (zones, rest) = cut(&aperture, 1024);
        let ends: Vec<u64> = zones.iter().map(|zone| zone.last() + 1).collect();
        // Below the interrupt window, not above it: the larger piece.
        assert_eq!(ends, [1 << 36, 1 << 27, 0xfee00]);
        let covered: u64 = zones.iter().map(|zone| zone.range().pages()).sum();
        let usable = |ranges: &[IovaRange]| ranges.iter().map(|r| r.pages()).sum::<u64>();
        assert_eq!(covered, 3 * 1024 * 512);
        assert_eq!(covered + usable(&rest), usable(aperture.usable()));
    }

    #[test]
    fn an_aperture_smaller_than_a_chunk_has_no_zone() {
        let aperture = Aperture::new(IovaPfn::new(100), IovaPfn::new(600), &[]).expect("valid");
        let (zones, rest) = cut(&aperture, 1024);
        assert!(zones.is_empty());
        assert_eq!(rest, aperture.usable());
    }
}
