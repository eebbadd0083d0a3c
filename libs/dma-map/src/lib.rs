//! IO page tables, invalidation, and the policies between map and unmap.
//!
//! * [`IoMap`]: the interface through which a mapper changes translations: tables, or a kernel's
//!   interface.
//! * [`table`]: the tables that a device's requests walk, mapped and unmapped by many cores without
//!   locks.
//! * [`invalidate`]: invalidation of cached translations, by one core at a time or combined for
//!   many.
//! * [`mapper`]: [`DmaMapper`], which turns memory into addresses for a device under a [`Policy`].
//! * [`risk`]: stale mappings, observed and promised.
//! * `testing` (a feature of that name): a domain of models, for tests of code that uses this
//!   crate.
//!
//! `address` and `iova`, whose types it takes, are re-exported. Three kinds of users:
//!
//! **A kernel**, two cores of a driver under [`Policy::DEFERRED`]: an unmap returns at once, a tick
//! invalidates, and the mappings that the device could reach meanwhile are counted.
//!
//! ```
//! use dma_map::address::PhysAddr;
//! use dma_map::invalidate::NullInvalidator; // a real one submits to the IOMMU's queue
//! use dma_map::iova::{Aperture, ChunkAllocator, CoreId};
//! use dma_map::table::{HostMemory, IoPageTable, LeafSizes, TableConfig, VtdSecondLevel};
//! use dma_map::{DeviceLimits, Direction, DmaMapper, Domain, ManualClock, Policy, Segment};
//!
//! let config = TableConfig { levels: 4, leaves: LeafSizes::FOUR_K };
//! let domain = Domain {
//!     allocator: ChunkAllocator::new(Aperture::of_bits(48)?, 2)?, // two cores
//!     table: IoPageTable::<VtdSecondLevel, _>::new(HostMemory::new(), config)?,
//!     invalidator: NullInvalidator,
//!     clock: ManualClock::new(), // of a driver: a `TickClock`
//! };
//! let mapper = DmaMapper::new(domain, Policy::DEFERRED, DeviceLimits::default())?;
//! let mut core = mapper.core(CoreId(0))?;
//!
//! let packet = core.map(&[Segment::new(PhysAddr::new(0x12345), 1500)], Direction::ToDevice)?;
//! assert_eq!(packet.iova().raw() & 0xfff, 0x345); // goes into the device's descriptor
//! core.unmap(packet)?;
//! assert_eq!(mapper.risk().stale_now, 1); // the device may still reach it
//!
//! // Each millisecond or so. A timer interrupt asks, and wakes a thread that ticks.
//! let now = 10_000_000;
//! assert!(mapper.is_due(now));
//! mapper.tick(now)?;
//! assert_eq!(mapper.risk().stale_now, 0);
//!
//! // Before memory is given to another user: a barrier. It covers the other core's work too.
//! let mut other = mapper.core(CoreId(1))?;
//! let buffer = other.map(&[Segment::new(PhysAddr::new(0x9000), 4096)], Direction::FromDevice)?;
//! other.unmap(buffer)?;
//! mapper.flush()?;
//! let risk = mapper.risk();
//! assert_eq!(risk.stale_now, 0);
//! risk.check(1_000_000)?; // the promise held, with ticks a millisecond apart
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **A user-space driver** over VFIO or iommufd, whose [`IoMap`] is three functions. A list for a
//! controller that takes no element across 64 KiB; an error bears the ioctl's errno.
//!
//! ```
//! use dma_map::address::PhysAddr;
//! use dma_map::invalidate::Invalidator;
//! use dma_map::iova::IovaAllocator;
//! use dma_map::{
//!     Clock, DeviceLimits, DeviceSegment, Direction, DmaMapError, IoMap, MapperCore, Mapping,
//!     Segment,
//! };
//!
//! fn read_into<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock>(
//!     core: &mut MapperCore<A, T, I, C>,
//!     buffer: &mut [u8],
//!     list: &mut Vec<DeviceSegment>,
//! ) -> Result<Mapping, DmaMapError<T::Error>> {
//!     // A kernel's «physical» address is a virtual one of ours.
//!     let memory = PhysAddr::new(buffer.as_mut_ptr().expose_provenance() as u64);
//!     let controller = DeviceLimits::of_bits(32).with_boundary(0x1_0000);
//!     let segment = Segment::new(memory, buffer.len() as u64);
//!     core.map_list(&controller, &[segment], Direction::FromDevice, list)
//! }
//! ```
//!
//! **A VMM** that gives a device the guest's memory, and translates the addresses that a device
//! model receives. Its policy tears down at once, since [`translate`](MapperCore::translate) finds
//! mappings that an optimistic one keeps after their unmap.
//!
//! ```
//! # use dma_map::address::PhysAddr;
//! # use dma_map::iova::{Aperture, ChunkAllocator};
//! # use dma_map::testing::ModelDomain;
//! # use dma_map::{DeviceLimits, Direction, Policy, Segment};
//! # let space = ChunkAllocator::new(Aperture::of_bits(39)?, 1)?;
//! # let domain = ModelDomain::new(space, Policy::STRICT, DeviceLimits::default(), 64);
//! # let mut core = domain.core(0);
//! // Two pieces of host memory, next to each other for the device.
//! let ram = [
//!     Segment::new(PhysAddr::new(0x20_0000), 0x8000),
//!     Segment::new(PhysAddr::new(0x70_0000), 0x8000),
//! ];
//! let mapping = core.map_coherent(&ram, Direction::Bidirectional)?;
//! let at = mapping.iova().checked_add(0x8010).expect("inside");
//! let found = core.translate(at).expect("mapped");
//! assert_eq!(found.phys, PhysAddr::new(0x70_0010));
//! core.unmap(mapping)?; // strict: from here on no device reaches it
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! UNSAFETY: denied here and opted into by the modules that hold the memory of tables
//! (`table::memory`, `table::tree`), because a table entry is a number that is turned into a
//! reference, on a path of nanoseconds, and by those that give table pages back (`mapper::reclaim`)
//! or pretend to (`testing`). Everything else is safe code.
#![cfg_attr(not(test), no_std)]
#![deny(unsafe_code)]

extern crate alloc;

pub use {address, iova};

pub mod clock;
pub mod invalidate;
pub mod mapper;
mod reuse;
pub mod risk;
pub mod table;
#[cfg(any(test, feature = "testing"))]
#[cfg(not(loom))]
#[path = "../tests/testing/mod.rs"]
pub mod testing;

pub use clock::{Clock, ManualClock, TickClock};
pub use mapper::{
    DeviceLimits, DeviceSegment, Direction, DmaMapError, DmaMapper, DmaUnmapError, Domain,
    MapperCore, Mapping, Policy, Segment, UnmapManyError,
};
pub use risk::Risk;
pub use table::IoMap;
