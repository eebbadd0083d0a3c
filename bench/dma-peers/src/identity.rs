//! `IdentityAllocator`: the IOVA of memory is its physical address plus the access that the device
//! has (*Utilizing the IOMMU Scalably*, USENIX ATC 2015, §4.1, "dynamic identity mapping").
//!
//! With `b` physical address bits the space has four regions of `2^b` bytes: region 1 is the
//! physical space as read-only, 2 as write-only, 3 as both ([`Access`] is the region's number). A
//! page wanted for two kinds of access at once thus has two IOVAs, and no permission has to change.
//! Region 0, and the space above region 3, is the fallback: a
//! [`TreeAllocator`](iova::TreeAllocator)'s space.
//!
//! Flow: [`alloc_for`](IdentityCore::alloc_for) computes the range; nothing is looked up, nothing
//! stored. It falls back to the tree where that is no answer: the aperture ends below region 3; a
//! reserved region or the request's limit is in the way; memory not aligned as the request wants
//! (its size's power of two at least, as everywhere). `free` tells the two apart by address.
//!
//! **Exactness.** Identity ranges may overlap and repeat: two buffers in one page give the same
//! IOVA twice, and both are freed. So this allocator cannot tell a double free of an identity
//! range, or a partial one, from a right one, and does not try: that is the page table's part,
//! which counts ([`CountedTable`](crate::CountedTable)) and refuses to unmap what is not mapped.
//! For the same reason `pin` of an identity range excludes no other caller. Only ranges that are no
//! identity range at all are refused. Fallback ranges are checked exactly, like all of the tree's.
//!
//! **Ownership.** A handle owns two counters, in a line of its own; the tree is behind one lock.
//!
//! Cost: an identity range costs a few compares (and a search of the usable ranges, of which there
//! are as many as reserved regions); the fallback what the tree costs.
//!
//! Left out: splitting a request into identity and fallback parts.

use alloc::{boxed::Box, sync::Arc, vec::Vec};
use core::fmt;

use address::PhysAddr;
use iova::parts::{Claims, Tree, Wanted, pinned};
use iova::{
    Access, AllocError, Aperture, ApertureError, ClaimError, CoreAllocator, CoreId, FreeError,
    IovaAllocator, IovaPfn, IovaRange, Pinned, Request, ResetError, Stats,
};
use lines::{AtomicU64, CachePadded, Lock, Ordering};

/// Identity ranges in three regions of permission, and a tree for the rest.
///
/// ```
/// use address::PhysAddr;
/// use dma_peers::IdentityAllocator;
/// use iova::{Access, Aperture, CoreAllocator, CoreId, IovaAllocator, Request};
///
/// let space = IdentityAllocator::new(Aperture::of_bits(48)?, 1, 46)?;
/// let mut core = space.claim(CoreId(0))?;
/// let range = core.alloc_for(Request::pages(1), PhysAddr::new(0x1234_5000), Access::Read)?;
/// assert_eq!(range.start().raw(), (1 << 46) + 0x1234_5000);
/// core.free(range)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct IdentityAllocator(Arc<Shared>);

struct Shared {
    aperture: Aperture,
    claims: Claims,
    /// Pages of a region; `None` where the aperture has no place for all.
    region_pages: Option<u64>,
    fallback: Lock<Fallback>,
    counters: Box<[CachePadded<Counters>]>,
}

struct Fallback {
    tree: Tree,
    slow: u64,
}

/// Identity ranges allocated less freed, by one core, and their pages; modulo 2^64. Written by the
/// core alone.
#[derive(Default)]
struct Counters {
    ranges: AtomicU64,
    pages: AtomicU64,
}

impl IdentityAllocator {
    /// All of `aperture` free, for `cores` cores (1 to [`MAX_CORES`](iova::MAX_CORES)) and memory
    /// of `phys_bits` address bits (more than 12). Where the aperture lacks `phys_bits + 2` bits
    /// every request falls back ([`Self::has_identity`]).
    ///
    /// # Errors
    /// [`ApertureError::Cores`]; [`ApertureError::Empty`] where the identity regions leave no page
    /// to the fallback.
    pub fn new(aperture: Aperture, cores: usize, phys_bits: u32) -> Result<Self, ApertureError> {
        let region_pages = Self::region_pages(&aperture, phys_bits);
        let claims = Claims::new(cores)?;
        let tree = Self::fallback(&aperture, region_pages)?;
        Ok(Self(Arc::new(Shared {
            claims,
            region_pages,
            fallback: Lock::new(Fallback { tree, slow: 0 }),
            counters: (0..cores).map(|_| CachePadded::default()).collect(),
            aperture,
        })))
    }

