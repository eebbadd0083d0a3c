//! A world with a device that forgets nothing: what it can reach is what a policy lets it reach.

mod errors;
mod hostile;
mod protection;
mod quiet;
mod reclaim;
mod threads;

use alloc::sync::Arc;
use core::time::Duration;

use address::PhysAddr;
use iova::{Aperture, ChunkAllocator, CoreId, IovaAllocator, IovaPfn, TreeAllocator};

use super::*;
use crate::clock::ManualClock;
use crate::invalidate::{ModelDevice, ModelIotlb, ModelMemory};
use crate::table::{IoPageTable, LeafSizes, TableConfig, VtdSecondLevel};

pub(super) type Table = IoPageTable<VtdSecondLevel, Arc<ModelMemory>>;
pub(super) type Mapper<A = TreeAllocator> = DmaMapper<A, Table, Arc<ModelIotlb>, Arc<ManualClock>>;
pub(super) type Core<A = TreeAllocator> = MapperCore<A, Table, Arc<ModelIotlb>, Arc<ManualClock>>;

/// A tick's period in these tests, in nanoseconds.
pub(super) const TICK: u64 = 1_000_000;

pub(super) struct World<A: IovaAllocator = TreeAllocator> {
    pub(super) memory: Arc<ModelMemory>,
    pub(super) iotlb: Arc<ModelIotlb>,
    pub(super) clock: Arc<ManualClock>,
    pub(super) mapper: Mapper<A>,
    pub(super) device: ModelDevice<VtdSecondLevel>,
}

impl<A: IovaAllocator> World<A> {
    pub(super) fn of(allocator: A, policy: Policy, limits: DeviceLimits) -> Self {
        let memory = Arc::new(ModelMemory::new(512));
        let iotlb = Arc::new(ModelIotlb::new());
        let clock = Arc::new(ManualClock::new());
        let config = TableConfig {
            levels: 3,
            leaves: LeafSizes::FOUR_K,
        };
        let domain = Domain {
            allocator,
            table: Table::new(Arc::clone(&memory), config).unwrap(),
            invalidator: Arc::clone(&iotlb),
            clock: Arc::clone(&clock),
        };
        // SAFETY: the allocators of `iova` keep to their contract, as does the model; the table is the mapper's alone.
        #[expect(unsafe_code, reason = "reclaiming is to be tested")]
        let mapper = unsafe { DmaMapper::new_reclaiming(domain, policy, limits) }.unwrap();
        let device = ModelDevice::new(
            Arc::clone(&memory),
            Arc::clone(&iotlb),
            mapper.table().root(),
            3,
        );
        Self {
            memory,
            iotlb,
            clock,
            mapper,
            device,
        }
    }

    pub(super) fn core(&self, core: usize) -> Core<A> {
        self.mapper.core(CoreId(core)).unwrap()
    }

    /// A millisecond passes.
    pub(super) fn tick(&self) {
        self.clock.pass(TICK);
        self.mapper.tick(self.clock.now()).unwrap();
    }
}

/// A space of `pages` pages for `cores` cores.
pub(super) fn space(pages: u64, cores: usize) -> TreeAllocator {
    let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(pages), &[]).unwrap();
    TreeAllocator::new(aperture, cores).unwrap()
}

/// The same, of chunks that are given back.
pub(super) fn chunks(pages: u64, cores: usize) -> ChunkAllocator {
    let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(pages), &[]).unwrap();
    ChunkAllocator::retiring(aperture, cores).unwrap()
}

pub(super) fn world(policy: Policy) -> World {
    World::of(space(1 << 16, 3), policy, DeviceLimits::default())
}

/// Every policy, and what combines.
pub(super) fn policies() -> impl Iterator<Item = Policy> {
    let small = Window {
        entries: 8,
        age: Duration::from_millis(5),
    };
    let idle = Optimistic {
        quota: 16,
        residency: Duration::from_millis(5),
    };
    [
        Policy::STRICT_LOCK,
        Policy::STRICT,
        Policy::STRICT_COMBINING,
        Policy::SHARED,
        Policy::SHARED.with_teardown(Teardown::Combining),
        Policy::ASYNC,
        Policy::DEFERRED,
        Policy::DEFERRED.with_teardown(Teardown::Deferred(small)),
        Policy::ASYNC.with_teardown(Teardown::Async(small)),
        Policy::optimistic(256),
        Policy::STRICT.with_reuse(Reuse::Optimistic(idle)),
        Policy::STRICT_COMBINING.with_reuse(Reuse::SharedOptimistic(idle)),
        Policy::ASYNC.with_reuse(Reuse::Optimistic(idle)),
        Policy::DEFERRED.with_reuse(Reuse::Shared),
        Policy::DEFERRED.with_reuse(Reuse::SharedOptimistic(idle)),
    ]
    .into_iter()
}

pub(super) fn is_strict(policy: &Policy) -> bool {
    policy.window().is_none() && matches!(policy.reuse, Reuse::Never | Reuse::Shared)
}

/// A page of memory.
pub(super) fn page(number: u64) -> Segment {
    Segment::new(PhysAddr::new(number << 12), 4096)
}
