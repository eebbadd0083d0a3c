//! Allocated ranges by first page: an open-addressed hash table with linear probing, of words that
//! are not 0.
//!
//! First pages are the allocator's own choice, so no caller can steer them into one bucket. Removal
//! shifts the followers back, so that no tombstones slow the table down with age. 16 bytes per
//! slot, at most 3/4 full; it grows by doubling and does not shrink before a reset.

use alloc::{vec, vec::Vec};

pub(super) struct Live {
    /// First pages and words, 0 in an empty slot; a power of two of them.
    slots: Vec<(u64, u64)>,
    len: usize,
}

impl Live {
    pub(super) fn new() -> Self {
        Self {
            slots: vec![(0, 0); 16],
            len: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<(u64, u64)>()
    }

    fn home(&self, first: u64) -> usize {
        let hash = first.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> (u64::BITS - self.slots.len().ilog2())) as usize
    }

    /// Returns the slot of the word of `first`, or the free one for it.
    fn slot_of(&self, first: u64) -> usize {
        let mut slot = self.home(first);
        while self.slots[slot].1 != 0 && self.slots[slot].0 != first {
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        slot
    }

    pub(super) fn get(&self, first: u64) -> Option<u64> {
        let (_, word) = self.slots[self.slot_of(first)];
        (word != 0).then_some(word)
    }

    /// Adds a word, or changes the one that is there.
    pub(super) fn set(&mut self, first: u64, word: u64) {
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            let larger = vec![(0, 0); self.slots.len() * 2];
            let old = core::mem::replace(&mut self.slots, larger);
            for (first, word) in old.into_iter().filter(|&(_, word)| word != 0) {
                let slot = self.slot_of(first);
                self.slots[slot] = (first, word);
            }
        }
        let slot = self.slot_of(first);
        self.len += usize::from(self.slots[slot].1 == 0);
        self.slots[slot] = (first, word);
    }

    /// Removes the word of `first`, which is there.
    pub(super) fn remove(&mut self, first: u64) {
        let mask = self.slots.len() - 1;
        let mut hole = self.slot_of(first);
        let mut next = hole;
        loop {
            next = (next + 1) & mask;
            if self.slots[next].1 == 0 {
                break;
            }
            // It may move back into the hole unless its home lies after the hole.
            let home = self.home(self.slots[next].0);
            if (next.wrapping_sub(home) & mask) >= (next.wrapping_sub(hole) & mask) {
                self.slots[hole] = self.slots[next];
                hole = next;
            }
        }
        self.slots[hole].1 = 0;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests;
