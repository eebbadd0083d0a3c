//! Caches of mappings by themselves: the mapper's two structures, their parts, and a trait common
//! to them and to other such caches, to be tested and measured side by side. Without a promise of
//! stability.

pub use crate::reuse::key::PackedRange;
pub use crate::reuse::optimistic::{evicted_together, owners};
pub use crate::reuse::slots::{Found, SlotMap};
pub use crate::reuse::{Batch, Expired, Key, Progress, SharingTable, Slab};
pub use crate::risk::{Counts, RiskContract};

use alloc::sync::Arc;

use iova::IovaRange;

/// The mapper's, with ranges for pins.
pub type OptimisticCache = crate::reuse::OptimisticCache<IovaRange>;

/// State of a released mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a mapping that is not kept has to be torn down"]
pub enum Released {
    /// It stays mapped, idle; the cache answers for it now.
    Kept,
    /// Another user still uses it.
    InUse,
    /// The cache does not want it: the caller tears it down before the release returns to the
    /// driver.
    TearDown,
}

/// One core's cache of mappings.
///
/// A mapping is known to its cache by the key it was mapped with and the IOVA range it got. The
/// caller keeps the page-table entries of everything that is kept, live or in a batch.
pub trait ReuseCache: Send {
    /// A mapping of `key` for one more user, which releases it later; `None`: the caller makes one,
    /// and [`insert`](Self::insert)s it. The range is mapped, with exactly the key's memory and
    /// access.
    fn acquire(&mut self, key: Key, now_ns: u64) -> Option<IovaRange>;

    /// A mapping was made after a miss, and has one user. The cache may ignore it: a mapping it
    /// does not know is nevertheless released through it.
    fn insert(&mut self, key: Key, range: IovaRange, now_ns: u64);

    /// One user of a mapping has ended. It was mapped with `key` and `range`, on this core or
    /// another.
    ///
    /// `batch` may gain mappings that have to go to make room or because they are due: the caller
    /// tears them down and reports [`torn_down`](Self::torn_down). Where it is full, a release may
    /// answer [`Released::TearDown`] although an older mapping would have been the better victim.
    fn release(&mut self, key: Key, range: IovaRange, now_ns: u64, batch: &mut Batch) -> Released;

    /// Moves the idle mappings whose residency has ended to `batch`, oldest first.
    fn expire(&mut self, now_ns: u64, batch: &mut Batch) -> Progress;

    /// Moves every idle mapping to `batch`: before a core parks, on exhaustion, on reset.
    fn drain(&mut self, batch: &mut Batch) -> Progress;

    /// No device can use the mappings of `batch` any more: their entries are cleared and the
    /// invalidation that covers them is complete. Empties the batch. Until then they count as
    /// stale.
    ///
    /// # Panics
    /// An entry of the batch was not taken from this cache: a mistake of the caller.
    fn torn_down(&mut self, batch: &mut Batch, now_ns: u64);

    /// The slab through which any thread may expire this cache's mappings; `None` where only the
    /// owner can, so that the age bound ends with the owner's calls.
    fn expirer(&self) -> Option<Arc<Slab>> {
        None
    }

    /// Counts since the start, including mappings that other threads expired.
    fn counts(&self) -> Counts;
}

/// As the mapper uses it, except that room is made without a lock: a mapping that is not kept is
/// torn down, and makes room for the next. Where others tear down, a core with a notice of it first
/// calls [`torn_down`](ReuseCache::torn_down), if need be with an empty batch.
impl ReuseCache for OptimisticCache {
    #[inline]
    fn acquire(&mut self, key: Key, now_ns: u64) -> Option<IovaRange> {
        let found = self.hit(key, now_ns);
        if found.is_none() {
            self.missed();
        }
        found
    }

    #[inline]
    fn insert(&mut self, _key: Key, _range: IovaRange, _now_ns: u64) {}

    #[inline]
    fn release(&mut self, key: Key, range: IovaRange, now_ns: u64, batch: &mut Batch) -> Released {
        let kept = self.keep(key, range, range, now_ns);
        if kept != Ok(false) {
            self.sweep(drop);
            self.make_room(now_ns, batch);
        }
        match kept {
            Ok(_) => Released::Kept,
            Err(_) => Released::TearDown,
        }
    }

    fn expire(&mut self, now_ns: u64, batch: &mut Batch) -> Progress {
        OptimisticCache::expire(self, now_ns, batch)
    }

    fn drain(&mut self, batch: &mut Batch) -> Progress {
        OptimisticCache::drain(self, batch)
    }

    fn torn_down(&mut self, batch: &mut Batch, now_ns: u64) {
        self.finish(batch, now_ns, drop);
    }

    fn expirer(&self) -> Option<Arc<Slab>> {
        Some(self.slab())
    }

    fn counts(&self) -> Counts {
        let mut counts = self.own_counts();
        counts.add(&self.slab().counts());
        counts
    }
}

impl ReuseCache for Arc<SharingTable> {
    #[inline]
    fn acquire(&mut self, key: Key, _now_ns: u64) -> Option<IovaRange> {
        SharingTable::acquire(self, key)
    }

    #[inline]
    fn insert(&mut self, key: Key, range: IovaRange, _now_ns: u64) {
        SharingTable::insert(self, key, range);
    }

    #[inline]
    fn release(&mut self, key: Key, range: IovaRange, _: u64, _: &mut Batch) -> Released {
        match self.end_use(key, range) {
            true => Released::InUse,
            false => Released::TearDown,
        }
    }

    fn expire(&mut self, _now_ns: u64, _batch: &mut Batch) -> Progress {
        Progress::Done
    }

    fn drain(&mut self, _batch: &mut Batch) -> Progress {
        Progress::Done
    }

    fn torn_down(&mut self, batch: &mut Batch, _now_ns: u64) {
        assert!(batch.is_empty(), "nothing is taken from a sharing table");
    }

    fn counts(&self) -> Counts {
        SharingTable::counts(self)
    }
}
