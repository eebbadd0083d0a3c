//! The tree of tables: all code that follows or changes an entry, and the whole argument why
//! following one is sound.
//!
//! **Invariant.** Every entry that [`Format::is_table`] recognizes, in any table reachable from the
//! root, holds the address of a page that came from this tree's memory and is not freed. It holds
//! because
//! * entries are written only here, as 0, as what `Format::leaf` makes (which is never taken for a
//!   table: formats are sealed and tested), or by [`Node::install`] with a fresh page;
//! * a page leaves the tree only by [`PageTable::retire_leaf`], whose caller promises that no core
//!   walks its range, and is freed only by [`PageTable::release`], after that;
//! * new pages are published by a *release* compare-and-swap and entries are loaded by *acquire*,
//!   so a core that finds the page finds its zeros too. With a relaxed swap it may find the page's
//!   old contents: entries of a table that is gone. (`tests/model.rs` makes that mistake on
//!   purpose.)
//!
//! A [`Node`] is a table in use by a call. It does not outlive the call. Therefore owners of IOVAs
//! can promise that no core walks them.
#![expect(
    unsafe_code,
    reason = "follows table entries to pages, and frees pages when no device holds them"
)]

use core::marker::PhantomData;
// `core`'s, since counters order nothing: models need not explore them.
use core::sync::atomic::AtomicUsize;

use address::{PAGE_SHIFT, PhysAddr};
use alloc::vec::Vec;
use iova::{Access, IovaRange};
use lines::{AtomicU64, Ordering};

use super::format::{ENTRIES, Entry, Format, INDEX_BITS, Leaf, MAX_LEVELS, entry_pages};
use super::memory::{Table, TableMemory};
use super::{ConfigError, LeafSizes, PageTable, RetiredTable, TableConfig, TableStats};

/// Index of `page`'s entry in a table at `level`.
#[inline]
const fn index(page: u64, level: u32) -> usize {
    (page >> (INDEX_BITS * (level - 1))) as usize & (ENTRIES - 1)
}

/// A tree of tables in format `F` on pages of `M`, that cores share without a lock.
#[derive(Debug)]
pub struct IoPageTable<F: Format, M: TableMemory> {
    root: PhysAddr,
    levels: u32,
    /// The first page that it does not translate.
    end: u64,
    pub(super) leaves: LeafSizes,
    memory: M,
    counters: Counters,
    format: PhantomData<fn() -> F>,
}

/// Tables by level, leaf tables first. Written when a table comes or goes, never on the common
/// path.
#[derive(Debug, Default)]
struct Counters {
    tables: [AtomicUsize; MAX_LEVELS as usize],
    retired: AtomicUsize,
    peak: AtomicUsize,
}

/// A table during a call. Its methods take pages, of which it has an entry.
pub(super) struct Node<'t, F: Format, M: TableMemory> {
    tree: &'t IoPageTable<F, M>,
    table: &'t Table,
    pub(super) level: u32,
}

impl<F: Format, M: TableMemory> Clone for Node<'_, F, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format, M: TableMemory> Copy for Node<'_, F, M> {}

