//! A node of the tree of gaps, and what fits into a gap.

/// Most gaps in a leaf, and children of an inner node.
pub(super) const FANOUT: usize = 16;

/// No node: index 0 is never used.
pub(super) const NIL: u32 = 0;

#[derive(Clone, Copy)]
pub(super) struct Node {
    /// First pages of gaps, or separators of children; ascending. An inner node's first means nothing.
    pub(super) keys: [u64; FANOUT],
    /// Last pages of gaps, or the highest [`natural`] under each child.
    pub(super) values: [u64; FANOUT],
    /// Children; of a leaf the two neighbours, of a free node the next one.
    pub(super) kids: [u32; FANOUT],
    pub(super) len: u32,
}

pub(super) const EMPTY: Node = Node {
    keys: [0; FANOUT],
    values: [0; FANOUT],
    kids: [NIL; FANOUT],
    len: 0,
};

/// Where a leaf keeps its neighbours.
pub(super) const BEFORE: usize = 0;
pub(super) const AFTER: usize = 1;

/// Largest number of pages that fits in `first..=last` when aligned to the power of two that holds it.
pub(super) fn natural(first: u64, last: u64) -> u64 {
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
    pub(super) fn keys(&self) -> &[u64] {
        &self.keys[..self.len as usize]
    }

    /// How many of a leaf's gaps start at or below `page`.
    #[inline]
    pub(super) fn count_to(&self, page: u64) -> usize {
        self.keys().iter().filter(|&&key| key <= page).count()
    }

    /// Which child of an inner node the place of `page` is under. The first child has no separator: whatever lies below
    /// the second one's is its, and pages far below those that it had when it became the first may come to it. So the first
    /// key is not read: it says where the child began long ago, and may be above the keys after it.
    #[inline]
    pub(super) fn child_to(&self, page: u64) -> usize {
        #[cfg(any(test, shuttle))]
        if crate::planted::has(crate::planted::Mistake::CountsFirstSeparator) {
            return self.count_to(page).saturating_sub(1);
        }
        let separators = &self.keys()[1..];
        separators.iter().filter(|&&key| key <= page).count()
    }

    /// The last child before `end` whose best is at least `need`.
    #[inline]
    pub(super) fn child_with(&self, end: usize, need: u64) -> Option<usize> {
        self.values[..end].iter().rposition(|&best| best >= need)
    }

    pub(super) fn insert(&mut self, at: usize, key: u64, value: u64, kid: u32) {
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

    pub(super) fn remove(&mut self, at: usize, is_leaf: bool) {
        let len = self.len as usize;
        self.keys.copy_within(at + 1..len, at);
        self.values.copy_within(at + 1..len, at);
        if !is_leaf {
            self.kids.copy_within(at + 1..len, at);
        }
        self.len -= 1;
    }
}
