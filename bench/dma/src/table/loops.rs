//! p-S: of S pages whose tables are there, map a random one and unmap it: a call each.
#![expect(
    unsafe_code,
    reason = "Linux's table trusts its callers to keep to pages of their own, as these loops do"
)]

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use address::PhysAddr;
use anyhow::{Result, ensure};
use dma_linux::Domain;
use dma_map::table::IoMap;
use iova::{Access, CoreAllocator, CoreId, IovaAllocator, IovaPfn, IovaRange, Request};

use crate::measure::{BATCH, Random, Task, Tasks};

/// A table in which single pages are mapped and unmapped, each page by one thread.
pub trait Pages: Send + Sync + 'static {
    /// Maps it.
    fn map(&self, range: IovaRange);

    /// Unmaps it.
    fn unmap(&self, range: IovaRange);
}

const PHYS: u64 = 0x5000_0000;

impl<T: IoMap + 'static> Pages for T {
    #[inline(never)]
    fn map(&self, range: IovaRange) {
        let mapped = IoMap::map(self, range, PhysAddr::new(PHYS), Access::ReadWrite);
        mapped.expect("ours, and not mapped");
    }

    #[inline(never)]
    fn unmap(&self, range: IovaRange) {
        IoMap::unmap(self, range).expect("just mapped");
    }
}

/// Linux's, called through pointers.
pub struct OfLinux(pub Domain);

impl Pages for OfLinux {
    #[inline(always)]
    fn map(&self, range: IovaRange) {
        // SAFETY: the loops give each thread pages of its own.
        let mapped = unsafe { self.0.map(range.first().raw(), PHYS, 4096, 1) };
        mapped.expect("ours, and not mapped");
    }

    #[inline(always)]
    fn unmap(&self, range: IovaRange) {
        // SAFETY: as above.
        let bytes = unsafe { self.0.unmap(range.first().raw(), 4096, 1) };
        assert_eq!(bytes, 4096, "just mapped");
    }
}

/// First page: 4 GiB.
const BASE: u64 = 0x1_0000_0000 >> 12;

/// Pages that a thread takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Page `2k + id`: each leaf table is written by both.
    Shared,
    /// Page `k + id × S/2`: as far apart as the pages are, which for S = 256 is half a leaf table.
    Disjoint,
    /// The same as `Disjoint` with leaf tables of their own, however small S is.
    OwnLeaves,
}

/// Threads of p-S over a table; `pages` (S) is a power of two, at least 4.
///
/// # Errors
/// The tables cannot be made.
pub fn pairs<T: Pages>(table: &Arc<T>, threads: usize, pages: u64, split: Split) -> Result<Tasks> {
    let of = |id: u64| {
        let (start, step) = match split {
            Split::Shared => (id, 2),
            Split::Disjoint => (id * pages / 2, 1),
            Split::OwnLeaves => (id * (pages / 2).max(512), 1),
        };
        (0..pages / 2).map(move |k| BASE + start + k * step)
    };
    (0..threads)
        .map(|id| task(table, id, of(id as u64).collect()))
        .collect()
}

/// The same with pages that each thread was given by its own core of an allocator: S/2 each. Thread
/// `t` works on space `t % n` of the `n`, which are a table and an allocator each.
///
/// # Errors
/// The tables cannot be made, or an allocator has not so many cores.
pub fn allocated<T: Pages, A: IovaAllocator>(
    spaces: &[(Arc<T>, A)],
    threads: usize,
    pages: u64,
) -> Result<Tasks> {
    ensure!(!spaces.is_empty(), "no space");
    // All cores at once: a chunk that one has given up would be the next one's.
    let claim = |id: usize| {
        let (table, allocator) = &spaces[id % spaces.len()];
        Ok((table, allocator.claim(CoreId(id / spaces.len()))?))
    };
    let mut cores = (0..threads).map(claim).collect::<Result<Vec<_>>>()?;
    // The ranges stay allocated; the allocator ends with the run.
    let of = |(id, (table, core)): (usize, &mut (&Arc<T>, A::Core))| {
        let pages = (0..pages / 2)
            .map(|_| Ok(core.alloc(Request::pages(1))?.first().raw()))
            .collect::<Result<_>>()?;
        task(table, id, pages)
    };
    cores.iter_mut().enumerate().map(of).collect()
}

