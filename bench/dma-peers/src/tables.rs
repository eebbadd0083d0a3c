//! Tables with locks, and one that counts: those that *Utilizing the IOMMU Scalably* (ATC 2015)
//! found in use (Table 1), and the one that its identity mappings need (§4.1).
//!
//! * [`GlobalLockTable`]: one lock for each call, around any table.
//! * [`RwLockTable`]: a reader-writer lock for each table, held to read one entry on the way down
//!   and to write an entry of the last table; never two at a time, so no order is needed. The walk
//!   is that of a table without locks, by single pages.
//! * [`CountedTable`]: pages that count how often they are mapped. The paper counts in the entry;
//!   here a map behind a lock does, since what is measured is how many tables there are, not time.
//!
//! None of them gives tables back before it is dropped.
#![expect(
    unsafe_code,
    reason = "follows table entries to pages, and forwards the two calls that give table pages back"
)]

use alloc::collections::BTreeMap;
use core::convert::Infallible;
use core::marker::PhantomData;

use address::{Iova, PAGE_SHIFT, PhysAddr};
use dma_map::table::{
    ENTRIES, Entry, Format, IoMap, MapError, PageTable, RetiredTable, TableMemory, TableStats,
    Translation, UnmapError, format::MAX_LEVELS,
};
use iova::{Access, IovaPfn, IovaRange};
use lines::{AtomicU32, AtomicU64, AtomicUsize, CachePadded, Lock, Ordering, spin_loop};

/// One lock around each call.
#[derive(Debug)]
pub struct GlobalLockTable<T> {
    lock: CachePadded<Lock<()>>,
    table: T,
}

impl<T> GlobalLockTable<T> {
    /// A lock around `table`.
    pub fn new(table: T) -> Self {
        let lock = CachePadded::new(Lock::new(()));
        Self { lock, table }
    }
}

impl<T: IoMap> IoMap for GlobalLockTable<T> {
    type Error = T::Error;

    #[inline]
    fn map(
        &self,
        range: IovaRange,
        phys: PhysAddr,
        access: Access,
    ) -> Result<(), MapError<T::Error>> {
        let _held = self.lock.lock();
        self.table.map(range, phys, access)
    }

    #[inline]
    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError<T::Error>> {
        let _held = self.lock.lock();
        self.table.unmap(range)
    }

    fn lookup(&self, iova: Iova) -> Option<Translation> {
        let _held = self.lock.lock();
        self.table.lookup(iova)
    }
}

impl<T: PageTable> PageTable for GlobalLockTable<T> {
    fn root(&self) -> PhysAddr {
        self.table.root()
    }

    fn stats(&self) -> TableStats {
        self.table.stats()
    }

    unsafe fn retire_leaf(&self, chunk: IovaRange) -> Option<RetiredTable> {
        let _held = self.lock.lock();
        // SAFETY: the caller's promise, passed on.
        unsafe { self.table.retire_leaf(chunk) }
    }

    unsafe fn release(&self, retired: RetiredTable) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.table.release(retired) }
    }
}

/// Locks that tables are spread over: with more tables than that, two may share one. 256 × 128 B =
/// 32 KiB.
const TABLE_LOCKS: usize = 256;

/// A reader-writer lock for each table; leaves of 4 KiB.
#[derive(Debug)]
pub struct RwLockTable<F: Format, M: TableMemory> {
    memory: M,
    root: PhysAddr,
    levels: u32,
    locks: Box<[CachePadded<RwSpin>]>,
    /// Tables by level, leaf tables first.
    tables: [AtomicUsize; 5],
    format: PhantomData<fn() -> F>,
}

impl<F: Format, M: TableMemory> RwLockTable<F, M> {
    /// An empty table of so many levels, which the format has; `None` without memory for a root.
    pub fn new(memory: M, levels: u32) -> Option<Self> {
        assert!((F::MIN_LEVELS..=MAX_LEVELS).contains(&levels));
        let root = memory.alloc()?;
        let table = Self {
            memory,
            root,
            levels,
            locks: (0..TABLE_LOCKS).map(|_| CachePadded::default()).collect(),
            tables: Default::default(),
            format: PhantomData,
        };
        table.tables[levels as usize - 1].store(1, Ordering::Relaxed);
        Some(table)
    }

