//! The tree of tables: all that follows or changes an entry, and the whole argument why following one is sound.
//!
//! **Invariant.** Every entry that [`Format::is_table`] recognizes, in any table reachable from the root, holds
//! the address of a page that came from this tree's memory and is not freed. It holds because
//! * entries are written only here, as 0, as what `Format::leaf` makes (which is never taken for a table: formats
//!   are sealed and tested), or by [`Node::install`] with a fresh page;
//! * a page leaves the tree only by [`Tree::retire`], whose caller promises that nobody walks its range, and is
//!   freed only by [`Tree::release`], after that;
//! * new pages are published by a *release* compare-and-swap and entries are loaded by *acquire*, so whoever
//!   finds the page finds its zeros too. With a relaxed swap he may find what the page held before: entries
//!   of a table that is gone. (`tests/model.rs` makes that mistake on purpose.)
//!
//! A [`Node`] is a table in use by a call. It does not outlive the call, which is what makes "nobody walks"
//! a promise that owners of IOVAs can make.
#![expect(
    unsafe_code,
    reason = "follows table entries to pages, and frees pages when no device holds them"
)]

use core::marker::PhantomData;
use core::ops::RangeInclusive;

use address::{PAGE_SHIFT, PhysAddr};
use alloc::vec::Vec;
use iova::{Access, IovaPfn, IovaRange};
use lines::{AtomicU64, AtomicUsize, Ordering};

use super::format::{ENTRIES, Entry, Format, INDEX_BITS, Leaf, MAX_LEVELS, entry_pages};
use super::memory::{Table, TableMemory};
use super::{RetiredTable, TableStats};

/// Index of `pfn`'s entry in a table at `level`.
#[inline]
pub(super) const fn index(pfn: u64, level: u32) -> usize {
    (pfn >> (INDEX_BITS * (level - 1))) as usize & (ENTRIES - 1)
}

/// The tables and their memory.
#[derive(Debug)]
pub(super) struct Tree<F: Format, M: TableMemory> {
    pub(super) root: PhysAddr,
    pub(super) levels: u32,
    pub(super) memory: M,
    counters: Counters,
    format: PhantomData<fn() -> F>,
    /// The ordering that publishes a table: release, except in a model that shows why.
    #[cfg(loom)]
    pub(super) install_order: Ordering,
}

/// A table during a call.
pub(super) struct Node<'t, F: Format, M: TableMemory> {
    tree: &'t Tree<F, M>,
    table: &'t Table,
    pub(super) level: u32,
}

/// What lies behind an entry.
pub(super) enum Child<'t, F: Format, M: TableMemory> {
    Empty,
    Leaf(Leaf),
    Table(Node<'t, F, M>),
}

impl<F: Format, M: TableMemory> Clone for Node<'_, F, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format, M: TableMemory> Copy for Node<'_, F, M> {}

impl<F: Format, M: TableMemory> Tree<F, M> {
    /// An empty tree of `levels` levels; `None` without memory for the root.
    pub(super) fn new(memory: M, levels: u32) -> Option<Self> {
        let root = memory.alloc()?;
        let tree = Self {
            root,
            levels,
            memory,
            counters: Counters::default(),
            format: PhantomData,
            #[cfg(loom)]
            install_order: Ordering::Release,
        };
        tree.counters.installed(levels);
        Some(tree)
    }

    pub(super) fn stats(&self) -> TableStats {
        self.counters.read()
    }

    /// Whether `pfn` lies in what the table translates.
    #[inline]
    pub(super) fn translates(&self, pfn: IovaPfn) -> bool {
        pfn.raw() >> (INDEX_BITS * self.levels) == 0
    }

    /// The table at `page`, which the root or a table entry of the tree names.
    #[inline]
    fn follow(&self, page: PhysAddr) -> &Table {
        // SAFETY: by the module's invariant the page came from this memory and is not freed while a walk that can
        // reach it runs; the reference is used inside that walk only (`Node` is not public outside `table`).
        unsafe { self.memory.entries(page) }
    }

