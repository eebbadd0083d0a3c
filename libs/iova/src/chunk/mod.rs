//! Chunks: 2 MiB of IOVA that one core owns, behind which lies one leaf table.
//!
//! # What
//! An allocator made for page tables: a *chunk* is the 512 pages that one leaf table maps, and one
//! core owns it. So a core allocates and frees without a lock and without an atomic
//! read-modify-write, no two cores write entries of the same leaf table, and the allocator knows,
//! without counting anything per entry, when a leaf table is empty.
//!
//! # Flow
//! A chunk is eight words of 64 pages, a word serves one size class (1 to 256 pages, powers of
//! two), and each page has a byte that says whether a range starts there, and how large it is
//! (`state`): a word's bytes are one cache line. Where nothing else is left, larger ranges are put
//! between those of a word's class, and a word of larger ones serves a smaller class from then on.
//! ```text
//! alloc: free list of the class ─▶ write the byte                none: a word with something free │ what remote cores freed │
//!                                                                an open word │ an abandoned chunk │ a free chunk │ the tree │
//!                                                                unused by other cores (`search`)
//! free:  chunk ─ ours? exact? ─▶ write the byte, keep it         another's: turn a bit in a line that remote cores write
//! ```
//! * The owner writes the bytes. Remote cores write `claimed` and `shared_freed`, by
//!   read-modify-write; one of them, the chunk's *designated remote freer*, writes
//!   `exclusive_freed` by plain stores. (`layout` lists the writer of each line, `ranges` the
//!   operations of each party, `remote_free` how the owner collects.) A free is checked before
//!   anything changes: exactly that range must be allocated, unpinned and not yet freed.
//! * What a core owns is in two halves: its free lists, which are plain memory, and all else, under
//!   a lock of the core (`core_zone`), where another core can see to it that nothing is kept
//!   unused.
//! * A core that parks abandons the chunks in use; a core that needs a chunk, or frees in one,
//!   reclaims it.
//! * Ranges of 512 pages and more are runs of whole chunks from the same set of free chunks; what
//!   fits no chunk (odd ends of the aperture, more than a zone holds) comes from a locked tree.
//! * A chunk in which nothing is allocated goes back to the space, or, for a space made with
//!   [`ChunkAllocator::retiring`], to [`retire`](crate::CoreAllocator::retire): the owner of the
//!   page table clears the entry that leads to the leaf table, and recycles the chunk after an
//!   invalidation.
//!
//! # Why a chunk in use cannot be retired
//! A core that walks the page table under an IOVA has that IOVA allocated, or pinned. The owner
//! pins by a store to its own state byte and retires chunks itself, so its own pin and retirement
//! cannot race. A remote core claims by read-modify-write and *then* checks whether the range is
//! still allocated; the owner empties the chunk and *then* checks, by read-modify-write, for
//! claims. At least one of the two sees the other's write.
//!
//! # Cost
//! Alloc and free of a page on its own core: about twice the floor (a pop and a push of a private
//! stack). Freeing another core's range: a plain store for the designated remote freer, a
//! read-modify-write for other cores, and about three line transfers per word of 64 pages however
//! many of them are freed together.
//! Bookkeeping: 1 KiB per chunk in use, made in blocks of 16.
//!
//! Measures that keep the common path short: the class of a freed range is computed from its size,
//! not from its byte, so that the next allocation does not wait for two loads; owner, zone and
//! marks are in one tag, so that one comparison tells that a chunk is ours, of the zone at hand and
//! without marks; single pages of the zone that a core last ran out of have a stack at a place of
//! its own (`ready`); and what leads from a page to its chunk is a table of blocks
//! (`directory_cache`), small enough for the first-level cache with 4 GiB in use.
//!
//! # Left out
//! Two frees of one range that *race* each other on two cores are one free too many, and like any
//! free that comes after the range was given out again cannot always be told from a right one.
//! Sizes are rounded up to powers of two below 512 pages and to whole chunks above. A run of chunks
//! that would lie half in the lowest zone and half in the tree below it is not found (only where
//! the space is larger than the zone).
//!
//! # What a core keeps that does not come back
//! Its free lists, and the chunks in which the ranges in these lie: at most 32 (of 256 pages) to
//! 4,096 (single pages) of each class, 16 times the first room (`ready`), of which it keeps the
//! first room until it has run over. They are taken by plain loads and stores, and to end that from
//! outside would take a fence in every operation. Everything else others take when they find no
//! other room: ranges that any core freed, under a pin or not, empty words, empty chunks. What is
//! live, what the owner is pinning or freeing at that moment (`remote_free` says why), and the rest
//! of a chunk in which such is, stays its owner's. A core that goes idle calls
//! [`park`](crate::CoreAllocator::park); one that works answers the next call for drains.
//!
//! A chunk in which another core has freed 16 ranges and more, and which that core has cached,
//! costs its owner a look at one more line at every free until the other core parks, owns the
//! chunk, or works in 4 GiB of other addresses; fewer remote frees are forgotten after 16 frees of
//! the owner.

