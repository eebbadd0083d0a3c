//! The free gaps of a space, by address: a treap in an index arena, in which the highest gap that fits is found
//! in logarithmic time with alignment counted.
//!
//! Alignment: a request of `p` pages starts at a multiple of the power of two that holds it, so a gap of `p`
//! pages need not fit it, and the largest gap of a subtree says little. What is kept instead is
//! [`natural`]: the largest request that fits a gap *so aligned*. It is one number because fitting is monotone
//! in `p` (where `p` pages lie aligned, any fewer do too), so its maximum over a subtree tells exactly whether the
//! subtree has a place. Let `m` be the most aligned page of a gap `first..=last`. Every smaller power of two
//! divides `m`; hence left of `m` the largest aligned block is the largest power of two that fits, and from `m` on
//! everything up to `last` fits: `natural = max(floor_pow2(m - first), last + 1 - m)`.
//!
//! A request aligned to more than its size is first sought as a whole block of its alignment, in logarithmic
//! time; only where there is none, in those gaps that could hold its size.
//!
//! Balance: a treap with priorities from a generator of fixed seed, expected depth about 2 ln n. (The order of
//! calls is a driver's, who does not know the priorities of nodes but could compute them; what it gains is its own
//! slowness.)
//!
//! Cost: a descent of the tree per search, change, insertion or removal; nodes of 40 bytes, no allocation unless
//! the number of gaps reaches a new maximum.

use alloc::{vec, vec::Vec};

use crate::{IovaRange, wanted::place};

/// No node: the sentinel at index 0, whose `best` is 0 and which has no children.
const NIL: u32 = 0;

#[derive(Clone, Copy)]
struct Node {
    first: u64,
    last: u64,
    /// Maximum of [`natural`] over the subtree.
    best: u64,
    /// Also the next free node of the arena.
    left: u32,
    right: u32,
    /// No child has a higher one.
    priority: u32,
}

pub(super) struct Gaps {
    nodes: Vec<Node>,
    root: u32,
    free: u32,
    seed: u64,
    /// At or above the last page of every gap there will be.
    top: u64,
    /// From the root down to what is being changed.
    path: Vec<u32>,
}

/// Largest number of pages that fits in `first..=last` when aligned to the power of two that holds it.
fn natural(first: u64, last: u64) -> u64 {
    // Above the highest bit in which `first - 1` and `last` differ nothing can be cleared.
    let middle = match first.checked_sub(1) {
        None => 0,
        Some(below) => {
            let shift = (below ^ last).ilog2();
            last >> shift << shift
        }
    };
    let left = (middle - first).checked_ilog2().map_or(0, |k| 1 << k);
    left.max(last + 1 - middle)
}

impl Gaps {
    /// Of ranges that ascend and do not touch.
    pub(super) fn new(ranges: &[IovaRange]) -> Self {
        let sentinel = Node {
            first: 0,
            last: 0,
            best: 0,
            left: NIL,
            right: NIL,
            priority: 0,
        };
        let mut gaps = Self {
            nodes: vec![sentinel],
            root: NIL,
            free: NIL,
            seed: 0x9e37_79b9_7f4a_7c15,
            top: ranges.last().map_or(0, |range| range.last().raw()),
            path: Vec::new(),
        };
        for range in ranges {
            gaps.insert(range.first().raw(), range.last().raw());
        }
        gaps
    }

    /// Takes `pages` pages at a multiple of `2^order`, none above `limit`, from the highest gap that has them.
    pub(super) fn take(&mut self, pages: u64, order: u8, limit: u64) -> Option<u64> {
        let (at, start) = self.find(pages, order, limit)?;
        let Node { first, last, .. } = self.nodes[at as usize];
        let after = start + pages;
        match (first < start, after <= last) {
            (false, false) => self.remove(first),
            (true, false) => self.set(first, first, start - 1),
            (false, true) => self.set(first, after, last),
            (true, true) => {
                self.set(first, first, start - 1);
                self.insert(after, last);
            }
        }
        Some(start)
    }

    /// Adds pages that lie in no gap, joining them with the gaps they touch.
    pub(super) fn give(&mut self, first: u64, last: u64) {
        let (below, above) = self.around(first);
        let (below, above) = (self.nodes[below as usize], self.nodes[above as usize]);
        // The sentinel is told by its `best`: a gap's is at least 1.
        debug_assert!(below.best == 0 || below.last < first);
        debug_assert!(above.best == 0 || last < above.first);
        let joins_below = below.best > 0 && below.last + 1 == first;
        let joins_above = above.best > 0 && last + 1 == above.first;
        match (joins_below, joins_above) {
            (false, false) => self.insert(first, last),
            (true, false) => self.set(below.first, below.first, last),
            (false, true) => self.set(above.first, first, above.last),
            (true, true) => {
                self.remove(above.first);
                self.set(below.first, below.first, above.last);
            }
        }
    }