    /// The root table.
    pub(super) fn top(&self) -> Node<'_, F, M> {
        Node {
            tree: self,
            table: self.follow(self.root),
            level: self.levels,
        }
    }

    /// The leaf table of a page that the tree translates, if there is one: the whole of the common path.
    #[inline]
    pub(super) fn leaf_table(&self, pfn: IovaPfn) -> Option<Node<'_, F, M>> {
        if !self.translates(pfn) {
            return None;
        }
        let mut table = self.follow(self.root);
        // Levels by name, so that shifts are constants: a loop over them costs 2 ns more.
        if self.levels == 5 {
            table = self.step(table, pfn, 5)?;
        }
        if self.levels >= 4 {
            table = self.step(table, pfn, 4)?;
        }
        if self.levels >= 3 {
            table = self.step(table, pfn, 3)?;
        }
        Some(Node {
            tree: self,
            table: self.step(table, pfn, 2)?,
            level: 1,
        })
    }

    /// The next table on the way to `pfn` from one at `level`.
    #[inline(always)]
    fn step(&self, table: &Table, pfn: IovaPfn, level: u32) -> Option<&Table> {
        // Acquire: pairs with `install`.
        let entry = table[index(pfn.raw(), level)].load(Ordering::Acquire);
        F::is_table(entry, level).then(|| self.follow(F::phys(entry)))
    }

    /// `pages` pages for tables to be installed; `None` if there are not so many.
    pub(super) fn reserve(&self, pages: u64) -> Option<Reserve<'_, F, M>> {
        let mut reserve = Reserve {
            tree: self,
            pages: Vec::new(),
        };
        let pages = usize::try_from(pages).ok()?;
        reserve.pages.try_reserve_exact(pages).ok()?;
        for _ in 0..pages {
            reserve.pages.push(self.memory.alloc()?);
        }
        Some(reserve)
    }

    /// The entry, of a table at the level, that stands for exactly `range`.
    fn entry_of(&self, range: IovaRange) -> Option<(&AtomicU64, u32)> {
        if !self.translates(range.last()) {
            return None;
        }
        let first = range.first().raw();
        let mut parent = self.top();
        // The parent is the table with one entry for the whole range.
        while entry_pages(parent.level) > range.pages() {
            match parent.child(index(first, parent.level)) {
                Child::Table(node) => parent = node,
                _ => return None,
            }
        }
        let level = parent.level;
        if level == 1 || entry_pages(level) != range.pages() || !first.is_multiple_of(range.pages())
        {
            return None;
        }
        Some((&parent.table[index(first, level)], level))
    }

    /// Whether there is a table for exactly `range`.
    pub(super) fn has_table(&self, range: IovaRange) -> bool {
        let entry = self.entry_of(range);
        entry.is_some_and(|(slot, level)| F::is_table(slot.load(Ordering::Relaxed), level))
    }

    /// Takes an empty table out of the tree; see [`PageTable::retire_leaf`](super::PageTable::retire_leaf).
    ///
    /// # Safety
    /// As there: nobody walks for an IOVA of `range`.
    pub(super) unsafe fn retire(&self, range: IovaRange) -> Option<RetiredTable> {
        let (slot, level) = self.entry_of(range)?;
        let entry = slot.load(Ordering::Acquire);
        if !F::is_table(entry, level) {
            return None;
        }
        let page = F::phys(entry);
        // Acquire: pairs with the release of whoever cleared an entry, so that his later stores to
        // the page (there are none) could not follow it into the free list.
        let is_empty = |entry: &AtomicU64| entry.load(Ordering::Acquire) == 0;
        if !self.follow(page).iter().all(is_empty) {
            return None;
        }
        // Fails if somebody else retired it at the same time. Release: the invalidation comes after.
        slot.compare_exchange(entry, 0, Ordering::AcqRel, Ordering::Relaxed)
            .ok()?;
        self.counters.retired(level - 1);
        Some(RetiredTable {
            page,
            root: self.root,
            range,
        })
    }

    /// Frees a retired table.
    ///
    /// # Safety
    /// As [`PageTable::release`](super::PageTable::release): no device holds the page's address.
    pub(super) unsafe fn release(&self, retired: RetiredTable) {
        assert_eq!(retired.root, self.root, "released into its own table");
        self.counters.released();
        // SAFETY: the page came from this memory by `install`, was unlinked by `retire`, and `RetiredTable` cannot be
        // copied, so it is freed once. No CPU walks it (`retire`'s promise) and no device (this one's).
        unsafe { self.memory.free(retired.page) };
    }

    /// Frees the tables below `node`.
    fn free_below(&self, node: Node<'_, F, M>) {
        if node.level == 1 {
            return;
        }
        for slot in node.table {
            let entry = slot.load(Ordering::Acquire);
            if let Child::Table(child) = node.behind(entry) {
                self.free_below(child);
                // SAFETY: named by an entry, so live by the invariant; called from `drop` only, which is alone with
                // the tree and does not look at this entry again. Devices: see `PageTable::root`.
                unsafe { self.memory.free(F::phys(entry)) };
            }
        }
    }
}

