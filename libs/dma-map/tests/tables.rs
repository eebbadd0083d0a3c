//! IO page tables against a naive model: a map from page to memory.
//!
//! Every call, hostile ones among them, must return the model's value, and leave every page as in
//! the model. Leaf sizes are read from the table (and checked to be legal), because the possible
//! sizes depend on tables that earlier calls left behind.
#![cfg(not(any(loom, shuttle)))]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use address::{Iova, PAGE_SIZE, PhysAddr};
use dma_map::table::{
    AmdV1, ConfigError, HostMemory, IoMap, IoPageTable, LeafSizes, MapError, PageTable, Table,
    TableConfig, TableMemory, UnmapError, VtdSecondLevel,
};
use dma_map::testing::{CountedMemory, RegionMemory};
use iova::{Access, IovaPfn, IovaRange};
use proptest::prelude::*;

type Vtd<'m> = IoPageTable<VtdSecondLevel, &'m CountedMemory>;

/// Pages that calls are about: six chunks, two of them past a 1 GiB border.
const WINDOW: u64 = 6 * 512;
const BASE: u64 = 3 * 512 * 512 - 4 * 512;

fn pages(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).expect("a range of the 64-bit space")
}

fn at(pfn: u64) -> Iova {
    IovaPfn::new(pfn).start()
}

const fn config(levels: u32, leaves: LeafSizes) -> TableConfig {
    TableConfig { levels, leaves }
}

/// One page of the model.
#[derive(Clone, Copy, Debug)]
struct Page {
    phys: u64,
    access: Access,
    leaf_first: u64,
    leaf_pages: u64,
}

#[derive(Default)]
struct Model(BTreeMap<u64, Page>);

impl Model {
    fn map(&self, first: u64, count: u64, phys: PhysAddr) -> Result<(), MapError> {
        if !phys.is_aligned(PAGE_SIZE) {
            return Err(MapError::PhysMisaligned { phys });
        }
        let end = u128::from(phys.raw()) + u128::from(count) * u128::from(PAGE_SIZE);
        if end > 1 << 52 {
            return Err(MapError::PhysTooWide {
                phys,
                pages: count,
                width: 52,
            });
        }
        match self.0.range(first..first + count).next() {
            None => Ok(()),
            Some((&pfn, page)) => Err(MapError::AlreadyMapped {
                iova: at(pfn),
                leaf_pages: page.leaf_pages,
            }),
        }
    }

    fn unmap(&self, first: u64, count: u64) -> Result<(), UnmapError> {
        for pfn in first..first + count {
            let Some(page) = self.0.get(&pfn) else {
                return Err(UnmapError::NotMapped { iova: at(pfn) });
            };
            if page.leaf_first < first || page.leaf_first + page.leaf_pages > first + count {
                return Err(UnmapError::InsideHugeLeaf {
                    iova: at(pfn),
                    leaf_pages: page.leaf_pages,
                });
            }
        }
        Ok(())
    }

    /// Takes a mapping over from the table, and checks it page by page.
    fn learn<P: PageTable>(
        &mut self,
        table: &P,
        first: u64,
        count: u64,
        phys: PhysAddr,
        access: Access,
    ) {
        for pfn in first..first + count {
            let goes = table.lookup(at(pfn)).expect("was mapped");
            let phys = phys.raw() + (pfn - first) * PAGE_SIZE;
            assert_eq!((goes.phys.raw(), goes.access), (phys, access));
            let leaf_first = pfn & !(goes.leaf_pages - 1);
            assert!(leaf_first >= first && leaf_first + goes.leaf_pages <= first + count);
            self.0.insert(
                pfn,
                Page {
                    phys,
                    access,
                    leaf_first,
                    leaf_pages: goes.leaf_pages,
                },
            );
        }
    }

