//! Set of the pages of guest memory that assigned devices reach, which may be neither evicted nor
//! discarded.
//!
//! A hole punched under a pinned page leaves the device writing into the old page while the
//! processor sees a new one, without an error anywhere. So all code that takes pages away checks
//! this set first: the owner's `in_use`, which is on the pager's path, and a balloon over plain
//! memory.
//!
//! ```text
//! run of pages = blocks of 2^k pages, each aligned to its size
//!                e.g. 5..=12  =  5 | 6..7 | 8..11 | 12
//! page p is reached  <=>  for some k there is a block p >> k of order k
//! ```
//! A run is at most two blocks of each order, so insertion, removal and a query of a page cost a
//! look-up for each order that is in use, regardless of the number and size of the mappings. The
//! same page may be reached through several mappings: blocks are counted.
//!
//! Shared by all devices of a machine and by its balloon; all run on the owner's thread, so the
//! lock is never waited for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guest_mem::{Gpa, PAGE_SIZE, Pages};

/// Orders of blocks: a run of 2^52 pages is all of a 64-bit address space.
const ORDERS: usize = 53;

/// Pages that the assigned devices of one machine reach. Clones are the same index.
#[derive(Clone, Debug, Default)]
pub struct Reach(Arc<Mutex<Index>>);

#[derive(Debug)]
struct Index {
    /// Blocks by order and number; how many mappings have each.
    blocks: BTreeMap<(u8, u64), u32>,
    /// Number of blocks of each order.
    by_order: [u32; ORDERS],
    /// Pages, each mapping counted.
    pages: u64,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            blocks: BTreeMap::new(),
            by_order: [0; ORDERS],
            pages: 0,
        }
    }
}

impl Reach {
    /// A mapping of `pages` pages from page number `first` on is about to be made.
    pub(crate) fn enter(&self, first: u64, pages: u64) {
        let mut index = self.index();
        index.pages += pages;
        for (order, block) in blocks(first, pages) {
            let count = index.blocks.entry((order, block)).or_default();
            *count += 1;
            if *count == 1 {
                index.by_order[usize::from(order)] += 1;
            }
        }
    }

    /// A mapping that was [entered](Self::enter) reaches nothing any more.
    pub(crate) fn leave(&self, first: u64, pages: u64) {
        let mut index = self.index();
        index.pages -= pages;
        for key in blocks(first, pages) {
            let Some(count) = index.blocks.get_mut(&key) else {
                debug_assert!(false, "block {key:?} was entered");
                continue;
            };
            *count -= 1;
            if *count == 0 {
                index.blocks.remove(&key);
                index.by_order[usize::from(key.0)] -= 1;
            }
        }
    }

    /// Those of `pages` that a device reaches, a bit for each.
    pub fn in_use(&self, pages: &Pages) -> u32 {
        let index = self.index();
        if index.blocks.is_empty() {
            return 0;
        }
        let named = pages.of(pages.all());
        let used = named.filter(|(gpa, _)| index.has(gpa.raw() / PAGE_SIZE));
        used.fold(0, |mask, (_, bit)| mask | bit)
    }

    /// Whether a device reaches any of the `len` bytes from `gpa` on.
    pub fn touches(&self, gpa: Gpa, len: u64) -> bool {
        let Some(last) = len.checked_sub(1) else {
            return false;
        };
        let first = gpa.raw() / PAGE_SIZE;
        let last = gpa.raw().saturating_add(last) / PAGE_SIZE;
        let index = self.index();
        index.orders().any(|order| {
            let range = (order, first >> order)..=(order, last >> order);
            index.blocks.range(range).next().is_some()
        })
    }

    /// Returns the number of pages reached, each counted as often as it is mapped, as the host
    /// accounts them.
    pub fn pages(&self) -> u64 {
        self.index().pages
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        // Counts, which no panic leaves unusable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Index {
    /// Orders of which there is a block.
    fn orders(&self) -> impl Iterator<Item = u8> {
        let orders = (0..).zip(&self.by_order);
        orders.filter_map(|(order, count)| (*count > 0).then_some(order))
    }

    fn has(&self, page: u64) -> bool {
        self.orders()
            .any(|order| self.blocks.contains_key(&(order, page >> order)))
    }
}

/// The blocks of which a run consists, each with its order and number.
fn blocks(first: u64, pages: u64) -> impl Iterator<Item = (u8, u64)> {
    let mut next = first;
    let mut left = pages;
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        // The largest block that begins here and is not longer than the rest of the run.
        let order = next.trailing_zeros().min(left.ilog2());
        let block = (order as u8, next >> order);
        next = next.wrapping_add(1 << order);
        left -= 1 << order;
        Some(block)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_run_is_a_few_blocks() {
        let of = |first, pages| blocks(first, pages).collect::<Vec<_>>();
        assert_eq!(of(5, 8), [(0, 5), (1, 3), (2, 2), (0, 12)]);
        assert_eq!(of(0, 0), []);
        assert_eq!(of(1 << 18, 1 << 18), [(18, 1)]);
        for first in 0..70 {
            assert!(of(first, (1 << 20) - first).len() <= 40, "{first}");
        }
    }

    proptest! {
        /// Against a list of mappings, each page compared.
        #[test]
        fn pages_are_reached_as_a_list_of_mappings_says(
            steps in prop::collection::vec((any::<bool>(), 0_u64..600, 1_u64..70), 1..60),
            asked in prop::collection::vec(0_u64..700, 32),
            ranges in prop::collection::vec((0_u64..700 * PAGE_SIZE, 0_u64..9 * PAGE_SIZE), 8),
        ) {
            let reach = Reach::default();
            let mut list: Vec<(u64, u64)> = Vec::new();
            for (leaves, first, pages) in steps {
                if leaves && !list.is_empty() {
                    let (first, pages) = list.swap_remove(first as usize % list.len());
                    reach.leave(first, pages);
                } else {
                    list.push((first, pages));
                    reach.enter(first, pages);
                }
                let has = |page: u64| list.iter().any(|(at, n)| (*at..at + n).contains(&page));
                let pages: Vec<_> = asked.iter().map(|page| Gpa::new(page * PAGE_SIZE)).collect();
                let wanted = (0..).zip(&asked).fold(0, |mask, (bit, page)| mask | u32::from(has(*page)) << bit);
                prop_assert_eq!(reach.in_use(&Pages::new(&pages).expect("32 pages")), wanted);
                for (at, len) in &ranges {
                    let wanted = *len > 0 && (at / PAGE_SIZE..=(at + len - 1) / PAGE_SIZE).any(has);
                    prop_assert_eq!(reach.touches(Gpa::new(*at), *len), wanted);
                }
                prop_assert_eq!(reach.pages(), list.iter().map(|(_, n)| n).sum::<u64>());
            }
        }
    }
}