mod bitmap;
mod core_cache;
mod core_zone;
mod directory_cache;
mod drains;
mod free_lists;
mod handle;
mod layout;
mod owner_side;
mod ranges;
mod remote_free;
mod search;
mod state;
mod trim;
mod zone;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::marker::PhantomData;

use lines::{AtomicU64, CachePadded, Fences, Lock, Ordering};

use crate::allocator::SpaceId;
use crate::claims::Claims;
use crate::tree::Tree;
use crate::{
    Aperture, ApertureError, CHUNK_PAGES, ClaimError, CoreId, FreeError, IovaAllocator, IovaPfn,
    IovaRange, ResetError, Stats,
};
use core_zone::CoreZones;
pub use handle::ChunkCore;
use handle::Local;
use layout::{Chunk, FULL, NO_CORE, RUN, WORD_PAGES, WORDS, bits, chunk_of, get, owner_of};
use zone::Zone;

/// Chunks a zone has unless more are asked for: 32 GiB of IOVA in use at a time, below each address
/// limit.
pub const DEFAULT_ZONE_CHUNKS: usize = 1 << 14;

/// Allocates from 2 MiB chunks that one core owns each. See the [module](self).
///
/// ```
/// use iova::{Aperture, ChunkAllocator, CoreAllocator, CoreId, IovaAllocator, Request};
///
/// let space = ChunkAllocator::new(Aperture::of_bits(48)?, 2)?;
/// let (mut first, mut second) = (space.claim(CoreId(0))?, space.claim(CoreId(1))?);
/// let packet = first.alloc(Request::pages(1))?;
/// let buffer = second.alloc(Request::pages(3))?;
/// assert_eq!(buffer.pages(), 4); // a power of two: all of it must be freed
/// second.free(packet)?; // any core may
/// assert!(first.free(packet).is_err()); // but only once
/// first.free(buffer)?;
/// assert_eq!(space.stats().live_ranges, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ChunkAllocator {
    shared: Arc<Shared>,
}

/// State shared by all cores of a space.
struct Shared {
    aperture: Aperture,
    /// Highest first; at most one per address limit.
    zones: Vec<Zone>,
    unzoned: UnzonedSpace,
    claims: Claims,
    /// Calls for drains so far. Every core compares it with the last one it answered.
    drain: CachePadded<AtomicU64>,
    space: SpaceId,
    /// Between owners that pin and cores that collect for them (`remote_free`).
    fences: Fences,
    /// Emptied chunks wait for their leaf tables to be reclaimed.
    retires: bool,
    cores: Box<[CachePadded<Published>]>,
}

/// Counters and state of one core that other cores access.
#[derive(Debug)]
struct Published {
    /// Operations that left its own memory. It alone writes this, and others read it now and then.
    slow: AtomicU64,
    /// Chunks it keeps. Written with the lock of `zones` held.
    chunks: AtomicU64,
    /// Number of times it has returned something that any core may allocate. It alone writes this.
    returned: AtomicU64,
    /// The page of the range that it is pinning or freeing, or [`NO_PAGE`](owner_side::NO_PAGE). It
    /// alone writes this.
    changing: Arc<CachePadded<AtomicU64>>,
    /// Number of times remote cores have marked a chunk of this core that had no marks.
    marked: CachePadded<AtomicU64>,
    /// Its chunks and words. Its own lock, which others take only where it is free.
    zones: CachePadded<Lock<CoreZones>>,
}

impl Published {
    fn new(core: usize) -> Self {
        Self {
            slow: AtomicU64::new(0),
            chunks: AtomicU64::new(0),
            returned: AtomicU64::new(0),
            changing: Arc::new(CachePadded::new(AtomicU64::new(owner_side::NO_PAGE))),
            marked: CachePadded::new(AtomicU64::new(0)),
            zones: CachePadded::new(Lock::new(CoreZones::new(CoreId(core)))),
        }
    }
}

/// Configuration of a space of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkConfig {
    /// Most chunks below each address limit (32 bits, 39 bits, the aperture's end), at least 1;
    /// what they do not cover is the tree's. Default: [`DEFAULT_ZONE_CHUNKS`].
    pub zone_chunks: usize,
    /// Emptied chunks wait for [`retire`](crate::CoreAllocator::retire), so that their leaf tables
    /// can be reclaimed. Default: no.
    pub retires: bool,
}

impl Default for ChunkConfig {
    fn default() -> Self {
        Self {
            zone_chunks: DEFAULT_ZONE_CHUNKS,
            retires: false,
        }
    }
}

