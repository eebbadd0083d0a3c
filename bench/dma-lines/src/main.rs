//! `cargo run --release -p dma-lines --features probe`: remote cache lines and locks per operation,
//! **counted** for up to 128 simulated cores («model»: no time is measured, and no machine has
//! these cores).
//!
//! | workload | one operation | scheduler |
//! |---|---|---|
//! | `a1` | free one of 256 single pages at random, allocate one | a random core makes half an operation |
//! | `c1` | the same with 1 to 32 pages | " |
//! | `b32` | one page allocated by one core and freed by its neighbour, in batches of 32 | a random core makes a batch |
//! | `map` | unmap and free one of 256 pages at random, allocate and map one | a random core makes half an operation |
//! | `ddef` | the same in order through `DmaMapper`, deferred | " |
//! | `dstr` | the same, strict, no two cores at once | " |
//! | `dstr_busy` | the same, all cores at once: a core that waits hands over to the next | round robin at each wait |
//!
//! The crates run as they are, with the atomics and locks of `lines` replaced by its probe; plain
//! memory that a core owns is not seen, nor what lies on the heap behind a lock or passes from core
//! to core (so `tree` is counted too low, and `magazine` lacks the 16 lines of each magazine that
//! changes hands: 0.13 in `b32`). Beside them stand re-models of what stock kernels do ([`linux`]).
//! The same seed gives the same counts.
//!
//! Numbers are steady state: a warm-up fills windows, caches and tables first. `transfers` are
//! lines fetched from another core, and copies ended there where the line itself need not move;
//! `fetches` the former alone; `locks` are locks taken, contended or not.
#![forbid(unsafe_code)]

mod alloc;
mod linux;
mod map;
mod table;
mod turns;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dma_peers::MagazineAllocator;
use iova::{Aperture, ChunkAllocator, TreeAllocator};
use line_probe::Counts;
use report::{Host, Object};
use seeded::Random;

use table::Table;

/// Counts remote cache lines and locks per operation for simulated cores.
#[derive(Parser)]
struct Args {
    /// Where the figures go, as one JSON object.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/report/dma-lines.json"
    )]
    report: PathBuf,
    /// A report that is there already, of `make bench-dma`: the figures are added to it as well.
    #[arg(long, value_name = "FILE")]
    into: Option<PathBuf>,
    /// Most cores, 2 to 128.
    #[arg(long, default_value_t = 128)]
    cores: usize,
}

/// Counts of one operation, averaged over all.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PerOp {
    transfers: f64,
    /// Of these, without those that only end copies.
    fetches: f64,
    locks: f64,
}

impl PerOp {
    fn of(counts: Counts, ops: u64) -> Self {
        Self {
            transfers: counts.transfers() as f64 / ops as f64,
            fetches: (counts.transfers() - counts.upgrades) as f64 / ops as f64,
            locks: counts.locks as f64 / ops as f64,
        }
    }
}

/// A random number below `end`.
fn below(random: &mut Random, end: usize) -> usize {
    ((random.bits() >> 32) % end as u64) as usize
}

/// Pages 1 to 2³⁶ − 1, as the workloads have it.
fn aperture() -> Result<Aperture> {
    Ok(Aperture::of_bits(48)?)
}

fn chunk(cores: usize) -> Result<ChunkAllocator> {
    Ok(ChunkAllocator::new(aperture()?, cores)?)
}

fn magazine(cores: usize) -> Result<MagazineAllocator> {
    Ok(MagazineAllocator::new(aperture()?, cores)?)
}

