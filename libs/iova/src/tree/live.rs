//! Map from the first page of an allocated range to a word that is not 0: an open-addressed hash
//! table with linear probing.
//!
//! The allocator chooses the first pages, so no caller can steer them into one bucket. Removal
//! shifts the followers back, so that no tombstones slow the table down with age. 16 bytes per
//! slot, at most 3/4 full; it grows by doubling and does not shrink before a reset.

use alloc::{vec, vec::Vec};

/// The map. See the module documentation.
pub(super) struct Live {
    /// Pairs of first page and word; the word is 0 in an empty slot. Their number is a power of
    /// two.
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

    /// Returns the slot at which probing for `first` begins.
    fn home(&self, first: u64) -> usize {
        let hash = first.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> (u64::BITS - self.slots.len().ilog2())) as usize
    }

    /// Returns the slot that holds `first`, or the empty one at which it would be inserted.
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

    /// Sets the word of `first`, and adds an entry if there is none.
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

    /// Removes the entry of `first`, which exists.
    pub(super) fn remove(&mut self, first: u64) {
        let mask = self.slots.len() - 1;
        let mut hole = self.slot_of(first);
        let mut next = hole;
        loop {
            next = (next + 1) & mask;
            if self.slots[next].1 == 0 {
                break;
            }
            // The entry may move back into the hole unless its home lies after the hole.
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
