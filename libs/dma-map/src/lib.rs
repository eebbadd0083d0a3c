//! IO page tables, invalidation, and the policies between map and unmap.
//!
//! * [`table`]: the tables that a device's requests walk, mapped and unmapped by many cores without locks.
//! * [`invalidate`]: making the IOMMU forget, one command or many cores' at a time.
//! * [`reuse`]: mappings that outlive their unmap, or are found a second time.
//! * [`mapper`]: [`DmaMapper`], which turns memory into addresses for a device under a [`Policy`].
//! * [`risk`]: what stale mappings there were, beside what is promised.
//! * `testing` (a feature of that name): a domain of models, for tests of what is built on this.
//!
//! **Locks.** One per mapper around flushes, one per core around tearing down its idle mappings, one word where cores that
//! combine meet; nobody holds it. None is taken by a deferred unmap that is not due, or by a map.
//!
//! **Barriers.** `flush` (all cores), `park` and the drop of a core (that core) wait for both kinds of lock, one at a time; a
//! tick never waits. Whoever takes idle mappings, the owner that evicts included, holds the core's lock from the first one
//! taken until the invalidation is complete, or leaves the cleared batch in the lock's value: so whoever gets the lock finds
//! each mapping idle, there, or gone. What a dropped core could not cover is counted apart from its line, whose numbers are
//! then nobody's. `tick(now)`, from any thread but in no interrupt, closes the windows of quiet cores and expires their idle mappings; the owners
//! free the IOVAs when they next run. `is_due(now)` is for interrupts: whether a tick would find something, without waiting.
//!
//! UNSAFETY: denied here and opted into by the modules that hold the memory of tables (`table::memory`,
//! `table::tree`, and the two forwarding functions of `table::radix`), because a table entry is a number that
//! is turned into a reference, on a path of nanoseconds, and by those that give table pages back
//! (`mapper::reclaim`) or pretend to (`testing`). Everything else is safe code.
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
#[path = "../tests/testing/mod.rs"]
pub mod testing;

pub use clock::{Clock, ManualClock, TickClock};
pub use mapper::{
    Bounce, DeviceLimits, DeviceSegment, Direction, DmaMapError, DmaMapper, DmaUnmapError, Domain,
    MapperCore, Mapping, Policy, Segment,
};
pub use risk::Risk;
