//! Mapping and unmapping: what the calls of [`PageTable`] do to the tree.
//!
//! A call for one page walks to its leaf table, looks at the entry and stores it: that is the whole of
//! [`map`](PageTable::map) and [`unmap`](PageTable::unmap) where nothing is wrong, and it is inlined. Everything else,
//! errors among it, goes out of line and begins again from the arguments:
//! 1. look at every entry of the range, change nothing, count the tables that are missing;
//! 2. allocate those;
//! 3. install them and store the leaves.
//!
//! So an error finds nothing changed. Steps 1 and 3 walk once to each leaf table of 512 pages, and not at all
//! below an entry that is empty (1) or becomes a large leaf.

use address::{Iova, PAGE_SHIFT, PAGE_SIZE, PhysAddr};
use iova::{Access, IovaPfn, IovaRange};

use super::format::{ENTRIES, Format, Leaf, entry_pages};
use super::locked::{GlobalLock, LockFree, Locking, TableLocks};
use super::memory::TableMemory;
use super::tree::{Child, Node, Reserve, Tree, index};
use super::{ConfigError, MapError, PageTable, RetiredTable, TableStats, Translation, UnmapError};

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

/// A tree of tables in format `F` on pages of `M`, that cores share under the locking `L`: none, by default.
#[derive(Debug)]
pub struct IoPageTable<F: Format, M: TableMemory, L: Locking = LockFree> {
    tree: Tree<F, M, L>,
    leaves: LeafSizes,
}

/// One lock around each call.
pub type GlobalLockTable<F, M> = IoPageTable<F, M, GlobalLock>;
/// A reader-writer lock for each table.
pub type RwLockTable<F, M> = IoPageTable<F, M, TableLocks>;

impl<F: Format, M: TableMemory, L: Locking> IoPageTable<F, M, L> {
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

