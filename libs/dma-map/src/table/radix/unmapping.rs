//! Ranges to unmap: the look at whether all of them is mapped, and the leaves that go.

use iova::IovaPfn;

use super::parts;
use crate::table::UnmapError;
use crate::table::format::{Format, entry_pages};
use crate::table::memory::TableMemory;
use crate::table::tree::{Child, Node, index};

/// Checks that all of `first` to `last` is mapped by leaves that lie inside.
pub(super) fn check_mapped<F: Format, M: TableMemory>(
    node: Node<'_, F, M>,
    first: u64,
    last: u64,
) -> Result<(), UnmapError> {
    let level = node.level();
    if level == 1 {
        let base = first - index(first, 1) as u64;
        return match node.first_empty(index(first, 1)..=index(last, 1)) {
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

/// Empties the leaves of `first` to `last`, which were checked.
pub(super) fn clear<F: Format, M: TableMemory>(node: Node<'_, F, M>, first: u64, last: u64) {
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
