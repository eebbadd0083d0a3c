//! The traits: a space that cores share, and the handle through which one core uses it.

use core::num::NonZeroU64;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::{
    AllocError, Aperture, ClaimError, CoreId, FreeError, FreeManyError, IovaPfn, IovaRange,
    Request, ResetError,
};

/// State of a space at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Ranges handed out and not freed.
    pub live_ranges: u64,
    /// Pages of those ranges.
    pub live_pages: u64,
    /// Free pages that cores keep for themselves.
    pub cached_pages: u64,
    /// 2 MiB chunks in which anything is allocated or cached: the leaf tables such a space needs.
    pub chunks: u64,
    /// Bytes of bookkeeping, all cores together.
    pub bytes: usize,
    /// Operations that left their core's own memory, since the start.
    pub slow: u64,
}

/// An IOVA space of one domain. All cores share it; each works through a handle of its own.
pub trait IovaAllocator: Send + Sync {
    /// The handle of one core. It may move to another thread but not be shared: no operation takes
    /// a lock only to find that it is uncontended.
    type Core: CoreAllocator;

    /// The handle of `core`. It comes back when it is dropped, which parks it first.
    ///
    /// # Errors
    /// The core has a handle, or does not exist.
    fn claim(&self, core: CoreId) -> Result<Self::Core, ClaimError>;

    /// Any free handle, for threads that have no number: a thread keeps it in thread-local storage
    /// or on its stack.
    ///
    /// # Errors
    /// [`ClaimError::NoneLeft`].
    fn register(&self) -> Result<Self::Core, ClaimError> {
        (0..self.cores())
            .find_map(|core| self.claim(CoreId(core)).ok())
            .ok_or(ClaimError::NoneLeft {
                cores: self.cores(),
            })
    }

    /// Number of cores it was made for.
    fn cores(&self) -> usize;

    /// The space.
    fn aperture(&self) -> &Aperture;

    /// Counts of allocated and cached pages and chunks. Reads every core's state, so it is slow
    /// and, while other cores work, approximate.
    fn stats(&self) -> Stats;

    /// Forgets every allocation, as a device reset does.
    ///
    /// # Errors
    /// A core has its handle.
    fn reset(&self) -> Result<(), ResetError>;
}

/// One core's way into an IOVA space.
pub trait CoreAllocator: Send {
    /// The core of this handle.
    fn core(&self) -> CoreId;

    /// A free range. It may be larger than asked for (rounded up to a power of two): all of it is
    /// the caller's, and all of it must be freed.
    ///
    /// # Errors
    /// [`AllocError`]; nothing has changed then, except that other cores may have been asked to
    /// drain.
    fn alloc(&mut self, request: Request) -> Result<IovaRange, AllocError>;

    /// Takes back a range exactly as a core of this space got it; any core may. A range does not
    /// say which space it is of: one of another space is refused unless exactly such a range is
    /// allocated in this one.
    ///
    /// # Errors
    /// [`FreeError`]; nothing has changed then.
    fn free(&mut self, range: IovaRange) -> Result<(), FreeError>;

    /// Takes back several ranges, in their order, each as [`free`](Self::free) does.
    ///
    /// # Errors
    /// [`FreeManyError`] names the first that is refused: those before it are freed, it and those
    /// behind it are as they were.
    fn free_many(&mut self, ranges: &[IovaRange]) -> Result<(), FreeManyError> {
        for (index, &range) in ranges.iter().enumerate() {
            let freed = self.free(range);
            freed.map_err(|source| FreeManyError { index, source })?;
        }
        Ok(())
    }

    /// Checks that `range` is allocated exactly so, and keeps it from being freed or pinned by
    /// another core until [`free_pinned`](Self::free_pinned) or [`unpin`](Self::unpin). Its leaf
    /// table stays meanwhile. This is the first half of an unmap; the second follows when no device
    /// can use it.
    ///
    /// An allocator whose owners pin without a read-modify-write
    /// ([`ChunkAllocator`](crate::ChunkAllocator)) may let two cores pin one range if they do so in
    /// the same moment: a caller's mistake, as two racing frees are.
    ///
    /// # Errors
    /// As [`free`](Self::free).
    fn pin(&mut self, range: IovaRange) -> Result<Pinned, FreeError>;