    /// The leaf table of a page, made where there is none; `None` where the reserve runs out or a large leaf is
    /// in the way, which no range that was checked and is owned meets.
    fn grow<'t>(
        &'t self,
        page: u64,
        reserve: &mut Reserve<'t, F, M, L>,
    ) -> Option<Node<'t, F, M, L>> {
        let mut node = self.tree.top();
        while node.level() > 1 {
            let at = index(page, node.level());
            let child = match node.child(at) {
                Child::Empty => node.install(at, reserve),
                child => child,
            };
            let Child::Table(next) = child else {
                return None;
            };
            node = next;
        }
        Some(node)
    }

    fn map_counted_range(
        &self,
        range: IovaRange,
        phys: PhysAddr,
        access: Access,
    ) -> Result<(), MapError> {
        self.check(range, phys)?;
        let (first, last) = (range.first().raw(), range.last().raw());
        if F::MAX_COUNT == 0 {
            return Err(overflow::<F>(first));
        }
        let job = Job {
            first,
            phys,
            access,
            leaves: LeafSizes::FOUR_K,
        };
        let tables = job.check_counted::<F, M, L>(self.tree.top(), first, last)?;
        let mut reserve = self
            .tree
            .reserve(tables)
            .ok_or(MapError::OutOfTables { tables })?;
        let mut leaf = None;
        for page in first..=last {
            let at = index(page, 1);
            if at == 0 || leaf.is_none() {
                leaf = self.grow(page, &mut reserve);
            }
            let counted = match leaf {
                Some(leaf) => job.count(leaf, page),
                None => Err(MapError::OutOfTables { tables: 1 }),
            };
            if let Err(error) = counted {
                // Another core changed the page since it was checked.
                return Err(self.uncount(first, page, error));
            }
        }
        Ok(())
    }

    /// Takes back the count of pages `first` to before `failed`, and completes the error that stopped it.
    fn uncount(&self, first: u64, failed: u64, mut error: MapError) -> MapError {
        let mut any_unmapped = false;
        for page in first..failed {
            let leaf = self.tree.leaf_table(IovaPfn::new(page));
            any_unmapped |= leaf.is_some_and(|leaf| take_count(leaf, page) == Ok(true));
        }
        if let MapError::Differs { undone, .. } | MapError::CountOverflow { undone, .. } =
            &mut error
            && any_unmapped
        {
            *undone = failed - first;
        }
        error
    }

    fn unmap_counted_range(&self, range: IovaRange) -> Result<Option<IovaRange>, UnmapError> {
        if !self.tree.translates(range.last()) {
            let width = self.width();
            return Err(UnmapError::IovaTooWide { range, width });
        }
        let (first, last) = (range.first().raw(), range.last().raw());
        check_counts(self.tree.top(), first, last)?;
        let mut gone: Option<(u64, u64)> = None;
        for page in first..=last {
            let not_mapped = UnmapError::NotMapped {
                iova: IovaPfn::new(page).start(),
            };
            let leaf = self.tree.leaf_table(IovaPfn::new(page)).ok_or(not_mapped)?;
            if take_count(leaf, page)? {
                gone = Some((gone.map_or(page, |(from, _)| from), page));
            }
        }
        Ok(gone.and_then(|(from, to)| IovaRange::new(IovaPfn::new(from), to - from + 1)))
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

/// A range to map, as the recursion over levels needs it. The depth is that of the tree.
struct Job {
    first: u64,
    phys: PhysAddr,
    access: Access,
    leaves: LeafSizes,
}

impl Job {
    /// Where `page` of the range goes. Nothing overflows: the arguments were checked.
    fn phys_of(&self, page: u64) -> PhysAddr {
        PhysAddr::new(self.phys.raw() + ((page - self.first) << PAGE_SHIFT))
    }

    /// Whether pages `first` to `last` can be one leaf at `level`.
    fn is_leaf(&self, level: u32, first: u64, last: u64) -> bool {
        let pages = entry_pages(level);
        self.leaves.has(level)
            && last - first == pages - 1
            && self.phys_of(first).is_aligned(pages << PAGE_SHIFT)
    }

    /// Tables needed below an empty entry of a table at `level` for its pages `first` to `last`.
    fn tables(&self, level: u32, first: u64, last: u64) -> u64 {
        if level == 1 || self.is_leaf(level, first, last) {
            return 0;
        }
        if level == 2 {
            return 1;
        }
        let below =
            parts(level - 1, first, last).map(|(_, from, to)| self.tables(level - 1, from, to));
        1 + below.sum::<u64>()
    }

    /// Checks that nothing is mapped; gives the number of tables that are missing.
    fn check<F: Format, M: TableMemory, L: Locking>(
        &self,
        node: Node<'_, F, M, L>,
        first: u64,
        last: u64,
    ) -> Result<u64, MapError> {
        let level = node.level();
        if level == 1 {
            let base = first - index(first, 1) as u64;
            return match node.first_used(index(first, 1)..=index(last, 1)) {
                None => Ok(0),
                Some((at, _)) => Err(already_mapped(base + at as u64, 1)),
            };
        }
        let mut missing = 0;
        for (at, from, to) in parts(level, first, last) {
            missing += match node.child(at) {
                Child::Empty => self.tables(level, from, to),
                Child::Table(child) => self.check(child, from, to)?,
                Child::Leaf(_) => return Err(already_mapped(from, level)),
            };
        }
        Ok(missing)
    }

    /// Stores the leaves. Fails only where others map what they do not own.
    fn store<'t, F: Format, M: TableMemory, L: Locking>(
        &self,
        node: Node<'t, F, M, L>,
        first: u64,
        last: u64,
        reserve: &mut Reserve<'t, F, M, L>,
    ) -> Result<(), MapError> {
        let level = node.level();
        if level == 1 {
            let at = index(first, 1)..=index(last, 1);
            node.store_leaves(at, self.phys_of(first), self.access);
            return Ok(());
        }
        for (at, from, to) in parts(level, first, last) {
            let mut child = node.child(at);
            if matches!(child, Child::Empty) {
                if self.is_leaf(level, from, to) {
                    let leaf = self.leaf(from, 0);
                    if !node.swap(at, None, Some(leaf)) {
                        return Err(already_mapped(from, level));
                    }
                    continue;
                }
                child = node.install(at, reserve);
            }
            match child {
                Child::Table(child) => self.store(child, from, to, reserve)?,
                Child::Leaf(_) => return Err(already_mapped(from, level)),
                Child::Empty => return Err(MapError::OutOfTables { tables: 1 }),
            }
        }
        Ok(())
    }

    fn leaf(&self, page: u64, count: u32) -> Leaf {
        Leaf {
            phys: self.phys_of(page),
            access: self.access,
            count,
        }
    }

    /// Checks that every page can be counted once more; gives the number of tables that are missing.
    fn check_counted<F: Format, M: TableMemory, L: Locking>(
        &self,
        node: Node<'_, F, M, L>,
        first: u64,
        last: u64,
    ) -> Result<u64, MapError> {
        let level = node.level();
        let mut missing = 0;
        for (at, from, to) in parts(level, first, last) {
            missing += match node.child(at) {
                Child::Empty => self.tables(level, from, to),
                Child::Table(child) => self.check_counted(child, from, to)?,
                Child::Leaf(leaf) => {
                    self.once_more::<F>(leaf, from, level)?;
                    0
                }
            };
        }
        Ok(missing)
    }

    /// The leaf that counts `page` once more than `leaf` does.
    fn once_more<F: Format>(&self, leaf: Leaf, page: u64, level: u32) -> Result<Leaf, MapError> {
        if level > 1 || leaf.count == 0 || leaf != self.leaf(page, leaf.count) {
            return Err(MapError::Differs {
                iova: IovaPfn::new(page).start(),
                phys: leaf.phys,
                access: leaf.access,
                count: leaf.count,
                undone: 0,
            });
        }
        if leaf.count == F::MAX_COUNT {
            return Err(overflow::<F>(page));
        }
        Ok(self.leaf(page, leaf.count + 1))
    }

    /// Counts `page` once more. Turns again only after another core changed the same entry.
    fn count<F: Format, M: TableMemory, L: Locking>(
        &self,
        node: Node<'_, F, M, L>,
        page: u64,
    ) -> Result<(), MapError> {
        let at = index(page, 1);
        loop {
            let (from, to) = match node.child(at) {
                Child::Leaf(leaf) => (Some(leaf), self.once_more::<F>(leaf, page, 1)?),
                _ => (None, self.leaf(page, 1)),
            };
            if node.swap(at, from, Some(to)) {
                return Ok(());
            }
        }
    }
}

