//! The pins of mappings that a reuse cache keeps which has no room for them: found by the first page, one line each.
//!
//! An idle mapping is pinned, so that a second unmap of it, by any core, is refused by the allocator, and its leaf
//! table stays. Open addressing with linear probing; a removal shifts its successors back, so there are no tombstones.
//! Grows by doubling when three quarters are used, which a cache with a quota does at most at the start.

use alloc::{boxed::Box, vec::Vec};

use iova::{IovaPfn, Pinned};

/// Pins by first page.
pub(super) struct IdlePins {
    slots: Box<[Option<Pinned>]>,
    len: usize,
}

fn empty(slots: usize) -> Box<[Option<Pinned>]> {
    (0..slots)
        .map(|_| None)
        .collect::<Vec<_>>()
        .into_boxed_slice()
}

impl IdlePins {
    /// Room for `expected` pins before it grows.
    pub(super) fn new(expected: usize) -> Self {
        Self {
            slots: empty((expected.max(8) * 2).next_power_of_two()),
            len: 0,
        }
    }

    /// Fibonacci hashing: neighbours of a chunk spread, and the high bits are the good ones.
    #[inline]
    fn home(&self, page: IovaPfn) -> usize {
        let hash = page.raw().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> 32) as usize & (self.slots.len() - 1)
    }

    #[inline]
    pub(super) fn insert(&mut self, pinned: Pinned) {
        if self.len * 4 >= self.slots.len() * 3 {
            self.grow();
        }
        let mut at = self.home(pinned.range().first());
        while self.slots[at].is_some() {
            at = (at + 1) & (self.slots.len() - 1);
        }
        self.slots[at] = Some(pinned);
        self.len += 1;
    }

    #[cold]
    fn grow(&mut self) {
        let larger = empty(self.slots.len() * 2);
        let old = core::mem::replace(&mut self.slots, larger);
        self.len = 0;
        for pinned in old.into_iter().flatten() {
            self.insert(pinned);
        }
    }

    /// Takes out the pin of the mapping that starts at `page`.
    #[inline]
    pub(super) fn remove(&mut self, page: IovaPfn) -> Option<Pinned> {
        let mask = self.slots.len() - 1;
        let mut hole = self.home(page);
        loop {
            match &self.slots[hole] {
                None => return None,
                Some(pinned) if pinned.range().first() == page => break,
                Some(_) => hole = (hole + 1) & mask,
            }
        }
        let found = self.slots[hole].take();
        self.len -= 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let Some(pinned) = &self.slots[at] else {
                return found;
            };
            // It may move back to the hole unless its home lies after the hole.
            let home = self.home(pinned.range().first());
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.slots[hole] = self.slots[at].take();
                hole = at;
            }
        }
    }
}
