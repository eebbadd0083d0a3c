//! p-S over the tables.

use std::sync::Arc;

use anyhow::{Context, Result};
use dma_map::table::{HostMemory, IoMap, VtdSecondLevel};
use dma_peers::{GlobalLockTable, RwLockTable};

use super::loops::{self, Split};
use crate::map::rig::{self, CONFIG};
use crate::measure::{Case, Turns};
use crate::record::Record;

/// S: one leaf table's worth, 128, and 4,096 of them (16 MiB of entries).
pub const PAGES: [u64; 3] = [256, 65_536, 2_097_152];

/// Names of the tables in keys.
pub const TABLES: [&str; 3] = ["lock_free", "rw_locks", "global_lock"];

/// Linux's `generic_pt` on the reference machine: one thread, two shared, two disjoint.
pub const QUOTED: [[&str; 3]; 3] = [
    ["71.4", "119", "71.6"],
    ["78.0", "117", "79.3"],
    ["216", "217", ""],
];

/// How threads share, as rows name it.
const SPLITS: [(&str, usize, Split); 4] = [
    ("alone", 1, Split::Shared),
    ("shared", 2, Split::Shared),
    ("disjoint", 2, Split::Disjoint),
    ("own_leaves", 2, Split::OwnLeaves),
];

/// Runs p-S.
pub fn measure(turns: &Turns, record: &mut Record) {
    for (pages, quoted) in PAGES.into_iter().zip(QUOTED) {
        for (index, (name, threads, split)) in SPLITS.into_iter().enumerate() {
            if split == Split::OwnLeaves && pages > 512 {
                continue;
            }
            let case = |title: &str| format!("p-{pages} {title}");
            let (lock_free, rw, global) = (
                plain(case("lock-free"), threads, pages, split, rig::table),
                plain(case("lock per table"), threads, pages, split, || {
                    RwLockTable::<VtdSecondLevel, _>::new(HostMemory::new(), CONFIG.levels)
                        .context("no memory for a root")
                }),
                plain(case("global lock"), threads, pages, split, || {
                    Ok(GlobalLockTable::new(rig::table()?))
                }),
            );
            let cases = [lock_free, rw, global];
            let s = if threads == 1 { "" } else { "s" };
            record.section(&format!(
                "p-{pages}: map and unmap a page, {threads} thread{s}, {}",
                name.replace('_', " ")
            ));
            let found = turns.measure(&cases);
            for ((table, case), outcome) in TABLES.iter().zip(&cases).zip(&found) {
                let key = format!("p{pages}_{name}_{table}");
                let quoted = match *table {
                    "lock_free" => quoted.get(index).copied().unwrap_or(""),
                    _ => "",
                };
                record.row(&key, case, outcome, quoted);
            }
        }
    }
    let alone = record.get("p256_alone_lock_free_1thr_ns_raw");
    let scaled = record.get("p256_alone_lock_free_1thr_ns");
    record.both("map_unmap_ns", alone, scaled, 2);
}

fn plain<'a, T: IoMap + 'static>(
    title: String,
    threads: usize,
    pages: u64,
    split: Split,
    table: impl Fn() -> Result<T> + 'a,
) -> Case<'a> {
    Case::new(title, threads, move || {
        loops::pairs(&Arc::new(table()?), threads, pages, split)
    })
}
