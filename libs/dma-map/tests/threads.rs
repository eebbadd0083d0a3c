//! Real threads on one table: each owns its pages, all share leaf tables, and chunks are reclaimed
//! meanwhile.
#![cfg(not(any(loom, shuttle)))]

use std::sync::Barrier;
use std::thread;

use address::PhysAddr;
use dma_map::table::{IoPageTable, LeafSizes, MapError, PageTable, TableConfig, VtdSecondLevel};
use dma_map::testing::CountedMemory;
use iova::{Access, IovaPfn, IovaRange};

const THREADS: u64 = 4;
/// Divides the number of rounds: an interpreter is a thousand times slower.
const SLOWER: u64 = if cfg!(miri) { 2000 } else { 1 };
const CONFIG: TableConfig = TableConfig {
    levels: 4,
    leaves: LeafSizes::TWO_M,
};

fn pages(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).expect("a range of the 64-bit space")
}

/// xorshift64*, seeded by thread.
struct Random(u64);

impl Random {
    fn of(thread: u64) -> Self {
        Self(0x9E37_79B9_7F4A_7C15u64.wrapping_mul(thread + 1))
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 20) % bound
    }
}

/// Every thread maps and unmaps its own pages of shared leaf tables (page p belongs to thread p mod
/// 4), looks up what it mapped, and uses chunks of its own, by runs of pages and whole, whose leaf
/// tables it reclaims.
fn hammer<P: PageTable>(table: &P, rounds: u64) {
    let start = Barrier::new(THREADS as usize);
    thread::scope(|scope| {
        for id in 0..THREADS {
            let start = &start;
            scope.spawn(move || {
                let mut random = Random::of(id);
                let mut mapped = [false; 1024];
                start.wait();
                for round in 0..rounds {
                    let slot = random.below(1024);
                    let pfn = (1 << 20) + slot * THREADS + id;
                    let phys = PhysAddr::new((pfn ^ 0x5a5a5) << 12);
                    if mapped[slot as usize] {
                        let found = table.lookup(pages(pfn, 1).start()).expect("we mapped it");
                        assert_eq!((found.phys, found.leaf_pages), (phys, 1));
                        table.unmap(pages(pfn, 1)).expect("we mapped it");
                        assert_eq!(table.lookup(pages(pfn, 1).start()), None);
                    } else {
                        table
                            .map(pages(pfn, 1), phys, Access::ReadWrite)
                            .expect("it is ours and not mapped");
                    }
                    mapped[slot as usize] ^= true;
                    if round % 16 == 0 {
                        own_chunk(table, id, &mut random);
                    }
                }
                for (slot, _) in mapped.iter().enumerate().filter(|(_, mapped)| **mapped) {
                    let pfn = (1 << 20) + slot as u64 * THREADS + id;
                    table.unmap(pages(pfn, 1)).expect("we mapped it");
                }
            });
        }
    });
    let stats = table.stats();
    assert_eq!(stats.retired, 0);
    let all_used = rounds >= 10_000;
    assert!(
        stats.tables[0] == 8 || !all_used,
        "the shared leaf tables: {stats:?}"
    );
    for chunk in 0..8 {
        retire(table, (1 << 20) + chunk * 512);
    }
    assert_eq!(table.stats().tables[0], 0);
}

/// Chunks next to each other belong to different threads, so their entries share lines.
fn own_chunk<P: PageTable>(table: &P, id: u64, random: &mut Random) {
    let chunk = (1 << 30) + (random.below(64) * THREADS + id) * 512;
    let (from, len) = match random.below(4) {
        0 => (0, 512),
        _ => {
            let from = random.below(512);
            (from, 1 + random.below(512 - from))
        }
    };
    let range = pages(chunk + from, len);
    let phys = PhysAddr::new((id + 1) << 30);
    table
        .map(range, phys, Access::Write)
        .expect("the chunk is ours");
    let last = table.lookup(range.last().start()).expect("just mapped");
    assert_eq!(last.phys.raw(), phys.raw() + (len - 1) * 4096);
    let first = table.map(range, phys, Access::Write);
    assert!(matches!(first, Err(MapError::AlreadyMapped { .. })));
    table.unmap(range).expect("just mapped");
    retire(table, chunk);
}

fn retire<P: PageTable>(table: &P, first: u64) {
    // SAFETY: the chunk belongs to this thread, which uses it nowhere else now.
    if let Some(retired) = unsafe { table.retire_leaf(pages(first, 512)) } {
        // SAFETY: no device uses the table.
        unsafe { table.release(retired) };
    }
}

#[test]
fn owners_do_not_disturb_each_other() {
    let memory = CountedMemory::new();
    let table = IoPageTable::<VtdSecondLevel, _>::new(&memory, CONFIG).unwrap();
    hammer(&table, 200_000 / SLOWER);
    drop(table);
    assert_eq!(memory.pages_in_use(), 0);
}
