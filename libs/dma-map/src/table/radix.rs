//! Mapping and unmapping: what the calls of [`IoMap`] do to the tree.
//!
//! A call for one page walks to its leaf table, looks at the entry and stores it: that is the whole of
//! [`map`](IoMap::map) and [`unmap`](IoMap::unmap) where nothing is wrong, and it is inlined. Everything else,
//! errors among it, goes out of line and begins again from the arguments:
//! 1. look at every entry of the range, change nothing, count the tables that are missing;
//! 2. allocate those;
//! 3. install them and store the leaves.
//!
//! So an error finds nothing changed, and what one call takes is bounded ([`MAX_TABLES`]). Steps 1 and 3 begin at the lowest
//! table that leads to all of the range, walk once to each leaf table of 512 pages, and not at all below an entry that is
//! empty (1) or becomes a large leaf.

mod range;

use core::convert::Infallible;

use address::{Iova, PAGE_SHIFT, PAGE_SIZE, PhysAddr};
use iova::{Access, IovaPfn, IovaRange};

use range::{Job, check_mapped, clear};

use super::format::{ENTRIES, Format, INDEX_BITS, entry_pages};
use super::memory::TableMemory;
use super::tree::{Child, Node, Tree, index};
use super::{
    ConfigError, IoMap, MapError, PageTable, RetiredTable, TableStats, Translation, UnmapError,
};

/// Most table pages that one call adds: 64 MiB, which map 32 GiB in pages of 4 KiB.
const MAX_TABLES: u64 = 1 << 14;

/// Sizes of leaves that a unit knows, beside pages of 4 KiB, which all do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeafSizes(u8);

impl LeafSizes {
    /// 4 KiB only.
    pub const FOUR_K: Self = Self(0);
    /// 4 KiB and 2 MiB.
    pub const TWO_M: Self = Self(1 << 2);
    /// 4 KiB, 2 MiB and 1 GiB.
    pub const ONE_G: Self = Self(1 << 2 | 1 << 3);

    #[inline]
    const fn has(self, level: u32) -> bool {
        self.0 >> level & 1 != 0
    }
}

/// What tables a unit can walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableConfig {
    /// Levels, within what the format has: 3 translate 39 bits, 4 48, 5 57.
    pub levels: u32,
    /// Leaf sizes.
    pub leaves: LeafSizes,
}

/// A tree of tables in format `F` on pages of `M`, that cores share without a lock.
#[derive(Debug)]
pub struct IoPageTable<F: Format, M: TableMemory> {
    tree: Tree<F, M>,
    leaves: LeafSizes,
}

impl<F: Format, M: TableMemory> IoPageTable<F, M> {
    /// An empty table: a root.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn new(memory: M, config: TableConfig) -> Result<Self, ConfigError> {
        let TableConfig { levels, leaves } = config;
        if !(F::MIN_LEVELS..=F::MAX_LEVELS).contains(&levels) {
            return Err(ConfigError::Levels {
                levels,
                format: F::NAME,
                min: F::MIN_LEVELS,
                max: F::MAX_LEVELS,
            });
        }
        let tree = Tree::new(memory, levels).ok_or(ConfigError::OutOfTables)?;
        Ok(Self { tree, leaves })
    }

    /// An empty table whose tables are installed with another ordering than release, to show what goes wrong.
    #[cfg(all(test, loom))]
    pub(crate) fn with_install_order(
        memory: M,
        config: TableConfig,
        order: lines::Ordering,
    ) -> Self {
        let mut table = Self::new(memory, config).expect("the configuration of the model is valid");
        table.tree.install_order = order;
        table
    }

    /// Where its pages come from.
    pub fn memory(&self) -> &M {
        &self.tree.memory
    }

    /// Bits of an IOVA that the table translates.
    pub fn width(&self) -> u32 {
        PAGE_SHIFT + INDEX_BITS * self.tree.levels
    }

    fn check(&self, range: IovaRange, phys: PhysAddr) -> Result<(), MapError> {
        if !self.tree.translates(range.last()) {
            let width = self.width();
            return Err(MapError::IovaTooWide { range, width });
        }
        if !phys.is_aligned(PAGE_SIZE) {
            return Err(MapError::PhysMisaligned { phys });
        }
        let end = range.len().and_then(|len| phys.checked_add(len - 1));
        if end.is_none_or(|end| end.raw() >> F::PHYS_BITS != 0) {
            return Err(MapError::PhysTooWide {
                phys,
                pages: range.pages(),
                width: F::PHYS_BITS,
            });
        }
        Ok(())
    }

    #[inline(never)]
    fn map_range(&self, range: IovaRange, phys: PhysAddr, access: Access) -> Result<(), MapError> {
        self.check(range, phys)?;
        let (first, last) = (range.first().raw(), range.last().raw());
        let job = Job {
            first,
            phys,
            access,
            leaves: self.leaves,
        };
        let top = self.lowest(first, last);
        let tables = job.check(top, first, last)?;
        if tables > MAX_TABLES {
            let max = MAX_TABLES;
            return Err(MapError::TooManyTables { tables, max });
        }
        let reserve = self.tree.reserve(tables);
        let mut reserve = reserve.ok_or(MapError::OutOfTables { tables })?;
        job.store(top, first, last, &mut reserve)
    }

    #[inline(never)]
    fn unmap_range(&self, range: IovaRange) -> Result<(), UnmapError> {
        if !self.tree.translates(range.last()) {
            let width = self.width();
            return Err(UnmapError::IovaTooWide { range, width });
        }
        let (first, last) = (range.first().raw(), range.last().raw());
        let top = self.lowest(first, last);
        check_mapped(top, first, last)?;
        clear(top, first, last)
    }

    /// The lowest table there is through which all walks for pages `first` to `last` go.
    fn lowest(&self, first: u64, last: u64) -> Node<'_, F, M> {
        let mut node = self.tree.top();
        while let level @ 2.. = node.level
            && (first ^ last) >> (INDEX_BITS * (level - 1)) == 0
            && let Child::Table(child) = node.child(index(first, level))
        {
            node = child;
        }
        node
    }
}

