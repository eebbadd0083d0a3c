//! The free gaps of a space, by address: a B+tree in an index arena, in which the highest gap that fits is found in
//! logarithmic time with alignment counted.
//!
//! Alignment: a request of `p` pages starts at a multiple of the power of two that holds it, so a gap of `p`
//! pages need not fit it, and the largest gap of a subtree says little. What is kept instead is
//! [`natural`](node::natural): the largest request that fits a gap *so aligned*. It is one number because fitting is
//! monotone in `p` (where `p` pages lie aligned, any fewer do too), so its maximum over a subtree tells exactly
//! whether the subtree has a place. Let `m` be the most aligned page of a gap `first..=last`. Every smaller power of
//! two divides `m`; hence left of `m` the largest aligned block is the largest power of two that fits, and from `m` on
//! everything up to `last` fits: `natural = max(floor_pow2(m - first), last + 1 - m)`.
//!
//! A request aligned to more than its size is first sought as a whole block of its alignment, in logarithmic
//! time; only where there is none, in those gaps that could hold its size.
//!
//! Shape: all leaves at one depth; a leaf holds up to [`FANOUT`](node::FANOUT) gaps and is linked to its neighbours, an
//! inner node as many children, each but the first with a separator (at or below every page of the child's gaps, above
//! every page of those before it), and each with the child's best. A full node splits, an empty one goes, a
//! quarter-full one joins a neighbour it fits into. Changes end in `raise_best`, which climbs only while the maximum
//! changes.
//!
//! Cost: four or five nodes of 324 bytes per descent at 65,536 gaps. A treap of the same gaps took about twice as long
//! (2.1 to 2.9 µs a pair against 1.1 to 1.3, on a busy machine). Nothing is allocated unless the number of gaps
//! reaches a new maximum.

mod change;
mod find;
mod node;
#[cfg(test)]
mod tests;

use alloc::{vec, vec::Vec};

use crate::IovaRange;
use node::{AFTER, BEFORE, EMPTY, NIL, Node};

pub(super) struct Gaps {
    nodes: Vec<Node>,
    root: u32,
    /// Levels; 1 when the root is a leaf.
    height: usize,
    free: u32,
    /// At or above the last page of every gap there will be.
    top: u64,
    /// From the root to an entry: nodes, and which child or gap of each.
    path: Vec<(u32, usize)>,
}

impl Gaps {
    /// Of ranges that ascend and do not touch.
    pub(super) fn new(ranges: &[IovaRange]) -> Self {
        let mut gaps = Self {
            nodes: vec![EMPTY; 2],
            root: 1,
            height: 1,
            free: NIL,
            top: ranges.last().map_or(0, |range| range.last().raw()),
            path: Vec::new(),
        };
        for range in ranges {
            gaps.give(range.first().raw(), range.last().raw());
        }
        gaps
    }

    /// Takes `pages` pages at a multiple of `2^order`, none above `limit`, from the highest gap that has them.
    pub(super) fn take(&mut self, pages: u64, order: u8, limit: u64) -> Option<u64> {
        let start = self.find(pages, order, limit)?;
        let (leaf, at) = self.end_of_path();
        let (first, last) = self.gap(leaf, at);
        let after = start + pages;
        match (first < start, after <= last) {
            (false, false) => self.remove_here(),
            (true, false) => self.set_here(first, start - 1),
            (false, true) => self.set_here(after, last),
            (true, true) => {
                self.set_here(first, start - 1);
                self.insert_here(at + 1, after, last);
            }
        }
        Some(start)
    }

    /// Adds pages that lie in no gap, joining them with the gaps they touch.
    pub(super) fn give(&mut self, first: u64, last: u64) {
        self.seek(first);
        let (leaf, count) = self.end_of_path();
        let node = &self.nodes[leaf as usize];
        let below = match count.checked_sub(1) {
            Some(at) => Some(self.gap(leaf, at)),
            None => self.neighbour(node.kids[BEFORE], |len| len - 1),
        };
        let above = match count < node.len as usize {
            true => Some(self.gap(leaf, count)),
            false => self.neighbour(node.kids[AFTER], |_| 0),
        };
        debug_assert!(below.is_none_or(|(_, end)| end < first), "given twice");
        debug_assert!(above.is_none_or(|(start, _)| last < start), "given twice");
        let below = below.filter(|&(_, end)| end + 1 == first);
        let above = above.filter(|&(start, _)| last + 1 == start);
        match (below, above) {
            (None, None) => self.insert_here(count, first, last),
            (Some((start, _)), None) => {
                self.go_to(start);
                self.set_here(start, last);
            }
            (None, Some((start, end))) => {
                self.go_to(start);
                self.set_here(first, end);
            }
            (Some((start, _)), Some((above, end))) => {
                self.go_to(above);
                self.remove_here();
                self.go_to(start);
                self.set_here(start, end);
            }
        }
    }