impl<F: Format, M: TableMemory> Drop for Tree<F, M> {
    fn drop(&mut self) {
        self.free_below(self.top());
        // SAFETY: allocated by `new`, and nothing uses the tree after this.
        unsafe { self.memory.free(self.root) };
    }
}

impl<'t, F: Format, M: TableMemory> Node<'t, F, M> {
    /// What lies behind the entry at `index`.
    pub(super) fn child(&self, index: usize) -> Child<'t, F, M> {
        let slot = &self.table[index];
        // Acquire: pairs with `install`; what is behind a table entry is seen with the entry.
        let entry = slot.load(Ordering::Acquire);
        self.behind(entry)
    }

    fn behind(&self, entry: u64) -> Child<'t, F, M> {
        match F::decode(entry, self.level) {
            Entry::Empty => Child::Empty,
            Entry::Leaf(leaf) => Child::Leaf(leaf),
            Entry::Table(page) => Child::Table(Self {
                tree: self.tree,
                table: self.tree.follow(page),
                level: self.level - 1,
            }),
        }
    }

    /// Puts an empty table behind the entry at `index`, unless another core was faster: what is there now.
    /// [`Child::Empty`] where the reserve is used up.
    pub(super) fn install(&self, index: usize, reserve: &mut Reserve<'t, F, M>) -> Child<'t, F, M> {
        let Some(page) = reserve.pages.pop() else {
            return Child::Empty;
        };
        let entry = F::table(page, self.level);
        let slot = &self.table[index];
        // Release: pairs with the acquire of every walk; the page's zeros go first. Acquire: the winner's do.
        #[cfg(not(loom))]
        let order = Ordering::Release;
        #[cfg(loom)]
        let order = self.tree.install_order;
        match slot.compare_exchange(0, entry, order, Ordering::Acquire) {
            Ok(_) => {
                self.tree.counters.installed(self.level - 1);
                self.behind(entry)
            }
            Err(theirs) => {
                // Nobody has seen our page: back to the reserve, which frees what is left over.
                reserve.pages.push(page);
                self.behind(theirs)
            }
        }
    }

    /// First of the leaf table's entries `among` these that is used, or that is not.
    #[inline]
    pub(super) fn first(&self, among: RangeInclusive<usize>, is_used: bool) -> Option<usize> {
        debug_assert_eq!(self.level, 1);
        let start = *among.start();
        let mut slots = self.table[among].iter();
        let found = slots.position(|slot| (slot.load(Ordering::Relaxed) != 0) == is_used)?;
        Some(start + found)
    }

    /// Makes the leaf table's entries `at` leaves of consecutive pages from `phys` on.
    #[inline]
    pub(super) fn store_leaves(&self, at: RangeInclusive<usize>, phys: PhysAddr, access: Access) {
        debug_assert_eq!(self.level, 1);
        // Release: a device that walks sees what the caller wrote to the page before.
        let mut phys = phys.raw();
        for slot in &self.table[at] {
            slot.store(F::leaf(PhysAddr::new(phys), access, 1), Ordering::Release);
            phys += 1 << PAGE_SHIFT;
        }
    }

    /// Empties the leaf table's entries `at`.
    #[inline]
    pub(super) fn clear_leaves(&self, at: RangeInclusive<usize>) {
        debug_assert_eq!(self.level, 1);
        for slot in &self.table[at] {
            slot.store(0, Ordering::Release);
        }
    }

    /// Changes one leaf, or nothing into a leaf or back; `false` if it is not `from` now. Never changes a table.
    #[inline]
    pub(super) fn swap(&self, at: usize, from: Option<Leaf>, to: Option<Leaf>) -> bool {
        let word = |leaf: Option<Leaf>| match leaf {
            Some(leaf) => F::leaf(leaf.phys, leaf.access, self.level),
            None => 0,
        };
        let slot = &self.table[at];
        slot.compare_exchange(word(from), word(to), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Maps one page of the leaf table if nothing is there.
    #[inline]
    pub(super) fn map_one(&self, at: usize, phys: PhysAddr, access: Access) -> bool {
        let slot = &self.table[at];
        // Relaxed, and no swap: the caller owns the IOVA, so nobody else writes this entry, and whatever
        // gave the caller the IOVA ordered the last owner's store before.
        if slot.load(Ordering::Relaxed) != 0 {
            return false;
        }
        slot.store(F::leaf(phys, access, 1), Ordering::Release);
        true
    }

    /// Unmaps one page of the leaf table if a mapping is there.
    #[inline]
    pub(super) fn unmap_one(&self, at: usize) -> bool {
        let slot = &self.table[at];
        if slot.load(Ordering::Relaxed) == 0 {
            return false;
        }
        slot.store(0, Ordering::Release);
        true
    }
}

/// Pages for tables, allocated before anything changes; what is left is freed.
pub(super) struct Reserve<'t, F: Format, M: TableMemory> {
    tree: &'t Tree<F, M>,
    pages: Vec<PhysAddr>,
}

impl<F: Format, M: TableMemory> Drop for Reserve<'_, F, M> {
    fn drop(&mut self) {
        for page in self.pages.drain(..) {
            // SAFETY: allocated by `Tree::reserve`, and never published: `install` takes it out of the list to do so.
            unsafe { self.tree.memory.free(page) };
        }
    }
}

