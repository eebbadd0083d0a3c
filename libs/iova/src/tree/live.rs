//! The ranges that are out, by first page: an open-addressed hash table with linear probing.
//!
//! First pages are the allocator's own choice, so nobody steers them into one bucket; removal shifts the followers
//! back, so that no tombstones slow the table down with age. 16 bytes per slot, at most 3/4 full; it grows by
//! doubling and does not shrink before a reset.

use alloc::{vec, vec::Vec};

#[derive(Clone, Copy)]
struct Slot {
    first: u64,
    /// 0 in an empty slot; [`PINNED`] may be set.
    pages: u64,
}

/// Set in the size of a range that is pinned (sizes are at most 2^52).
const PINNED: u64 = 1 << 63;
const EMPTY: Slot = Slot { first: 0, pages: 0 };
const FEWEST: usize = 16;

pub(super) struct Live {
    /// A power of two of them.
    slots: Vec<Slot>,
    len: usize,
}

/// What is known of a first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    slot: usize,
    pub(super) pages: u64,
    pub(super) is_pinned: bool,
}

impl Live {
    pub(super) fn new() -> Self {
        Self {
            slots: vec![EMPTY; FEWEST],
            len: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    fn home(&self, first: u64) -> usize {
        let hash = first.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> (u64::BITS - self.slots.len().ilog2())) as usize
    }

    pub(super) fn find(&self, first: u64) -> Option<Found> {
        let mut slot = self.home(first);
        loop {
            let Slot { first: at, pages } = self.slots[slot];
            if pages == 0 {
                return None;
            }
            if at == first {
                return Some(Found {
                    slot,
                    pages: pages & !PINNED,
                    is_pinned: pages & PINNED != 0,
                });
            }
            slot = (slot + 1) & (self.slots.len() - 1);
        }
    }

    /// Adds a first page that is not there.
    pub(super) fn insert(&mut self, first: u64, pages: u64) {
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            let larger = vec![EMPTY; self.slots.len() * 2];
            let old = core::mem::replace(&mut self.slots, larger);
            for slot in old.into_iter().filter(|slot| slot.pages != 0) {
                self.put(slot);
            }
        }
        self.put(Slot { first, pages });
        self.len += 1;
    }

    fn put(&mut self, new: Slot) {
        let mut slot = self.home(new.first);
        while self.slots[slot].pages != 0 {
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        self.slots[slot] = new;
    }

    pub(super) fn set_pinned(&mut self, found: Found, is_pinned: bool) {
        self.slots[found.slot].pages = found.pages | if is_pinned { PINNED } else { 0 };
    }

    pub(super) fn remove(&mut self, found: Found) {
        let mask = self.slots.len() - 1;
        let mut hole = found.slot;
        let mut next = hole;
        loop {
            next = (next + 1) & mask;
            if self.slots[next].pages == 0 {
                break;
            }
            // It may move back into the hole unless its home lies after the hole.
            let home = self.home(self.slots[next].first);
            if (next.wrapping_sub(home) & mask) >= (next.wrapping_sub(hole) & mask) {
                self.slots[hole] = self.slots[next];
                hole = next;
            }
        }
        self.slots[hole] = EMPTY;
        self.len -= 1;
    }

    /// Every first page and size, in no order.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        let used = self.slots.iter().filter(|slot| slot.pages != 0);
        used.map(|slot| (slot.first, slot.pages & !PINNED))
    }
}

#[cfg(test)]
mod tests;
