//! Allocators, tables and caches of the papers and of Linux, for `bench/` to compare with this
//! project's.
//!
//! | of | here | what it is |
//! |---|---|---|
//! | [`iova`] | [`MagazineAllocator`] | per-core magazines and bounded depots over a tree (*Utilizing the IOMMU Scalably*, ATC 2015, §4) |
//! | | [`SlabAllocator`] | offsets of objects in one arena ("IOVA-kmalloc", same paper) |
//! | | [`IdentityAllocator`] | the physical address, once for each permission (same paper) |
//! | | [`LinearAllocator`], [`EiovaRAllocator`] | the scan of 2015's Linux, and a cache before it (FAST 2015) |
//! | [`dma_map::table`] | [`GlobalLockTable`], [`RwLockTable`] | tables with the locks that ATC 2015 found in use |
//! | | [`CountedTable`] | pages that count how often they are mapped, for identity |
//! | [`reuse`] | [`LruCache`] | optimistic teardown (vIOMMU, ATC 2011) by the owner alone: ≤ quota, expired only while the owner calls |
//! | | [`RtcCache`] | Reverse Translation Cache (PVIOMMU, KSII TIIS 2016): no bound, 3 to 4 cycles of 10 s |
//! | [`dma_map::invalidate`] | [`SerialFlush`] | hardware that works on one command at a time, each taking a given time |
//!
//! They have the interfaces of the product and are built from its parts (the features `parts` of
//! `iova`, `testing` of `dma-map`). Caches have a trait of their own,
//! [`ReuseCache`](reuse::ReuseCache), which the mapper's cache implements too. Allocators keep what
//! `iova` promises: a range that is freed twice, in part or with another size is refused, caches
//! are drained before a space is exhausted. `tests/` checks that, in phases beside a model, on
//! threads and, with `--cfg shuttle`, under random schedules; `magazine/model.rs` is a loom model.
//!
//! **Left out**: everything that only a user of the product would need. Only `bench/`, `fuzz/` and
//! tests need this crate.
#![deny(unsafe_code)]

extern crate alloc;

#[cfg(not(loom))]
mod art;
mod backing;
mod crew;
mod identity;
mod linear;
mod locked;
#[cfg(not(loom))]
mod lru;
mod magazine;
#[cfg(not(loom))]
mod rtc;
mod serial;
mod slab;
mod states;
mod tables;

#[cfg(not(loom))]
pub use dma_map::testing::reuse;
pub use identity::{IdentityAllocator, IdentityCore};
pub use linear::{EiovaRAllocator, EiovaRCore, LinearAllocator, LinearCore, MAX_LISTED};
#[cfg(not(loom))]
pub use lru::{LruCache, RESIDENCY_NS};
pub use magazine::{MagazineAllocator, MagazineConfig, MagazineCore};
#[cfg(not(loom))]
pub use rtc::{CYCLE_NS, RtcCache};
pub use serial::{GLOBAL_NS, PAGE_NS, SerialFlush};
pub use slab::{SlabAllocator, SlabConfig, SlabCore};
pub use tables::{CountedTable, GlobalLockTable, RwLockTable};
