//! Ranges to map: the look at what is there, the tables that are missing, the leaves. And to unmap: the look at whether all of
//! it is mapped, and the leaves that go.

use address::{PAGE_SHIFT, PhysAddr};
use iova::{Access, IovaPfn};

use super::{LeafSizes, parts};
use crate::table::format::{Format, Leaf, entry_pages};
use crate::table::memory::TableMemory;
use crate::table::tree::{Child, Node, Reserve, index};
use crate::table::{MapError, UnmapError};

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
        let mut below = parts(level - 1, first, last);
        let count = |part: Option<(usize, u64, u64)>| {
            part.map_or(0, |(_, from, to)| self.tables(level - 1, from, to))
        };
        // Between the first and the last are whole ones, which all need the same.
        let ends = count(below.next()) + count(below.next_back());
        let whole = below.len() as u64;
        1 + ends + whole * count(below.next())
    }

    /// Checks that nothing is mapped; gives the number of tables that are missing.
    pub(super) fn check<F: Format, M: TableMemory>(
        &self,
        node: Node<'_, F, M>,
        first: u64,
        last: u64,
    ) -> Result<u64, MapError> {
        let level = node.level;
        if level == 1 {
            let base = first - index(first, 1) as u64;
            return match node.first(index(first, 1)..=index(last, 1), true) {
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
        let level = node.level;
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

/// Checks that all of `first` to `last` is mapped by leaves that lie inside.
pub(super) fn check_mapped<F: Format, M: TableMemory>(
    node: Node<'_, F, M>,
    first: u64,
    last: u64,
) -> Result<(), UnmapError> {
    let level = node.level;
    if level == 1 {
        let base = first - index(first, 1) as u64;
        return match node.first(index(first, 1)..=index(last, 1), false) {
            None => Ok(()),
            Some(at) => Err(not_mapped(base + at as u64)),
        };
    }
    for (at, from, to) in parts(level, first, last) {
        match node.child(at) {
            Child::Empty => return Err(not_mapped(from)),
            Child::Table(child) => check_mapped(child, from, to)?,
            Child::Leaf(_) if to - from == entry_pages(level) - 1 => {}
            Child::Leaf(_) => return Err(inside(from, level)),
        }
    }
    Ok(())
}

#[cold]
fn not_mapped(page: u64) -> UnmapError {
    let iova = IovaPfn::new(page).start();
    UnmapError::NotMapped { iova }
}

#[cold]
fn inside(page: u64, level: u32) -> UnmapError {
    UnmapError::InsideHugeLeaf {
        iova: IovaPfn::new(page).start(),
        leaf_pages: entry_pages(level),
    }
}

/// Empties the leaves of `first` to `last`, which were checked. An error where others change what they do not own: a large leaf
/// is not there any more.
pub(super) fn clear<F: Format, M: TableMemory>(
    node: Node<'_, F, M>,
    first: u64,
    last: u64,
) -> Result<(), UnmapError> {
    let level = node.level;
    if level == 1 {
        node.clear_leaves(index(first, 1)..=index(last, 1));
        return Ok(());
    }
    let mut cleared = Ok(());
    for (at, from, to) in parts(level, first, last) {
        let done = match node.child(at) {
            Child::Table(child) => clear(child, from, to),
            Child::Leaf(leaf) if node.swap(at, Some(leaf), None) => Ok(()),
            _ => Err(not_mapped(from)),
        };
        cleared = cleared.and(done);
    }
    cleared
}
