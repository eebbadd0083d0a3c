//! Mapping for DMA: memory in, addresses for a device out, and back, under a policy.
//!
//! A [`DmaMapper`] is one domain: an IOVA space, a table, an invalidator, a clock, and a
//! [`Policy`]. All cores share it; each maps and unmaps through a [`MapperCore`] of its own, which
//! takes no lock only to find it uncontended.
//!
//! | policy | unmap returns | stale mappings |
//! |---|---|---|
//! | [`STRICT`](Policy::STRICT) | after its invalidation | 0 |
//! | [`STRICT_COMBINING`](Policy::STRICT_COMBINING) | after an invalidation that it may share with other cores | 0 |
//! | [`SHARED`](Policy::SHARED) | as strict, for the last user of a page | 0 |
//! | [`ASYNC`](Policy::ASYNC) | when the invalidation is submitted | ≤ 250 per core, 10 ms |
//! | [`DEFERRED`](Policy::DEFERRED) | at once; one flush for all, later | ≤ 250 per core, 10 ms |
//! | [`optimistic`](Policy::optimistic) | at once; the mapping stays for its next user | ≤ quota per core, 10 ms |
//! | [`OFF`](Policy::OFF) | at once; no translation | everything, always |
//!
//! **An unmap**: pin the IOVA (the allocator checks that it is allocated exactly so; no other core
//! can free it, and its leaf table stays) → clear the entries → invalidate, or queue → free the
//! IOVA. Between the clearing and the end of an invalidation that began after it, the IOVA is never
//! allocated again.
//!
//! **Many at once**: [`MapperCore::unmap_many`] clears a list first and invalidates once for up to
//! 32 of it (`core_unmap_many.rs`).
//!
//! **Deferred**: a core's queue fills until it is full or its oldest entry too old; then the core
//! or the tick that finds this flushes for all cores (`lines.rs` describes the protocol between
//! cores and flushers). [`DmaMapper::tick`], from any thread, flushes for cores that are quiet and
//! expires their cached mappings; their IOVAs come back when they next run.
//!
//! **Exhaustion**: a map that finds no IOVA gives back what its own core keeps, flushes, frees the
//! deferred work of dropped cores, and asks the other cores to drain. A core that does not run then
//! still keeps these IOVAs: those in its queue and those of its cached mappings, torn down or not
//! (at most what [`contract`](DmaMapper::contract) says for one core; none where the policy is
//! strict and nothing has failed), the rest of the chunks in which they lie, which only the chunks'
//! owners may use, and what the allocator keeps for it ([`iova::chunk`]). It also keeps what it has
//! mapped and others have unmapped until it runs once more, or parks: they unmap under pins
//! (`iova::chunk` gives the reason). An owner of mappings that goes idle parks.
//!
//! **Table pages** come back by chunks (`core_reclaim.rs`), with the invalidation that the queue
//! waits for anyway.
//!
//! **Failures**: every error names the operation and the place, and leaves things as they were,
//! except for a failed invalidation: entries are cleared then, and the IOVA waits, counted as
//! stale, in the same queue until a later invalidation succeeds. When the queue is full of such,
//! unmaps are refused.
//!
//! **Barriers**: [`DmaMapper::flush`] for what any core has unmapped, [`MapperCore::park`] and
//! dropping it for what that core has. When they return `Ok` (a drop that counts nothing as left
//! behind), no device reaches what was unmapped before, whatever other threads are in the middle
//! of. Each mapping that was unmapped and is not yet out of reach is in one of these:
//! * a queue: its number is noted by any flush that begins later, even while other threads flush or
//!   wait for a ticket;
//! * the deferred work of a dropped core, where an invalidation had failed before the drop: noted
//!   by a flush as well;
//! * a reuse cache, idle: taken by the thread that drains with the core's `leaving` lock held;
//! * on its way out of one: the thread that takes it, in a tick, a flush or the owner that makes
//!   room, has held that lock since before, and releases it when the mapping is invalidated, or,
//!   where the invalidation failed, lies cleared in the lock's value.
//!
//! So a barrier waits for `flush` and for each core's `leaving`, one at a time, and does the rest
//! itself. A tick takes neither where it would have to wait, and leaves the core to the next tick;
//! nor does an owner that makes room, whose mapping is torn down at once then.
//!
//! **Locks**, in the order in which they are waited for:
//! 1. `flush`, of the mapper, or `leaving`, of a core, for the teardown of its cached mappings:
//!    never two of these. The hardware is waited for with them held.
//! 2. That of the deferred work of dropped cores, of the mapper; `expirer`, of a core, and
//!    `expiry_scan`, of its slab: held briefly, one at a time.
//! 3. `reuse` and `left`, of a core, and a shard of the sharing table: with no other.
//!
//! A map or an unmap takes none but, where pages are shared, that of a shard. When something is
//! due, or space, places or table memory are exhausted, it takes any of these as needed. Cores that
//! combine meet at a word, which no core locks. Nothing that a mapper works with (table, allocator,
//! invalidator, clock) may call back: locks may be held.
//!
//! A [`MapperCore`] is one thread's at a time. Deferred map and unmap cost two allocator calls, two
//! table calls, one queue entry, one Release store, two loads of lines that change once per flush;
//! no clock is read but the coarse one.
//!
//! Left out: invalidation on map (hardware in caching mode: emulated units that are shadowed),
//! memory that stands in for what a device cannot address (a bounce pool), and PASIDs.

