//! Cores that map and give tables back, and a device that walks all the while: it keeps the address
//! of each leaf table on its walks until it sees an invalidation.
#![expect(
    unsafe_code,
    reason = "a memory whose pages tell their past, and an owner who gives tables back"
)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering as Real};
use std::sync::{Arc, OnceLock};

use address::{Iova, PAGE_SIZE, PhysAddr};
use dma_map::table::{
    Entry, Format, IoMap, IoPageTable, LeafSizes, PageTable, Table, TableConfig, TableMemory,
    VtdSecondLevel,
};
use iova::{Access, CHUNK_PAGES, IovaPfn, IovaRange};
use lines::{AtomicU64, Ordering};
use random_schedules::{any, fail, finds, has_failed, holds, thread};

const LEVELS: u32 = 3;
/// Chunks of one owner each, and one more that all map in and no owner retires.
const OWNERS: u64 = 4;
const COMMON: u64 = OWNERS;
const ROUNDS: usize = 3;
/// Memory to which page *n* is mapped, by any core.
const PHYS: u64 = 0x1000_0000;

/// Pages that are given out once, fresh, and are never really freed.
#[derive(Default)]
struct Memory {
    pages: [Page; 32],
    next: AtomicUsize,
}

#[derive(Default)]
struct Page {
    entries: OnceLock<Box<Table>>,
    is_freed: AtomicBool,
}

impl Memory {
    fn page(&self, page: PhysAddr) -> &Page {
        &self.pages[(page.raw() / PAGE_SIZE) as usize - 1]
    }

    fn look(&self, page: PhysAddr, who: &str) -> &Table {
        let page = self.page(page);
        if page.is_freed.load(Real::Relaxed) {
            fail(format!("{who} walked a freed table"));
        }
        page.entries.get().expect("it was given out")
    }
}

// SAFETY: an address is the index of a page, given out once, zeroed; the pages live as long as the
// memory.
unsafe impl TableMemory for Memory {
    fn alloc(&self) -> Option<PhysAddr> {
        let index = self.next.fetch_add(1, Real::Relaxed);
        let page = self.pages.get(index)?;
        let fresh = Box::new(core::array::from_fn(|_| AtomicU64::new(0)));
        page.entries.set(fresh).expect("given out once");
        Some(PhysAddr::new((index as u64 + 1) * PAGE_SIZE))
    }

    unsafe fn free(&self, page: PhysAddr) {
        if self.page(page).is_freed.swap(true, Real::Relaxed) {
            fail("a table was freed twice");
        }
    }

    unsafe fn entries(&self, page: PhysAddr) -> &Table {
        self.look(page, "a core")
    }
}

type Tree = IoPageTable<VtdSecondLevel, Arc<Memory>>;

struct World {
    table: Tree,
    /// Invalidations asked for, and those that the device has obeyed.
    asked: AtomicU64,
    obeyed: AtomicU64,
    /// Cores that are through.
    done: AtomicU64,
}

/// Time at which the page of a table goes back.
#[derive(Clone, Copy, PartialEq)]
enum Release {
    AfterInvalidation,
    /// The mistake: some earlier invalidation, which may have been over before the table was taken
    /// away.
    AfterTheLast,
}

fn page(pfn: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(pfn), 1).expect("a page")
}

fn map_and_unmap(world: &World, pfn: u64) {
    let phys = PhysAddr::new(PHYS + pfn * PAGE_SIZE);
    if let Err(error) = world.table.map(page(pfn), phys, Access::Read) {
        return fail(error);
    }
    let found = world.table.lookup(Iova::new(pfn * PAGE_SIZE));
    if found.map(|found| found.phys) != Some(phys) {
        fail(format!("page {pfn:#x} leads to {found:?}"));
    }
    if let Err(error) = world.table.unmap(page(pfn)) {
        fail(error);
    }
}