#[cold]
fn already_mapped(page: u64, level: u32) -> MapError {
    MapError::AlreadyMapped {
        iova: IovaPfn::new(page).start(),
        leaf_pages: entry_pages(level),
    }
}

#[cold]
fn overflow<F: Format>(page: u64) -> MapError {
    MapError::CountOverflow {
        iova: IovaPfn::new(page).start(),
        max: F::MAX_COUNT,
        undone: 0,
    }
}

/// Checks that all of `first` to `last` is mapped by leaves that lie inside and are not counted.
fn check_mapped<F: Format, M: TableMemory, L: Locking>(
    node: Node<'_, F, M, L>,
    first: u64,
    last: u64,
) -> Result<(), UnmapError> {
    let level = node.level();
    if level == 1 {
        let base = first - index(first, 1) as u64;
        return match node.first_not_plain(index(first, 1)..=index(last, 1)) {
            None => Ok(()),
            Some((at, leaf)) => Err(not_plain(base + at as u64, leaf)),
        };
    }
    for (at, from, to) in parts(level, first, last) {
        match node.child(at) {
            Child::Empty => return Err(not_plain(from, None)),
            Child::Table(child) => check_mapped(child, from, to)?,
            Child::Leaf(_) if to - from == entry_pages(level) - 1 => {}
            Child::Leaf(_) => return Err(inside(from, level)),
        }
    }
    Ok(())
}

#[cold]
fn not_plain(page: u64, leaf: Option<Leaf>) -> UnmapError {
    let iova = IovaPfn::new(page).start();
    match leaf {
        None => UnmapError::NotMapped { iova },
        Some(Leaf { count, .. }) => UnmapError::Counted { iova, count },
    }
}

