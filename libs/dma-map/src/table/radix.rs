//! Mapping and unmapping: what the calls of [`IoMap`] do to the tree.
//!
//! A call for one page walks to its leaf table, looks at the entry and stores it: that is the whole of
//! [`map`](IoMap::map) and [`unmap`](IoMap::unmap) where nothing is wrong, and it is inlined. Everything else,
//! errors among it, goes out of line and begins again from the arguments:
//! 1. look at every entry of the range, change nothing, count the tables that are missing;
//! 2. allocate those;
//! 3. install them and store the leaves.
//!
//! So an error finds nothing changed. Steps 1 and 3 walk once to each leaf table of 512 pages, and not at all
//! below an entry that is empty (1) or becomes a large leaf.

mod mapping;
mod unmapping;

use core::convert::Infallible;

use address::{Iova, PAGE_SHIFT, PAGE_SIZE, PhysAddr};
use iova::{Access, IovaPfn, IovaRange};

use mapping::Job;
use unmapping::{check_mapped, clear};

use super::format::{ENTRIES, Format, entry_pages};
use super::memory::TableMemory;
use super::tree::{Child, Tree, index};
use super::{
    ConfigError, IoMap, MapError, PageTable, RetiredTable, TableStats, Translation, UnmapError,
};

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
    pub(super) fn with_install_order(
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
        self.tree.memory()
    }

    /// Bits of an IOVA that the table translates.
    pub fn width(&self) -> u32 {
        PAGE_SHIFT + super::format::INDEX_BITS * self.tree.levels()
    }

    /// The common path of `map`: `false` where anything is out of the ordinary.
    #[inline]
    fn map_page(&self, page: IovaPfn, phys: PhysAddr, access: Access) -> bool {
        is_page_of::<F>(phys)
            && self
                .tree
                .leaf_table(page)
                .is_some_and(|leaf| leaf.map_one(index(page.raw(), 1), phys, access))
    }

    /// The common path of `unmap`: `false` where anything is out of the ordinary.
    #[inline]
    fn unmap_page(&self, page: IovaPfn) -> bool {
        self.tree
            .leaf_table(page)
            .is_some_and(|leaf| leaf.unmap_one(index(page.raw(), 1)))
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
        if share_leaf_table(first, last)
            && let Some(leaf) = self.tree.leaf_table(range.first())
        {
            job.check(leaf, first, last)?;
            leaf.store_leaves(index(first, 1)..=index(last, 1), phys, access);
            return Ok(());
        }
        let tables = job.check(self.tree.top(), first, last)?;
        let mut reserve = self
            .tree
            .reserve(tables)
            .ok_or(MapError::OutOfTables { tables })?;
        job.store(self.tree.top(), first, last, &mut reserve)
    }

    #[inline(never)]
    fn unmap_range(&self, range: IovaRange) -> Result<(), UnmapError> {
        if !self.tree.translates(range.last()) {
            let width = self.width();
            return Err(UnmapError::IovaTooWide { range, width });
        }
        let (first, last) = (range.first().raw(), range.last().raw());
        let top = match self.tree.leaf_table(range.first()) {
            Some(leaf) if share_leaf_table(first, last) => leaf,
            _ => self.tree.top(),
        };
        check_mapped(top, first, last)?;
        clear(top, first, last);
        Ok(())
    }
}

/// Whether an address is that of a page, and an entry of the format can hold it.
#[inline]
fn is_page_of<F: Format>(phys: PhysAddr) -> bool {
    phys.raw() & ((PAGE_SIZE - 1) | !(u64::MAX >> (64 - F::PHYS_BITS))) == 0
}

#[inline]
fn share_leaf_table(first: u64, last: u64) -> bool {
    first / ENTRIES as u64 == last / ENTRIES as u64
}

/// The entries of a table at `level` that pages `first` to `last` concern, which lie below one table: for each
/// its index and its pages among these, both ends inclusive.
fn parts(level: u32, first: u64, last: u64) -> impl Iterator<Item = (usize, u64, u64)> {
    let pages = entry_pages(level);
    let start = first & !(pages * ENTRIES as u64 - 1);
    (index(first, level)..=index(last, level)).map(move |at| {
        let from = start + at as u64 * pages;
        (at, from.max(first), last.min(from + (pages - 1)))
    })
}

impl<F: Format, M: TableMemory> IoMap for IoPageTable<F, M> {
    type Error = Infallible;

    #[inline]
    fn map(&self, range: IovaRange, phys: PhysAddr, access: Access) -> Result<(), MapError> {
        if range.pages() == 1 && self.map_page(range.first(), phys, access) {
            return Ok(());
        }
        self.map_range(range, phys, access)
    }

    #[inline]
    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError> {
        if range.pages() == 1 && self.unmap_page(range.first()) {
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
            let level = node.level();
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
        self.tree.root()
    }

    fn levels(&self) -> u32 {
        self.tree.levels()
    }

    fn stats(&self) -> TableStats {
        self.tree.stats()
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
