//! Ranges to unmap: the look at whether all of them is mapped, and the leaves that go.

use iova::IovaPfn;

use super::parts;
use crate::table::UnmapError;
use crate::table::format::{Format, Leaf, entry_pages};
use crate::table::locked::Locking;
use crate::table::memory::TableMemory;
use crate::table::tree::{Child, Node, index};

/// Checks that all of `first` to `last` is mapped by leaves that lie inside and are not counted.
pub(super) fn check_mapped<F: Format, M: TableMemory, L: Locking>(
    node: Node<'_, F, M, L>,
    first: u64,
    last: u64,
) -> Result<(), UnmapError> {
    let level = node.level();
    if level == 1 {
        let base = first - index(first, 1) as u64;
        return match node.first_not_plain(index(first, 1)..=index(last, 1)) {
            None => Ok(()),
            Some((at, leaf)) => Err(not_plain(base + at as u64, leaf)),
        };
    }
    for (at, from, to) in parts(level, first, last) {
        match node.child(at) {
            Child::Empty => return Err(not_plain(from, None)),
            Child::Table(child) => check_mapped(child, from, to)?,
            Child::Leaf(_) if to - from == entry_pages(level) - 1 => {}
            Child::Leaf(_) => return Err(inside(from, level)),
        }
    }
    Ok(())
}

#[cold]
fn not_plain(page: u64, leaf: Option<Leaf>) -> UnmapError {
    let iova = IovaPfn::new(page).start();
    match leaf {
        None => UnmapError::NotMapped { iova },
        Some(Leaf { count, .. }) => UnmapError::Counted { iova, count },
    }
}

#[cold]
fn inside(page: u64, level: u32) -> UnmapError {
    UnmapError::InsideHugeLeaf {
        iova: IovaPfn::new(page).start(),
        leaf_pages: entry_pages(level),
    }
}

/// Empties the leaves of `first` to `last`, which were checked.
pub(super) fn clear<F: Format, M: TableMemory, L: Locking>(
    node: Node<'_, F, M, L>,
    first: u64,
    last: u64,
) {
    let level = node.level();
    if level == 1 {
        return node.clear_leaves(index(first, 1)..=index(last, 1));
    }
    for (at, from, to) in parts(level, first, last) {
        match node.child(at) {
            Child::Table(child) => clear(child, from, to),
            Child::Leaf(leaf) => {
                // Nobody else changes a leaf of an owned range.
                node.swap(at, Some(leaf), None);
            }
            Child::Empty => {}
        }
    }
}

/// Checks that every page is counted.
pub(super) fn check_counts<F: Format, M: TableMemory, L: Locking>(
    node: Node<'_, F, M, L>,
    first: u64,
    last: u64,
) -> Result<(), UnmapError> {
    let level = node.level();
    for (at, from, to) in parts(level, first, last) {
        match node.child(at) {
            Child::Empty => return Err(not_plain(from, None)),
            Child::Table(child) => check_counts(child, from, to)?,
            Child::Leaf(_) if level > 1 => return Err(inside(from, level)),
            Child::Leaf(leaf) if leaf.count == 0 => return Err(not_plain(from, Some(leaf))),
            Child::Leaf(_) => {}
        }
    }
    Ok(())
}

/// Takes one count from `page`: whether it was the last, and the page is not mapped any more. Turns again only
/// after another core changed the same entry.
pub(super) fn take_count<F: Format, M: TableMemory, L: Locking>(
    node: Node<'_, F, M, L>,
    page: u64,
) -> Result<bool, UnmapError> {
    let at = index(page, 1);
    loop {
        let leaf = match node.child(at) {
            Child::Leaf(leaf) if leaf.count > 0 => leaf,
            Child::Leaf(leaf) => return Err(not_plain(page, Some(leaf))),
            _ => return Err(not_plain(page, None)),
        };
        let count = leaf.count - 1;
        let to = (count > 0).then_some(Leaf { count, ..leaf });
        if node.swap(at, Some(leaf), to) {
            return Ok(count == 0);
        }
    }
}
