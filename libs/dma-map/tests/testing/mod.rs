//! A domain made of models, for tests of this crate and of code that uses it (feature `testing`): a
//! mapper that gives tables back, a device that forgets nothing by itself, and a clock that stands
//! still. Beside it, [`reuse`]: the caches that find mappings again, by themselves; and
//! [`reuse_world`], against which any such cache is compared.
//!
//! [`ModelDomain::new`] is safe although it makes a mapper that reclaims: a [`ModelMemory`] never
//! really frees a page. An allocator that breaks its promises lets a walk meet a page that is free
//! or another table's, which shows as a wrong answer or as [`DeviceFault::FreedTable`], never as
//! undefined behaviour.
//!
//! ```
//! use address::PhysAddr;
//! use dma_map::testing::ModelDomain;
//! use dma_map::{DeviceLimits, Direction, Policy, Segment};
//! use iova::{Access, Aperture, ChunkAllocator};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let allocator = ChunkAllocator::retiring(Aperture::of_bits(39)?, 1)?;
//! let domain = ModelDomain::new(allocator, Policy::STRICT, DeviceLimits::default(), 64);
//! let mut core = domain.core(0);
//! let page = PhysAddr::new(0x5000);
//! let mapping = core.map(&[Segment::new(page, 4096)], Direction::ToDevice)?;
//! let iova = mapping.iova();
//! assert_eq!(domain.device.access(iova, Access::Read), Ok(page));
//! core.unmap(mapping)?;
//! assert!(domain.device.access(iova, Access::Read).is_err());
//! # Ok(()) }
//! ```
#![expect(
    unsafe_code,
    reason = "makes a mapper that reclaims, over memory that is never really freed"
)]

mod device;
#[cfg(not(shuttle))]
mod memory;
pub mod reuse;
pub mod reuse_world;

pub use device::{DeviceFault, ModelDevice, ModelIotlb, ModelMemory};
#[cfg(not(shuttle))]
pub use memory::{CountedMemory, RegionMemory};

use alloc::sync::Arc;
use core::time::Duration;

use iova::{CoreId, IovaAllocator};

use crate::clock::{Clock, ManualClock};
use crate::invalidate::InvalidateError;
use crate::mapper::{Optimistic, Reuse, Teardown, Window};
use crate::table::{IoPageTable, LeafSizes, TableConfig, VtdSecondLevel};
use crate::{DeviceLimits, DmaMapper, Domain, MapperCore, Policy};

/// A page table in memory whose pages tell whether they are free.
pub type ModelTable = IoPageTable<VtdSecondLevel, Arc<ModelMemory>>;
/// A mapper over models.
pub type ModelMapper<A> = DmaMapper<A, ModelTable, Arc<ModelIotlb>, Arc<ManualClock>>;
/// One core of it.
pub type ModelCore<A> = MapperCore<A, ModelTable, Arc<ModelIotlb>, Arc<ManualClock>>;

/// Time between two ticks of [`ModelDomain::tick`], nanoseconds.
pub const TICK: u64 = 1_000_000;

/// A mapper, and the models around it for tests to inspect.
pub struct ModelDomain<A: IovaAllocator> {
    /// Source of table pages.
    pub memory: Arc<ModelMemory>,
    /// IOTLB that caches everything until it is invalidated.
    pub iotlb: Arc<ModelIotlb>,
    /// The mapper's time.
    pub clock: Arc<ManualClock>,
    /// The mapper under test.
    pub mapper: ModelMapper<A>,
    /// The device.
    pub device: ModelDevice<VtdSecondLevel>,
}

impl<A: IovaAllocator> ModelDomain<A> {
    /// Three levels (39 bits), leaves of 4 KiB, and `tables` pages for tables.
    ///
    /// # Panics
    /// No page for the root, or a policy or limits that [`DmaMapper::new`] refuses.
    pub fn new(allocator: A, policy: Policy, limits: DeviceLimits, tables: usize) -> Self {
        let memory = Arc::new(ModelMemory::new(tables));
        Self::in_memory(allocator, policy, limits, &memory)
    }

