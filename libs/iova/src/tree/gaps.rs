//! The free gaps of a space, by address: a B+tree in an index arena, in which the highest gap that fits is found in
//! logarithmic time with alignment counted.
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
//! Shape: all leaves at one depth; a leaf holds up to [`FANOUT`] gaps and is linked to its neighbours, an inner node
//! up to [`FANOUT`] children with a separator (at or below every page of the child's gaps, above every page of
//! those before it; the first one's counts as 0) and the child's best. A full node splits, an empty one goes, a quarter-full one joins a
//! neighbour it fits into. Changes end in [`Gaps::raise_best`], which climbs only while the maximum changes.
//!
//! Cost: four or five nodes per descent at 65,536 gaps, 328 bytes each, of which two or three lines are touched; a
//! treap took 20 cache misses there and six times as long. Nothing is allocated unless the number of gaps
//! reaches a new maximum.

use alloc::{vec, vec::Vec};

use crate::{IovaRange, wanted::place};

/// Most gaps in a leaf, and children of an inner node.
const FANOUT: usize = 16;

/// No node: index 0 is never used.
const NIL: u32 = 0;

#[derive(Clone, Copy)]
struct Node {
    /// First pages of gaps, or separators of children; ascending.
    keys: [u64; FANOUT],
    /// Last pages of gaps, or the highest [`natural`] under each child.
    values: [u64; FANOUT],
    /// Children; of a leaf the two neighbours, of a free node the next one.
    kids: [u32; FANOUT],
    len: u32,
}

const EMPTY: Node = Node {
    keys: [0; FANOUT],
    values: [0; FANOUT],
    kids: [NIL; FANOUT],
    len: 0,
};

/// Where a leaf keeps its neighbours.
const BEFORE: usize = 0;
const AFTER: usize = 1;

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

impl Node {
    fn keys(&self) -> &[u64] {
        &self.keys[..self.len as usize]
    }

    /// How many keys are at or below `page`.
    #[inline]
    fn count_to(&self, page: u64) -> usize {
        self.keys().iter().filter(|&&key| key <= page).count()
    }

    /// The last child before `end` whose best is at least `need`.
    #[inline]
    fn child_with(&self, end: usize, need: u64) -> Option<usize> {
        self.values[..end].iter().rposition(|&best| best >= need)
    }

    fn insert(&mut self, at: usize, key: u64, value: u64, kid: u32) {
        let len = self.len as usize;
        self.keys.copy_within(at..len, at + 1);
        self.values.copy_within(at..len, at + 1);
        (self.keys[at], self.values[at]) = (key, value);
        if kid != NIL {
            self.kids.copy_within(at..len, at + 1);
            self.kids[at] = kid;
        }
        self.len += 1;
    }

    fn remove(&mut self, at: usize, is_leaf: bool) {
        let len = self.len as usize;
        self.keys.copy_within(at + 1..len, at);
        self.values.copy_within(at + 1..len, at);
        if !is_leaf {
            self.kids.copy_within(at + 1..len, at);
        }
        self.len -= 1;
    }
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
            at = node.kids[node.count_to(first).saturating_sub(1)];
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

