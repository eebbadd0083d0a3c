//! Section `table`, workload p-S: threads map and unmap one page at a time among S pages, in the
//! lock-free page table and in those with locks.

use std::sync::Arc;

use anyhow::{Context, Result};
use dma_linux::Domain;
use dma_map::table::{HostMemory, VtdSecondLevel};
use dma_peers::{GlobalLockTable, RwLockTable};

use super::loops::{self, OfLinux, Pages, Split};
use crate::alloc;
use crate::map::rig::{self, CONFIG};
use crate::measure::{Case, Turns};
use crate::record::Record;

/// S: the pages of half a leaf table, of 128 leaf tables, and of 4,096 (16 MiB of entries).
pub const PAGES: [u64; 3] = [256, 65_536, 2_097_152];

/// Names of the tables in keys.
pub const TABLES: [&str; 4] = ["lock_free", "rw_locks", "global_lock", "linux"];

/// Overlap of the threads' pages, by the names of rows.
const SPLITS: [(&str, usize, Split); 4] = [
    ("alone", 1, Split::Shared),
    ("shared", 2, Split::Shared),
    ("disjoint", 2, Split::Disjoint),
    ("own_leaves", 2, Split::OwnLeaves),
];

/// Measures workload p-S.
pub fn measure(turns: &Turns, record: &mut Record) {
    for pages in PAGES {
        for (name, threads, split) in SPLITS {
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
            let of_linux = alloc::linux().map(|linux| {
                plain(case("linux"), threads, pages, split, move || {
                    Ok(OfLinux(Domain::new(linux, alloc::FIRST_PAGE)?))
                })
            });
            let cases: Vec<_> = [lock_free, rw, global]
                .into_iter()
                .chain(of_linux)
                .collect();
            let s = if threads == 1 { "" } else { "s" };
            record.section(&format!(
                "p-{pages}: map and unmap a page, {threads} thread{s}, {}",
                name.replace('_', " ")
            ));
            let found = turns.measure(&cases);
            for ((table, case), outcome) in TABLES.iter().zip(&cases).zip(&found) {
                let key = format!("p{pages}_{name}_{table}");
                record.row(&key, case, outcome);
            }
            let of = |at: usize| found.get(at).and_then(|outcome| outcome.as_ref().ok());
            let key = format!("p{pages}_{name}_{threads}thr_ratio");
            record.ratio(&key, of(0), of(3));
        }
    }
}

fn plain<'a, T: Pages>(
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
