//! Which slots of the store are taken, and by whom; which of the free ones can be given back to what is below the store.
//!
//! A slot that was written and given back keeps its blocks, which nobody needs: trimmed, they are the file system's or the device's
//! again. That goes by chunks of 1 MiB, aligned to their size, all of whose slots are free. Until it has ended they are not: who
//! trims a slot that has been handed out again destroys a page. A pass over all chunks begins when a chunk's worth of slots has
//! been given back since the last one began.

use super::entry::{Page, Slot};

/// Free, and written since it was last trimmed.
const FREE: u32 = u32::MAX;
/// Free, and nothing is behind it that could be given back.
const UNUSED: u32 = u32::MAX - 1;
/// Being trimmed: nobody's.
const TRIMMING: u32 = u32::MAX - 2;

/// Slots of a chunk: 1 MiB.
const CHUNK: usize = 256;
/// Chunks that one look goes over, and that are trimmed together at most: 8 MiB.
const LOOK: usize = 8;

/// Slots, 4 bytes each. They are given out in order and round: pages that leave one after the other lie one after the other.
#[derive(Debug)]
pub(super) struct Slots {
    owners: Vec<u32>,
    free: usize,
    next: usize,
    chunk: usize,
    /// Being trimmed.
    trimming: usize,
    /// Given back since the last pass began.
    given_back: usize,
    /// The next chunk of the pass that is going on, if one is.
    pass: Option<usize>,
}

impl Default for Slots {
    fn default() -> Self {
        Self {
            owners: Vec::new(),
            free: 0,
            next: 0,
            chunk: CHUNK,
            trimming: 0,
            given_back: 0,
            pass: None,
        }
    }
}

impl Slots {
    /// With smaller chunks, for tests with few slots.
    #[cfg(test)]
    pub fn set_chunk(&mut self, chunk: usize) {
        self.chunk = chunk;
    }

    /// Adds `count` free ones at the end.
    pub fn add(&mut self, count: usize) {
        // Numbers have 32 bits; the last ones mean none.
        let len = self.owners.len().saturating_add(count).min(FREE as usize);
        self.free += len - self.owners.len();
        // Not as many again as there are.
        self.owners.reserve_exact(len - self.owners.len());
        self.owners.resize(len, UNUSED);
    }

    /// Bytes that are allocated.
    pub fn bytes(&self) -> usize {
        self.owners.capacity() * size_of::<u32>()
    }

    /// Without those that are being trimmed.
    pub fn free(&self) -> usize {
        self.free
    }

    /// Free or not.
    pub fn count(&self) -> usize {
        self.owners.len()
    }

    #[cfg(test)]
    pub fn taken(&self) -> usize {
        self.owners.len() - self.free - self.trimming
    }

    /// The next free one, if there is any.
    pub fn take(&mut self, page: Page) -> Option<Slot> {
        if self.free == 0 {
            return None;
        }
        debug_assert!(page.0 < TRIMMING, "numbers that mean something else");
        let (before, after) = self.owners.split_at(self.next.min(self.owners.len()));
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
        debug_assert!(*owner < TRIMMING, "a slot is given back once");
        *owner = FREE;
        self.free += 1;
        self.given_back += 1;
    }

    /// Whose it is.
    pub fn owner(&self, slot: Slot) -> Option<Page> {
        let owner = *self.owners.get(slot.0 as usize)?;
        (owner < TRIMMING).then_some(Page(owner))
    }

    /// Whether a look may find something to trim.
    pub fn may_trim(&self) -> bool {
        self.trimming == 0 && (self.pass.is_some() || self.given_back >= self.chunk)
    }

    /// Looks at the next few chunks. Of those that can be trimmed the first ones that lie side by side, the first slot and how many:
    /// they are nobody's until [`trimmed`](Self::trimmed). They are a quarter of the free ones at most.
    pub fn trim(&mut self) -> Option<(Slot, u32)> {
        if !self.may_trim() {
            return None;
        }
        let first = self.pass.take().unwrap_or_else(|| {
            self.given_back = 0;
            0
        });
        let chunks = self.owners.chunks(self.chunk).skip(first).take(LOOK);
        let can_be = |chunk: &[u32]| chunk.iter().all(is_free) && chunk.contains(&FREE);
        let are: Vec<bool> = chunks.map(can_be).collect();
        let start = are.iter().position(|is| *is).unwrap_or(are.len());
        let run = are[start..].iter().take_while(|is| **is).count();
        // Who needs slots meanwhile finds as many again and more.
        let run = run.min(self.free / 4 / self.chunk);
        let next = first + (start + run).max(1);
        self.pass = (next * self.chunk < self.owners.len()).then_some(next);
        let at = (first + start) * self.chunk;
        let end = (at + run * self.chunk).min(self.owners.len());
        let count = end.saturating_sub(at);
        if count == 0 {
            return None;
        }
        self.owners[at..end].fill(TRIMMING);
        self.free -= count;
        self.trimming = count;
        // Slots have numbers of 32 bits.
        Some((Slot(at as u32), count as u32))
    }