    /// Returns whether `range` is the identity range of memory, which several mappings may have at
    /// once. The caller that maps must count these, then.
    pub fn is_counted(&self, range: IovaRange) -> bool {
        self.0.is_identity(range).unwrap_or(false)
    }

    /// Whether there are identity regions.
    pub fn has_identity(&self) -> bool {
        self.0.region_pages.is_some()
    }

    fn region_pages(aperture: &Aperture, phys_bits: u32) -> Option<u64> {
        let shift = phys_bits.checked_sub(address::PAGE_SHIFT + 1)? + 1;
        // The last page of region 3, in numbers that a shift cannot overflow.
        let pages = 1u64.checked_shl(shift).filter(|_| shift <= 50)?;
        let last = 4 * pages - 1;
        (aperture.first().raw() < pages && last <= aperture.last().raw()).then_some(pages)
    }

    /// Returns a tree of the usable space outside of the identity regions.
    fn fallback(aperture: &Aperture, region_pages: Option<u64>) -> Result<Tree, ApertureError> {
        let identity =
            region_pages.and_then(|pages| IovaRange::new(IovaPfn::new(pages), 3 * pages));
        let reserved: Vec<IovaRange> = aperture
            .reserved()
            .iter()
            .copied()
            .chain(identity)
            .collect();
        let outside = Aperture::new(aperture.first(), aperture.last(), &reserved)?;
        Ok(Tree::new(outside.usable()))
    }
}

impl Shared {
    /// Returns the identity range of a request's memory, if it satisfies the request.
    #[inline]
    fn identity(&self, phys: PhysAddr, access: Access, wanted: &Wanted) -> Option<IovaRange> {
        let pages = self.region_pages?;
        let frame = phys.raw() >> address::PAGE_SHIFT;
        if frame >= pages || wanted.pages > pages - frame {
            return None;
        }
        if frame & ((1 << wanted.order) - 1) != 0 {
            return None;
        }
        let region = match access {
            Access::Read => 1,
            Access::Write => 2,
            Access::ReadWrite => 3,
        };
        let range = IovaRange::new(IovaPfn::new(region * pages + frame), wanted.pages)?;
        (range.last() <= wanted.last && self.aperture.allows(range)).then_some(range)
    }

    /// Whether a range lies in the identity regions. An error where it lies there but can be no
    /// identity range.
    #[inline]
    fn is_identity(&self, range: IovaRange) -> Result<bool, FreeError> {
        let Some(pages) = self.region_pages else {
            return Ok(false);
        };
        let region = |pfn: IovaPfn| match pfn.raw() / pages {
            region @ 1..4 => region,
            _ => 0,
        };
        match (region(range.first()), region(range.last())) {
            (0, 0) => Ok(false),
            (first, last) if first == last && self.aperture.allows(range) => Ok(true),
            _ if self.aperture.allows(range) => Err(FreeError::NotAllocated { range }),
            _ => Err(FreeError::Outside { range }),
        }
    }
}

impl IovaAllocator for IdentityAllocator {
    type Core = IdentityCore;

    fn claim(&self, core: CoreId) -> Result<IdentityCore, ClaimError> {
        self.0.claims.claim(core)?;
        let Counters { ranges, pages } = &*self.0.counters[core.0];
        Ok(IdentityCore {
            ranges: ranges.load(Ordering::Relaxed),
            pages: pages.load(Ordering::Relaxed),
            shared: Arc::clone(&self.0),
            core,
        })
    }

    fn cores(&self) -> usize {
        self.0.claims.cores()
    }

    fn aperture(&self) -> &Aperture {
        &self.0.aperture
    }

