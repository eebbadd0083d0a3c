//! Loom models of the tree: `RUSTFLAGS="--cfg loom" cargo test --release -p dma-map --lib model`.
//!
//! The code is the real one; only tables are smaller (two levels of two entries: four pages).
//! Beside the cores that map runs a **device**, which reads entries as hardware does, keeps the
//! address of a leaf table that it walked through, and forgets it only when it sees an
//! invalidation, which it then acknowledges. The pages of the model memory hold [`STALE`] before
//! they are first given out and [`FREED`] after they come back: a walker that finds either was let
//! in too early or left in too long.
//!
//! The two mistakes that matter must be caught: a table installed by a relaxed swap
//! (`tests/mutants/dma-map/relaxed-install`), and a table that its user releases before the
//! invalidation completes.
//!
//! Loads of the device are acquire: hardware orders a load after the load that gave its address.

use std::boxed::Box;
use std::sync::atomic::AtomicUsize as Index;

use address::{Iova, PAGE_SIZE, PhysAddr};
use iova::{Access, IovaPfn, IovaRange};
use lines::{AtomicU64, Ordering};
use loom::thread;

use super::{
    IoMap, IoPageTable, LeafSizes, PageTable, Table, TableConfig, TableMemory, VtdSecondLevel,
};

/// Contents of a page before its first use: no table, in any format.
const STALE: u64 = u64::MAX;
/// Contents of a page after its release.
const FREED: u64 = u64::MAX - 0x1000;

pub(crate) struct ModelMemory {
    pages: Vec<Table>,
    /// Not loom's: the list of free pages is not what is modelled.
    next: Index,
}

impl ModelMemory {
    pub(crate) fn new(pages: usize) -> Self {
        let page = |_| core::array::from_fn(|_| AtomicU64::new(STALE));
        Self {
            pages: (0..pages).map(page).collect(),
            next: Index::new(0),
        }
    }

    pub(crate) fn table(&self, page: PhysAddr) -> &Table {
        &self.pages[(page.raw() / PAGE_SIZE) as usize - 1]
    }

    fn fill(&self, page: PhysAddr, word: u64) {
        for entry in self.table(page) {
            entry.store(word, Ordering::Relaxed);
        }
    }
}

// SAFETY: a page is given out once and never again, zeroed; an address is the index of its page.
#[expect(unsafe_code, reason = "a memory whose pages tell their past")]
unsafe impl TableMemory for ModelMemory {
    fn alloc(&self) -> Option<PhysAddr> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let page = PhysAddr::new((index as u64 + 1) * PAGE_SIZE);
        (index < self.pages.len()).then(|| {
            self.fill(page, 0);
            page
        })
    }

    unsafe fn free(&self, page: PhysAddr) {
        self.fill(page, FREED);
    }

    unsafe fn entries(&self, page: PhysAddr) -> &Table {
        self.table(page)
    }
}

pub(crate) type ModelTable = IoPageTable<VtdSecondLevel, ModelMemory>;

pub(crate) const CONFIG: TableConfig = TableConfig {
    levels: 2,
    leaves: LeafSizes::FOUR_K,
};
const A: PhysAddr = PhysAddr::new(0xa000);
const B: PhysAddr = PhysAddr::new(0xb000);

/// Leaked, a few hundred bytes for each order that is tried: a table that is dropped while a model
/// fails would use loom after its end.
pub(crate) fn leaked(pages: usize, config: TableConfig) -> &'static ModelTable {
    let table = ModelTable::new(ModelMemory::new(pages), config);
    Box::leak(Box::new(
        table.expect("the configuration of the model is valid"),
    ))
}

fn pages(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).expect("a small range")
}

fn map(table: &ModelTable, pfn: u64, phys: PhysAddr) {
    table
        .map(pages(pfn, 1), phys, Access::Read)
        .expect("no stale entry in a new table");
}

/// The IOMMU: reads entries, and keeps the address of one leaf table.
struct Device {
    table: &'static ModelTable,
    cached: Option<PhysAddr>,
}

impl Device {
    fn new(table: &'static ModelTable) -> Self {
        Self {
            table,
            cached: None,
        }
    }

    /// Translates `pfn`, 0 or 1: through the cached leaf table if there is one.
    fn access(&mut self, pfn: usize) -> Option<PhysAddr> {
        let memory = self.table.memory();
        if self.cached.is_none() {
            let entry = load(&memory.table(self.table.root())[0]);
            self.cached = (entry != 0).then(|| PhysAddr::new(entry & !3));
        }
        let entry = load(&memory.table(self.cached?)[pfn]);
        (entry != 0).then(|| PhysAddr::new(entry & !3))
    }
}

