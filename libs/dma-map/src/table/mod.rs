//! IO page tables: they translate a device's addresses, and many cores change them while the device
//! reads them.
//!
//! A tree of tables of 512 entries, 3 to 5 levels high, with leaves of 4 KiB, 2 MiB and 1 GiB, in
//! the format of Intel VT-d's second level or AMD's version 1 ([`format`](mod@format)).
//!
//! # Flow
//! [`IoMap::map`] and [`unmap`](IoMap::unmap) take an IOVA range that the caller **owns**: an
//! allocator gave it to no other caller. So a leaf is written by a load, to check it, and a plain
//! store. Only tables, which owners of different ranges share, are installed by compare-and-swap; a
//! core that loses the race gives its page back. No core waits for another.
//!
//! Tables that become empty stay, until the owner of all their IOVAs, usually the allocator that
//! got a whole chunk of 512 pages back, calls [`retire_leaf`](PageTable::retire_leaf): no walk
//! counts anything. The device may still hold the table's address in a page-walk cache, so the page
//! is [`release`](PageTable::release)d only after an invalidation that covers it:
//!
//! ```text
//! owner      unmap ─ free IOVA ┄ all 512 free ─ retire_leaf ─ submit ───────────── release ─ map ─ ...
//! device      ... walks, with cached tables ...                 └ invalidates ┘ complete
//! ```
//!
//! Freeing on the allocator's request is the project's own idea: a use count in each table would
//! cost more than the walk. That no table need be locked is from *Utilizing the IOMMU Scalably*
//! (USENIX ATC 2015).
//!
//! # Parts
//! [`format`](mod@format) the layout of an entry; [`memory`] the sources of pages; `tree` the
//! entries and the reasons why following them is sound (with `memory`, all of the unsafe code);
//! `radix` the changes that a call makes to the tree; `tests/model.rs` the loom models.
//!
//! # Cost
//! Mapping or unmapping a page whose leaf table exists takes one walk: four dependent loads and a
//! store. Measured by `make bench-dma` (`p256_alone_lock_free_1thr_ns`) and by
//! `cargo run --release -p dma-peers --example map_unmap`; a loop over the levels instead of the
//! unrolled walk was slower. Cores that use pages of the same leaf table share its cache lines; an
//! allocator that gives each core its own chunks avoids that.
//!
//! # Left out
//! Write-back of changed lines for units that do not snoop (VT-d `ECAP.C` clear); access and dirty
//! bits; splitting large leaves; leaf sizes between levels; keeping a cursor to the last leaf
//! table.
//!
//! ```
//! use address::{Iova, PhysAddr};
//! use dma_map::table::{
//!     HostMemory, IoMap, IoPageTable, LeafSizes, TableConfig, UnmapError, VtdSecondLevel,
//! };
//! use iova::{Access, IovaPfn, IovaRange};
//!
//! let config = TableConfig { levels: 4, leaves: LeafSizes::TWO_M };
//! let table = IoPageTable::<VtdSecondLevel, _>::new(HostMemory::new(), config)?;
//! let range = IovaRange::new(IovaPfn::new(0x1000), 3).expect("inside the space");
//! table.map(range, PhysAddr::new(0x8_0000), Access::Read)?;
//! let goes = table.lookup(Iova::new(0x100_2010)).expect("mapped");
//! assert_eq!((goes.phys, goes.access), (PhysAddr::new(0x8_2010), Access::Read));
//! table.unmap(range)?;
//! let iova = range.start();
//! assert_eq!(table.unmap(range), Err(UnmapError::NotMapped { iova }));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
mod error;
pub mod format;
mod io_map;
pub mod memory;
#[cfg(all(test, loom))]
#[path = "tests/model.rs"]
pub(crate) mod model;
mod radix;
mod tree;

use address::PhysAddr;
use iova::{Access, IovaRange};

pub use config::{LeafSizes, TableConfig};
pub use error::{ConfigError, MapError, UnmapError};
pub use format::{AmdV1, ENTRIES, Entry, Format, Leaf, VtdSecondLevel};
pub use io_map::IoMap;
#[cfg(not(any(loom, shuttle)))]
pub use memory::HostMemory;
pub use memory::{Table, TableMemory};
pub use tree::IoPageTable;

/// Translation of an IOVA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Physical address of the byte at the IOVA.
    pub phys: PhysAddr,
    /// Accesses that the device may make there.
    pub access: Access,
    /// Size of the leaf that maps it, in pages of 4 KiB: 1, 512 or 512 × 512.
    pub leaf_pages: u64,
}

/// Numbers of table pages of one IO page table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Tables in the tree by level, leaf tables first; the root is included.
    pub tables: [usize; format::MAX_LEVELS as usize],
    /// Tables taken out of the tree and not yet released.
    pub retired: usize,
    /// Largest number of pages so far, retired ones included.
    pub peak: usize,
}

impl TableStats {
    /// Number of all pages, retired ones included.
    pub fn pages(&self) -> usize {
        self.tables.iter().sum::<usize>() + self.retired
    }
}

/// A table taken out of the tree. Devices may still walk it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the page is lost until it is released"]
pub struct RetiredTable {
    page: PhysAddr,
    root: PhysAddr,
    range: IovaRange,
}

impl RetiredTable {
    /// The range that the table translated: to be invalidated, page-walk caches included.
    pub fn range(&self) -> IovaRange {
        self.range
    }
}

/// A tree of tables that the IOMMU walks. [`map`](IoMap::map) takes the largest leaves that
/// alignment, the configuration and existing tables allow, and adds no table page where it fails.
/// [`unmap`](IoMap::unmap) takes any range that covers no part of a leaf, and leaves tables where
/// they are. [`lookup`](IoMap::lookup) may also be called for IOVAs that no caller owns, and finds
/// what was true at some moment of the call, as long as no table that was there when it began is
/// [released](Self::release) before it ends.
#[expect(
    unsafe_code,
    reason = "giving a table page back rests on what the device still holds"
)]
pub trait PageTable: IoMap {
    /// Returns the page of the root table, for the device's context entry. Code that enters it
    /// there must remove it, and wait for the invalidation, before the table is dropped: dropping
    /// frees its pages.
    fn root(&self) -> PhysAddr;

    /// Returns the numbers of pages. They are exact while no core maps.
    fn stats(&self) -> TableStats;

    /// Returns whether there may be a table that translates exactly `chunk`, which
    /// [`retire_leaf`](Self::retire_leaf) might take. The caller owns all of `chunk`.
    fn has_table(&self, _chunk: IovaRange) -> bool {
        true
    }

    /// Takes the table that translates exactly `chunk` (512 pages, or a power of 512, aligned) out
    /// of the tree, if there is one and it is empty, and keeps its page. Also makes way for a leaf
    /// of the chunk's size.
    ///
    /// # Safety
    /// No other call maps or unmaps an IOVA of `chunk` from here until this call returns, and none
    /// that began before is running: such a caller holds the IOVA allocated or pinned, and here no
    /// caller does. A lookup is over before the `release`.
    unsafe fn retire_leaf(&self, chunk: IovaRange) -> Option<RetiredTable>;

    /// Gives the page of a retired table back to the memory.
    ///
    /// # Safety
    /// An invalidation of [`RetiredTable::range`], page-walk caches included, was submitted after
    /// `retire_leaf` returned and has completed: no device holds the address of the page. No lookup
    /// runs that began before.
    unsafe fn release(&self, retired: RetiredTable);
}