    /// Whether one gap holds all of these pages.
    pub(super) fn holds(&self, first: u64, last: u64) -> bool {
        let mut at = self.root;
        while at != NIL {
            let node = &self.nodes[at as usize];
            if first < node.first {
                at = node.left;
            } else if first > node.last {
                at = node.right;
            } else {
                return last <= node.last;
            }
        }
        false
    }

    /// Every gap, ascending, as first and last page.
    pub(super) fn for_each(&self, mut visit: impl FnMut(u64, u64)) {
        let mut above = Vec::new();
        let mut at = self.root;
        loop {
            while at != NIL {
                above.push(at);
                at = self.nodes[at as usize].left;
            }
            let Some(next) = above.pop() else { return };
            let node = &self.nodes[next as usize];
            visit(node.first, node.last);
            at = node.right;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>() + self.path.capacity() * size_of::<u32>()
    }

    fn best(&self, at: u32) -> u64 {
        self.nodes[at as usize].best
    }

    /// The node to take from, and where.
    fn find(&self, pages: u64, order: u8, limit: u64) -> Option<(u32, u64)> {
        let block = 1u64 << order;
        if pages > block >> 1 {
            return self.find_whole(pages, pages, order, limit);
        }
        self.find_whole(block, pages, order, limit)
            .or_else(|| self.search(self.root, pages, order, limit))
    }

    /// The highest gap that fits, if some gap at or below the limit has `natural >= need`, which suffices.
    fn find_whole(&self, need: u64, pages: u64, order: u8, limit: u64) -> Option<(u32, u64)> {
        if limit >= self.top {
            return self.descend(self.root, need, pages, order);
        }
        // Each node at which the way to the limit turns right lies at or below it, with its left subtree; the
        // later turns are the higher ones. Only the last turn's gap can reach past the limit.
        let (mut at, mut hit) = (self.root, None);
        while at != NIL {
            let node = &self.nodes[at as usize];
            if node.first > limit {
                at = node.left;
                continue;
            }
            if let Some(start) = place(node.first, node.last.min(limit), pages, order) {
                hit = Some((at, Some(start)));
            } else if self.best(node.left) >= need {
                hit = Some((at, None));
            }
            at = node.right;
        }
        match hit? {
            (at, Some(start)) => Some((at, start)),
            (at, None) => self.descend(self.nodes[at as usize].left, need, pages, order),
        }
    }

    /// The highest gap of a subtree with `natural >= need`, or one above it that fits as well.
    fn descend(&self, mut at: u32, need: u64, pages: u64, order: u8) -> Option<(u32, u64)> {
        if self.best(at) < need {
            return None;
        }
        loop {
            let node = &self.nodes[at as usize];
            if self.best(node.right) >= need {
                at = node.right;
            } else if let Some(start) = place(node.first, node.last, pages, order) {
                return Some((at, start));
            } else {
                at = node.left;
            }
        }
    }

    /// The highest gap that fits, through every gap that could hold the size: for requests aligned to more than
    /// their size where no whole block is left.
    #[cold]
    fn search(&self, at: u32, pages: u64, order: u8, limit: u64) -> Option<(u32, u64)> {
        let node = &self.nodes[at as usize];
        if node.best < pages {
            return None;
        }
        if node.first <= limit {
            if let found @ Some(_) = self.search(node.right, pages, order, limit) {
                return found;
            }
            if let Some(start) = place(node.first, node.last.min(limit), pages, order) {
                return Some((at, start));
            }
        }
        self.search(node.left, pages, order, limit)
    }

    /// The gap with the highest first page below `page`, and the one with the lowest at or above it.
    fn around(&self, page: u64) -> (u32, u32) {
        let (mut below, mut above, mut at) = (NIL, NIL, self.root);
        while at != NIL {
            let node = &self.nodes[at as usize];
            if node.first < page {
                (below, at) = (at, node.right);
            } else {
                (above, at) = (at, node.left);
            }
        }
        (below, above)
    }

    /// Recomputes `best` of one node; whether it changed.
    fn pull(&mut self, at: u32) -> bool {
        let node = &self.nodes[at as usize];
        let best = natural(node.first, node.last)
            .max(self.best(node.left))
            .max(self.best(node.right));
        let is_new = best != node.best;
        self.nodes[at as usize].best = best;
        is_new
    }

    /// Recomputes `best` up the path, as far as it changes.
    fn pull_path(&mut self) {
        while let Some(at) = self.path.pop() {
            if !self.pull(at) {
                self.path.clear();
            }
        }
    }

    /// Puts `child` where the path's end leads to for `first`.
    fn hang(&mut self, first: u64, child: u32) {
        match self.path.last() {
            None => self.root = child,
            Some(&parent) => {
                let parent = &mut self.nodes[parent as usize];
                if first < parent.first {
                    parent.left = child;
                } else {
                    parent.right = child;
                }
            }
        }
    }

    /// Moves the ends of the gap that starts at `key`; its place among the others stays.
    fn set(&mut self, key: u64, first: u64, last: u64) {
        let at = self.walk_to(key);
        let node = &mut self.nodes[at as usize];
        (node.first, node.last) = (first, last);
        self.path.push(at);
        self.pull_path();
    }

    /// The gap that starts at `key`, with the path to its parent.
    fn walk_to(&mut self, key: u64) -> u32 {
        self.path.clear();
        let mut at = self.root;
        loop {
            let node = &self.nodes[at as usize];
            if node.first == key {
                return at;
            }
            debug_assert_ne!(at, NIL, "the gap exists");
            self.path.push(at);
            at = if key < node.first {
                node.left
            } else {
                node.right
            };
        }
    }

    fn insert(&mut self, first: u64, last: u64) {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        let priority = (self.seed >> 32) as u32;
        self.path.clear();
        let mut at = self.root;
        while at != NIL && self.nodes[at as usize].priority >= priority {
            let node = &self.nodes[at as usize];
            self.path.push(at);
            at = if first < node.first {
                node.left
            } else {
                node.right
            };
        }
        let (left, right) = self.split(at, first);
        let node = Node {
            first,
            last,
            best: 0,
            left,
            right,
            priority,
        };
        let new = self.new_node(node);
        self.pull(new);
        self.hang(first, new);
        self.pull_path();
    }

    fn remove(&mut self, first: u64) {
        let at = self.walk_to(first);
        let Node { left, right, .. } = self.nodes[at as usize];
        let joined = self.join(left, right);
        self.hang(first, joined);
        self.nodes[at as usize].left = self.free;
        self.free = at;
        self.pull_path();
    }

    fn new_node(&mut self, node: Node) -> u32 {
        if self.free != NIL {
            let at = self.free;
            self.free = self.nodes[at as usize].left;
            self.nodes[at as usize] = node;
            return at;
        }
        let at = u32::try_from(self.nodes.len()).expect("fewer than 2^32 gaps: 160 GiB of nodes");
        self.nodes.push(node);
        at
    }

    /// Splits a subtree into what lies below `first` and what lies above.
    fn split(&mut self, at: u32, first: u64) -> (u32, u32) {
        if at == NIL {
            return (NIL, NIL);
        }
        let node = self.nodes[at as usize];
        if node.first < first {
            let (left, right) = self.split(node.right, first);
            self.nodes[at as usize].right = left;
            self.pull(at);
            (at, right)
        } else {
            let (left, right) = self.split(node.left, first);
            self.nodes[at as usize].left = right;
            self.pull(at);
            (left, at)
        }
    }

    /// Joins two subtrees, of which the first lies below the second.
    fn join(&mut self, left: u32, right: u32) -> u32 {
        if left == NIL || right == NIL {
            return left | right;
        }
        let (l, r) = (self.nodes[left as usize], self.nodes[right as usize]);
        let top = if l.priority >= r.priority {
            self.nodes[left as usize].right = self.join(l.right, right);
            left
        } else {
            self.nodes[right as usize].left = self.join(left, r.left);
            right
        };
        self.pull(top);
        top
    }

    /// Panics where order, priorities or `best` are wrong. Linear.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn check(&self) {
        let mut end = None;
        self.for_each(|first, last| {
            assert!(end < Some(first) && first <= last, "gaps ascend apart");
            end = Some(last + 1);
        });
        let mut todo = vec![self.root];
        while let Some(at) = todo.pop() {
            if at == NIL {
                continue;
            }
            let node = &self.nodes[at as usize];
            let kids = [node.left, node.right];
            let below = kids.map(|kid| self.best(kid)).into_iter().max();
            let own = natural(node.first, node.last);
            assert_eq!(Some(node.best), below.max(Some(own)), "best is exact");
            for kid in kids {
                let priority = self.nodes[kid as usize].priority;
                assert!(priority <= node.priority, "children rank lower");
            }
            todo.extend(kids);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, tried out.
    fn natural_by_trying(first: u64, last: u64) -> u64 {
        (1..=last + 1 - first)
            .filter(|&pages| {
                let order = crate::wanted::order_of(pages);
                (first..=last).any(|at| at % (1 << order) == 0 && at + pages - 1 <= last)
            })
            .max()
            .expect("one page always fits")
    }

    #[test]
    fn natural_is_the_largest_aligned_request_that_fits() {
        for first in 0..70 {
            for last in first..140 {
                assert_eq!(
                    natural(first, last),
                    natural_by_trying(first, last),
                    "{first}..={last}"
                );
            }
        }
        let top = (1 << 52) - 1;
        assert_eq!((natural(0, top), natural(1, top)), (1 << 52, 1 << 51));
    }
}