    /// Frees a pinned range, pinned by this core or another of the same space.
    ///
    /// # Panics
    /// Where it was pinned in another space (as far as 1,024 spaces are distinguished); so do
    /// [`unpin`](Self::unpin) and [`recycle`](Self::recycle).
    fn free_pinned(&mut self, pinned: Pinned);

    /// As [`free_pinned`](Self::free_pinned), of whole chunks behind which there is no leaf table:
    /// nothing has to be [retired](Self::retire) before they are used again.
    fn free_without_table(&mut self, pinned: Pinned) {
        self.free_pinned(pinned);
    }

    /// Releases a pin of this core: the range is allocated as before.
    fn unpin(&mut self, pinned: Pinned);

    /// Gives everything cached back to the space. The handle remains usable.
    fn park(&mut self);

    /// Takes one 2 MiB chunk in which nothing is allocated out of circulation, so that the leaf
    /// table behind it can be reclaimed. `None` where there is none to spare, or where the
    /// allocator does not own chunks.
    fn retire(&mut self) -> Option<RetiredChunk> {
        None
    }

    /// Makes a retired chunk allocatable again.
    fn recycle(&mut self, chunk: RetiredChunk) {
        unreachable!("{chunk:?} was not retired by this allocator")
    }
}

/// A range that no other core can free or map over, and whose leaf table cannot be retired.
// Two words, so that it goes through registers: with the flag in a byte of its own, storing the
// parts and loading the whole would stall every unmap.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a pinned range stays allocated until it is freed"]
pub struct Pinned {
    first: IovaPfn,
    /// The pages, the space and [`Self::FOREIGN`].
    pages: NonZeroU64,
}

/// Number of the space of a pinned range or a retired chunk: one of 1,024, in turn. Lies in bits
/// that a range's size does not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpaceId(u64);

impl SpaceId {
    const SHIFT: u32 = 53;
    const COUNT: u64 = 1 << 10;

    /// One that the last 1,023 spaces did not get.
    pub(crate) fn next() -> Self {
        static SPACES: AtomicU64 = AtomicU64::new(1);
        Self((SPACES.fetch_add(1, Ordering::Relaxed) % Self::COUNT) << Self::SHIFT)
    }

    /// For allocators that do not check.
    #[cfg(feature = "parts")]
    pub(crate) const NONE: Self = Self(0);
}

impl Pinned {
    /// Marked in shared memory because another core owns the chunk. No range has so many pages.
    const FOREIGN: u64 = 1 << 63;
    const PAGES: u64 = (1 << SpaceId::SHIFT) - 1;

    /// A range that the caller has just pinned; `is_foreign` means something to the allocator only.
    #[inline(always)]
    pub(crate) fn new(range: IovaRange, space: SpaceId, is_foreign: bool) -> Self {
        let mark = if is_foreign { Self::FOREIGN } else { 0 };
        Self {
            first: range.first(),
            pages: NonZeroU64::new(range.pages() | space.0 | mark).expect("a range has pages"),
        }
    }

    /// Whether it was pinned in this space and not marked in shared memory.
    #[inline(always)]
    pub(crate) fn is_own(&self, space: SpaceId) -> bool {
        self.pages.get() & !Self::PAGES == space.0
    }

    /// # Panics
    /// It was pinned in another space.
    #[inline]
    pub(crate) fn check(&self, space: SpaceId) {
        let own = self.pages.get() & !Self::PAGES & !Self::FOREIGN;
        assert_eq!(own, space.0, "{} was pinned in another space", self.range());
    }

    /// The range.
    #[inline(always)]
    pub fn range(&self) -> IovaRange {
        let pages = NonZeroU64::new(self.pages.get() & Self::PAGES);
        IovaRange::within_space(self.first.raw(), pages.unwrap_or(NonZeroU64::MIN))
    }
}

/// Pages of a chunk: as many as one leaf table maps.
pub const CHUNK_PAGES: u64 = 512;

/// A chunk out of circulation: 512 pages, aligned, none of them allocated.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a retired chunk is lost until it is recycled"]
pub struct RetiredChunk {
    pub(crate) first: IovaPfn,
    pub(crate) space: SpaceId,
}

impl RetiredChunk {
    /// Its pages.
    pub fn range(&self) -> IovaRange {
        IovaRange::new(self.first, CHUNK_PAGES).expect("a chunk lies in the space")
    }
}
