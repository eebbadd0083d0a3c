//! Ranges to map: the look at what is there, the tables that are missing, the leaves.

use address::{PAGE_SHIFT, PhysAddr};
use iova::{Access, IovaPfn};

use super::{LeafSizes, parts};
use crate::table::MapError;
use crate::table::format::{Format, Leaf, entry_pages};
use crate::table::memory::TableMemory;
use crate::table::tree::{Child, Node, Reserve, index};

/// A range to map, as the recursion over levels needs it. The depth is that of the tree.
pub(super) struct Job {
    pub(super) first: u64,
    pub(super) phys: PhysAddr,
    pub(super) access: Access,
    pub(super) leaves: LeafSizes,
}

impl Job {
    /// Where `page` of the range goes. Nothing overflows: the arguments were checked.
    fn phys_of(&self, page: u64) -> PhysAddr {
        PhysAddr::new(self.phys.raw() + ((page - self.first) << PAGE_SHIFT))
    }

    /// Whether pages `first` to `last` can be one leaf at `level`.
    fn is_leaf(&self, level: u32, first: u64, last: u64) -> bool {
        let pages = entry_pages(level);
        self.leaves.has(level)
            && last - first == pages - 1
            && self.phys_of(first).is_aligned(pages << PAGE_SHIFT)
    }

    /// Tables needed below an empty entry of a table at `level` for its pages `first` to `last`.
    fn tables(&self, level: u32, first: u64, last: u64) -> u64 {
        if level == 1 || self.is_leaf(level, first, last) {
            return 0;
        }
        if level == 2 {
            return 1;
        }
        let below =
            parts(level - 1, first, last).map(|(_, from, to)| self.tables(level - 1, from, to));
        1 + below.sum::<u64>()
    }

    /// Checks that nothing is mapped; gives the number of tables that are missing.
    pub(super) fn check<F: Format, M: TableMemory>(
        &self,
        node: Node<'_, F, M>,
        first: u64,
        last: u64,
    ) -> Result<u64, MapError> {
        let level = node.level();
        if level == 1 {
            let base = first - index(first, 1) as u64;
            return match node.first_used(index(first, 1)..=index(last, 1)) {
                None => Ok(0),
                Some(at) => Err(already_mapped(base + at as u64, 1)),
            };
        }
        let mut missing = 0;
        for (at, from, to) in parts(level, first, last) {
            missing += match node.child(at) {
                Child::Empty => self.tables(level, from, to),
                Child::Table(child) => self.check(child, from, to)?,
                Child::Leaf(_) => return Err(already_mapped(from, level)),
            };
        }
        Ok(missing)
    }

    /// Stores the leaves. Fails only where others map what they do not own.
    pub(super) fn store<'t, F: Format, M: TableMemory>(
        &self,
        node: Node<'t, F, M>,
        first: u64,
        last: u64,
        reserve: &mut Reserve<'t, F, M>,
    ) -> Result<(), MapError> {
        let level = node.level();
        if level == 1 {
            let at = index(first, 1)..=index(last, 1);
            node.store_leaves(at, self.phys_of(first), self.access);
            return Ok(());
        }
        for (at, from, to) in parts(level, first, last) {
            let mut child = node.child(at);
            if matches!(child, Child::Empty) {
                if self.is_leaf(level, from, to) {
                    let leaf = Leaf {
                        phys: self.phys_of(from),
                        access: self.access,
                    };
                    if !node.swap(at, None, Some(leaf)) {
                        return Err(already_mapped(from, level));
                    }
                    continue;
                }
                child = node.install(at, reserve);
            }
            match child {
                Child::Table(child) => self.store(child, from, to, reserve)?,
                Child::Leaf(_) => return Err(already_mapped(from, level)),
                Child::Empty => return Err(MapError::OutOfTables { tables: 1 }),
            }
        }
        Ok(())
    }
}

#[cold]
fn already_mapped(page: u64, level: u32) -> MapError {
    MapError::AlreadyMapped {
        iova: IovaPfn::new(page).start(),
        leaf_pages: entry_pages(level),
    }
}