fn tree(cores: usize) -> Result<TreeAllocator> {
    Ok(TreeAllocator::new(aperture()?, cores)?)
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!((2..=128).contains(&args.cores), "--cores is 2 to 128");
    let host = Host::read();
    // One of the simulated cores runs at a time: handing over within a CPU is quicker than waking
    // another.
    if let Some(cpu) = report::host::cpus()?.first() {
        report::host::pin(*cpu)?;
    }
    let numbers = [2, 4, 8, 16, 32, 64, 128].into_iter();
    let mut table = Table::new(numbers.filter(|n| *n <= args.cores).collect());

    use alloc::{Size, passed_on, windows};
    for (workload, size, goal) in [("a1", Size::One, Some(0.0)), ("c1", Size::UpTo32, None)] {
        table.row(workload, "chunk", goal, |n| windows(chunk(n)?, n, size))?;
        table.row(workload, "magazine", None, |n| {
            windows(magazine(n)?, n, size)
        })?;
        table.row(workload, "tree", None, |n| windows(tree(n)?, n, size))?;
    }
    table.row("a1", "linux-tree", None, linux::tree)?;
    table.row("b32", "chunk", Some(0.25), |n| passed_on(chunk(n)?, n))?;
    table.row("b32", "magazine", None, |n| passed_on(magazine(n)?, n))?;
    table.row("b32", "tree", None, |n| passed_on(tree(n)?, n))?;
    table.row("map", "chunk", Some(0.0), |n| map::tables(chunk(n)?, n))?;
    table.row("map", "magazine", None, |n| map::tables(magazine(n)?, n))?;
    table.row("map", "tree", None, |n| map::tables(tree(n)?, n))?;
    table.row("ddef", "chunk", Some(2.0 / 256.0), |n| {
        map::alone(chunk(n)?, n, map::DEFERRED)
    })?;
    for (subject, policy, goal) in map::STRICT {
        table.row("dstr", subject, goal, |n| map::alone(chunk(n)?, n, policy))?;
    }
    for (subject, policy, goal) in map::STRICT {
        table.row("dstr_busy", subject, goal, |n| {
            map::busy(chunk(n)?, n, policy)
        })?;
    }
    table.row("dstr_busy", "linux-queue", None, linux::strict)?;

    print!("{table}");
    let mut object = Object::new(&host, "model: counted on simulated cores");
    table.keys(&mut object);
    object.write(&args.report)?;
    println!("written to {}", args.report.display());
    if let Some(file) = &args.into {
        let read = Object::read(file);
        let mut object = read.with_context(|| format!("cannot read {}", file.display()))?;
        table.keys(&mut object);
        object.write(file)?;
        println!("added to {}", file.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_allocator_works_on_lines_of_its_cores() {
        let cores = 8;
        let window = alloc::windows(chunk(cores).unwrap(), cores, alloc::Size::One).unwrap();
        assert_eq!((window.transfers, window.locks), (0.0, 0.0));
        let mapped = map::tables(chunk(cores).unwrap(), cores).unwrap();
        assert_eq!((mapped.transfers, mapped.locks), (0.0, 0.0));
        let passed = alloc::passed_on(chunk(cores).unwrap(), cores).unwrap();
        assert!(passed.transfers <= 0.25, "{passed:?}");
        // Batches do pass from core to core: a count of 0 would be a probe that sees nothing.
        assert!(passed.transfers > 0.0, "{passed:?}");
    }

    #[test]
    fn a_row_that_fails_says_which() {
        let mut table = Table::new(vec![2, 4]);
        let error = table
            .row("a1", "chunk", None, |n| {
                ensure!(n < 4, "no more");
                Ok(PerOp::of(Counts::default(), 1))
            })
            .unwrap_err();
        assert_eq!(format!("{error:#}"), "a1 on chunk with 4 cores: no more");
        let counted = PerOp {
            transfers: 1.5,
            fetches: 1.0,
            locks: 2.0,
        };
        table
            .row("b32", "tree", Some(1.0), |_| Ok(counted))
            .unwrap();
        let mut object = Object::default();
        table.keys(&mut object);
        assert_eq!(object.get("b32_tree_4_transfers"), Some(1.5));
        assert_eq!(object.get("b32_tree_goal_transfers"), Some(1.0));
        assert!(table.to_string().contains("1.5* / 2"));
    }
}