mod cache;
mod core_map;
mod core_reclaim;
mod core_return;
mod core_unmap;
mod core_unmap_many;
mod error;
mod limits;
mod lines;
#[cfg(all(test, loom))]
#[path = "tests/model.rs"]
mod model;
mod policy;
mod queue;
mod reclaim;
mod request;
mod shared;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
mod walks;
#[cfg(all(test, loom))]
#[path = "tests/whole.rs"]
mod whole;

pub use core_map::MapperCore;
pub use error::{DmaMapError, DmaUnmapError, DomainError, UnmapManyError};
pub use limits::DeviceLimits;
pub use policy::{Optimistic, Policy, Reuse, Teardown, Window};
pub use request::{DeviceSegment, Direction, Mapping, Segment};

use ::lines::{AtomicBool, AtomicUsize, CachePadded, Lock};
use alloc::{sync::Arc, vec::Vec};
use core::time::Duration;

use address::PhysAddr;
use iova::{ClaimError, CoreId, IovaAllocator};

use crate::clock::Clock;
use crate::invalidate::{Combiner, InvalidateError, Invalidator};
use crate::reuse::SharingTable;
use crate::risk::{Counts, Risk, RiskContract, StaleTimeHistogram};
use crate::table::{IoMap, PageTable, TableStats};
use reclaim::Reclaim;
use shared::{AbandonedQueue, Flush, Shared};

/// Parts that a mapper works with.
pub struct Domain<A, T, I, C> {
    /// IOVAs.
    pub allocator: A,
    /// Their translation. Only this mapper maps or unmaps in it.
    pub table: T,
    /// Invalidation of the hardware's caches.
    pub invalidator: I,
    /// Time.
    pub clock: C,
}