    /// `chunks` counts the fallback's only: which identity chunks are in use, the page table knows.
    fn stats(&self) -> Stats {
        let shared = &*self.0;
        let sum = |counter: fn(&Counters) -> &AtomicU64| {
            let each = shared.counters.iter();
            // Relaxed: approximate while others work.
            let sum = each
                .map(|counters| counter(counters).load(Ordering::Relaxed))
                .fold(0, u64::wrapping_add);
            // Below zero only after frees of what was never allocated, which are not noticed here.
            sum.cast_signed().max(0).cast_unsigned()
        };
        let fallback = shared.fallback.lock();
        let tree = &fallback.tree;
        Stats {
            live_ranges: tree.live_ranges() + sum(|counters| &counters.ranges),
            live_pages: tree.live_pages() + sum(|counters| &counters.pages),
            cached_pages: 0,
            chunks: tree.chunks(),
            bytes: tree.bytes() + size_of_val(&*shared.counters) + shared.claims.cores(),
            slow: fallback.slow,
        }
    }

    fn reset(&self) -> Result<(), ResetError> {
        let shared = &*self.0;
        shared.claims.while_idle(|| {
            let tree = Self::fallback(&shared.aperture, shared.region_pages);
            *shared.fallback.lock() = Fallback {
                tree: tree.expect("it was made from the same aperture before"),
                slow: 0,
            };
            for counters in &shared.counters {
                let Counters { ranges, pages } = &**counters;
                ranges.store(0, Ordering::Relaxed);
                pages.store(0, Ordering::Relaxed);
            }
        })
    }
}

impl fmt::Debug for IdentityAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdentityAllocator")
            .field("region_pages", &self.0.region_pages)
            .finish_non_exhaustive()
    }
}

/// One core's handle of an [`IdentityAllocator`]. It caches nothing.
pub struct IdentityCore {
    shared: Arc<Shared>,
    core: CoreId,
    ranges: u64,
    pages: u64,
}

impl IdentityCore {
    #[inline]
    fn count(&mut self, sign: i64, pages: u64) {
        self.ranges = self.ranges.wrapping_add_signed(sign);
        self.pages = self.pages.wrapping_add_signed(sign * pages as i64);
        let shared = &self.shared.counters[self.core.0];
        shared.ranges.store(self.ranges, Ordering::Relaxed);
        shared.pages.store(self.pages, Ordering::Relaxed);
    }

    /// A range for memory at `phys`, with which the device may do `access`.
    ///
    /// # Errors
    /// As [`alloc`](CoreAllocator::alloc).
    pub fn alloc_for(
        &mut self,
        request: Request,
        phys: PhysAddr,
        access: Access,
    ) -> Result<IovaRange, AllocError> {
        let wanted = Wanted::of(&request)?;
        if let Some(range) = self.shared.identity(phys, access, &wanted) {
            self.count(1, range.pages());
            return Ok(range);
        }
        self.alloc(request)
    }

    fn with_fallback<R>(&self, work: impl FnOnce(&mut Tree) -> R) -> R {
        let mut fallback = self.shared.fallback.lock();
        fallback.slow += 1;
        work(&mut fallback.tree)
    }
}

impl CoreAllocator for IdentityCore {
    fn core(&self) -> CoreId {
        self.core
    }

    fn alloc(&mut self, request: Request) -> Result<IovaRange, AllocError> {
        let wanted = Wanted::of(&request)?;
        self.with_fallback(|tree| tree.alloc(wanted.pages, wanted.order, wanted.last))
            .ok_or_else(|| wanted.failure(&self.shared.aperture, 0))
    }

    fn free(&mut self, range: IovaRange) -> Result<(), FreeError> {
        if self.shared.is_identity(range)? {
            self.count(-1, range.pages());
            return Ok(());
        }
        self.with_fallback(|tree| tree.free(range))
    }

    fn pin(&mut self, range: IovaRange) -> Result<Pinned, FreeError> {
        if !self.shared.is_identity(range)? {
            self.with_fallback(|tree| tree.set_pinned(range, true))?;
        }
        Ok(pinned(range))
    }

    fn free_pinned(&mut self, pinned: Pinned) {
        let range = pinned.range();
        if self.shared.is_identity(range) == Ok(true) {
            self.count(-1, range.pages());
            return;
        }
        self.with_fallback(|tree| tree.free_pinned(range))
            .expect("what was pinned is allocated");
    }

    fn unpin(&mut self, pinned: Pinned) {
        if self.shared.is_identity(pinned.range()) != Ok(true) {
            self.with_fallback(|tree| tree.set_pinned(pinned.range(), false))
                .expect("what was pinned is allocated");
        }
    }