/// Tables by level. Written when a table comes or goes, never on the common path.
#[derive(Debug, Default)]
struct Counters {
    tables: [AtomicUsize; MAX_LEVELS as usize],
    retired: AtomicUsize,
    all: AtomicUsize,
    peak: AtomicUsize,
}

impl Counters {
    // In a model every access is a branch to explore, and nothing there reads these.
    const COUNTS: bool = !cfg!(loom);

    fn installed(&self, level: u32) {
        if Self::COUNTS {
            self.tables[level as usize - 1].fetch_add(1, Ordering::Relaxed);
            let all = self.all.fetch_add(1, Ordering::Relaxed) + 1;
            self.peak.fetch_max(all, Ordering::Relaxed);
        }
    }

    fn retired(&self, level: u32) {
        if Self::COUNTS {
            self.tables[level as usize - 1].fetch_sub(1, Ordering::Relaxed);
            self.retired.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn released(&self) {
        if Self::COUNTS {
            self.retired.fetch_sub(1, Ordering::Relaxed);
            self.all.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn read(&self) -> TableStats {
        TableStats {
            tables: core::array::from_fn(|level| self.tables[level].load(Ordering::Relaxed)),
            retired: self.retired.load(Ordering::Relaxed),
            peak: self.peak.load(Ordering::Relaxed),
        }
    }
}
