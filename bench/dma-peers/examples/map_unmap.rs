//! Cost of mapping and unmapping one page:
//! `cargo run --release -p dma-peers --example map_unmap [turns]`.
//!
//! The tables are there, and of S = 256 pages (65,536 in the second block) one is chosen at random,
//! mapped and unmapped. Two threads take alternate pages, so that both write every leaf table
//! (`shared`), or halves whose leaf tables differ (`disjoint`: two chunks). The locks of *Utilizing
//! the IOMMU Scalably* stand beside. Prints the least and the median of `turns` (5) runs of 0.2 s,
//! in ns on the CPU for a map and an unmap, loop included.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, OnceLock};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs};

use address::PhysAddr;
use dma_map::table::{HostMemory, IoMap, IoPageTable, LeafSizes, TableConfig, VtdSecondLevel};
use dma_peers::{GlobalLockTable, RwLockTable};
use iova::{Access, IovaPfn, IovaRange};

type LockFreeTable = IoPageTable<VtdSecondLevel, HostMemory>;

const BASE: u64 = 0x1_0000_0000 >> 12;
const CONFIG: TableConfig = TableConfig {
    levels: 4,
    leaves: LeafSizes::ONE_G,
};

/// Sharing of two threads.
#[derive(Clone, Copy)]
enum Split {
    Alone,
    Shared,
    Disjoint,
}

fn page(split: Split, thread: u64, pages: u64, random: u64) -> u64 {
    let k = (random >> 20) & (pages / 2 - 1);
    BASE + match split {
        Split::Alone | Split::Shared => 2 * k + thread,
        Split::Disjoint => k + thread * (pages / 2).max(512),
    }
}

fn one(pfn: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(pfn), 1).expect("a page below 2^52")
}

/// Time of this thread on a CPU, in ns: what others run meanwhile is not our cost. Wall time where
/// the kernel does not tell.
fn on_cpu() -> f64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    let began = BEGAN.get_or_init(Instant::now);
    fs::read_to_string("/proc/thread-self/schedstat")
        .ok()
        .and_then(|stat| stat.split(' ').next()?.parse().ok())
        .unwrap_or_else(|| began.elapsed().as_nanos() as f64)
}

/// One run: ns per pair and thread.
fn run<P: IoMap>(table: &P, split: Split, pages: u64) -> f64 {
    for first in (BASE..BASE + 2 * pages.max(512)).step_by(512) {
        table
            .map(one(first), PhysAddr::new(0x1000), Access::Read)
            .expect("nothing is mapped");
        table.unmap(one(first)).expect("just mapped");
    }
    let threads = if matches!(split, Split::Alone) { 1 } else { 2 };
    let (start, stop) = (Barrier::new(threads as usize + 1), AtomicBool::new(false));
    thread::scope(|scope| {
        let worker = |thread: u64| {
            let (start, stop) = (&start, &stop);
            move || {
                let mut v = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(thread + 1);
                start.wait();
                let began = on_cpu();
                let mut pairs = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..1024 {
                        v ^= v >> 12;
                        v ^= v << 25;
                        v ^= v >> 27;
                        let random = v.wrapping_mul(0x2545_F491_4F6C_DD1D);
                        let range = one(page(split, thread, pages, random));
                        table
                            .map(range, PhysAddr::new(0x5000_0000), Access::ReadWrite)
                            .expect("ours, and not mapped");
                        table.unmap(range).expect("just mapped");
                    }
                    pairs += 1024;
                }
                (on_cpu() - began) / pairs as f64
            }
        };
        let workers: Vec<_> = (0..threads).map(|id| scope.spawn(worker(id))).collect();
        start.wait();
        thread::sleep(Duration::from_millis(200));
        stop.store(true, Ordering::Relaxed);
        let total: f64 = workers
            .into_iter()
            .map(|worker| worker.join().expect("no worker panics"))
            .sum();
        total / threads as f64
    })
}

fn line<P: IoMap>(name: &str, table: &P, pages: u64, turns: usize) {
    print!("{name:<12}");
    for split in [Split::Alone, Split::Shared, Split::Disjoint] {
        let mut ns: Vec<_> = (0..turns).map(|_| run(table, split, pages)).collect();
        ns.sort_by(f64::total_cmp);
        print!("{:>9.1}{:>9.1}", ns[0], ns[turns / 2]);
    }
    println!();
}

fn main() {
    let turns = env::args().nth(1).and_then(|arg| arg.parse().ok());
    let turns: usize = turns.unwrap_or(5).max(1);
    for pages in [256, 65_536] {
        println!("p-{pages}: map+unmap of a page, ns (min, median of {turns})");
        println!("            1 thread          2 shared          2 disjoint");
        let new = "the configuration is valid";
        line(
            "lock-free",
            &LockFreeTable::new(HostMemory::new(), CONFIG).expect(new),
            pages,
            turns,
        );
        line(
            "rw locks",
            &RwLockTable::<VtdSecondLevel, _>::new(HostMemory::new(), CONFIG.levels)
                .expect("memory"),
            pages,
            turns,
        );
        line(
            "global lock",
            &GlobalLockTable::new(LockFreeTable::new(HostMemory::new(), CONFIG).expect(new)),
            pages,
            turns,
        );
    }
}