pub(crate) fn load(entry: &AtomicU64) -> u64 {
    let entry = entry.load(Ordering::Acquire);
    assert_ne!(entry, STALE, "the device met a stale entry");
    assert_ne!(entry, FREED, "the device walked a freed table");
    entry
}

/// Two cores map pages of the same leaf table, which is not there yet, while the device looks.
fn two_cores_install() {
    let table = leaked(6, CONFIG);
    let other = thread::spawn(move || map(table, 1, B));
    let device = thread::spawn(move || {
        let mut device = Device::new(table);
        let seen = device.access(0);
        assert!(seen.is_none_or(|phys| phys == A), "{seen:?}");
        let seen = device.access(1);
        assert!(seen.is_none_or(|phys| phys == B), "{seen:?}");
    });
    map(table, 0, A);
    other.join().expect("the other core maps");
    device.join().expect("the device sees mappings");
    for (pfn, phys) in [(0, A), (1, B)] {
        let found = table.lookup(Iova::new(pfn * PAGE_SIZE));
        let found = found.map(|found| found.phys);
        assert_eq!(found, Some(phys), "a stale entry replaced the mapping");
    }
}

/// Time at which the table page goes back.
#[derive(Clone, Copy, PartialEq)]
enum Release {
    AfterInvalidation,
    BeforeInvalidation,
}

/// The owner of a chunk maps, unmaps, takes the leaf table away and maps again; a neighbour shares
/// the root; the device looks all the time and acknowledges one invalidation.
fn reclaim(release: Release) {
    let table = leaked(6, CONFIG);
    let requested: &AtomicU64 = Box::leak(Box::new(AtomicU64::new(0)));
    let done: &AtomicU64 = Box::leak(Box::new(AtomicU64::new(0)));

    let device = thread::spawn(move || {
        let mut device = Device::new(table);
        let seen = device.access(0);
        assert!(seen.is_none_or(|phys| phys == A || phys == B), "{seen:?}");
        let seen = device.access(0);
        assert!(seen.is_none_or(|phys| phys == A || phys == B), "{seen:?}");
        while requested.load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
        device.cached = None;
        done.store(1, Ordering::Release);
        let seen = device.access(0);
        assert!(seen.is_none_or(|phys| phys == B), "unmapped: {seen:?}");
    });
    let neighbour = thread::spawn(move || map(table, 2, A));

    map(table, 0, A);
    table.unmap(pages(0, 1)).expect("just mapped");
    // SAFETY: only this thread maps in the first two pages, and it does not now.
    #[expect(unsafe_code, reason = "the owner of the chunk")]
    let retired = unsafe { table.retire_leaf(pages(0, 2)) }.expect("a leaf table, and empty");
    requested.store(1, Ordering::Release);
    let mut retired = Some(retired);
    let mut give_back = || {
        let retired = retired.take().expect("released once");
        // SAFETY: called after the device is done; or before, which is the mistake that the model
        // must find. The page is not reused and its memory stays, so it finds it without undefined
        // behaviour.
        #[expect(unsafe_code, reason = "after the invalidation, or on purpose not")]
        unsafe {
            table.release(retired);
        }
    };
    if release == Release::BeforeInvalidation {
        give_back();
    }
    while done.load(Ordering::Acquire) == 0 {
        thread::yield_now();
    }
    if release == Release::AfterInvalidation {
        give_back();
    }
    map(table, 0, B);
    device.join().expect("the device sees mappings");
    neighbour.join().expect("the neighbour maps");
}

/// Explores with at most three preemptions, as loom recommends: most mistakes need two.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Two cores that both take a large leaf for their own.
#[test]
fn model_of_two_that_unmap_one_large_leaf_one_does() {
    explore(|| {
        let leaves = LeafSizes::TWO_M;
        let config = TableConfig { leaves, ..CONFIG };
        let table = leaked(4, config);
        table.map(pages(0, 2), A, Access::Read).expect("empty");
        let other = thread::spawn(move || table.unmap(pages(0, 2)).is_ok());
        let both = [
            table.unmap(pages(0, 2)).is_ok(),
            other.join().expect("it ends"),
        ];
        assert_ne!(both[0], both[1], "both unmapped it, or neither");
    });
}

#[test]
fn model_install_shows_no_stale_entry() {
    explore(two_cores_install);
}

#[test]
fn model_reclaim_after_the_invalidation_is_safe() {
    explore(|| reclaim(Release::AfterInvalidation));
}

#[test]
#[should_panic(expected = "walked a freed table")]
fn model_catches_a_release_before_the_invalidation() {
    explore(|| reclaim(Release::BeforeInvalidation));
}