#[cold]
fn inside(page: u64, level: u32) -> UnmapError {
    UnmapError::InsideHugeLeaf {
        iova: IovaPfn::new(page).start(),
        leaf_pages: entry_pages(level),
    }
}

/// Empties the leaves of `first` to `last`, which were checked.
fn clear<F: Format, M: TableMemory, L: Locking>(node: Node<'_, F, M, L>, first: u64, last: u64) {
    let level = node.level();
    if level == 1 {
        return node.clear_leaves(index(first, 1)..=index(last, 1));
    }
    for (at, from, to) in parts(level, first, last) {
        match node.child(at) {
            Child::Table(child) => clear(child, from, to),
            Child::Leaf(leaf) => {
                // Nobody else changes a leaf of an owned range.
                node.swap(at, Some(leaf), None);
            }
            Child::Empty => {}
        }
    }
}

/// Checks that every page is counted.
fn check_counts<F: Format, M: TableMemory, L: Locking>(
    node: Node<'_, F, M, L>,
    first: u64,
    last: u64,
) -> Result<(), UnmapError> {
    let level = node.level();
    for (at, from, to) in parts(level, first, last) {
        match node.child(at) {
            Child::Empty => return Err(not_plain(from, None)),
            Child::Table(child) => check_counts(child, from, to)?,
            Child::Leaf(_) if level > 1 => return Err(inside(from, level)),
            Child::Leaf(leaf) if leaf.count == 0 => return Err(not_plain(from, Some(leaf))),
            Child::Leaf(_) => {}
        }
    }
    Ok(())
}

/// Takes one count from `page`: whether it was the last, and the page is not mapped any more. Turns again only
/// after another core changed the same entry.
fn take_count<F: Format, M: TableMemory, L: Locking>(
    node: Node<'_, F, M, L>,
    page: u64,
) -> Result<bool, UnmapError> {
    let at = index(page, 1);
    loop {
        let leaf = match node.child(at) {
            Child::Leaf(leaf) if leaf.count > 0 => leaf,
            Child::Leaf(leaf) => return Err(not_plain(page, Some(leaf))),
            _ => return Err(not_plain(page, None)),
        };
        let count = leaf.count - 1;
        let to = (count > 0).then_some(Leaf { count, ..leaf });
        if node.swap(at, Some(leaf), to) {
            return Ok(count == 0);
        }
    }
}

impl<F: Format, M: TableMemory, L: Locking> PageTable for IoPageTable<F, M, L> {
    #[inline]
    fn map(&self, range: IovaRange, phys: PhysAddr, access: Access) -> Result<(), MapError> {
        self.tree.locking().whole(|| {
            if range.pages() == 1 && self.map_page(range.first(), phys, access) {
                return Ok(());
            }
            self.map_range(range, phys, access)
        })
    }

    #[inline]
    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError> {
        self.tree.locking().whole(|| {
            if range.pages() == 1 && self.unmap_page(range.first()) {
                return Ok(());
            }
            self.unmap_range(range)
        })
    }

    fn lookup(&self, iova: Iova) -> Option<Translation> {
        let page = IovaPfn::of(iova);
        if !self.tree.translates(page) {
            return None;
        }
        self.tree.locking().whole(|| {
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
        })
    }

    fn map_counted(
        &self,
        range: IovaRange,
        phys: PhysAddr,
        access: Access,
    ) -> Result<(), MapError> {
        let locking = self.tree.locking();
        locking.whole(|| self.map_counted_range(range, phys, access))
    }

    fn unmap_counted(&self, range: IovaRange) -> Result<Option<IovaRange>, UnmapError> {
        let locking = self.tree.locking();
        locking.whole(|| self.unmap_counted_range(range))
    }

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
        let locking = self.tree.locking();
        // SAFETY: the caller promises that nobody walks for an IOVA of the chunk, which is what `retire` asks.
        locking.whole(|| unsafe { self.tree.retire(chunk) })
    }

    #[expect(unsafe_code, reason = "the promise is the caller's, passed on")]
    unsafe fn release(&self, retired: RetiredTable) {
        // SAFETY: the caller promises that no device holds the page, which is what `release` asks.
        unsafe { self.tree.release(retired) }
    }
}