fn one(page: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(page), 1).expect("a page below 2^52")
}

/// Builds the tables, and makes the thread.
fn task<T: Pages>(table: &Arc<T>, id: usize, pages: Vec<u64>) -> Result<Box<dyn Task>> {
    let mut ranges = Vec::with_capacity(pages.len());
    for page in pages {
        table.map(one(page));
        table.unmap(one(page));
        ranges.push(one(page));
    }
    // With consecutive pages the range is computed, as the quoted loop does, and not looked up.
    let step = match ranges[..] {
        [first, second, ..] => second.first().raw().wrapping_sub(first.first().raw()),
        _ => 0,
    };
    let start = ranges[0].first().raw();
    let is_regular = ranges
        .iter()
        .enumerate()
        .all(|(k, range)| range.first().raw() == start.wrapping_add(step.wrapping_mul(k as u64)));
    let (table, random) = (Arc::clone(table), Random::of_core(id));
    Ok(if is_regular {
        let mask = ranges.len() as u64 - 1;
        Box::new(Pairs {
            table,
            random,
            range: move |r: u64| one(start.wrapping_add(((r >> 20) & mask).wrapping_mul(step))),
        })
    } else {
        let mask = ranges.len() - 1;
        Box::new(Pairs {
            table,
            random,
            range: move |r: u64| ranges[(r >> 20) as usize & mask],
        })
    })
}

struct Pairs<T, F> {
    table: Arc<T>,
    random: Random,
    range: F,
}

impl<T: Pages, F: Fn(u64) -> IovaRange + Send> Task for Pairs<T, F> {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        for _ in 0..BATCH {
            let range = std::hint::black_box((self.range)(self.random.bits()));
            self.table.map(range);
            self.table.unmap(range);
        }
        BATCH
    }
}

#[cfg(test)]
mod tests {
    use dma_map::table::PageTable;

    use super::*;
    use crate::alloc::{Best, space};
    use crate::map::rig::table;

    #[test]
    fn pairs_leave_nothing_mapped_and_stay_in_their_tables() {
        for (split, leaves) in [
            (Split::Shared, 1),
            (Split::Disjoint, 1),
            (Split::OwnLeaves, 2),
        ] {
            let table = Arc::new(table().expect("memory"));
            let mut tasks = pairs(&table, 2, 256, split).expect("tables");
            let built = table.stats().tables[0];
            assert_eq!(built, leaves, "{split:?}");
            for task in &mut tasks {
                assert_eq!(task.batch(&AtomicBool::new(false)), BATCH);
            }
            assert_eq!(table.stats().tables[0], built);
            let start = IovaPfn::new(BASE).start();
            let mapped = (0..2048 * 4096).step_by(4096).filter(|at| {
                let iova = start.checked_add(*at).expect("below the end");
                table.lookup(iova).is_some()
            });
            assert_eq!(mapped.count(), 0);
        }
    }

    #[test]
    fn threads_get_pages_of_their_own_and_spaces_if_there_are_more() {
        for (spaces, cores) in [(1, 2), (2, 1)] {
            let space = |_| {
                let allocator = Best::new(space().expect("pages"), cores).expect("cores");
                (Arc::new(table().expect("memory")), allocator)
            };
            let spaces: Vec<_> = (0..spaces).map(space).collect();
            let mut tasks = allocated(&spaces, 2, 256).expect("tables");
            assert_eq!(tasks.len(), 2);
            for task in &mut tasks {
                assert_eq!(task.batch(&AtomicBool::new(false)), BATCH);
            }
            let leaves = spaces.iter().map(|(table, _)| table.stats().tables[0]);
            // A leaf table for each thread, wherever it is.
            assert_eq!(leaves.sum::<usize>(), 2);
        }
    }
}