/// Maps memory for the devices of one domain. Clones share one mapper.
///
/// ```
/// use dma_map::invalidate::NullInvalidator;
/// use dma_map::table::{HostMemory, IoPageTable, LeafSizes, TableConfig, VtdSecondLevel};
/// use dma_map::{DeviceLimits, Direction, DmaMapper, Domain, ManualClock, Policy, Segment};
/// use dma_map::address::PhysAddr;
/// use dma_map::iova::{Aperture, CoreId, TreeAllocator};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = TableConfig { levels: 3, leaves: LeafSizes::FOUR_K };
/// let domain = Domain {
///     allocator: TreeAllocator::new(Aperture::of_bits(39)?, 2)?,
///     table: IoPageTable::<VtdSecondLevel, _>::new(HostMemory::new(), config)?,
///     invalidator: NullInvalidator,
///     clock: ManualClock::new(),
/// };
/// let mapper = DmaMapper::new(domain, Policy::STRICT, DeviceLimits::of_bits(32))?;
/// let mut core = mapper.core(CoreId(0))?;
/// let buffer = Segment::new(PhysAddr::new(0x12345), 1500);
/// let mapping = core.map(&[buffer], Direction::ToDevice)?;
/// assert_eq!(mapping.iova().raw() & 0xfff, 0x345);
/// core.unmap(mapping)?;
/// assert_eq!(mapper.risk().stale_max, 0);
/// # Ok(()) }
/// ```
pub struct DmaMapper<A, T, I, C>(Arc<Shared<A, T, I, C>>);

impl<A, T, I, C> Clone for DmaMapper<A, T, I, C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> DmaMapper<A, T, I, C> {
    /// A mapper that keeps the table pages it once needed.
    ///
    /// # Errors
    /// [`DomainError`].
    pub fn new(
        domain: Domain<A, T, I, C>,
        policy: Policy,
        limits: DeviceLimits,
    ) -> Result<Self, DomainError> {
        Self::build(domain, policy, limits, None)
    }

    fn build(
        domain: Domain<A, T, I, C>,
        policy: Policy,
        limits: DeviceLimits,
        reclaim: Option<Reclaim<T>>,
    ) -> Result<Self, DomainError> {
        let aperture = domain.allocator.aperture();
        if !policy.is_off && limits.last_page < aperture.usable()[0].first() {
            return Err(DomainError::NothingAddressable {
                last: limits.last.raw(),
                aperture: aperture.clone(),
            });
        }
        let entries = policy.window().map_or(1, |window| window.entries);
        if !(1..=1 << 16).contains(&entries) {
            return Err(DomainError::Entries { entries });
        }
        let cores = domain.allocator.cores();
        // Without a window, of retired tables, and of what an invalidation failed for.
        let age = policy.window().unwrap_or(Window::DEFAULT).age;
        Ok(Self(Arc::new(Shared {
            id: next_id(),
            policy,
            limits,
            age_ns: u64::try_from(age.as_nanos()).unwrap_or(u64::MAX),
            lines: (0..cores).map(|_| Default::default()).collect(),
            used: AtomicUsize::new(0),
            flush: CachePadded::new(Lock::new(Flush {
                noted: Vec::with_capacity(cores),
            })),
            combiner: match policy.teardown {
                Teardown::Combining { looks } => Combiner::new(cores, looks),
                _ => Combiner::new(0, 0),
            },
            sharing: matches!(policy.reuse, Reuse::Shared)
                .then(|| SharingTable::new(SHARED_PER_CORE * cores, 4 * cores)),
            reclaim,
            abandoned: Lock::new(AbandonedQueue::default()),
            has_orphans: AtomicBool::new(false),
            allocator: domain.allocator,
            table: domain.table,
            invalidator: domain.invalidator,
            clock: domain.clock,
        })))
    }

    /// The handle of one core.
    ///
    /// # Errors
    /// [`ClaimError::InUse`], or [`ClaimError::NoSuchCore`] where the allocator was made for fewer.
    pub fn core(&self, core: CoreId) -> Result<MapperCore<A, T, I, C>, ClaimError> {
        let claimed = self.0.allocator.claim(core)?;
        Ok(MapperCore::new(Arc::clone(&self.0), claimed))
    }

    /// Advances the time to `now` nanoseconds: closes every window that has been open for the
    /// policy's age, for cores that are quiet as well, and expires idle mappings. To be called by
    /// one thread or several, about every millisecond: the period adds to the age that mappings
    /// reach. A busy core waits for nothing here but its flush. The call never waits for a flush or
    /// teardown by another thread, but leaves it to the next tick.
    ///
    /// For threads, not for interrupts: it waits for the hardware and for short locks that a core
    /// may hold when it is interrupted, and it allocates. An interrupt asks
    /// [`is_due`](Self::is_due), and has a thread call this.
    ///
    /// # Errors
    /// [`InvalidateError`]: some windows stay open; the next tick tries again.
    pub fn tick(&self, now: u64) -> Result<(), InvalidateError> {
        self.0.tick(now)
    }

