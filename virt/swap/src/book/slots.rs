//! Which slots of the store are taken, and by whom.

use super::entry::{Page, Slot};

const FREE: u32 = u32::MAX;

/// Slots, 4 bytes each. They are given out in order and round: pages that leave one after the other lie one after the other.
#[derive(Debug, Default)]
pub(super) struct Slots {
    owners: Vec<u32>,
    free: usize,
    next: usize,
}

impl Slots {
    /// Adds `count` free ones at the end.
    pub fn add(&mut self, count: usize) {
        // Numbers have 32 bits; the last one means none.
        let len = self.owners.len().saturating_add(count).min(FREE as usize);
        self.free += len - self.owners.len();
        // Not as many again as there are.
        self.owners.reserve_exact(len - self.owners.len());
        self.owners.resize(len, FREE);
    }

    /// Bytes that are allocated.
    pub fn bytes(&self) -> usize {
        self.owners.capacity() * size_of::<u32>()
    }

    pub fn free(&self) -> usize {
        self.free
    }

    /// Free or not.
    pub fn count(&self) -> usize {
        self.owners.len()
    }

    #[cfg(test)]
    pub fn taken(&self) -> usize {
        self.owners.len() - self.free
    }

    /// The next free one, if there is any.
    pub fn take(&mut self, page: Page) -> Option<Slot> {
        if self.free == 0 {
            return None;
        }
        let (before, after) = self.owners.split_at(self.next.min(self.owners.len()));
        let is_free = |owner: &u32| *owner == FREE;
        let at = match after.iter().position(is_free) {
            Some(at) => before.len() + at,
            None => before.iter().position(is_free)?,
        };
        self.owners[at] = page.0;
        self.free -= 1;
        self.next = at + 1;
        // Below FREE, as `add` sees to.
        Some(Slot(at as u32))
    }

    pub fn give_back(&mut self, slot: Slot) {
        let owner = &mut self.owners[slot.0 as usize];
        debug_assert_ne!(*owner, FREE, "a slot is given back once");
        *owner = FREE;
        self.free += 1;
    }

    /// Whose it is.
    pub fn owner(&self, slot: Slot) -> Option<Page> {
        let owner = *self.owners.get(slot.0 as usize)?;
        (owner != FREE).then_some(Page(owner))
    }
}