    #[inline]
    fn lock_of(&self, page: PhysAddr) -> &RwSpin {
        // Fibonacci hashing: the top bits of the product depend on every bit of the page number.
        let hash = (page.raw() >> PAGE_SHIFT).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.locks[(hash >> 32) as usize % TABLE_LOCKS]
    }

    /// The entry of `page` in the table at `table`, which is at `level`.
    #[inline]
    fn entry(&self, table: PhysAddr, page: u64, level: u32) -> &AtomicU64 {
        // SAFETY: the root, and every page that a table entry of this tree names, came from this
        // memory,
        // and no page is freed before the tree is dropped.
        let entries = unsafe { self.memory.entries(table) };
        &entries[index(page, level)]
    }

    #[inline]
    fn read(&self, table: PhysAddr, entry: &AtomicU64) -> u64 {
        self.lock_of(table)
            .reading(|| entry.load(Ordering::Acquire))
    }

    /// The leaf table of a page.
    #[inline]
    fn leaf_table(&self, page: u64) -> Option<PhysAddr> {
        if page >> (9 * self.levels) != 0 {
            return None;
        }
        let mut table = self.root;
        for level in (2..=self.levels).rev() {
            let entry = self.read(table, self.entry(table, page, level));
            if !F::is_table(entry, level) {
                return None;
            }
            table = F::phys(entry);
        }
        Some(table)
    }

    /// The same, made where there is none; `None` without memory, or for a page that the table does
    /// not translate.
    #[cold]
    fn grow(&self, page: u64) -> Option<PhysAddr> {
        if page >> (9 * self.levels) != 0 {
            return None;
        }
        let mut table = self.root;
        for level in (2..=self.levels).rev() {
            let slot = self.entry(table, page, level);
            let mut entry = self.read(table, slot);
            if !F::is_table(entry, level) {
                let new = self.memory.alloc()?;
                entry = self.lock_of(table).writing(|| {
                    // Release and acquire: the zeros written to the page happen before its use,
                    // whichever core made it.
                    let there = slot.load(Ordering::Acquire);
                    if there == 0 {
                        slot.store(F::table(new, level), Ordering::Release);
                    }
                    there
                });
                if entry == 0 {
                    entry = F::table(new, level);
                    self.tables[level as usize - 2].fetch_add(1, Ordering::Relaxed);
                } else {
                    // SAFETY: allocated above; no other core has seen it.
                    unsafe { self.memory.free(new) };
                }
            }
            table = F::phys(entry);
        }
        Some(table)
    }

    /// Stores `to` where `from` says that it may; the entry that was there otherwise.
    #[inline]
    fn set(&self, table: PhysAddr, page: u64, to: u64, from: impl Fn(u64) -> bool) -> bool {
        let slot = self.entry(table, page, 1);
        self.lock_of(table).writing(|| {
            let may = from(slot.load(Ordering::Relaxed));
            if may {
                slot.store(to, Ordering::Release);
            }
            may
        })
    }

    fn free_below(&self, table: PhysAddr, level: u32) {
        for page in 0..ENTRIES as u64 {
            // The index at `level` of the pages below this entry.
            let entry = self.entry(table, page << (9 * (level - 1)), level);
            let entry = entry.load(Ordering::Relaxed);
            if level > 1 && F::is_table(entry, level) {
                self.free_below(F::phys(entry), level - 1);
            }
        }
        // SAFETY: a table of this tree, reached once, by `drop`, which is alone with it.
        unsafe { self.memory.free(table) };
    }
}

impl<F: Format, M: TableMemory> Drop for RwLockTable<F, M> {
    fn drop(&mut self) {
        self.free_below(self.root, self.levels);
    }
}

#[inline]
const fn index(page: u64, level: u32) -> usize {
    (page >> (9 * (level - 1))) as usize & (ENTRIES - 1)
}