    fn park(&mut self) {}
}

impl fmt::Debug for IdentityCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdentityCore")
            .field("core", &self.core)
            .finish_non_exhaustive()
    }
}

impl Drop for IdentityCore {
    fn drop(&mut self) {
        self.shared.claims.release(self.core);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use iova::parts::range_at;

    const REGION: u64 = 1 << (40 - 12);

    fn space() -> IdentityAllocator {
        let reserved = [range_at(3 * REGION + 0x100, 0x10)];
        let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(5 * REGION), &reserved);
        IdentityAllocator::new(aperture.expect("pages"), 2, 40).expect("a fallback")
    }

    fn phys(frame: u64) -> PhysAddr {
        PhysAddr::new(frame << 12 | 0x123)
    }

    #[test]
    fn each_permission_has_a_copy_of_memory() {
        let space = space();
        let mut core = space.claim(CoreId(1)).expect("free");
        for (access, region) in [
            (Access::Read, 1),
            (Access::Write, 2),
            (Access::ReadWrite, 3),
        ] {
            let range = core
                .alloc_for(Request::pages(3), phys(0x44), access)
                .expect("identity");
            assert_eq!(range, range_at(region * REGION + 0x44, 3));
            let again = core
                .alloc_for(Request::pages(3), phys(0x44), access)
                .expect("by design");
            assert_eq!(again, range);
            assert_eq!(space.stats().live_pages, 6);
            core.free(range).expect("identity");
            core.free(again).expect("identity");
        }
        assert_eq!((space.stats().live_ranges, space.stats().slow), (0, 0));
    }

    #[test]
    fn requests_without_an_identity_range_fall_back() {
        let space = space();
        let mut core = space.claim(CoreId(0)).expect("free");
        let requests = [
            // Reserved there; beyond memory; ends beyond; not aligned to its size; above the limit.
            (Request::pages(1), 0x108, Access::ReadWrite),
            (Request::pages(1), REGION, Access::Read),
            (Request::pages(8), REGION - 4, Access::Read),
            (Request::pages(3), 0x45, Access::Read),
            (Request::pages(1).aligned(3), 0x44, Access::Read),
            (
                Request::pages(1).at_most(IovaPfn::new(0xf_ffff)),
                0x44,
                Access::Read,
            ),
        ];
        let mut out = Vec::new();
        for (request, frame, access) in requests {
            let range = core.alloc_for(request, phys(frame), access).expect("room");
            let is_identity = (REGION..4 * REGION).contains(&range.first().raw());
            assert!(
                !is_identity && range.last() <= Wanted::of(&request).expect("valid").last,
                "{request:?}: {range}"
            );
            out.push(range);
        }
        for range in out {
            assert_eq!(core.free(range), Ok(()));
            assert_eq!(core.free(range), Err(FreeError::NotAllocated { range }));
        }
    }

    #[test]
    fn a_narrow_aperture_has_no_identity() {
        for (bits, phys_bits, expected) in [
            (48, 46, true),
            (48, 47, false),
            (39, 46, false),
            (64, 62, true),
            (64, 63, false),
            (48, 12, false),
        ] {
            let aperture = Aperture::of_bits(bits).expect("valid");
            let space = IdentityAllocator::new(aperture, 1, phys_bits).expect("a fallback");
            assert_eq!(space.has_identity(), expected, "{bits} {phys_bits}");
            let mut core = space.claim(CoreId(0)).expect("free");
            let range = core.alloc_for(Request::pages(1), phys(5), Access::Read);
            let range = range.expect("room");
            core.free(range).expect("out");
        }
    }

    #[test]
    fn a_range_across_regions_or_a_reserved_one_is_refused() {
        let space = space();
        let mut core = space.claim(CoreId(0)).expect("free");
        let range = range_at(2 * REGION - 1, 2);
        assert_eq!(core.free(range), Err(FreeError::NotAllocated { range }));
        let range = range_at(REGION - 1, 2);
        assert_eq!(core.free(range), Err(FreeError::NotAllocated { range }));
        let range = range_at(3 * REGION + 0xff, 2);
        assert_eq!(core.free(range), Err(FreeError::Outside { range }));
        assert_eq!(core.pin(range), Err(FreeError::Outside { range }));
    }
}