    /// They are free again, and nothing is behind them, as far as is known.
    pub fn trimmed(&mut self, first: Slot, count: u32) {
        let range = first.0 as usize..first.0 as usize + count as usize;
        for owner in &mut self.owners[range] {
            if *owner == TRIMMING {
                *owner = UNUSED;
                self.free += 1;
                self.trimming -= 1;
            }
        }
    }
}

fn is_free(owner: &u32) -> bool {
    *owner >= UNUSED
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of `count` slots in chunks of 4, all of which have been taken and given back, but these.
    fn used(count: usize, kept: &[u32]) -> Slots {
        let mut slots = Slots::default();
        slots.set_chunk(4);
        slots.add(count);
        for number in 0..count as u32 {
            assert_eq!(slots.take(Page(number)), Some(Slot(number)));
        }
        let given = (0..count as u32).filter(|number| !kept.contains(number));
        given.for_each(|number| slots.give_back(Slot(number)));
        slots
    }

    /// All that a pass finds.
    fn pass(slots: &mut Slots) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        while slots.may_trim() {
            if let Some((first, count)) = slots.trim() {
                assert_eq!(slots.trim(), None, "one at a time");
                found.push((first.0, count));
                slots.trimmed(first, count);
            }
        }
        found
    }

    #[test]
    fn chunks_of_free_slots_are_trimmed_once_and_eight_at_a_time() {
        let mut slots = used(256, &[6, 255]);
        // The chunk of slot 6 ends the first look, and the next one begins with it.
        let by_sevens = [(0, 4), (8, 28)];
        let by_eights = (36..228).step_by(32).map(|first| (first, 32));
        let all: Vec<_> = by_sevens
            .into_iter()
            .chain(by_eights)
            .chain([(228, 24)])
            .collect();
        assert_eq!(pass(&mut slots), all);
        assert_eq!(slots.free(), 254);
        assert_eq!(pass(&mut slots), [], "nothing was given back");
        // A chunk's worth of slots, from two chunks.
        slots.next = 10;
        let taken: Vec<Slot> = (0..4).filter_map(|page| slots.take(Page(page))).collect();
        assert_eq!(taken, [10, 11, 12, 13].map(Slot));
        taken.into_iter().for_each(|slot| slots.give_back(slot));
        assert_eq!(pass(&mut slots), [(8, 8)]);
    }

    #[test]
    fn what_is_trimmed_is_handed_out_to_nobody_until_it_has_ended() {
        let mut slots = used(160, &[]);
        assert_eq!(slots.trim(), Some((Slot(0), 32)));
        assert_eq!(slots.free(), 128);
        slots.next = 0;
        let mut taken = std::iter::from_fn(|| slots.take(Page(1)));
        assert!(taken.all(|slot| slot.0 >= 32));
        assert_eq!(slots.owner(Slot(5)), None);
        slots.trimmed(Slot(0), 32);
        assert_eq!((slots.free(), slots.take(Page(2))), (32, Some(Slot(0))));
    }

    #[test]
    fn no_more_than_a_quarter_of_the_free_ones_is_trimmed_at_a_time() {
        let kept: Vec<u32> = (0..144).collect();
        let by_ones = [(144, 4), (148, 4), (152, 4), (156, 4)];
        assert_eq!(pass(&mut used(160, &kept)), by_ones);
        assert_eq!(pass(&mut used(160, &(4..160).collect::<Vec<_>>())), []);
    }

    #[test]
    fn a_store_that_was_never_written_is_left_alone() {
        let mut slots = Slots::default();
        slots.set_chunk(4);
        slots.add(64);
        assert!(!slots.may_trim());
        // One slot of the first chunk was used again and again.
        for _ in 0..4 {
            slots.next = 0;
            let slot = slots.take(Page(1)).expect("free");
            slots.give_back(slot);
        }
        assert_eq!(pass(&mut slots), [(0, 4)]);
    }
}