    /// The same with table pages from the caller's memory, which can check afterwards that all came
    /// back.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub fn in_memory(
        allocator: A,
        policy: Policy,
        limits: DeviceLimits,
        memory: &Arc<ModelMemory>,
    ) -> Self {
        Self::with_leaves(allocator, policy, limits, memory, LeafSizes::FOUR_K)
    }

    /// The same with leaves of other sizes.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub fn with_leaves(
        allocator: A,
        policy: Policy,
        limits: DeviceLimits,
        memory: &Arc<ModelMemory>,
        leaves: LeafSizes,
    ) -> Self {
        let memory = Arc::clone(memory);
        let iotlb = Arc::new(ModelIotlb::new());
        let clock = Arc::new(ManualClock::new());
        let config = TableConfig { levels: 3, leaves };
        let domain = Domain {
            allocator,
            table: ModelTable::new(Arc::clone(&memory), config).expect("memory for a root"),
            invalidator: Arc::clone(&iotlb),
            clock: Arc::clone(&clock),
        };
        // SAFETY: the caller's promise is that no page of a table is walked after it was freed.
        // Here that is no question of memory safety: the pages of a `ModelMemory` live as long as
        // it, freed or not, and are reached by index only; table, invalidator and memory are this
        // function's own.
        let mapper = unsafe { DmaMapper::new_reclaiming(domain, policy, limits) };
        let mapper = mapper.expect("a policy within its bounds");
        let root = mapper.root();
        Self {
            device: ModelDevice::new(Arc::clone(&memory), Arc::clone(&iotlb), root, 3),
            memory,
            iotlb,
            clock,
            mapper,
        }
    }

    /// The handle of a core.
    ///
    /// # Panics
    /// It is in use, or there is no such core.
    pub fn core(&self, core: usize) -> ModelCore<A> {
        self.mapper.core(CoreId(core)).expect("a free core")
    }

    /// Lets [`TICK`] pass, and ticks the mapper.
    ///
    /// # Errors
    /// As [`DmaMapper::tick`].
    pub fn tick(&self) -> Result<(), InvalidateError> {
        self.clock.pass(TICK);
        self.mapper.tick(self.clock.now())
    }
}

const SMALL: Window = Window {
    entries: 8,
    age: Duration::from_millis(5),
};
const IDLE: Optimistic = Optimistic {
    quota: 16,
    residency: Duration::from_millis(5),
};

/// Every policy that protects, and what combines, with a name each; small windows and quotas beside
/// the usual ones.
pub const POLICIES: [(&str, Policy); 12] = [
    ("strict", Policy::STRICT),
    ("strict-combining", Policy::STRICT_COMBINING),
    ("shared", Policy::SHARED),
    (
        "shared, combining",
        Policy::SHARED.with_teardown(Teardown::COMBINING),
    ),
    ("async", Policy::ASYNC),
    ("deferred", Policy::DEFERRED),
    (
        "deferred, 8",
        Policy::DEFERRED.with_teardown(Teardown::Deferred(SMALL)),
    ),
    (
        "async, 8",
        Policy::ASYNC.with_teardown(Teardown::Async(SMALL)),
    ),
    ("optimistic, 256", Policy::optimistic(256)),
    (
        "optimistic, 16",
        Policy::STRICT.with_reuse(Reuse::Optimistic(IDLE)),
    ),
    (
        "optimistic, 16, async",
        Policy::ASYNC.with_reuse(Reuse::Optimistic(IDLE)),
    ),
    (
        "shared, deferred",
        Policy::DEFERRED.with_reuse(Reuse::Shared),
    ),
];

/// Whether nothing may be reached after its unmap.
pub fn is_strict(policy: &Policy) -> bool {
    let is_immediate = matches!(
        policy.teardown,
        Teardown::Strict | Teardown::Combining { .. }
    );
    !policy.is_off && is_immediate && matches!(policy.reuse, Reuse::Never | Reuse::Shared)
}
