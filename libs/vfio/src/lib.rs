//! VFIO type 1: devices of drivers in user space, and of virtual machines.
//!
//! A driver's DMA goes through a `dma_map::DmaMapper`; a virtual machine's devices reach memory
//! that others own.
//!
//! With VFIO the kernel keeps the IO page tables: each map and unmap is a system call. `dma-map`
//! gives a driver the rest: the allocation of IOVAs, the order of invalidation and release in an
//! unmap, and a stated bound on the memory that stays within the device's reach. This crate joins
//! the two.
//!
//! 1. [`Group`], [`Container`], [`Device`]: the files of `/dev/vfio`, opened in the order that the
//!    kernel requires.
//! 2. [`IommuInfo`]: the IOVAs that the kernel allows (an
//!    [`iova::Aperture`](dma_map::iova::Aperture), reserved ranges left out), page sizes, and the
//!    limit on mappings.
//! 3. [`VfioMap`]: the container as the table *and* the invalidator of a mapper. Memory is mapped
//!    by its address in this process, and only memory that the map knows: [`DmaBuffer`]s, which it
//!    keeps alive for as long as the device may reach them.
//! 4. [`ExternalMap`]: the container as a plain table of memory that others own
//!    ([`ExternalMemory`]), a virtual machine's, without allocator and policy. It keeps that memory
//!    alive in the same way.
//! 5. [`Region`], [`Irq`]: the parts of a device that can be read, written and mapped, and the call
//!    that hands all eventfds of an interrupt over. [`groups`]: the devices of the host, and their
//!    drivers.
//!
//! ```no_run
//! use dma_map::iova::{ChunkAllocator, CoreId};
//! use dma_map::{DeviceLimits, Direction, DmaMapper, Domain, ManualClock, Policy};
//! use vfio::{Container, Group, VfioMap};
//!
//! let group = Group::of_device("0000:01:00.0")?; // bound to vfio-pci
//! let container = Container::open()?;
//! container.attach(&group)?;
//! let aperture = container.info()?.aperture()?;
//! let device = group.device("0000:01:00.0")?;
//! device.reset()?;
//! device.enable_dma()?;
//!
//! let map = VfioMap::new(container)?;
//! let domain = Domain {
//!     allocator: ChunkAllocator::new(aperture, 1)?,
//!     table: map.clone(),
//!     invalidator: map.clone(),
//!     clock: ManualClock::new(), // of a driver: a `TickClock`
//! };
//! let mapper = DmaMapper::new(domain, Policy::STRICT, DeviceLimits::default())?;
//! let mut core = mapper.core(CoreId(0))?;
//!
//! let buffer = map.allocate(64 << 10)?;
//! buffer.write(0, b"for the device");
//! let mapping = core.map(&[buffer.segment(0, 4096)], Direction::ToDevice)?;
//! // ... mapping.iova() goes into the device's descriptor; when the device is done:
//! core.unmap(mapping)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `examples/nvme` is a whole driver: `cargo run --release -p vfio --example nvme -- --help`.
//!
//! # Policies over VFIO
//! The kernel clears entries and invalidates in one call, `VFIO_IOMMU_UNMAP_DMA`, and returns when
//! no device reaches the memory any more. That call is the *invalidation*: an unmap only takes the
//! mapping out of the record of [`VfioMap`], and the device reaches the memory until the mapper
//! invalidates.
//!
//! | policy | time of the call | saving |
//! |---|---|---|
//! | strict, strict-combining, shared | before unmap returns | combining: mappings of several cores go in one call |
//! | async | before unmap returns: a call cannot be submitted and waited for later, so this is strict with a queue | nothing |
//! | deferred | when the window closes, or at `flush` | all mappings of a window between which nothing is in use go in one call |
//! | optimistic | when an idle mapping is torn down | a buffer that comes round again needs no call at all |
//!
//! 45,700 commands of that driver took 45,700 calls to unmap under strict, 2,500 to 6,000 under
//! deferred, and under optimistic 124 to map and 33 to unmap (`make vfio`).
//!
//! # Versions, and what is left out
//! Layouts and numbers are of `include/uapi/linux/vfio.h`, the group interface (`/dev/vfio/N`),
//! with the second version of type 1, whose mappings are unmapped whole; Linux 5.4 or newer, since
//! older ones do not report which IOVAs they reserve. Of a processor's ordering towards a device
//! only x86's is known ([`Bar`]). Left out: the device interface (`/dev/vfio/devices`) with
//! iommufd, hot reset, migration, dirty pages, and the delivery of an interrupt behind its eventfd
//! (KVM's irqfd is the hypervisor's).
//!
//! UNSAFETY: denied here and opted into by `sys`, which holds every system call and every access to
//! memory that a device shares, and by `map`, which answers for the one call after which a device
//! reaches memory (and by `testing`, whose kernel reaches none).
#![deny(unsafe_code)]

mod chain;
mod device;
mod error;
mod group;
mod host;
mod info;
mod irq;
mod limits;
mod map;
mod memory;
mod region;
mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod uapi;

pub use device::{Bar, Device, DeviceInfo};
pub use error::{Errno, InfoError, VfioError};
pub use group::{Container, Group};
pub use host::{Binding, HostDevice, HostGroup, groups};
pub use info::{AllowedRange, IommuInfo, aperture_of};
pub use irq::{Irq, IrqIndex};
pub use limits::HostLimits;
pub use map::{
    Calls, CloseError, ExternalMap, ExternalMapError, ExternalMemory, ExternalUnmapError, Kernel,
    MapRefused, Mappings, Refused, UnmapFailed, VfioMap,
};
pub use memory::DmaBuffer;
pub use region::Region;
