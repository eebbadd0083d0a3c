//! An owner's side of remote frees while it runs: it publishes the page that it changes, and counts
//! the marks that it meets.
//!
//! ```text
//!          changing(page), freeing(page)
//! NO_PAGE ──────────────────────────────▶ page: cores that collect for this one leave it alone (`remote_free`)
//!         ◀──────────────────────────────
//!                    changed
//!
//! meetings: 0 ──meet──▶ 1 ──meet──▶ … ──meet──▶ MEETINGS: the chunk at hand is collected, and it is 0
//! ```

use alloc::sync::Arc;

use lines::{AtomicU64, CachePadded, Fences, Ordering};

use super::Shared;
use super::core_cache::CoreCache;
use super::layout::PENDING;
use crate::{CHUNK_PAGES, CoreId};

/// Value of [`Published::changing`](super::Published) while a core changes no range.
pub(super) const NO_PAGE: u64 = u64::MAX;

/// Frees in chunks with marks after which an owner collects the chunk at hand.
pub(super) const MEETINGS: u32 = 16;

/// An owner's side of remote frees.
#[derive(Debug)]
pub(super) struct OwnerSide {
    fences: Fences,
    /// See [`Published`](super::Published).
    changing: Arc<CachePadded<AtomicU64>>,
    /// Frees in chunks with marks since the last time such a chunk was collected.
    meetings: u32,
}

impl OwnerSide {
    pub(super) fn new(id: CoreId, shared: &Shared) -> Self {
        Self {
            fences: shared.fences,
            changing: Arc::clone(&shared.cores[id.0].changing),
            meetings: 0,
        }
    }

    /// Publishes that the range at a page is about to be pinned or freed. Called before the loads
    /// that the change depends on.
    #[inline(always)]
    pub(super) fn changing(&self, page: u64) {
        self.changing.store(page, Ordering::Relaxed);
        self.fences.light();
    }

    /// The same of a free. Where it needs a fence of the CPU, that is made by [`Self::fence_free`]:
    /// to ask here would cost each free 3 % more.
    #[inline(always)]
    pub(super) fn freeing(&self, page: u64) {
        self.changing.store(page, Ordering::Relaxed);
        Fences::light_by_kernel();
    }

    /// Makes the fence of a free that has not been made. What was loaded before is not to be relied
    /// on.
    #[inline(always)]
    pub(super) fn fence_free(&self) {
        if !self.fences.is_by_kernel() {
            self.fences.light();
        }
    }

    /// Publishes that the change is done, or that the range was found to be another core's.
    #[inline(always)]
    pub(super) fn changed(&self) {
        // Release: a core that collects and sees this store sees the change of the range.
        self.changing.store(NO_PAGE, Ordering::Release);
    }

    /// Counts a free of our own in a chunk with such a tag, and collects the chunk where marks were
    /// met often enough.
    pub(super) fn meet(&mut self, shared: &Shared, cache: &CoreCache, tag: u64, page: u64) {
        // A chunk that only a designated remote freer marks is not better for being collected.
        self.meetings += u32::from(tag & PENDING != 0);
        if self.meetings >= MEETINGS {
            self.meetings = 0;
            collect_met(shared, cache, page);
        }
    }
}

/// Collects the chunk of a page in which a core has met marks so often, if it is still that core's.
#[cold]
#[inline(never)]
fn collect_met(shared: &Shared, cache: &CoreCache, page: u64) {
    let zones = &mut *shared.zones_of(cache.id()).lock();
    let Some(chunk) = cache.known(page) else {
        return;
    };
    if chunk.is_own(cache.owner()) {
        let first = page / CHUNK_PAGES * CHUNK_PAGES;
        zones.drain(chunk, first, chunk.lane());
    }
}