    /// Whether one gap holds all of these pages.
    pub(super) fn holds(&self, first: u64, last: u64) -> bool {
        let mut at = self.root;
        for _ in 1..self.height {
            let node = &self.nodes[at as usize];
            at = node.kids[node.child_to(first)];
        }
        let node = &self.nodes[at as usize];
        let gap = match node.count_to(first).checked_sub(1) {
            Some(slot) => Some(self.gap(at, slot)),
            None => self.neighbour(node.kids[BEFORE], |len| len - 1),
        };
        gap.is_some_and(|(_, end)| last <= end)
    }

    /// Every gap, ascending, as first and last page.
    pub(super) fn for_each(&self, mut visit: impl FnMut(u64, u64)) {
        let mut at = self.root;
        for _ in 1..self.height {
            at = self.nodes[at as usize].kids[0];
        }
        while at != NIL {
            let node = &self.nodes[at as usize];
            (0..node.len as usize).for_each(|slot| visit(node.keys[slot], node.values[slot]));
            at = node.kids[AFTER];
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>() + self.path.capacity() * size_of::<(u32, usize)>()
    }

    fn gap(&self, leaf: u32, at: usize) -> (u64, u64) {
        let node = &self.nodes[leaf as usize];
        (node.keys[at], node.values[at])
    }

    /// A gap of a leaf beside another; a leaf without gaps is the root and nobody's neighbour.
    fn neighbour(&self, leaf: u32, which: impl Fn(usize) -> usize) -> Option<(u64, u64)> {
        let node = &self.nodes[leaf as usize];
        (leaf != NIL).then(|| self.gap(leaf, which(node.len as usize)))
    }

    fn end_of_path(&self) -> (u32, usize) {
        *self.path.last().expect("a search went before")
    }

    /// Panics where order, separators, links or bests are wrong, or where a search misses a gap. A search for each gap.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn check(&self) {
        let mut end = None;
        let mut count = 0;
        self.for_each(|first, last| {
            assert!(end < Some(first) && first <= last, "gaps ascend apart");
            end = Some(last + 1);
            count += 1;
        });
        let counted = self.check_node(self.root, 1, 0, u64::MAX);
        assert_eq!(counted.0, count, "leaves are linked");
        self.for_each(|first, last| {
            assert!(self.holds(first, last), "a search finds {first:#x}");
            let below = first.checked_sub(1);
            assert!(
                below.is_none_or(|below| !self.holds(below, last)),
                "gaps end"
            );
        });
    }

    /// Counts the gaps under a node, all of which lie in `from..below`, and their best.
    #[cfg(any(test, debug_assertions))]
    fn check_node(&self, at: u32, level: usize, from: u64, below: u64) -> (usize, u64) {
        let node = &self.nodes[at as usize];
        let len = node.len as usize;
        assert!(len > 0 || self.height == 1, "no node is empty but the root");
        if level == self.height {
            let mut ends = node.keys().iter().chain(&node.values[..len]);
            assert!(ends.all(|page| (from..below).contains(page)), "separated");
            return (len, self.best_of(at, true, u64::MAX));
        }
        let mut sum = (0, 0);
        for child in 0..len {
            let start = if child == 0 { from } else { node.keys[child] };
            let end = if child + 1 < len {
                node.keys[child + 1]
            } else {
                below
            };
            let ends = [start, end - 1].map(|page| node.child_to(page));
            assert_eq!(ends, [child; 2], "a search goes where the separators say");
            let (count, best) = self.check_node(node.kids[child], level + 1, start, end);
            assert_eq!(best, node.values[child], "best is exact");
            sum = (sum.0 + count, sum.1.max(best));
        }
        sum
    }
}
