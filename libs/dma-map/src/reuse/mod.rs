//! Mappings that outlive their unmap, or are found a second time, so that the next map of the same page costs no
//! page-table change, no IOVA and no invalidation.
//!
//! One trait, [`ReuseCache`], carries the ways published and one of our own. The mapper asks it first
//! ([`acquire`](ReuseCache::acquire)), tells it of the mappings it had to make ([`adopt`](ReuseCache::adopt)), and
//! hands it every mapping that a driver lets go of ([`release`](ReuseCache::release)): the answer says whether the
//! mapping stays. What does not stay any longer comes back in a [`Batch`], so that one invalidation covers many.
//!
//! | structure | source | stale mappings | age | keeps |
//! |---|---|---|---|---|
//! | [`OptimisticCache`] | vIOMMU (ATC'11) §3.4, optimistic teardown | ≤ quota, per core | ≤ residency, even where the owner is quiet | idle mappings of one core |
//! | [`SharingCache`] | vIOMMU §3.2-3.3, approximate sharing | 0 | 0 | live mappings of all cores |
//!
//! The bound each one promises is a value ([`RiskContract`]) that its own counters can be checked against
//! ([`RiskContract::check`]). A mapping is *stale* from its release until it is acquired again or its teardown,
//! invalidation included, has been reported by [`torn_down`](ReuseCache::torn_down).
//!
//! Keys are (physical page, pages, access): a mapping for reading is never found by who wants to write, nor one
//! for both by who wants less. Mappings of more than [`Key::MAX_PAGES`] pages are not reused.
//!
//! Time is the caller's: `now_ns` is nanoseconds of one monotonic clock for all cores, as coarse as the caller
//! likes. A clock that lags makes entries expire early, never late; the age bound holds to the period at which
//! somebody calls [`expire`](ReuseCache::expire) or [`Expire::expire`].
//!
//! Called by `DmaMapper`'s cores, each with a cache of its own, and by any thread through [`Expire`]. No structure
//! here touches page tables, IOVAs or the IOMMU, takes a clock reading, or allocates after its construction.

#![forbid(unsafe_code)]

mod batch;
mod key;
mod risk;

mod index;
mod slab;
mod slot_map;

mod optimistic;
#[cfg(feature = "parts")]
pub mod parts;
mod sharing;

pub use batch::{Batch, Expired};
pub use key::Key;
pub use optimistic::{OptimisticCache, RESIDENCY_NS};
pub use risk::{Counts, RiskContract, Violation, Windows};
pub use sharing::{SharingCache, SharingTable};

use alloc::sync::Arc;

use iova::IovaRange;

/// What a released mapping becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a mapping that is not kept has to be torn down"]
pub enum Released {
    /// It stays mapped, idle; the cache answers for it now.
    Kept,
    /// Somebody else still uses it.
    InUse,
    /// The cache does not want it: the caller tears it down before the release returns to the driver.
    TearDown,
}

/// Whether a call that fills a batch found everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what is left has to be fetched with another batch"]
pub enum Progress {
    /// Nothing more is due now.
    Done,
    /// The batch is full: tear it down and call again.
    More,
}

/// One core's cache of mappings.
///
/// A mapping is known to its cache by the key it was mapped with and the IOVA range it got. The caller keeps the
/// page-table entries of everything that is kept, live or in a batch.
pub trait ReuseCache: Send {
    /// A mapping of `key` for one more user, which releases it later; `None`: the caller makes one, and
    /// [`adopt`](Self::adopt)s it. The range is mapped, with exactly the key's memory and access.
    fn acquire(&mut self, key: Key, now_ns: u64) -> Option<IovaRange>;

    /// A mapping was made after a miss, and has one user. The cache may ignore it: a mapping it does not know is
    /// nevertheless released through it.
    fn adopt(&mut self, key: Key, range: IovaRange, now_ns: u64);

    /// One user of a mapping has ended. `key` and `range` are what it was mapped with, on this core or another.
    ///
    /// `batch` may gain mappings that have to go to make room or because they are due: the caller tears them down
    /// and reports [`torn_down`](Self::torn_down). Where it is full, a release may answer
    /// [`Released::TearDown`] although an older mapping would have been the better victim.
    fn release(&mut self, key: Key, range: IovaRange, now_ns: u64, batch: &mut Batch) -> Released;

    /// Moves the idle mappings whose residency has ended to `batch`, oldest first.
    fn expire(&mut self, now_ns: u64, batch: &mut Batch) -> Progress;

    /// Moves every idle mapping to `batch`: before a core parks, on exhaustion, on reset.
    fn drain(&mut self, batch: &mut Batch) -> Progress;

    /// No device can use the mappings of `batch` any more: their entries are cleared and the invalidation that
    /// covers them is complete. Empties the batch. Until then they count as stale.
    ///
    /// # Panics
    /// An entry of the batch was not taken from this cache: a mistake of the caller.
    fn torn_down(&mut self, batch: &mut Batch, now_ns: u64);

    /// How any thread may expire this cache's mappings; `None` where only the owner can, so that the age bound
    /// ends with the owner's calls.
    fn expirer(&self) -> Option<Arc<dyn Expire>>;

    /// What is promised.
    fn contract(&self) -> RiskContract;

    /// What happened, since the start. What other threads expired is included.
    fn counts(&self) -> Counts;
}

/// Expires a cache's idle mappings from outside its owner: a timer, or a core that found the space exhausted.
pub trait Expire: Send + Sync {
    /// As [`ReuseCache::expire`]. Returns at once, `Done`, where another thread is at it.
    fn expire(&self, now_ns: u64, batch: &mut Batch) -> Progress;

    /// Whether [`expire`](Self::expire) would find something at `now_ns`, were nobody else at it. Waits for nobody and
    /// allocates nothing: an interrupt may ask, whatever it has interrupted.
    fn is_due(&self, now_ns: u64) -> bool;

    /// As [`ReuseCache::drain`]. Once it has answered `Done`, what was idle at the call is in `batch`, or in one that
    /// another thread or the owner has filled and not reported as torn down; it may wait for others who look. Who
    /// wants to know when *those* are torn down has to arrange that with them, by a lock for instance that is held from
    /// the filling of a batch until it is torn down or put where the next holder finds it.
    fn drain(&self, batch: &mut Batch) -> Progress;

    /// As [`ReuseCache::torn_down`], for a batch that this expirer filled.
    ///
    /// # Panics
    /// An entry of the batch was not taken from this cache: a mistake of the caller.
    fn torn_down(&self, batch: &mut Batch, now_ns: u64);

    /// What can be seen from outside: mappings that are stale now, and the windows and number of those that
    /// were expired from outside. Part of what [`ReuseCache::counts`] gives.
    fn counts(&self) -> Counts;
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
