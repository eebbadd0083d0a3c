//! IO page tables, invalidation, and the policies between map and unmap.
//!
//! * [`table`]: the tables that a device's requests walk, mapped and unmapped by many cores without locks.
//! * [`invalidate`]: making the IOMMU forget, one command or many cores' at a time.
//! * [`reuse`]: mappings that outlive their unmap, or are found a second time.
//! * [`mapper`]: [`DmaMapper`], which turns memory into addresses for a device under a [`Policy`].
//! * [`risk`]: what stale mappings there were, beside what is promised.
//! * `testing` (a feature of that name): a domain of models, for tests of what is built on this.
//!
//! UNSAFETY: denied here and opted into by the modules that hold the memory of tables (`table::memory`,
//! `table::tree`, and the two forwarding functions of `table::radix`), because a table entry is a number that
//! is turned into a reference, on a path of nanoseconds, and by those that give table pages back
//! (`mapper::reclaim`) or pretend to (`invalidate::model`, `testing`). Everything else is safe code.
#![cfg_attr(not(test), no_std)]
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(shuttle)]
extern crate std;

pub mod clock;
pub mod invalidate;
pub mod mapper;
#[cfg(shuttle)]
pub mod planted;
pub mod reuse;
pub mod risk;
pub mod table;
#[cfg(any(test, feature = "testing"))]
#[cfg(not(loom))]
pub mod testing;

pub use clock::{Clock, ManualClock, TickClock};
pub use mapper::{
    Bounce, DeviceLimits, DeviceSegment, Direction, DmaMapError, DmaMapper, DmaUnmapError, Domain,
    MapperCore, Mapping, Policy, Segment,
};
pub use risk::Risk;
