//! Changes of the gap at the path's end, and what follows from them: separators, the best of nodes, nodes that split,
//! join and vanish.

use super::Gaps;
use super::node::{AFTER, BEFORE, EMPTY, FANOUT, NIL, natural};

impl Gaps {
    /// Moves the ends of the gap at the path's end; its place among the others stays.
    pub(super) fn set_here(&mut self, first: u64, last: u64) {
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
    pub(super) fn best_of(&self, at: u32, is_leaf: bool, most: u64) -> u64 {
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
    pub(super) fn insert_here(&mut self, at: usize, first: u64, last: u64) {
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
    pub(super) fn remove_here(&mut self) {
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
        // What was the first child there is one of others here, and needs its separator.
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
}