    fn compare<P: PageTable>(&self, table: &P) {
        for pfn in BASE..BASE + WINDOW {
            let goes = table.lookup(Iova::new(at(pfn).raw() + 0x123));
            let expected = self
                .0
                .get(&pfn)
                .map(|page| (page.phys + 0x123, page.access, page.leaf_pages));
            let found = goes.map(|goes| (goes.phys.raw(), goes.access, goes.leaf_pages));
            assert_eq!(found, expected, "page {pfn:#x}");
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Page of the window, pages, physical page, access.
    Map(u64, u64, u64, Access),
    /// A 2 MiB-aligned range of so many chunks.
    MapChunks(u64, u64, u64),
    /// Misaligned or too high memory.
    MapHostile(u64, u64, u64),
    Unmap(u64, u64),
    /// All pages of the mapped run that holds or follows this page.
    UnmapRun(u64),
    Retire(u64),
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![
        Just(Access::Read),
        Just(Access::Write),
        Just(Access::ReadWrite)
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let page = 0..WINDOW;
    let count = prop_oneof![Just(1u64), 1u64..40, 1u64..2000, Just(512u64)];
    prop_oneof![
        4 => (page.clone(), count.clone(), 1u64..1 << 30, access())
            .prop_map(|(page, count, phys, access)| Op::Map(page, count, phys, access)),
        2 => (0..6u64, 1..4u64, 0..1u64 << 20).prop_map(|(c, n, phys)| Op::MapChunks(c, n, phys)),
        1 => (page.clone(), count.clone(), prop_oneof![
            Just(u64::MAX), Just(1u64), Just(0x1fff), Just((1u64 << 52) - PAGE_SIZE), Just(1u64 << 52),
            Just(u64::MAX - 0xfff),
        ]).prop_map(|(page, count, phys)| Op::MapHostile(page, count, phys)),
        2 => (page.clone(), count).prop_map(|(page, count)| Op::Unmap(page, count)),
        4 => page.prop_map(Op::UnmapRun),
        1 => (0..6u64).prop_map(Op::Retire),
    ]
}

/// Cuts a range to the window.
fn cut(page: u64, count: u64) -> (u64, u64) {
    (BASE + page, count.min(WINDOW - page).max(1))
}

fn apply<P: PageTable<Error = Infallible>>(table: &P, model: &mut Model, op: &Op) {
    match *op {
        Op::Map(page, count, phys, access) => {
            let (first, count) = cut(page, count);
            check_map(
                table,
                model,
                first,
                count,
                PhysAddr::new(phys * PAGE_SIZE),
                access,
            );
        }
        Op::MapChunks(chunk, chunks, phys) => {
            let (first, count) = cut(chunk * 512, chunks * 512);
            let phys = PhysAddr::new(phys << 21);
            check_map(table, model, first, count, phys, Access::ReadWrite);
        }
        Op::MapHostile(page, count, phys) => {
            let (first, count) = cut(page, count);
            check_map(
                table,
                model,
                first,
                count,
                PhysAddr::new(phys),
                Access::Read,
            );
        }
        Op::Unmap(page, count) => {
            let (first, count) = cut(page, count);
            check_unmap(table, model, first, count);
        }
        Op::UnmapRun(page) => {
            let Some((&first, _)) = model.0.range(BASE + page..).next() else {
                return;
            };
            let first = model.0[&first].leaf_first;
            let run = (first..)
                .take_while(|pfn| model.0.contains_key(pfn))
                .count() as u64;
            check_unmap(table, model, first, run);
            assert!(!model.0.contains_key(&first), "a whole run is unmapped");
        }
        Op::Retire(chunk) => retire(table, model, BASE + chunk * 512),
    }
}

fn check_map<P: PageTable<Error = Infallible>>(
    table: &P,
    model: &mut Model,
    first: u64,
    count: u64,
    phys: PhysAddr,
    access: Access,
) {
    let expected = model.map(first, count, phys);
    let before = table.stats();
    let range = pages(first, count);
    assert_eq!(
        table.map(range, phys, access),
        expected,
        "{range} to {phys:?}"
    );
    match expected {
        Ok(()) => model.learn(table, first, count, phys, access),
        Err(_) => assert_eq!(table.stats(), before, "an error adds no table"),
    }
}

fn check_unmap<P: PageTable<Error = Infallible>>(
    table: &P,
    model: &mut Model,
    first: u64,
    count: u64,
) {
    let expected = model.unmap(first, count);
    assert_eq!(table.unmap(pages(first, count)), expected);
    if expected.is_ok() {
        model
            .0
            .retain(|pfn, _| !(first..first + count).contains(pfn));
    }
}

fn retire<P: PageTable>(table: &P, model: &Model, first: u64) {
    let before = table.stats();
    // SAFETY: this thread alone uses the table, and no device does.
    let Some(retired) = (unsafe { table.retire_leaf(pages(first, 512)) }) else {
        return;
    };
    assert!(model.0.range(first..first + 512).next().is_none());
    assert_eq!(retired.range(), pages(first, 512));
    assert_eq!(table.stats().retired, before.retired + 1);
    assert_eq!(table.stats().pages(), before.pages());
    // SAFETY: no device uses the table.
    unsafe { table.release(retired) };
    assert_eq!(table.stats().pages(), before.pages() - 1);
}

/// Runs the calls, then unmaps everything and retires every leaf table: only the upper ones remain.
fn play<P: PageTable<Error = Infallible>>(table: &P, ops: &[Op]) {
    let mut model = Model::default();
    for op in ops {
        apply(table, &mut model, op);
    }
    model.compare(table);
    while let Some((&first, _)) = model.0.iter().next() {
        apply(table, &mut model, &Op::UnmapRun(first - BASE));
    }
    model.compare(table);
    for chunk in 0..6 {
        retire(table, &model, BASE + chunk * 512);
    }
    let stats = table.stats();
    assert_eq!((stats.tables[0], stats.retired), (0, 0), "{stats:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn tables_do_what_a_map_does(ops in prop::collection::vec(op(), 1..80)) {
        let memory = CountedMemory::new();
        for (levels, leaves) in [
            (4, LeafSizes::TWO_M),
            (3, LeafSizes::FOUR_K),
            (5, LeafSizes::ONE_G),
        ] {
            play(&Vtd::new(&memory, config(levels, leaves)).unwrap(), &ops);
        }
        let two_m = config(4, LeafSizes::TWO_M);
        play(&IoPageTable::<AmdV1, _>::new(&memory, two_m).unwrap(), &ops);
        prop_assert_eq!(memory.pages_in_use(), 0);
    }
}

#[test]
fn a_config_outside_the_format_is_an_error() {
    let memory = CountedMemory::new();
    for levels in [0, 2, 6, u32::MAX] {
        let made = Vtd::new(&memory, config(levels, LeafSizes::ONE_G));
        assert!(matches!(made, Err(ConfigError::Levels { levels: l, .. }) if l == levels));
    }
    let none = CountedMemory::with_limit(0);
    let made = Vtd::new(&none, config(4, LeafSizes::ONE_G));
    assert_eq!(made.err(), Some(ConfigError::OutOfTables));
}

#[test]
fn ranges_past_the_width_are_errors_that_name_it() {
    let memory = CountedMemory::new();
    for (levels, width) in [(3, 39), (4, 48), (5, 57)] {
        let table = Vtd::new(&memory, config(levels, LeafSizes::ONE_G)).unwrap();
        let end = 1u64 << (width - 12);
        for range in [
            pages(end, 1),
            pages(end - 1, 2),
            pages(0, 1 << 52),
            pages(IovaPfn::MAX.raw(), 1),
        ] {
            let map = table.map(range, PhysAddr::new(0x1000), Access::Read);
            assert_eq!(map, Err(MapError::IovaTooWide { range, width }));
            let unmap = Err(UnmapError::IovaTooWide { range, width });
            assert_eq!(table.unmap(range), unmap);
            assert_eq!(table.lookup(range.last().start()), None);
            // SAFETY: the table has no other user.
            assert_eq!(unsafe { table.retire_leaf(range) }, None);
        }
        let last = pages(end - 1, 1);
        table
            .map(last, PhysAddr::new((1 << 52) - PAGE_SIZE), Access::Write)
            .unwrap();
        assert!(table.lookup(last.start()).is_some());
        table.unmap(last).unwrap();
    }
    assert_eq!(memory.pages_in_use(), 0);
}

#[test]
fn the_largest_legal_leaf_is_used_and_must_be_unmapped_whole() {
    const GIB: u64 = 512 * 512;
    let memory = CountedMemory::new();
    let table = Vtd::new(&memory, config(4, LeafSizes::ONE_G)).unwrap();
    // 1 GiB, 2 MiB and one page, and as much before.
    let range = pages(GIB - 513, 2 * (GIB + 513));
    let phys = PhysAddr::new((8 * GIB - 513) * PAGE_SIZE);
    table.map(range, phys, Access::ReadWrite).unwrap();
    let leaf = |pfn| table.lookup(at(pfn)).unwrap().leaf_pages;
    let sizes = [
        GIB - 513,
        GIB - 512,
        GIB,
        3 * GIB - 1,
        3 * GIB,
        3 * GIB + 512,
    ]
    .map(leaf);
    assert_eq!(sizes, [1, 512, GIB, GIB, 512, 1]);
    assert_eq!(table.stats().tables, [2, 2, 1, 1, 0]);
    let inside = UnmapError::InsideHugeLeaf {
        iova: at(GIB),
        leaf_pages: GIB,
    };
    assert_eq!(table.unmap(pages(GIB - 513, 514)), Err(inside));
    assert_eq!(
        table.map(pages(2 * GIB + 7, 1), phys, Access::Read),
        Err(MapError::AlreadyMapped {
            iova: at(2 * GIB + 7),
            leaf_pages: GIB
        })
    );
    table.unmap(range).unwrap();
    assert_eq!(table.lookup(at(2 * GIB)), None);
    drop(table);
    assert_eq!(memory.pages_in_use(), 0);
}

#[test]
fn a_retired_leaf_table_makes_way_for_a_large_leaf() {
    let memory = CountedMemory::new();
    let table = Vtd::new(&memory, config(4, LeafSizes::TWO_M)).unwrap();
    let chunk = pages(512, 512);
    let phys = PhysAddr::new(0x4000_0000);
    table.map(pages(600, 1), phys, Access::Read).unwrap();
    // SAFETY: the table has no other user.
    let retire = |range| unsafe { table.retire_leaf(range) };
    assert_eq!(retire(chunk), None, "not empty");
    table.unmap(pages(600, 1)).unwrap();
    table.map(chunk, phys, Access::Read).unwrap();
    assert_eq!(table.lookup(at(512)).unwrap().leaf_pages, 1);
    table.unmap(chunk).unwrap();
    for odd in [
        pages(513, 512),
        pages(512, 511),
        pages(512, 1024),
        pages(512, 1),
    ] {
        assert_eq!(retire(odd), None, "{odd}");
    }
    let retired = retire(chunk).expect("empty");
    assert_eq!(retire(chunk), None, "gone");
    table.map(chunk, phys, Access::Read).unwrap();
    assert_eq!(table.lookup(at(512)).unwrap().leaf_pages, 512);
    // SAFETY: no device uses the table.
    unsafe { table.release(retired) };
    table.unmap(chunk).unwrap();
    // The table above it, of 1 GiB, is empty now too.
    let upper = retire(pages(0, 512 * 512)).expect("empty");
    // SAFETY: no device uses the table.
    unsafe { table.release(upper) };
    let stats = table.stats();
    assert_eq!((stats.tables, stats.peak), ([0, 0, 1, 1, 0], 4));
}

#[test]
fn without_memory_for_tables_nothing_is_mapped_and_none_is_kept() {
    let memory = CountedMemory::with_limit(5);
    let table = Vtd::new(&memory, config(4, LeafSizes::FOUR_K)).unwrap();
    let phys = PhysAddr::new(0x1000);
    // Three leaf tables, one of level 2 and one of level 3 are missing, and four pages are left.
    let map = table.map(pages(0, 513 + 512), phys, Access::Read);
    assert_eq!(map, Err(MapError::OutOfTables { tables: 5 }));
    assert_eq!((memory.pages_in_use(), table.stats().pages()), (1, 1));
    table.map(pages(0, 1024), phys, Access::Read).unwrap();
    assert_eq!(memory.pages_in_use(), 5);
    assert_eq!(
        table.map(pages(1 << 20, 1), phys, Access::Read),
        Err(MapError::OutOfTables { tables: 2 })
    );
    table.unmap(pages(0, 1024)).unwrap();
    drop(table);
    assert_eq!(memory.pages_in_use(), 0);
}

/// With exactly as many pages as the range needs tables, it is mapped; with one page less the error
/// has the number that is missing.
#[test]
fn the_tables_that_are_missing_are_counted_exactly() {
    const GIB: u64 = 512 * 512;
    let none = LeafSizes::FOUR_K;
    for (leaves, first, count, off) in [
        (none, 5, 1, 0),
        (none, 511, 2, 0),
        (none, GIB - 1, 2 * GIB + 2, 0),
        (none, 512 * GIB - 513, 1026, 0),
        (LeafSizes::TWO_M, 511, 3 * 512 + 2, 0),
        (LeafSizes::TWO_M, 511, 3 * 512 + 2, 1),
        (LeafSizes::TWO_M, GIB - 512, 513 * 512, 0),
        (LeafSizes::ONE_G, GIB - 513, 3 * GIB + 1026, 0),
        (LeafSizes::ONE_G, GIB - 513, 3 * GIB + 1026, 512),
    ] {
        // A page is mapped by the largest leaf that lies in the range and to whose size IOVA and
        // memory are off alike.
        let size = |page: u64| {
            let fits = |size: &u64| {
                let start = page & !(size - 1);
                off % size == 0 && start >= first && start + size <= first + count
            };
            let sizes: &[u64] = match leaves {
                LeafSizes::ONE_G => &[GIB, 512],
                LeafSizes::TWO_M => &[512],
                _ => &[],
            };
            sizes.iter().copied().find(fits).unwrap_or(1)
        };
        let mut tables = std::collections::BTreeSet::new();
        let mut page = first;
        while page < first + count {
            let size = size(page);
            // Of the levels below the root's, those above the leaf.
            for level in 1..4 {
                let shift = 9 * level;
                if 1 << shift > size {
                    tables.insert((level, page >> shift));
                }
            }
            page += size;
        }
        let tables = tables.len() as u64;
        let phys = PhysAddr::new((16 * GIB + first + off) * PAGE_SIZE);
        let map = |limit: u64| {
            let memory = CountedMemory::with_limit(limit as usize);
            let table = Vtd::new(&memory, config(4, leaves)).unwrap();
            let mapped = table.map(pages(first, count), phys, Access::Read);
            (mapped, memory.pages_in_use() as u64)
        };
        let what = format!("{leaves:?}, {count} pages from {first} on, off by {off}");
        assert_eq!(map(1 + tables), (Ok(()), 1 + tables), "{what}");
        assert_eq!(
            map(tables),
            (Err(MapError::OutOfTables { tables }), 1),
            "{what}"
        );
    }
}

/// A memory that counts its allocations.
struct CountingMemory(HostMemory, AtomicU64);

// SAFETY: every call goes to the host's memory.
unsafe impl TableMemory for CountingMemory {
    fn alloc(&self) -> Option<PhysAddr> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.alloc()
    }

    unsafe fn free(&self, page: PhysAddr) {
        // SAFETY: passed on.
        unsafe { self.0.free(page) }
    }

    unsafe fn entries(&self, page: PhysAddr) -> &Table {
        // SAFETY: passed on.
        unsafe { self.0.entries(page) }
    }
}

#[test]
fn a_range_that_needs_too_many_tables_is_refused_before_one_is_taken() {
    let memory = CountingMemory(HostMemory::new(), AtomicU64::new(0));
    let table = IoPageTable::<VtdSecondLevel, _>::new(&memory, config(5, LeafSizes::TWO_M));
    let table = table.unwrap();
    // 32 PiB, and not aligned: a leaf table for each 2 MiB.
    let odd = PhysAddr::new(0x1000);
    let mapped = table.map(pages(0, 1 << 39), odd, Access::Read);
    assert!(
        matches!(mapped, Err(MapError::TooManyTables { tables, max }) if tables > 1 << 30 && max < 1 << 20),
        "{mapped:?}"
    );
    assert_eq!(memory.1.load(Ordering::Relaxed), 1, "the root");
    // The most that goes, in one call.
    let most = pages(0, 16_000 * 512);
    table.map(most, odd, Access::Read).unwrap();
    table.unmap(most).unwrap();
}

#[test]
fn host_memory_recycles_pages_and_gives_them_out_zeroed() {
    let memory = HostMemory::new();
    let mut held: Vec<_> = (0..100).map(|_| memory.alloc().unwrap()).collect();
    held.sort();
    held.dedup();
    assert_eq!(held.len(), 100);
    for &page in &held {
        assert!(page.is_aligned(PAGE_SIZE));
        // SAFETY: allocated above, freed below.
        let entries = unsafe { memory.entries(page) };
        entries.iter().for_each(|e| e.store(1, Ordering::Relaxed));
        // SAFETY: allocated above and freed once; the reference is not used again.
        unsafe { memory.free(page) };
    }
    // More than the pool holds: the last ones are new.
    for _ in 0..100 {
        let page = memory.alloc().unwrap();
        // SAFETY: just allocated, and not freed.
        let entries = unsafe { memory.entries(page) };
        assert!(entries.iter().all(|e| e.load(Ordering::Relaxed) == 0));
        held.push(page);
    }
    for page in held.split_off(100) {
        // SAFETY: allocated in the loop above, and freed once.
        unsafe { memory.free(page) };
    }
}

#[test]
fn tables_may_lie_elsewhere_for_the_device_and_all_go_back() {
    let layout = Layout::from_size_align(8 * 4096, 4096).unwrap();
    // SAFETY: the layout's size is not 0.
    let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
    let base = PhysAddr::new(0x1_0000_0000);
    // SAFETY: the region is freed below, after the table, and has no other writer.
    let region = unsafe { RegionMemory::new(base, memory, 8) };
    let table =
        IoPageTable::<VtdSecondLevel, _>::new(&region, config(4, LeafSizes::FOUR_K)).unwrap();
    for turn in 0..3 {
        let range = pages(turn << 18, 512);
        table
            .map(range, PhysAddr::new(0x5000), Access::Read)
            .unwrap();
        // What a device finds: the leaf table's first entry, at its place in the region.
        let root = (table.root().raw() - base.raw()) as usize;
        // SAFETY: the region's pages hold atomic words, which are only accessed atomically.
        let word = |page: usize, index| unsafe {
            let word = memory.add(page + 8 * index).cast::<AtomicU64>();
            word.as_ref().load(Ordering::Acquire)
        };
        let mut page = root;
        for index in [0, turn as usize, 0] {
            let entry = word(page, index);
            assert_eq!(entry & 0xfff, 3);
            page = ((entry & !0xfff) - base.raw()) as usize;
        }
        assert_eq!((word(page, 0), word(page, 511)), (0x5001, 0x20_4001));
    }
    let full = table.map(pages(3 << 18, 1), PhysAddr::new(0), Access::Read);
    assert_eq!(full, Err(MapError::OutOfTables { tables: 2 }));
    assert_eq!(region.pages_in_use(), 8);
    drop(table);
    assert_eq!(region.pages_in_use(), 0);
    // SAFETY: allocated above with this layout; no table is left there.
    unsafe { dealloc(memory.as_ptr(), layout) };
}
