//! Ways from the root to a gap: to the highest one that fits, and to a page's place.

use super::Gaps;
use crate::wanted::place;

impl Gaps {
    /// The path to the place of a gap of `limit` or more pages, and where in it.
    pub(super) fn find(&mut self, pages: u64, order: u8, limit: u64) -> Option<u64> {
        let block = 1u64 << order;
        if pages > block >> 1 {
            return self.find_whole(pages, pages, order, limit);
        }
        self.find_whole(block, pages, order, limit).or_else(|| {
            self.path.clear();
            self.search(self.root, pages, order, limit)
        })
    }

    /// The highest gap that fits, if some gap at or below the limit has `natural >= need`, which suffices.
    fn find_whole(&mut self, need: u64, pages: u64, order: u8, limit: u64) -> Option<u64> {
        self.path.clear();
        if limit >= self.top {
            return self.descend(self.root, need, pages, order);
        }
        // All children before the one on the way to the limit lie at or below it; the deepest are the highest.
        // Only the last gap on the way can reach past the limit.
        let (mut at, mut hit) = (self.root, None);
        while self.path.len() + 1 < self.height {
            let node = &self.nodes[at as usize];
            let child = node.child_to(limit);
            if let Some(other) = node.child_with(child, need) {
                hit = Some((self.path.len(), at, other));
            }
            self.path.push((at, child));
            at = node.kids[child];
        }
        let count = self.nodes[at as usize].count_to(limit);
        if let found @ Some(_) = self.fit_in_leaf(at, count, pages, order, limit) {
            return found;
        }
        let (depth, at, child) = hit?;
        self.path.truncate(depth);
        self.path.push((at, child));
        self.descend(self.nodes[at as usize].kids[child], need, pages, order)
    }

    /// The highest gap under a node with `natural >= need`, or one above it in its leaf that fits as well.
    fn descend(&mut self, mut at: u32, need: u64, pages: u64, order: u8) -> Option<u64> {
        while self.path.len() + 1 < self.height {
            let node = &self.nodes[at as usize];
            let child = node.child_with(node.len as usize, need)?;
            self.path.push((at, child));
            at = node.kids[child];
        }
        let count = self.nodes[at as usize].len as usize;
        self.fit_in_leaf(at, count, pages, order, u64::MAX)
    }

    /// The highest place in the first `count` gaps of a leaf.
    #[inline]
    fn fit_in_leaf(
        &mut self,
        leaf: u32,
        count: usize,
        pages: u64,
        order: u8,
        limit: u64,
    ) -> Option<u64> {
        let node = &self.nodes[leaf as usize];
        let fit = |at: usize| {
            let last = node.values[at].min(limit);
            Some((at, place(node.keys[at], last, pages, order)?))
        };
        let (at, start) = (0..count).rev().find_map(fit)?;
        self.path.push((leaf, at));
        Some(start)
    }

    /// The highest gap that fits, through every gap that could hold the size: for requests aligned to more than
    /// their size where no whole block is left.
    #[cold]
    fn search(&mut self, at: u32, pages: u64, order: u8, limit: u64) -> Option<u64> {
        let node = &self.nodes[at as usize];
        if self.path.len() + 1 == self.height {
            return self.fit_in_leaf(at, node.count_to(limit), pages, order, limit);
        }
        for child in (0..=node.child_to(limit)).rev() {
            let node = &self.nodes[at as usize];
            if node.values[child] >= pages {
                let kid = node.kids[child];
                self.path.push((at, child));
                if let found @ Some(_) = self.search(kid, pages, order, limit) {
                    return found;
                }
                self.path.pop();
            }
        }
        None
    }

    /// The path to where a gap from `first` on belongs: its leaf, and how many gaps of it lie below.
    pub(super) fn seek(&mut self, first: u64) {
        self.path.clear();
        let mut at = self.root;
        for _ in 1..self.height {
            let node = &self.nodes[at as usize];
            let child = node.child_to(first);
            self.path.push((at, child));
            at = node.kids[child];
        }
        let count = self.nodes[at as usize].count_to(first);
        self.path.push((at, count));
    }

    /// The path to the gap that starts at `first`; cheap where the path leads to its leaf already.
    pub(super) fn go_to(&mut self, first: u64) {
        let is_there = |&(leaf, _): &(u32, usize)| {
            self.nodes[leaf as usize]
                .keys()
                .iter()
                .position(|&key| key == first)
        };
        let slot = self.path.last().and_then(is_there);
        match (slot, self.path.last_mut()) {
            (Some(slot), Some(end)) => end.1 = slot,
            _ => {
                self.seek(first);
                let end = self.path.last_mut().expect("the path was just found");
                end.1 -= 1;
                debug_assert_eq!(self.nodes[end.0 as usize].keys[end.1], first);
            }
        }
    }
}