impl<F: Format, M: TableMemory> IoPageTable<F, M> {
    /// An empty table: a root.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn new(memory: M, config: TableConfig) -> Result<Self, ConfigError> {
        let TableConfig { levels, leaves } = config;
        if !(F::MIN_LEVELS..=MAX_LEVELS).contains(&levels) {
            return Err(ConfigError::Levels {
                levels,
                format: F::NAME,
                min: F::MIN_LEVELS,
                max: MAX_LEVELS,
            });
        }
        let tree = Self {
            root: memory.alloc().ok_or(ConfigError::OutOfTables)?,
            levels,
            end: entry_pages(levels + 1),
            leaves,
            memory,
            counters: Counters::default(),
            format: PhantomData,
        };
        tree.count_table(levels);
        Ok(tree)
    }

    /// The memory of its pages.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Bits of an IOVA that the table translates.
    pub fn width(&self) -> u32 {
        PAGE_SHIFT + self.end.trailing_zeros()
    }

    /// Whether `page` lies in what the table translates.
    #[inline]
    pub(super) fn translates(&self, page: u64) -> bool {
        page < self.end
    }

    fn count_table(&self, level: u32) {
        self.counters.tables[level as usize - 1].fetch_add(1, Ordering::Relaxed);
        let pages = self.stats().pages();
        self.counters.peak.fetch_max(pages, Ordering::Relaxed);
    }

    /// The table at `page`, which the root or a table entry of the tree names.
    #[inline]
    fn follow(&self, page: PhysAddr) -> &Table {
        // SAFETY: by the module's invariant the page came from this memory and is not freed while a
        // walk that can reach it runs; the reference is used inside that walk only (`Node` is not
        // public outside `table`).
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

    /// The leaf table of all pages from `first` to `last`, if there is one: the whole walk of the
    /// common path.
    #[inline]
    pub(super) fn leaf_table(&self, first: u64, last: u64) -> Option<Node<'_, F, M>> {
        if (first ^ last) >= ENTRIES as u64 || !self.translates(first) {
            return None;
        }
        let (mut table, levels) = (self.follow(self.root), self.levels);
        // Levels by name, so that shifts are constants: a loop over them costs 2 ns more.
        let mut descend = |level| {
            // Acquire: pairs with `install`.
            let entry = table[index(first, level)].load(Ordering::Acquire);
            let is_table = F::is_table(entry, level);
            if is_table {
                table = self.follow(F::phys(entry));
            }
            is_table
        };
        let is_there = (levels < 5 || descend(5))
            && (levels < 4 || descend(4))
            && (levels < 3 || descend(3))
            && descend(2);
        is_there.then_some(Node {
            tree: self,
            table,
            level: 1,
        })
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

    /// The table with one entry for exactly `range`, if there is one and a table may be behind that
    /// entry.
    fn above(&self, range: IovaRange) -> Option<Node<'_, F, M>> {
        let (first, pages) = (range.first().raw(), range.pages());
        let level = 1 + pages.trailing_zeros() / INDEX_BITS;
        let is_entry = level > 1
            && level <= self.levels
            && pages == entry_pages(level)
            && first.is_multiple_of(pages)
            && self.translates(first);
        let node = is_entry.then(|| self.top().lowest(first, first, level))?;
        (node.level == level).then_some(node)
    }

    /// Frees the tables below `node`.
    fn free_below(&self, node: Node<'_, F, M>) {
        if node.level == 1 {
            return;
        }
        for slot in node.table {
            let entry = slot.load(Ordering::Acquire);
            if let Entry::Table(child) = node.behind(entry) {
                self.free_below(child);
                // SAFETY: named by an entry, so live by the invariant; called from `drop` only,
                // which is alone with the tree and does not read this entry again. Devices: see
                // `PageTable::root`.
                unsafe { self.memory.free(F::phys(entry)) };
            }
        }
    }
}

impl<F: Format, M: TableMemory> PageTable for IoPageTable<F, M> {
    fn root(&self) -> PhysAddr {
        self.root
    }

    fn stats(&self) -> TableStats {
        let Counters {
            tables,
            retired,
            peak,
        } = &self.counters;
        TableStats {
            tables: core::array::from_fn(|level| tables[level].load(Ordering::Relaxed)),
            retired: retired.load(Ordering::Relaxed),
            peak: peak.load(Ordering::Relaxed),
        }
    }

    fn has_table(&self, chunk: IovaRange) -> bool {
        let node = self.above(chunk);
        node.is_some_and(|node| matches!(node.child(chunk.first().raw()), Entry::Table(_)))
    }

    unsafe fn retire_leaf(&self, chunk: IovaRange) -> Option<RetiredTable> {
        let above = self.above(chunk)?;
        let slot = above.slot(chunk.first().raw());
        let entry = slot.load(Ordering::Acquire);
        let Entry::Table(child) = above.behind(entry) else {
            return None;
        };
        // Acquire: pairs with the release by the core that cleared an entry, so that its later
        // stores to the page (there are none) could not follow it into the free list.
        let is_empty = |entry: &AtomicU64| entry.load(Ordering::Acquire) == 0;
        if !child.table.iter().all(is_empty) {
            return None;
        }
        // Fails if another core retired it at the same time. Release: the invalidation comes after.
        slot.compare_exchange(entry, 0, Ordering::AcqRel, Ordering::Relaxed)
            .ok()?;
        self.counters.retired.fetch_add(1, Ordering::Relaxed);
        self.counters.tables[child.level as usize - 1].fetch_sub(1, Ordering::Relaxed);
        Some(RetiredTable {
            page: F::phys(entry),
            root: self.root,
            range: chunk,
        })
    }

    unsafe fn release(&self, retired: RetiredTable) {
        assert_eq!(retired.root, self.root, "released into its own table");
        self.counters.retired.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the page came from this memory by `install`, was unlinked by `retire_leaf`, and
        // `RetiredTable` cannot be copied, so it is freed once. No CPU walks it (the promise there)
        // and no device (this one's).
        unsafe { self.memory.free(retired.page) };
    }
}

impl<F: Format, M: TableMemory> Drop for IoPageTable<F, M> {
    fn drop(&mut self) {
        self.free_below(self.top());
        // SAFETY: allocated by `new`, and nothing uses the tree after this.
        unsafe { self.memory.free(self.root) };
    }
}