impl ChunkAllocator {
    /// All of `aperture` free, for `cores` cores.
    ///
    /// # Errors
    /// [`ApertureError::Cores`].
    pub fn new(aperture: Aperture, cores: usize) -> Result<Self, ApertureError> {
        Self::with_config(aperture, cores, ChunkConfig::default())
    }

    /// The same for an IO page table that gives leaf tables back: an emptied chunk is not used
    /// again before [`retire`](crate::CoreAllocator::retire) had a chance to take it.
    ///
    /// # Errors
    /// [`ApertureError::Cores`].
    pub fn retiring(aperture: Aperture, cores: usize) -> Result<Self, ApertureError> {
        let config = ChunkConfig {
            retires: true,
            ..ChunkConfig::default()
        };
        Self::with_config(aperture, cores, config)
    }

    /// All of `aperture` free, as `config` says.
    ///
    /// # Errors
    /// [`ApertureError::Cores`].
    pub fn with_config(
        aperture: Aperture,
        cores: usize,
        config: ChunkConfig,
    ) -> Result<Self, ApertureError> {
        let claims = Claims::new(cores)?;
        let (zones, rest) = zone::cut(&aperture, config.zone_chunks.max(1), config.retires);
        Ok(Self {
            shared: Arc::new(Shared {
                unzoned: UnzonedSpace {
                    tree: Lock::new(Tree::new(&rest)),
                    usable: rest,
                },
                aperture,
                zones,
                claims,
                drain: CachePadded::new(AtomicU64::new(0)),
                space: SpaceId::next(),
                fences: Fences::new(),
                retires: config.retires,
                cores: (0..cores)
                    .map(|core| CachePadded::new(Published::new(core)))
                    .collect(),
            }),
        })
    }
}

impl fmt::Debug for ChunkAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkAllocator")
            .field("aperture", &self.shared.aperture)
            .finish_non_exhaustive()
    }
}

impl IovaAllocator for ChunkAllocator {
    type Core = ChunkCore;

    fn claim(&self, core: CoreId) -> Result<ChunkCore, ClaimError> {
        let shared = Arc::clone(&self.shared);
        shared.claims.claim(core)?;
        {
            let mut zones = shared.zones_of(core).lock();
            for (own, zone) in zones.zones.iter_mut().zip(&shared.zones) {
                own.answered = zone.calls.load(Ordering::Relaxed);
            }
        }
        let local = Local::new(core, &shared);
        Ok(ChunkCore {
            shared,
            local,
            alone: PhantomData,
        })
    }

    fn cores(&self) -> usize {
        self.shared.claims.cores()
    }

    fn aperture(&self) -> &Aperture {
        &self.shared.aperture
    }

    fn stats(&self) -> Stats {
        self.shared.stats()
    }

    fn reset(&self) -> Result<(), ResetError> {
        let shared = &self.shared;
        shared.claims.while_idle(|| {
            for zone in &shared.zones {
                for (_, chunk) in zone.known_chunks() {
                    chunk.wipe();
                    chunk.set_owner(NO_CORE);
                }
                zone.fill();
            }
            *shared.unzoned.tree.lock() = Tree::new(&shared.unzoned.usable);
        })
    }
}

impl Shared {
    /// The zone that a page lies in, and its number.
    fn zone_of(&self, page: u64) -> Option<(usize, &Zone)> {
        self.zones
            .iter()
            .enumerate()
            .find(|(_, zone)| zone.contains(page))
    }

    /// The chunk in which a range starts; `None` where it is the tree's.
    fn locate(&self, range: IovaRange) -> Result<Option<(usize, &Zone, &Chunk)>, FreeError> {
        if !self.aperture.allows(range) {
            return Err(FreeError::Outside { range });
        }
        let page = range.first().raw();
        let Some((lane, zone)) = self.zone_of(page) else {
            return Ok(None);
        };
        let block = zone.block(page).ok_or(FreeError::NotAllocated { range })?;
        Ok(Some((lane, zone, chunk_of(block, page))))
    }

    /// Counts for the owner of a chunk that the chunk has marks now.
    fn tell(&self, owner: u64) {
        let core = usize::try_from(owner.wrapping_sub(1)).unwrap_or(usize::MAX);
        // Owners that are no core (none, `AWAY`) have no counter. Release: the mark happens before
        // it is counted.
        if let Some(core) = self.cores.get(core) {
            core.marked.fetch_add(1, Ordering::Release);
        }
    }

    /// The zones of one core. That core locks them; others only use [`Lock::try_lock`], as it may
    /// be running.
    fn zones_of(&self, core: CoreId) -> &Lock<CoreZones> {
        &self.cores[core.0].zones
    }