fn numbers(range: IovaRange) -> core::ops::RangeInclusive<u64> {
    range.first().raw()..=range.last().raw()
}

impl<F: Format, M: TableMemory> IoMap for RwLockTable<F, M> {
    type Error = Infallible;

    #[inline]
    fn map(&self, range: IovaRange, phys: PhysAddr, access: Access) -> Result<(), MapError> {
        for (at, page) in numbers(range).enumerate() {
            let found = self.leaf_table(page).or_else(|| self.grow(page));
            let to = PhysAddr::new(phys.raw() + ((at as u64) << PAGE_SHIFT));
            let failed = match found {
                Some(table) if self.set(table, page, F::leaf(to, access, 1), |was| was == 0) => {
                    continue;
                }
                Some(_) => MapError::AlreadyMapped {
                    iova: IovaPfn::new(page).start(),
                    leaf_pages: 1,
                },
                None => MapError::OutOfTables { tables: 1 },
            };
            if let Some(done) = IovaRange::new(range.first(), at as u64) {
                self.unmap(done).expect("mapped just now");
            }
            return Err(failed);
        }
        Ok(())
    }

    #[inline]
    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError> {
        if range.pages() > 1
            && let Some(page) =
                numbers(range).find(|page| self.lookup(IovaPfn::new(*page).start()).is_none())
        {
            let iova = IovaPfn::new(page).start();
            return Err(UnmapError::NotMapped { iova });
        }
        for page in numbers(range) {
            let cleared = self
                .leaf_table(page)
                .is_some_and(|table| self.set(table, page, 0, |was| was != 0));
            if !cleared {
                let iova = IovaPfn::new(page).start();
                return Err(UnmapError::NotMapped { iova });
            }
        }
        Ok(())
    }

    fn lookup(&self, iova: Iova) -> Option<Translation> {
        let page = IovaPfn::of(iova).raw();
        let table = self.leaf_table(page)?;
        let entry = self.read(table, self.entry(table, page, 1));
        let Entry::Leaf(leaf) = F::decode(entry, 1) else {
            return None;
        };
        Some(Translation {
            phys: PhysAddr::new(leaf.phys.raw() + iova.offset_in(1 << PAGE_SHIFT)),
            access: leaf.access,
            leaf_pages: 1,
        })
    }
}

impl<F: Format, M: TableMemory> PageTable for RwLockTable<F, M> {
    fn root(&self) -> PhysAddr {
        self.root
    }

    fn stats(&self) -> TableStats {
        let tables = core::array::from_fn(|level| self.tables[level].load(Ordering::Relaxed));
        TableStats {
            tables,
            retired: 0,
            peak: tables.iter().sum(),
        }
    }

    unsafe fn retire_leaf(&self, _: IovaRange) -> Option<RetiredTable> {
        None
    }

    unsafe fn release(&self, _: RetiredTable) {}
}

/// Readers inside, or [`WRITER`].
#[derive(Debug)]
struct RwSpin(AtomicU32);

impl Default for RwSpin {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

const WRITER: u32 = u32::MAX;

impl RwSpin {
    /// Runs `read` as one of the readers. Acquire pairs with the release of the last writer to
    /// leave.
    #[inline]
    fn reading<R>(&self, read: impl FnOnce() -> R) -> R {
        let mut readers = self.0.load(Ordering::Relaxed);
        loop {
            if readers == WRITER {
                spin_loop();
                readers = self.0.load(Ordering::Relaxed);
                continue;
            }
            let entered = self.0.compare_exchange_weak(
                readers,
                readers + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            match entered {
                Ok(_) => break,
                Err(now) => readers = now,
            }
        }
        let result = read();
        self.0.fetch_sub(1, Ordering::Release);
        result
    }

    /// Runs `write` as the writer. Acquire pairs with the release of the last reader or writer.
    #[inline]
    fn writing<R>(&self, write: impl FnOnce() -> R) -> R {
        while self
            .0
            .compare_exchange_weak(0, WRITER, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            spin_loop();
        }
        let result = write();
        self.0.store(0, Ordering::Release);
        result
    }
}

/// A table whose pages count how often they are mapped, so that callers may share an IOVA because
/// they share the page.
#[derive(Debug)]
pub struct CountedTable<T> {
    table: T,
    users: Lock<BTreeMap<u64, Users>>,
}

/// Mappings of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Users {
    phys: u64,
    access: Access,
    count: u64,
}

impl<T: IoMap> CountedTable<T> {
    /// Wraps `table`, in which no other caller maps.
    pub fn new(table: T) -> Self {
        let users = Lock::new(BTreeMap::new());
        Self { table, users }
    }

