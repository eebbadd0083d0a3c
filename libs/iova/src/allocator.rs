//! The traits: a space that cores share, and the handle through which one core uses it.

use core::num::NonZeroU64;

use crate::{
    AllocError, Aperture, ClaimError, CoreId, FreeError, IovaPfn, IovaRange, Request, ResetError,
    Stats,
};

/// An IOVA space of one domain. All cores share it; each works through a handle of its own.
pub trait IovaAllocator: Send + Sync {
    /// The handle of one core. It may move to another thread but not be shared: no operation takes a lock
    /// only to find out that nobody else is there.
    type Core: CoreAllocator;

    /// The handle of `core`. It comes back when it is dropped, which parks it first.
    ///
    /// # Errors
    /// The core has a handle, or does not exist.
    fn claim(&self, core: CoreId) -> Result<Self::Core, ClaimError>;

    /// Any free handle, for threads that have no number: a thread keeps it in thread-local storage or on its stack.
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

    /// How many cores it was made for.
    fn cores(&self) -> usize;

    /// The space.
    fn aperture(&self) -> &Aperture;

    /// What is allocated and cached; reads every core's state, so it is slow and, while others work, approximate.
    fn stats(&self) -> Stats;

    /// Forgets every allocation, as a device reset does.
    ///
    /// # Errors
    /// A core has its handle.
    fn reset(&self) -> Result<(), ResetError>;
}

/// One core's way into an IOVA space.
pub trait CoreAllocator: Send {
    /// Which core this is.
    fn core(&self) -> CoreId;

    /// A free range. It may be larger than asked for (rounded up to a power of two): all of it is the
    /// caller's, and all of it must be freed.
    ///
    /// # Errors
    /// [`AllocError`]; nothing has changed then, except that other cores may have been asked to drain.
    fn alloc(&mut self, request: Request) -> Result<IovaRange, AllocError>;

    /// Takes back a range exactly as a core of this space got it; any core may.
    ///
    /// # Errors
    /// [`FreeError`]; nothing has changed then.
    fn free(&mut self, range: IovaRange) -> Result<(), FreeError>;

    /// Checks that `range` is allocated exactly so, and keeps it from being freed or pinned by another core until
    /// [`free_pinned`](Self::free_pinned) or [`unpin`](Self::unpin). What lies behind it (its leaf table) stays
    /// meanwhile. This is the first half of an unmap; the second follows when no device can use it.
    ///
    /// An allocator whose owners pin without a read-modify-write ([`ChunkAllocator`](crate::ChunkAllocator)) may let two
    /// cores pin one range if they do so in the same moment: a caller's mistake, as two racing frees are.
    ///
    /// # Errors
    /// As [`free`](Self::free).
    fn pin(&mut self, range: IovaRange) -> Result<Pinned, FreeError>;

    /// Frees what was pinned, by this core or another.
    fn free_pinned(&mut self, pinned: Pinned);

    /// Lets go of what this core pinned: it is allocated as before.
    fn unpin(&mut self, pinned: Pinned);

    /// Gives everything cached back to the space. The handle remains usable.
    fn park(&mut self);

    /// Takes one 2 MiB chunk in which nothing is allocated out of circulation, so that the leaf table behind it can
    /// be reclaimed. `None` where there is none to spare, or where the allocator does not own chunks.
    fn retire(&mut self) -> Option<RetiredChunk> {
        None
    }

    /// Makes a retired chunk allocatable again.
    fn recycle(&mut self, chunk: RetiredChunk) {
        unreachable!("{chunk:?} was not retired by this allocator")
    }
}

/// A range that nobody else can free, map over or lose the leaf table of.
// Two words, so that it goes through registers: with the flag in a byte of its own, storing the parts and loading the
// whole would stall every unmap.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a pinned range stays allocated until it is freed"]
pub struct Pinned {
    first: IovaPfn,
    /// The pages, and [`Self::FOREIGN`].
    pages: NonZeroU64,
}

impl Pinned {
    /// Marked in shared memory because another core owns the chunk. No range has so many pages.
    const FOREIGN: u64 = 1 << 63;

    /// A range that the caller has just pinned; `is_foreign` means something to the allocator only.
    #[inline(always)]
    pub(crate) fn new(range: IovaRange, is_foreign: bool) -> Self {
        let mark = if is_foreign { Self::FOREIGN } else { 0 };
        Self {
            first: range.first(),
            pages: NonZeroU64::new(range.pages() | mark).expect("a range has pages"),
        }
    }

    /// The range.
    #[inline(always)]
    pub fn range(&self) -> IovaRange {
        IovaRange::within_space(self.first.raw(), self.pages.get() & !Self::FOREIGN)
    }

    /// What [`new`](Self::new) was told.
    #[inline(always)]
    pub(crate) fn is_foreign(&self) -> bool {
        self.pages.get() & Self::FOREIGN != 0
    }
}

/// Pages of a chunk: what one leaf table maps.
pub const CHUNK_PAGES: u64 = 512;

/// A chunk out of circulation: 512 pages, aligned, none of them allocated.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a retired chunk is lost until it is recycled"]
pub struct RetiredChunk {
    pub(crate) first: IovaPfn,
}

impl RetiredChunk {
    /// Its pages.
    pub fn range(&self) -> IovaRange {
        IovaRange::new(self.first, CHUNK_PAGES).expect("a chunk lies in the space")
    }
}
