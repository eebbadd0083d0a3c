//! Memory of page tables: the number of leaf tables that the loops need, and what remains after a
//! hundred iterations.
//!
//! * **c-1**: leaf tables of 256 live ranges of 1 to 32 pages after random replacement, by what the
//!   allocator says it touches (live and cached), and by the tables that stand behind a strict
//!   mapper that gives them back;
//! * **after an epoch**: everything is unmapped, one flush passes, each core makes one mapping
//!   more; strict policies, which have no flush to wait for, give tables back when a core looks for
//!   them, so they are read once more after that;
//! * **iterations**: each maps 4,096 ranges of 1 to 32 pages on two cores, unmaps them in random
//!   order, and flushes.
//! * **parked**: 512,000 single pages mapped, unmapped in random order, the core parked, an epoch:
//!   in any order, the tables go.

use std::sync::atomic::AtomicBool;

use address::{PAGE_SHIFT, PhysAddr};
use anyhow::Result;
use dma_map::table::PageTable;
use dma_map::{Direction, Mapping, Policy, Segment};
use dma_peers::{CountedTable, IdentityAllocator};
use iova::{Access, CoreAllocator, CoreId, IovaAllocator, IovaRange, Request};

use crate::alloc::loops::{WINDOW, Window, windows};
use crate::alloc::subject::Ours;
use crate::alloc::{Best, space};
use crate::map::linux::{Core, Mapper, mapper};
use crate::map::rig::table;
use crate::measure::{Random, Turns};
use crate::record::Record;

/// Iterations of the last part.
pub const ITERATIONS: usize = 100;
/// Ranges of an iteration, both cores together.
const RANGES: usize = 4096;
/// Batches of 1,024 pairs in c-1.
const BATCHES: usize = 200;
/// Unmaps after which a core with a strict policy looks for leaf tables that it can give back.
const LOOK_EVERY: usize = 512;

/// Leaf tables of a mapper.
fn leaf_tables(mapper: &Mapper) -> usize {
    mapper.table_stats().tables[0]
}

/// Buffers of up to 32 pages in 64 GiB of memory: never two that lie together, and none a second
/// time before half a million others, so that no two that are mapped share a page.
struct Buffers {
    count: u64,
    random: Random,
}

impl Buffers {
    fn new(id: usize) -> Self {
        Self {
            count: (id as u64) << 18,
            random: Random::of_core(id),
        }
    }

    fn next(&mut self, pages: u64) -> Segment {
        self.count += 1;
        let slot = self.count.wrapping_mul(0x9e37_79b1) & 0x7_ffff;
        let page = (1 << 20) + slot * 32;
        Segment::new(PhysAddr::new(page << PAGE_SHIFT), pages << PAGE_SHIFT)
    }
}

/// Chunks that the allocator touches after c-1.
fn c1_chunks(threads: usize) -> Result<u64> {
    let subject = Ours(Best::new(space()?, threads)?);
    let mut tasks = windows(&subject, threads, Window::of(WINDOW).pages(1, 31))?;
    for _ in 0..BATCHES {
        for task in &mut tasks {
            task.batch(&AtomicBool::new(false));
        }
    }
    let chunks = subject.0.stats().chunks;
    tasks.iter_mut().for_each(|task| task.finish());
    Ok(chunks)
}

/// Table pages once `count` single pages were mapped, unmapped in random order and the core parked.
fn after_park(policy: Policy, count: usize) -> Result<usize> {
    let mapper = mapper(1, policy, true)?;
    let mut core = mapper.core(CoreId(0))?;
    let mut buffers = Buffers::new(0);
    let mut live = Vec::with_capacity(count);
    for _ in 0..count {
        live.push(core.map(&[buffers.next(1)], Direction::FromDevice)?);
    }
    while !live.is_empty() {
        let at = (buffers.random.bits() >> 32) as usize % live.len();
        core.unmap(live.swap_remove(at))?;
    }
    core.park()?;
    mapper.flush()?;
    core.park()?;
    Ok(mapper.table_stats().pages())
}

/// Leaf tables of c-1 over a mapper: with everything mapped; after everything is unmapped and an
/// epoch has passed; after each core has looked for empty ones, which under strict policies it does
/// every 512 unmaps and where a queue is emptied anyway; and after the cores are parked.
struct C1Tables {
    mapped: usize,
    after_epoch: usize,
    after_look: usize,
    parked: usize,
}