    /// The table.
    pub fn table(&self) -> &T {
        &self.table
    }

    /// Maps by single pages, or counts those that are mapped so once more. All or nothing.
    ///
    /// # Errors
    /// [`MapError::AlreadyMapped`] where a page is mapped otherwise, or another [`MapError`].
    pub fn map(
        &self,
        range: IovaRange,
        phys: PhysAddr,
        access: Access,
    ) -> Result<(), MapError<T::Error>> {
        let mut users = self.users.lock();
        let of = |page: u64| phys.raw() + ((page - range.first().raw()) << PAGE_SHIFT);
        let differs = |page: &u64| {
            users
                .get(page)
                .is_some_and(|known| (known.phys, known.access) != (of(*page), access))
        };
        if let Some(page) = numbers(range).find(differs) {
            let iova = IovaPfn::new(page).start();
            return Err(MapError::AlreadyMapped {
                iova,
                leaf_pages: 1,
            });
        }
        for page in numbers(range) {
            if let Some(known) = users.get_mut(&page) {
                known.count += 1;
                continue;
            }
            if let Err(error) = self.table.map(one(page), PhysAddr::new(of(page)), access) {
                for done in range.first().raw()..page {
                    self.leave(&mut users, done);
                }
                return Err(error);
            }
            let first = Users {
                phys: of(page),
                access,
                count: 1,
            };
            users.insert(page, first);
        }
        Ok(())
    }

    /// Takes back one [`map`](Self::map) of each page. Gives the smallest range that holds the
    /// pages of which this was the last: they are to be invalidated.
    ///
    /// # Errors
    /// [`UnmapError::NotMapped`]; nothing has changed then.
    pub fn unmap(&self, range: IovaRange) -> Result<Option<IovaRange>, UnmapError<T::Error>> {
        let mut users = self.users.lock();
        if let Some(page) = numbers(range).find(|page| !users.contains_key(page)) {
            let iova = IovaPfn::new(page).start();
            return Err(UnmapError::NotMapped { iova });
        }
        let mut gone: Option<(u64, u64)> = None;
        for page in numbers(range) {
            if self.leave(&mut users, page) {
                gone = Some((gone.map_or(page, |(from, _)| from), page));
            }
        }
        Ok(gone.and_then(|(from, to)| IovaRange::new(IovaPfn::new(from), to - from + 1)))
    }

    /// One user less of a page; whether it was the last.
    fn leave(&self, users: &mut BTreeMap<u64, Users>, page: u64) -> bool {
        let Some(known) = users.get_mut(&page) else {
            return false;
        };
        known.count -= 1;
        let was_last = known.count == 0;
        if was_last {
            users.remove(&page);
            self.table.unmap(one(page)).expect("it was mapped");
        }
        was_last
    }
}

fn one(page: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(page), 1).expect("a page of a range")
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use dma_map::table::{IoPageTable, LeafSizes, TableConfig, VtdSecondLevel};
    use dma_map::testing::CountedMemory;
    use iova::testing::Random;

    use super::*;

    type Rw<'a> = RwLockTable<VtdSecondLevel, &'a CountedMemory>;
    type Plain<'a> = IoPageTable<VtdSecondLevel, &'a CountedMemory>;

    fn range(first: u64, pages: u64) -> IovaRange {
        IovaRange::new(IovaPfn::new(first), pages).expect("a range of the space")
    }