/// Whether an address is that of a page, and an entry of the format can hold it.
#[inline]
fn is_page_of<F: Format>(phys: PhysAddr) -> bool {
    phys.raw() & ((PAGE_SIZE - 1) | !(u64::MAX >> (64 - F::PHYS_BITS))) == 0
}

/// The entries of a table at `level` that pages `first` to `last` concern, which lie below one table: for each
/// its index and its pages among these, both ends inclusive.
fn parts(
    level: u32,
    first: u64,
    last: u64,
) -> impl ExactSizeIterator<Item = (usize, u64, u64)> + DoubleEndedIterator {
    let pages = entry_pages(level);
    let start = first & !(pages * ENTRIES as u64 - 1);
    (index(first, level)..index(last, level) + 1).map(move |at| {
        let from = start + at as u64 * pages;
        (at, from.max(first), last.min(from + (pages - 1)))
    })
}

impl<F: Format, M: TableMemory> IoMap for IoPageTable<F, M> {
    type Error = Infallible;

    #[inline]
    fn map(&self, range: IovaRange, phys: PhysAddr, access: Access) -> Result<(), MapError> {
        let page = range.first();
        if range.pages() == 1
            && is_page_of::<F>(phys)
            && let Some(leaf) = self.tree.leaf_table(page)
            && leaf.map_one(index(page.raw(), 1), phys, access)
        {
            return Ok(());
        }
        self.map_range(range, phys, access)
    }

    #[inline]
    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError> {
        let page = range.first();
        if range.pages() == 1
            && let Some(leaf) = self.tree.leaf_table(page)
            && leaf.unmap_one(index(page.raw(), 1))
        {
            return Ok(());
        }
        self.unmap_range(range)
    }

    fn lookup(&self, iova: Iova) -> Option<Translation> {
        let page = IovaPfn::of(iova);
        if !self.tree.translates(page) {
            return None;
        }
        let mut node = self.tree.top();
        loop {
            let level = node.level;
            match node.child(index(page.raw(), level)) {
                Child::Empty => return None,
                Child::Table(child) => node = child,
                Child::Leaf(leaf) => {
                    let leaf_pages = entry_pages(level);
                    let offset = iova.offset_in(leaf_pages << PAGE_SHIFT);
                    return Some(Translation {
                        phys: leaf.phys.checked_add(offset)?,
                        access: leaf.access,
                        leaf_pages,
                    });
                }
            }
        }
    }
}

impl<F: Format, M: TableMemory> PageTable for IoPageTable<F, M> {
    fn root(&self) -> PhysAddr {
        self.tree.root
    }

    fn levels(&self) -> u32 {
        self.tree.levels
    }

    fn stats(&self) -> TableStats {
        self.tree.stats()
    }

    fn has_table(&self, chunk: IovaRange) -> bool {
        self.tree.has_table(chunk)
    }

    #[expect(unsafe_code, reason = "the promise is the caller's, passed on")]
    unsafe fn retire_leaf(&self, chunk: IovaRange) -> Option<RetiredTable> {
        // SAFETY: the caller promises that nobody walks for an IOVA of the chunk, which is what `retire` asks.
        unsafe { self.tree.retire(chunk) }
    }

    #[expect(unsafe_code, reason = "the promise is the caller's, passed on")]
    unsafe fn release(&self, retired: RetiredTable) {
        // SAFETY: the caller promises that no device holds the page, which is what `release` asks.
        unsafe { self.tree.release(retired) }
    }
}