fn c1_tables(threads: usize, policy: Policy) -> Result<C1Tables> {
    let mapper = mapper(threads, policy, true)?;
    let mut cores = Vec::new();
    for id in 0..threads {
        cores.push((mapper.core(CoreId(id))?, Buffers::new(id), Vec::new()));
    }
    for (core, buffers, window) in &mut cores {
        for _ in 0..WINDOW {
            let pages = 1 + (buffers.random.bits() >> 20 & 31);
            window.push(core.map(&[buffers.next(pages)], Direction::FromDevice)?);
        }
    }
    for _ in 0..BATCHES {
        for (core, buffers, window) in &mut cores {
            for _ in 0..1024 {
                let r = buffers.random.bits();
                let at = (r >> 32) as usize % window.len();
                core.unmap(window.swap_remove(at))?;
                let pages = 1 + (r >> 20 & 31);
                window.push(core.map(&[buffers.next(pages)], Direction::FromDevice)?);
            }
        }
    }
    let mapped = leaf_tables(&mapper);
    for (core, _, window) in &mut cores {
        for mapping in window.drain(..) {
            core.unmap(mapping)?;
        }
    }
    for _ in 0..2 {
        mapper.flush()?;
        for (core, buffers, _) in &mut cores {
            // Cores look after what is theirs when they run.
            let mapping = core.map(&[buffers.next(1)], Direction::FromDevice)?;
            core.unmap(mapping)?;
        }
    }
    mapper.flush()?;
    let after_epoch = leaf_tables(&mapper);
    for (core, buffers, _) in &mut cores {
        for _ in 0..LOOK_EVERY {
            let mapping = core.map(&[buffers.next(1)], Direction::FromDevice)?;
            core.unmap(mapping)?;
        }
    }
    let after_look = leaf_tables(&mapper);
    for (core, ..) in &mut cores {
        core.park()?;
    }
    mapper.flush()?;
    for (core, ..) in &mut cores {
        core.park()?;
    }
    Ok(C1Tables {
        mapped,
        after_epoch,
        after_look,
        parked: leaf_tables(&mapper),
    })
}

/// Table pages after each iteration.
fn iterations(reclaims: bool, count: usize) -> Result<Vec<usize>> {
    let mapper = mapper(2, Policy::DEFERRED, reclaims)?;
    let mut cores = [mapper.core(CoreId(0))?, mapper.core(CoreId(1))?];
    let mut buffers = Buffers::new(0);
    (0..count)
        .map(|_| {
            iteration(&mapper, &mut cores, &mut buffers)?;
            Ok(mapper.table_stats().pages())
        })
        .collect()
}

fn iteration(mapper: &Mapper, cores: &mut [Core; 2], buffers: &mut Buffers) -> Result<()> {
    let mut live: Vec<(usize, Mapping)> = Vec::with_capacity(RANGES);
    for at in 0..RANGES {
        let pages = 1 + (buffers.random.bits() >> 20 & 31);
        let mapping = cores[at % 2].map(&[buffers.next(pages)], Direction::FromDevice)?;
        live.push((at % 2, mapping));
    }
    while !live.is_empty() {
        let at = (buffers.random.bits() >> 32) as usize % live.len();
        let (core, mapping) = live.swap_remove(at);
        cores[core].unmap(mapping)?;
    }
    mapper.flush()?;
    for core in cores {
        // Cores look after what is theirs when they run.
        let mapping = core.map(&[buffers.next(1)], Direction::FromDevice)?;
        core.unmap(mapping)?;
    }
    Ok(mapper.flush()?)
}

/// The same where a page's address is its IOVA, and the table counts.
fn identity_iterations(count: usize) -> Result<Vec<usize>> {
    let space = IdentityAllocator::new(space()?, 2, 46)?;
    let mut cores = [space.claim(CoreId(0))?, space.claim(CoreId(1))?];
    let table = CountedTable::new(table()?);
    let mut buffers = Buffers::new(0);
    let mut pages_after = Vec::new();
    for _ in 0..count {
        let mut live: Vec<(usize, IovaRange)> = Vec::with_capacity(RANGES);
        for at in 0..RANGES {
            let pages = 1 + (buffers.random.bits() >> 20 & 31);
            let phys = buffers.next(pages).phys;
            let range = cores[at % 2].alloc_for(Request::pages(pages), phys, Access::Write)?;
            table.map(range, phys, Access::Write)?;
            live.push((at % 2, range));
        }
        while !live.is_empty() {
            let at = (buffers.random.bits() >> 32) as usize % live.len();
            let (core, range) = live.swap_remove(at);
            table.unmap(range)?;
            cores[core].free(range)?;
        }
        pages_after.push(table.table().stats().pages());
    }
    Ok(pages_after)
}

