//! Mappings that outlive their unmap, or are found a second time, so that the next map of the same
//! page costs no page-table change, no IOVA and no invalidation.
//!
//! | structure | source | stale mappings | age | keeps |
//! |---|---|---|---|---|
//! | [`OptimisticCache`] | vIOMMU (ATC'11) §3.4, optimistic teardown | ≤ quota, per core | ≤ residency, even where the owner is quiet | idle mappings of one core |
//! | [`SharingTable`] | vIOMMU §3.2-3.3, approximate sharing | 0 | 0 | live mappings of all cores |
//!
//! A mapping is *stale* from its release until it is found again or its teardown, invalidation
//! included, has been reported: by its owner with [`OptimisticCache::finish`], by others with
//! [`Slab::torn_down`]. Mappings to be torn down come in a [`Batch`], so that one invalidation
//! covers many.
//!
//! Time is the caller's: `now_ns` is nanoseconds of one monotonic clock for all cores, as coarse as
//! the caller likes. A clock that lags makes entries expire early, never late. The age bound holds
//! up to the period at which [`Slab::expire`] is called.
//!
//! Called by `DmaMapper`'s cores, each with a cache of its own or all with one sharing table, and
//! by any thread through a cache's [`Slab`]. Nothing here touches page tables, IOVAs or the IOMMU,
//! takes a clock reading, or allocates after its construction. Other caches, from papers, are in
//! `bench/dma-peers` for comparison.

#![forbid(unsafe_code)]

pub(crate) mod key;
pub(crate) mod optimistic;
mod sharing;
mod slab;
pub(crate) mod slots;

pub use key::Key;
pub use optimistic::OptimisticCache;
pub use sharing::SharingTable;
pub use slab::Slab;

use alloc::vec::Vec;

use iova::IovaRange;

/// Part of the residency by which the owner releases its mappings before other cores expire them: a
/// quarter, which is more than two ticks. So a scan by another core finds nothing due in the cache
/// of a core that runs, and leaves its lines alone; with one time for both, each tick would fetch
/// all that the owner has written since the last.
const OWNER_LEAD: u64 = 4;

/// Whether a call that fills a batch found everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what is left has to be fetched with another batch"]
pub enum Progress {
    /// Nothing more is due now.
    Done,
    /// The batch is full: tear it down and call again.
    More,
}

/// A mapping that has to be torn down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expired {
    /// The IOVA range, all of it mapped as long as its key says and allocated.
    pub range: IovaRange,
    /// Time of its release, on the caller's clock, nanoseconds: it has been stale since.
    pub since_ns: u64,
    /// The place in the cache that it occupies until it is torn down.
    pub place: u32,
}

/// Up to a fixed number of mappings of one cache that have to be torn down, for one invalidation.
/// One that is dropped before keeps its mappings stale, and their places in the cache occupied, for
/// ever.
#[derive(Debug)]
#[must_use = "its mappings stay stale until they are torn down"]
pub struct Batch {
    entries: Vec<Expired>,
    room: usize,
}

impl Batch {
    /// An empty batch for `room` mappings, at least 1; its memory is allocated now.
    pub fn with_room(room: usize) -> Self {
        let room = room.max(1);
        Self {
            entries: Vec::with_capacity(room),
            room,
        }
    }

    /// The mappings to tear down, oldest first.
    pub fn entries(&self) -> &[Expired] {
        &self.entries
    }

    /// Whether there is nothing to tear down.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether no further mapping fits.
    pub fn is_full(&self) -> bool {
        self.entries.len() == self.room
    }

    /// Adds one; there is room.
    pub fn push(&mut self, expired: Expired) {
        debug_assert!(!self.is_full());
        self.entries.push(expired);
    }

    /// Takes everything out, to report it as torn down.
    pub fn take(&mut self) -> impl Iterator<Item = Expired> + '_ {
        self.entries.drain(..)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