    fn count_slow(&self, core: CoreId) {
        bump(&self.cores[core.0].slow);
    }

    /// Counts that a core, which calls, has returned something that any core may have.
    fn count_returned(&self, core: CoreId) {
        bump(&self.cores[core.0].returned);
    }

    /// Other cores that keep chunks.
    fn others(&self, core: CoreId) -> usize {
        let keeps =
            |at: &usize| *at != core.0 && self.cores[*at].chunks.load(Ordering::Relaxed) != 0;
        (0..self.cores.len()).filter(keeps).count()
    }

    fn stats(&self) -> Stats {
        let tree = self.unzoned.tree.lock();
        let mut stats = Stats {
            live_ranges: tree.live_ranges(),
            live_pages: tree.live_pages(),
            chunks: tree.chunks(),
            bytes: tree.bytes() + size_of::<Self>() + size_of_val(&*self.cores),
            slow: self
                .cores
                .iter()
                .map(|core| core.slow.load(Ordering::Relaxed))
                .sum(),
            ..Stats::default()
        };
        drop(tree);
        for zone in &self.zones {
            stats.bytes += zone.bytes();
            for (page, chunk) in zone.known_chunks() {
                let is_kept = owner_of(chunk.tag()) != NO_CORE || !zone.free.has(zone.index(page));
                if is_kept {
                    add_chunk(&mut stats, chunk);
                }
            }
        }
        stats
    }
}

/// A counter that one core writes and others read now and then.
fn bump(counter: &AtomicU64) {
    // Release: the counted event happens before a core sees the count.
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Release);
}

/// Adds a chunk that is in use to the statistics.
fn add_chunk(stats: &mut Stats, chunk: &Chunk) {
    if chunk.kind(0) == RUN {
        let chunks = chunk.run().load(Ordering::Relaxed);
        stats.live_ranges += 1;
        stats.live_pages += chunks * CHUNK_PAGES;
        stats.chunks += chunks;
        return;
    }
    let mut live = 0;
    for word in 0..WORDS {
        let freed = get(chunk.shared_freed(word));
        let starts = FULL.get(chunk.order(word)).copied().unwrap_or(0);
        for at in bits(starts) {
            let page = word as u64 * WORD_PAGES + at;
            let state = chunk.state(page);
            if let Some(order) = state.order()
                && freed >> at & 1 == 0
                && !chunk.is_exclusively_freed(page, state)
            {
                stats.live_ranges += 1;
                live += 1 << order;
            }
        }
    }
    stats.live_pages += live;
    // The later chunks of a run count with its head, and retired ones for no core.
    if owner_of(chunk.tag()) != layout::AWAY {
        stats.chunks += 1;
        stats.cached_pages += CHUNK_PAGES - live;
    }
}

/// The part of the space that no zone covers.
struct UnzonedSpace {
    tree: Lock<Tree>,
    usable: Vec<IovaRange>,
}

impl UnzonedSpace {
    fn alloc(&self, pages: u64, order: u8, last: IovaPfn) -> Option<IovaRange> {
        if self.usable.is_empty() {
            return None;
        }
        self.tree.lock().alloc(pages, order, last)
    }

    fn free(&self, range: IovaRange) -> Result<(), FreeError> {
        let mut tree = self.tree.lock();
        tree.free(range)
            .map_err(|error| refusal(&tree, range, error))
    }

    fn pin(&self, range: IovaRange) -> Result<(), FreeError> {
        let mut tree = self.tree.lock();
        tree.set_pinned(range, true)
            .map_err(|error| refusal(&tree, range, error))
    }

    fn unpin(&self, range: IovaRange) {
        let unpinned = self.tree.lock().set_pinned(range, false);
        debug_assert!(
            unpinned.is_ok(),
            "a pinned range stays as it is: {unpinned:?}"
        );
    }

    fn free_pinned(&self, range: IovaRange) {
        let freed = self.tree.lock().free_pinned(range);
        debug_assert!(freed.is_ok(), "a pinned range stays as it is: {freed:?}");
    }
}

/// Refines an error of the tree: a range outside the tree may still be in the space, in a zone.
fn refusal(tree: &Tree, range: IovaRange, error: FreeError) -> FreeError {
    match error {
        FreeError::Outside { .. } if tree.pages_at(range.first()).is_some() => {
            FreeError::Mismatch { range }
        }
        FreeError::Outside { .. } => FreeError::NotAllocated { range },
        error => error,
    }
}

#[cfg(all(test, loom))]
#[path = "tests/model.rs"]
mod model;
#[cfg(all(any(test, feature = "testing"), not(loom)))]
#[path = "tests/sound.rs"]
mod sound;
#[cfg(all(test, not(any(loom, shuttle))))]
mod tests;