    /// Returns whether a [`tick`](Self::tick) at `now` nanoseconds would find something to do; also
    /// `true` where another thread holds a lock that the answer needs. Once it has returned
    /// `false`, a tick of the same time does nothing except for what is unmapped meanwhile.
    ///
    /// For interrupts: it may interrupt whatever a core, a tick or a flush is in the middle of. It
    /// never waits, takes a lock only if that is free, allocates nothing, and calls nothing of the
    /// domain but [`Clock::advance`].
    #[must_use]
    pub fn is_due(&self, now: u64) -> bool {
        self.0.is_due(now)
    }

    /// A barrier: when it returns `Ok`, no device reaches anything that was unmapped before the
    /// call, on any core, including idle mappings and the deferred work of dropped cores.
    ///
    /// It waits for a thread that is in the middle of tearing down or flushing some of it, a tick
    /// or a core, as long as that one waits for the hardware. It is for threads that may wait, and
    /// not to be called by the [`Invalidator`], nor from an interrupt that may have interrupted one
    /// of them.
    ///
    /// # Errors
    /// [`InvalidateError`]: some windows stay open, and are counted in [`risk`](Self::risk); a later
    /// flush that succeeds closes them.
    pub fn flush(&self) -> Result<(), InvalidateError> {
        let drained = self.0.drain();
        self.0.flush_if(|| true).and(drained)
    }

    /// Stale mappings, observed and promised. Reads the lines of all cores. Windows of idle
    /// mappings that were found again, and the most at one time, are as their cores last published
    /// them: see [`MapperCore::publish`].
    pub fn risk(&self) -> Risk {
        let shared = &*self.0;
        let mut stale_times = StaleTimeHistogram::EMPTY;
        let (mut stale_now, mut stale_max) = (0, 0);
        for line in shared.lines() {
            let queued = line.stale();
            stale_now += queued;
            stale_max += line.counters.add_to(&mut stale_times).max(queued);
            let idle = line.reuse_counts();
            stale_now += idle.stale;
            stale_max += idle.stale_max;
            stale_times.add(&idle.stale_times);
        }
        // After the lines: a mapping on its way from there to here is counted twice rather than not
        // at all.
        let abandoned = shared.abandoned.lock();
        stale_times.add(&abandoned.stale_times);
        stale_now += abandoned.stale();
        stale_max += abandoned.stale_max;
        drop(abandoned);
        Risk {
            is_unprotected: shared.policy.is_off,
            stale_now,
            stale_max,
            stale_times,
            contract: self.contract(),
        }
    }

    /// Counts of reused and released mappings. The counts of cores' idle mappings are as they last
    /// published them: see [`MapperCore::publish`]. All 0 where nothing is reused; `stale_max` is
    /// the sum of the cores'.
    pub fn reuse_counts(&self) -> Counts {
        let sharing = self.0.sharing.as_ref();
        let mut sum = sharing.map_or_else(Counts::default, |table| table.counts());
        for line in self.0.lines() {
            sum.add(&line.reuse_counts());
        }
        sum
    }

    /// Bounds that the policy promises for all cores together.
    pub fn contract(&self) -> RiskContract {
        let policy = &self.0.policy;
        if policy.is_off {
            return RiskContract::NONE;
        }
        let cores = self.0.lines.len() as u64;
        let of = |count: usize, age: Duration| RiskContract {
            max_stale: Some((count as u64).saturating_mul(cores)),
            max_age_ns: Some(u64::try_from(age.as_nanos()).unwrap_or(u64::MAX)),
        };
        let teardown = policy.window().map_or(RiskContract::STRICT, |window| {
            of(window.entries, window.age)
        });
        match policy.reuse {
            Reuse::Never | Reuse::Shared => teardown,
            Reuse::Optimistic(idle) => teardown.and(of(idle.quota, idle.residency)),
        }
    }