    /// The path to the place of a gap of `limit` or more pages, and where in it.
    fn find(&mut self, pages: u64, order: u8, limit: u64) -> Option<u64> {
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
            let child = node.count_to(limit).saturating_sub(1);
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
        let count = self.nodes[at as usize].count_to(limit);
        if self.path.len() + 1 == self.height {
            return self.fit_in_leaf(at, count, pages, order, limit);
        }
        for child in (0..count.max(1)).rev() {
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
    fn seek(&mut self, first: u64) {
        self.path.clear();
        let mut at = self.root;
        for _ in 1..self.height {
            let node = &self.nodes[at as usize];
            let child = node.count_to(first).saturating_sub(1);
            self.path.push((at, child));
            at = node.kids[child];
        }
        let count = self.nodes[at as usize].count_to(first);
        self.path.push((at, count));
    }

    /// The path to the gap that starts at `first`; cheap where the path leads to its leaf already.
    fn go_to(&mut self, first: u64) {
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

    /// Moves the ends of the gap at the path's end; its place among the others stays.
    fn set_here(&mut self, first: u64, last: u64) {
        let (leaf, at) = self.end_of_path();
        let (old_first, old_last) = self.gap(leaf, at);
        let node = &mut self.nodes[leaf as usize];
        (node.keys[at], node.values[at]) = (first, last);
        if at == 0 && first < old_first {
            self.lower_separator(first);
        }
        if last > old_last {
            self.raise_separator(at, last);
        }
        self.raise_best(natural(old_first, old_last), natural(first, last));
    }

    /// A leaf's first gap starts lower: the separator before it, which the leaf's ancestors hold, follows.
    fn lower_separator(&mut self, first: u64) {
        let inner = self.path.len() - 1;
        let holder = self.path[..inner]
            .iter()
            .rev()
            .find(|&&(_, child)| child > 0);
        if let Some(&(at, child)) = holder {
            let key = &mut self.nodes[at as usize].keys[child];
            *key = first.min(*key);
        }
    }

    /// A leaf's last gap ends higher: the separator after it, if left from a gap that joined this one, makes way.
    fn raise_separator(&mut self, at: usize, last: u64) {
        let (leaf, _) = self.end_of_path();
        if at + 1 < self.nodes[leaf as usize].len as usize {
            return;
        }
        for level in (0..self.path.len() - 1).rev() {
            let (at, child) = self.path[level];
            let node = &mut self.nodes[at as usize];
            if child + 1 < node.len as usize {
                let key = &mut node.keys[child + 1];
                *key = (last + 1).max(*key);
                return;
            }
        }
    }

    /// After the path's last entry went from `old` to `new`: its ancestors' best.
    fn raise_best(&mut self, mut old: u64, mut new: u64) {
        for level in (1..self.path.len()).rev() {
            let (below, _) = self.path[level];
            let (at, child) = self.path[level - 1];
            let best = self.nodes[at as usize].values[child];
            if new < best {
                if old < best {
                    return;
                }
                new = self.best_of(below, level + 1 == self.height, best);
            }
            if new == best {
                return;
            }
            self.nodes[at as usize].values[child] = new;
            old = best;
        }
    }

    /// The best of a node, which is at most `most`.
    fn best_of(&self, at: u32, is_leaf: bool, most: u64) -> u64 {
        let node = &self.nodes[at as usize];
        let mut best = 0;
        for slot in 0..node.len as usize {
            best = best.max(match is_leaf {
                true => natural(node.keys[slot], node.values[slot]),
                false => node.values[slot],
            });
            if best == most {
                break;
            }
        }
        best
    }

    /// Adds a gap as number `at` of the leaf at the path's end.
    fn insert_here(&mut self, at: usize, first: u64, last: u64) {
        let (leaf, _) = self.end_of_path();
        if at == 0 {
            self.lower_separator(first);
        }
        if (self.nodes[leaf as usize].len as usize) < FANOUT {
            self.nodes[leaf as usize].insert(at, first, last, NIL);
            self.raise_separator(at, last);
            return self.raise_best(0, natural(first, last));
        }
        self.split(self.path.len() - 1);
        self.seek(first);
        let (_, at) = self.end_of_path();
        self.insert_here(at, first, last);
    }

    /// Splits the full node at this level of the path. The path is void afterwards.
    fn split(&mut self, level: usize) {
        if level == 0 {
            let kid = self.root;
            self.root = self.new_node();
            let is_leaf = self.height == 1;
            let best = self.best_of(kid, is_leaf, u64::MAX);
            self.nodes[self.root as usize].insert(0, 0, best, kid);
            self.path.insert(0, (self.root, 0));
            self.height += 1;
            return self.split(1);
        }
        let (parent, _) = self.path[level - 1];
        if self.nodes[parent as usize].len as usize == FANOUT {
            // Then there is room above; the insertion comes back here.
            return self.split(level - 1);
        }
        let (parent, child) = self.path[level - 1];
        let (left, _) = self.path[level];
        let is_leaf = level + 1 == self.height;
        let right = self.new_node();
        let mut node = self.nodes[left as usize];
        let mut upper = EMPTY;
        let half = FANOUT / 2;
        upper.len = (FANOUT - half) as u32;
        upper.keys[..FANOUT - half].copy_from_slice(&node.keys[half..]);
        upper.values[..FANOUT - half].copy_from_slice(&node.values[half..]);
        if is_leaf {
            let after = node.kids[AFTER];
            (upper.kids[BEFORE], upper.kids[AFTER]) = (left, after);
            node.kids[AFTER] = right;
            self.nodes[after as usize].kids[BEFORE] = right;
        } else {
            upper.kids[..FANOUT - half].copy_from_slice(&node.kids[half..]);
        }
        node.len = half as u32;
        self.nodes[left as usize] = node;
        self.nodes[right as usize] = upper;
        let bests = [left, right].map(|at| self.best_of(at, is_leaf, u64::MAX));
        let parent = &mut self.nodes[parent as usize];
        parent.values[child] = bests[0];
        parent.insert(child + 1, upper.keys[0], bests[1], right);
    }

    /// Removes the gap at the path's end. The path is void afterwards.
    fn remove_here(&mut self) {
        let (leaf, at) = self.end_of_path();
        let (first, last) = self.gap(leaf, at);
        self.nodes[leaf as usize].remove(at, true);
        self.raise_best(natural(first, last), 0);
        let mut level = self.path.len() - 1;
        while level > 0 && self.shrink(level) {
            level -= 1;
        }
        while self.height > 1 && self.nodes[self.root as usize].len == 1 {
            let old = self.root;
            self.root = self.nodes[old as usize].kids[0];
            self.height -= 1;
            self.free_node(old);
        }
        self.path.clear();
    }

    /// Joins a node that is a quarter full with a neighbour it fits into; whether its parent lost a child.
    fn shrink(&mut self, level: usize) -> bool {
        let (parent, child) = self.path[level - 1];
        let (node, _) = self.path[level];
        let is_leaf = level + 1 == self.height;
        let len = self.nodes[node as usize].len as usize;
        if len > FANOUT / 4 {
            return false;
        }
        let siblings = self.nodes[parent as usize].len as usize;
        if len == 0 && siblings == 1 {
            // The parent is empty with it, and joins a neighbour of its own.
            if is_leaf {
                let [before, after, ..] = self.nodes[node as usize].kids;
                self.nodes[before as usize].kids[AFTER] = after;
                self.nodes[after as usize].kids[BEFORE] = before;
            }
            self.nodes[parent as usize].len = 0;
            self.free_node(node);
            return true;
        }
        let fits = |other: usize| {
            let kid = self.nodes[parent as usize].kids[other];
            len + self.nodes[kid as usize].len as usize <= FANOUT * 3 / 4
        };
        let left = match () {
            () if child > 0 && (len == 0 || fits(child - 1)) => child - 1,
            () if child + 1 < siblings && (len == 0 || fits(child + 1)) => child,
            () => return false,
        };
        self.join(parent, left, is_leaf);
        true
    }

    /// Moves all of a child's right neighbour into it; one of them may be empty, and both fit into one.
    fn join(&mut self, parent: u32, left: usize, is_leaf: bool) {
        let mut above = self.nodes[parent as usize];
        let (kid, gone) = (above.kids[left], above.kids[left + 1]);
        let mut node = self.nodes[kid as usize];
        let mut other = self.nodes[gone as usize];
        // The first separator of an inner node counts as 0 only while it is the first.
        if !is_leaf {
            other.keys[0] = above.keys[left + 1];
        }
        let (len, more) = (node.len as usize, other.len as usize);
        node.keys[len..len + more].copy_from_slice(&other.keys[..more]);
        node.values[len..len + more].copy_from_slice(&other.values[..more]);
        if is_leaf {
            node.kids[AFTER] = other.kids[AFTER];
            self.nodes[other.kids[AFTER] as usize].kids[BEFORE] = kid;
        } else {
            node.kids[len..len + more].copy_from_slice(&other.kids[..more]);
        }
        node.len += other.len;
        above.values[left] = above.values[left].max(above.values[left + 1]);
        above.remove(left + 1, false);
        self.nodes[kid as usize] = node;
        self.nodes[parent as usize] = above;
        self.free_node(gone);
    }

    fn new_node(&mut self) -> u32 {
        if self.free != NIL {
            let at = self.free;
            self.free = self.nodes[at as usize].kids[0];
            self.nodes[at as usize] = EMPTY;
            return at;
        }
        let at = u32::try_from(self.nodes.len()).expect("fewer than 2^32 nodes: 1.3 TiB of them");
        self.nodes.push(EMPTY);
        at
    }

    fn free_node(&mut self, at: u32) {
        self.nodes[at as usize].kids[0] = self.free;
        self.free = at;
    }

    /// Panics where order, separators, links or bests are wrong. Linear.
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
            let (count, best) = self.check_node(node.kids[child], level + 1, start, end);
            assert_eq!(best, node.values[child], "best is exact");
            sum = (sum.0 + count, sum.1.max(best));
        }
        sum
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

    /// Every second page is a gap, then runs of them vanish in every order; full and nearly empty nodes lie side by
    /// side.
    #[test]
    fn nodes_split_join_and_vanish() {
        const GAPS: u64 = 6000;
        for run in [1, 3, 40, 500, GAPS] {
            let mut gaps = Gaps::new(&[]);
            gaps.top = 2 * GAPS;
            let mut left = std::collections::BTreeSet::new();
            for step in 0..GAPS {
                // 7 and 6000 have no common factor.
                let page = 1 + step * 7 % GAPS * 2;
                gaps.give(page, page);
                left.insert(page);
            }
            gaps.check();
            let mut seed = run;
            while !left.is_empty() {
                seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(11);
                let from = (seed >> 33) % (2 * GAPS);
                let doomed: Vec<u64> = left.range(from..).copied().take(run as usize).collect();
                // Downwards, each run in turn.
                for &page in doomed.iter().rev() {
                    assert_eq!(gaps.take(1, 0, page), Some(page));
                    left.remove(&page);
                }
                if left.len() % 16 == 0 || run > 3 {
                    gaps.check();
                }
                if doomed.is_empty() {
                    let &lowest = left.first().expect("not empty");
                    assert_eq!(gaps.take(1, 0, lowest), Some(lowest));
                    left.remove(&lowest);
                }
            }
            gaps.check();
            assert_eq!((gaps.height, gaps.holds(1, 1)), (1, false));
        }
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