/// A core: maps in its own chunk and in the common one, and retires its leaf table.
fn owner(world: &World, id: u64, release: Release) {
    for _ in 0..ROUNDS {
        for _ in 0..1 + any(2) {
            map_and_unmap(world, id * CHUNK_PAGES + any(2));
            map_and_unmap(world, COMMON * CHUNK_PAGES + id);
        }
        let chunk = IovaRange::new(IovaPfn::new(id * CHUNK_PAGES), CHUNK_PAGES).expect("a chunk");
        // SAFETY: only this thread maps in the chunk, and it does not now.
        let Some(retired) = (unsafe { world.table.retire_leaf(chunk) }) else {
            return fail("the leaf table of an empty chunk is not there");
        };
        let number = match release {
            Release::AfterInvalidation => world.asked.fetch_add(1, Ordering::AcqRel) + 1,
            Release::AfterTheLast => world.asked.load(Ordering::Acquire),
        };
        while world.obeyed.load(Ordering::Acquire) < number && !has_failed() {
            lines::spin_loop();
        }
        // SAFETY: after the invalidation; or too early, which is the mistake that must be found:
        // the page is never used again, and its memory stays.
        unsafe { world.table.release(retired) };
        if has_failed() {
            return;
        }
    }
}

/// The IOMMU.
fn device(world: &World) {
    let memory = world.table.memory();
    let mut leaves = BTreeMap::new();
    while world.done.load(Ordering::Acquire) < OWNERS && !has_failed() {
        for _ in 0..any(6) {
            let pfn = any(OWNERS + 1) * CHUNK_PAGES + any(OWNERS);
            let chunk = pfn / CHUNK_PAGES;
            let Some(leaf) = leaves.get(&chunk).copied().or_else(|| walk(world, chunk)) else {
                continue;
            };
            leaves.insert(chunk, leaf);
            let entry = &memory.look(leaf, "the device")[(pfn % CHUNK_PAGES) as usize];
            match VtdSecondLevel::decode(entry.load(Ordering::Acquire), 1) {
                Entry::Empty => {}
                Entry::Leaf(found) if found.phys.raw() == PHYS + pfn * PAGE_SIZE => {}
                other => fail(format!("the device found {other:?} at page {pfn:#x}")),
            }
        }
        let asked = world.asked.load(Ordering::Acquire);
        if asked > world.obeyed.load(Ordering::Relaxed) {
            leaves.clear();
            world.obeyed.store(asked, Ordering::Release);
        }
        lines::spin_loop();
    }
}

/// The leaf table of a chunk, from the root.
fn walk(world: &World, chunk: u64) -> Option<PhysAddr> {
    let memory = world.table.memory();
    let mut table = world.table.root();
    for level in (2..=LEVELS).rev() {
        let index = (chunk >> (9 * (level - 2))) as usize % CHUNK_PAGES as usize;
        let entry = memory.look(table, "the device")[index].load(Ordering::Acquire);
        match VtdSecondLevel::decode(entry, level) {
            Entry::Table(next) => table = next,
            _ => return None,
        }
    }
    Some(table)
}

fn model(release: Release) -> impl Fn() + Send + Sync + 'static {
    move || {
        let memory = Arc::new(Memory::default());
        let config = TableConfig {
            levels: LEVELS,
            leaves: LeafSizes::FOUR_K,
        };
        let world = Arc::new(World {
            table: Tree::new(Arc::clone(&memory), config).expect("memory for a root"),
            asked: AtomicU64::new(0),
            obeyed: AtomicU64::new(0),
            done: AtomicU64::new(0),
        });
        let owners = (0..OWNERS).map(|id| {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                owner(&world, id, release);
                world.done.fetch_add(1, Ordering::AcqRel);
            })
        });
        let mut threads: Vec<_> = owners.collect();
        let walker = Arc::clone(&world);
        threads.push(thread::spawn(move || device(&walker)));
        for thread in threads {
            thread.join().expect("a model ends at a panic");
        }
        if has_failed() {
            return;
        }
        // A root, the table below it, and the leaf table of the chunk that no owner retires.
        let stats = world.table.stats();
        if (stats.pages(), stats.retired) != (3, 0) {
            fail(format!("tables are left over: {stats:?}"));
        }
    }
}

#[test]
fn no_table_goes_before_the_device_lets_go_of_it() {
    holds(1_000, model(Release::AfterInvalidation));
}

#[test]
fn a_table_that_goes_before_its_invalidation_is_found() {
    let what = "the device walked a freed table";
    assert!(finds(1_000, what, model(Release::AfterTheLast)));
}