impl<'t, F: Format, M: TableMemory> Node<'t, F, M> {
    /// Returns the lowest existing table, at `level` or above, through which all walks for pages
    /// `first` to `last` go.
    pub(super) fn lowest(mut self, first: u64, last: u64, level: u32) -> Self {
        while self.level > level
            && (first ^ last) < entry_pages(self.level)
            && let Entry::Table(child) = self.child(first)
        {
            self = child;
        }
        self
    }

    /// Returns the end of a walk for `page`: the last table, and the leaf that its entry is, if it
    /// is one.
    pub(super) fn walk(mut self, page: u64) -> (Self, Option<Leaf>) {
        loop {
            match self.child(page) {
                Entry::Table(child) => self = child,
                Entry::Leaf(leaf) => return (self, Some(leaf)),
                Entry::Empty => return (self, None),
            }
        }
    }

    fn slot(&self, page: u64) -> &'t AtomicU64 {
        &self.table[index(page, self.level)]
    }

    /// The entries of pages `first` to `last` of a leaf table.
    #[inline]
    fn slots(&self, first: u64, last: u64) -> &'t [AtomicU64] {
        debug_assert_eq!(self.level, 1);
        let first_at = index(first, 1);
        &self.table[first_at..first_at + (last - first) as usize + 1]
    }

    /// Decodes the entry of `page`.
    fn child(&self, page: u64) -> Entry<Self> {
        // Acquire: pairs with `install`; the contents of a table are seen with its entry.
        self.behind(self.slot(page).load(Ordering::Acquire))
    }

    fn behind(&self, entry: u64) -> Entry<Self> {
        match F::decode(entry, self.level) {
            Entry::Empty => Entry::Empty,
            Entry::Leaf(leaf) => Entry::Leaf(leaf),
            Entry::Table(page) => Entry::Table(Self {
                tree: self.tree,
                table: self.tree.follow(page),
                level: self.level - 1,
            }),
        }
    }

    /// Puts an empty table behind the entry of `page`, unless another core was faster. False where
    /// the reserve is used up.
    pub(super) fn install(&self, page: u64, reserve: &mut Reserve<'t, F, M>) -> bool {
        let Some(table) = reserve.pages.pop() else {
            return false;
        };
        let entry = F::table(table, self.level);
        // Release: pairs with the acquire of every walk; the page's zeros go first.
        match (self.slot(page)).compare_exchange(0, entry, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => self.tree.count_table(self.level - 1),
            // No other core has seen this page: back to the reserve, which frees its leftovers.
            Err(_) => reserve.pages.push(table),
        }
        true
    }

    /// Returns the first of the leaf table's pages `first` to `last` that is mapped, or that is
    /// not.
    #[inline]
    pub(super) fn find(&self, first: u64, last: u64, is_mapped: bool) -> Option<u64> {
        // Relaxed: the caller owns the IOVAs, so no other core writes these entries, and whatever
        // gave the caller the IOVAs ordered the last owner's stores before.
        let mut slots = self.slots(first, last).iter();
        let found = slots.position(|slot| (slot.load(Ordering::Relaxed) != 0) == is_mapped)?;
        Some(first + found as u64)
    }

    /// Makes the leaf table's entries of pages `first` to `last` leaves of consecutive pages from
    /// `phys` on.
    #[inline]
    pub(super) fn store(&self, first: u64, last: u64, phys: PhysAddr, access: Access) {
        let mut leaf = F::leaf(phys, access, 1);
        for slot in self.slots(first, last) {
            // Release: a device that walks sees what the caller wrote to the page before.
            slot.store(leaf, Ordering::Release);
            leaf = leaf.wrapping_add(1 << PAGE_SHIFT);
        }
    }

    /// Empties the leaf table's entries of pages `first` to `last`.
    #[inline]
    pub(super) fn clear(&self, first: u64, last: u64) {
        for slot in self.slots(first, last) {
            slot.store(0, Ordering::Release);
        }
    }

    /// Changes one leaf, or nothing into a leaf or back; false if it is not `from` now. Never
    /// changes a table.
    pub(super) fn swap(&self, page: u64, from: Option<Leaf>, to: Option<Leaf>) -> bool {
        let word = |leaf: Option<Leaf>| match leaf {
            Some(leaf) => F::leaf(leaf.phys, leaf.access, self.level),
            None => 0,
        };
        (self.slot(page))
            .compare_exchange(word(from), word(to), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }
}

/// Pages for tables, allocated before anything changes; those not used are freed.
pub(super) struct Reserve<'t, F: Format, M: TableMemory> {
    tree: &'t IoPageTable<F, M>,
    pages: Vec<PhysAddr>,
}

impl<F: Format, M: TableMemory> Drop for Reserve<'_, F, M> {
    fn drop(&mut self) {
        for page in self.pages.drain(..) {
            // SAFETY: allocated by `reserve`, and never published: `install` takes it out of the
            // list to do so.
            unsafe { self.tree.memory.free(page) };
        }
    }
}