    /// The policy.
    pub fn policy(&self) -> Policy {
        self.0.policy
    }

    /// Counts of allocated and cached pages and chunks; slow and, while other cores work,
    /// approximate.
    pub fn allocator_stats(&self) -> iova::Stats {
        self.0.allocator.stats()
    }

    /// The invalidator.
    pub fn invalidator(&self) -> &I {
        &self.0.invalidator
    }
}

impl<A: IovaAllocator, T: PageTable, I: Invalidator, C: Clock> DmaMapper<A, T, I, C> {
    /// A mapper that gives table pages back when nothing is allocated in their 2 MiB.
    ///
    /// # Safety
    /// The allocator gives out no page of a chunk between `retire` and `recycle`, and no range that
    /// is allocated. The invalidator keeps its contract. Table and allocator are this mapper's own:
    /// a caller that kept access to them (a shared pointer inside) uses it neither to look up, map
    /// or unmap, nor to allocate or reset. Where the allocator does not exclude two pins of the
    /// same moment ([`pin`](iova::CoreAllocator::pin) says so), no mapping is ended by two cores at
    /// once: [`Mapping`]s ensure that, [`unmap_at`](MapperCore::unmap_at) leaves it to its callers.
    ///
    /// The mapper in turn lends neither. [`MapperCore::translate`] looks addresses up, and the
    /// release of tables waits for it; [`table_stats`](Self::table_stats) and
    /// [`allocator_stats`](Self::allocator_stats) return the counts of table and allocator.
    ///
    /// ```compile_fail,E0599
    /// # use dma_map::{Clock, DmaMapper, iova, invalidate::Invalidator, table::PageTable};
    /// fn walk<A: iova::IovaAllocator, T: PageTable, I: Invalidator, C: Clock>(
    ///     mapper: &DmaMapper<A, T, I, C>,
    /// ) {
    ///     // A walk that a core's release of the table may overtake.
    ///     mapper.table().lookup(dma_map::address::Iova::new(0x1000));
    /// }
    /// ```
    ///
    /// ```compile_fail,E0599
    /// # use dma_map::{Clock, DmaMapper, iova, invalidate::Invalidator, table::PageTable};
    /// fn forget<A: iova::IovaAllocator, T: PageTable, I: Invalidator, C: Clock>(
    ///     mapper: &DmaMapper<A, T, I, C>,
    /// ) {
    ///     // Live mappings would be given out again, and their chunks retired.
    ///     mapper.allocator().reset();
    /// }
    /// ```
    #[expect(
        unsafe_code,
        reason = "allocator and invalidator are safe traits, and table pages are freed on their \
             word"
    )]
    pub unsafe fn new_reclaiming(
        domain: Domain<A, T, I, C>,
        policy: Policy,
        limits: DeviceLimits,
    ) -> Result<Self, DomainError> {
        Self::build(domain, policy, limits, Some(Reclaim::NEW))
    }

    /// The page of the root table, for the device's context entry. Code that gives it to a device
    /// takes it away again, and waits for the invalidation, before the last handle of the mapper is
    /// dropped: its pages are freed then.
    pub fn root(&self) -> PhysAddr {
        self.0.table.root()
    }

    /// Table pages, by level. Exact while no core maps.
    pub fn table_stats(&self) -> TableStats {
        self.0.table.stats()
    }
}

/// A number that no mapper has had. One each nanosecond would last 584 years.
fn next_id() -> u64 {
    // `core`'s, since the atomics of models live no longer than one schedule and this one publishes
    // nothing.
    static NEXT: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, core::sync::atomic::Ordering::Relaxed)
}

/// Live mappings per core that the reverse lookup of `Reuse::Shared` remembers.
const SHARED_PER_CORE: usize = 4096;