    fn plain(memory: &CountedMemory) -> Plain<'_> {
        let config = TableConfig {
            levels: 4,
            leaves: LeafSizes::FOUR_K,
        };
        Plain::new(memory, config).expect("memory for a root")
    }

    /// The table without locks is the model: it has tests of its own.
    #[test]
    fn tables_with_locks_answer_as_the_one_without() {
        let memory = CountedMemory::new();
        let rw = Rw::new(&memory, 4).expect("memory for a root");
        let global = GlobalLockTable::new(plain(&memory));
        let model = plain(&memory);
        let mut random = Random::new(1);
        for step in 0..40_000 {
            // Around the borders of leaf tables, in two places far from each other.
            let page = random.below(600) + 500 + (random.below(2) << 30);
            let range = range(page, 1 + random.below(4) * random.below(40));
            if random.below(2) == 0 {
                let phys = PhysAddr::new(random.below(1 << 30) << PAGE_SHIFT);
                let expected = model.map(range, phys, Access::Write);
                assert_eq!(
                    rw.map(range, phys, Access::Write),
                    expected,
                    "{step}: {range}"
                );
                assert_eq!(
                    global.map(range, phys, Access::Write),
                    expected,
                    "{step}: {range}"
                );
            } else {
                let expected = model.unmap(range);
                assert_eq!(rw.unmap(range), expected, "{step}: {range}");
                assert_eq!(global.unmap(range), expected, "{step}: {range}");
            }
            let iova = IovaPfn::new(page).start();
            assert_eq!(rw.lookup(iova), model.lookup(iova));
            assert_eq!(global.lookup(iova), model.lookup(iova));
        }
        assert_eq!(rw.stats().tables, model.stats().tables);
        drop((rw, global, model));
        assert_eq!(memory.pages_in_use(), 0);
    }

    fn hammer(table: &impl PageTable) {
        std::thread::scope(|scope| {
            for id in 0..4 {
                scope.spawn(move || {
                    let mut random = Random::new(id);
                    for _ in 0..20_000 {
                        // All of them write all leaf tables.
                        let page = (1 << 20) + random.below(1024) * 4 + id;
                        let phys = PhysAddr::new((page ^ 0x5a5a5) << PAGE_SHIFT);
                        table.map(range(page, 1), phys, Access::Read).expect("ours");
                        let found = table.lookup(range(page, 1).start());
                        assert_eq!(found.map(|found| found.phys), Some(phys));
                        table.unmap(range(page, 1)).expect("just mapped");
                    }
                });
            }
        });
        assert_eq!(table.stats().tables[0], 8);
    }

    #[test]
    fn owners_do_not_disturb_each_other() {
        let memory = CountedMemory::new();
        hammer(&Rw::new(&memory, 4).expect("memory for a root"));
        hammer(&GlobalLockTable::new(plain(&memory)));
        assert_eq!(memory.pages_in_use(), 0);
    }

    #[test]
    fn a_counted_page_ends_with_its_last_user() {
        let memory = CountedMemory::new();
        let table = CountedTable::new(plain(&memory));
        let (two, phys) = (range(511, 2), PhysAddr::new(511 << PAGE_SHIFT));
        for _ in 0..3 {
            table.map(two, phys, Access::Write).expect("the same");
        }
        let otherwise = [(phys, Access::Read), (PhysAddr::new(0), Access::Write)];
        for (phys, access) in otherwise {
            let refused = table.map(two, phys, access);
            assert!(matches!(refused, Err(MapError::AlreadyMapped { .. })));
        }
        assert_eq!(table.unmap(two), Ok(None));
        assert_eq!(table.unmap(range(512, 1)), Ok(None));
        assert_eq!(table.unmap(two), Ok(Some(range(512, 1))));
        let iova = range(512, 1).start();
        assert_eq!(table.unmap(two), Err(UnmapError::NotMapped { iova }));
        assert!(table.table().lookup(range(511, 1).start()).is_some());
        assert_eq!(table.unmap(range(511, 1)), Ok(Some(range(511, 1))));
        assert!(table.table().lookup(range(511, 1).start()).is_none());
    }
}