/// Counts; nothing here is timed.
pub fn measure(turns: &Turns, record: &mut Record) {
    if let Err(error) = run(turns, record) {
        println!("\npage-table memory: not measured: {error:#}");
    }
}

fn run(turns: &Turns, record: &mut Record) -> Result<()> {
    println!("\nleaf tables after c-1 (ideal 9 and 17)");
    println!(
        "{:10} {:>10} {:>14} {:>16} {:>12} {:>8} {:>13} {:>17}",
        "cores",
        "allocator",
        "strict mapper",
        "deferred mapper",
        "after epoch",
        "parked",
        "epoch, strict",
        "512 unmaps, strict"
    );
    for threads in [1, 2] {
        let suffix = if threads == 1 { "" } else { "_2thr" };
        let chunks = c1_chunks(threads)?;
        let strict = c1_tables(threads, Policy::STRICT)?;
        let deferred = c1_tables(threads, Policy::DEFERRED)?;
        for (key, value) in [
            ("c1", chunks as usize),
            ("c1_strict_mapper", strict.mapped),
            ("c1_deferred_mapper", deferred.mapped),
            ("after_epoch", deferred.after_epoch),
            ("after_epoch_strict", strict.after_epoch),
            ("after_look_strict", strict.after_look),
            ("parked", deferred.parked),
        ] {
            record.number(&format!("leaf_tables_{key}{suffix}"), value as f64, 0);
        }
        println!(
            "{threads:<10} {:>10} {:>14} {:>16} {:>12} {:>8} {:>13} {:>17}",
            chunks,
            strict.mapped,
            deferred.mapped,
            deferred.after_epoch,
            deferred.parked,
            strict.after_epoch,
            strict.after_look
        );
    }
    let many = if turns.runs == 1 { 4096 } else { 512_000 };
    println!("\ntable pages after {many} pages were unmapped in random order and the core parked");
    for (key, policy) in [
        ("tables_after_park_512k", Policy::DEFERRED),
        ("tables_after_park_512k_strict", Policy::STRICT),
    ] {
        let pages = after_park(policy, many)?;
        println!("{key:40} {pages:>9}");
        record.number(key, pages as f64, 0);
    }
    let count = if turns.runs == 1 { 5 } else { ITERATIONS };
    println!("\ntable pages (4 KiB) after so many iterations, deferred, two cores");
    println!("{:32} {:>8} {:>8} {:>8} {:>8}", "", 1, 10, 50, count);
    for (name, title, pages) in [
        ("reclaimed", "with reclamation", iterations(true, count)?),
        ("kept", "without", iterations(false, count)?),
        ("identity", "identity, without", identity_iterations(count)?),
    ] {
        let at = |iteration: usize| pages.get(iteration - 1).copied();
        for iteration in [1, 2, 5, 10, 20, 50, 100] {
            if let Some(pages) = at(iteration) {
                let key = format!("table_pages_{name}_after_{iteration}");
                record.number(&key, pages as f64, 0);
            }
        }
        let text = |iteration| at(iteration).map_or_else(|| "-".to_owned(), |at| at.to_string());
        println!(
            "{title:32} {:>8} {:>8} {:>8} {:>8}",
            text(1),
            text(10),
            text(50),
            text(count)
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strict_mapper_over_c1_has_tables_for_what_is_mapped() {
        let of = c1_tables(1, Policy::STRICT).expect("runs");
        // 256 ranges of 16.5 pages on average lie in 9 leaf tables at best.
        assert!(of.mapped >= 9, "{}", of.mapped);
        assert!(of.after_epoch <= of.mapped && of.after_look <= of.after_epoch);
        // One for the class in use, and none once the core is parked.
        assert!(of.after_look <= 1 && of.parked == 0, "{}", of.after_look);
    }

    #[test]
    fn mapper_that_gives_tables_back_never_has_more() {
        let with = iterations(true, 3).expect("runs");
        let without = iterations(false, 3).expect("runs");
        assert!(
            with.iter()
                .zip(&without)
                .all(|(with, without)| with <= without)
        );
    }
}
