//! Slots of the store: the page of each, and which free ones can be discarded from the file system
//! or device below the store.
//!
//! A slot that was written and freed keeps its blocks, which no page needs: a trim returns them to
//! the file system or the device. It works on chunks of 1 MiB, aligned to their size, all of whose
//! slots are free. Until a trim has ended its slots are not free: a slot handed out meanwhile would
//! lose its page. A pass over all chunks begins when a chunk's worth of slots has been freed since
//! the last one began.
//!
//! ```text
//!            take                give_back             trim                trimmed
//! UNUSED ───────────▶ a page's ────────────▶ FREE ───────────▶ TRIMMING ───────────▶ UNUSED
//!   └─────────────────────── trim, in a chunk with a FREE one ────▲
//! ```
//! A FREE slot can be taken as well.

use super::entry::{Page, Slot};

/// Free, and written since it was last trimmed.
const FREE: u32 = u32::MAX;
/// Free, with no blocks behind it that could be discarded.
const UNUSED: u32 = u32::MAX - 1;
/// Being trimmed: belongs to no page.
const TRIMMING: u32 = u32::MAX - 2;

/// Slots of a chunk: 1 MiB.
const CHUNK: usize = 256;
/// Chunks that one search covers, and that are trimmed together at most: 8 MiB.
const SEARCH: usize = 8;

/// Slots, 4 bytes each. They are handed out in ascending order, round robin, so pages that leave in
/// succession get adjacent slots.
#[derive(Debug, Default)]
pub struct Slots {
    owners: Vec<u32>,
    free: usize,
    next: usize,
    /// Number of slots being trimmed.
    trimming: usize,
    pass: TrimPass,
}

/// Pass over the chunks, in search of those that can be trimmed.
#[derive(Debug)]
struct TrimPass {
    is_enabled: bool,
    /// Slots of a chunk.
    chunk: usize,
    /// Slots freed since the last pass began.
    given_back: usize,
    /// Next chunk of the current pass, if there is one.
    next: Option<usize>,
}

impl Default for TrimPass {
    fn default() -> Self {
        Self {
            is_enabled: false,
            chunk: CHUNK,
            given_back: 0,
            next: None,
        }
    }
}

impl TrimPass {
    /// Returns whether a pass is under way, or enough has been freed for another one.
    fn has_work(&self) -> bool {
        self.is_enabled && (self.next.is_some() || self.given_back >= self.chunk)
    }

    /// Searches the next few chunks. Returns the first adjacent ones that can be trimmed, at most
    /// `most`: the position of their first slot, and that behind their last.
    fn search(&mut self, owners: &[u32], most: usize) -> (usize, usize) {
        let first = self.next.take().unwrap_or_else(|| {
            self.given_back = 0;
            0
        });
        let chunks = owners.chunks(self.chunk).skip(first).take(SEARCH);
        let can_be = |chunk: &[u32]| chunk.iter().all(is_free) && chunk.contains(&FREE);
        let are: Vec<bool> = chunks.map(can_be).collect();
        let start = are.iter().position(|is| *is).unwrap_or(are.len());
        let run = are[start..].iter().take_while(|is| **is).count();
        let run = run.min(most / self.chunk);
        let next = first + (start + run).max(1);
        self.next = (next * self.chunk < owners.len()).then_some(next);
        let at = (first + start) * self.chunk;
        (at, (at + run * self.chunk).min(owners.len()))
    }
}

impl Slots {
    /// Sets smaller chunks, for tests with few slots.
    #[cfg(test)]
    pub fn set_chunk(&mut self, chunk: usize) {
        self.pass.chunk = chunk;
    }

    /// Adds `count` free slots at the end.
    pub fn add(&mut self, count: usize) {
        // Numbers have 32 bits; the last ones mean that there is no page.
        let len = self.owners.len().saturating_add(count).min(FREE as usize);
        self.free += len - self.owners.len();
        // Exact: the vector must not double.
        self.owners.reserve_exact(len - self.owners.len());
        self.owners.resize(len, UNUSED);
    }

    /// Returns the bytes that are allocated.
    pub fn bytes(&self) -> usize {
        self.owners.capacity() * size_of::<u32>()
    }

    /// Returns the number of free slots, without those that are being trimmed.
    pub fn free(&self) -> usize {
        self.free
    }

    /// Returns the number of slots, free or not.
    pub fn count(&self) -> usize {
        self.owners.len()
    }

    #[cfg(test)]
    pub fn taken(&self) -> usize {
        self.owners.len() - self.free - self.trimming
    }

    /// Takes the next free slot, if there is one.
    pub(super) fn take(&mut self, page: Page) -> Option<Slot> {
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
        // Below FREE, as `add` ensures.
        Some(Slot(at as u32))
    }

    pub(super) fn give_back(&mut self, slot: Slot) {
        let owner = &mut self.owners[slot.0 as usize];
        debug_assert!(*owner < TRIMMING, "a slot is given back once");
        *owner = FREE;
        self.free += 1;
        self.pass.given_back += 1;
    }

    /// Returns the page that the slot belongs to.
    pub fn owner(&self, slot: Slot) -> Option<Page> {
        let owner = *self.owners.get(slot.0 as usize)?;
        (owner < TRIMMING).then_some(Page(owner))
    }

    /// Enables or disables trimming.
    pub fn set_trims(&mut self, is_enabled: bool) {
        self.pass.is_enabled = is_enabled;
    }

    /// Returns whether a search may find something to trim.
    pub fn may_trim(&self) -> bool {
        self.trimming == 0 && self.pass.has_work()
    }

    /// Searches the next few chunks. Returns the first adjacent slots that can be trimmed, as the
    /// first slot and their number: they belong to no page until [`trimmed`](Self::trimmed). They
    /// are a quarter of the free ones at most.
    pub fn trim(&mut self) -> Option<(Slot, u32)> {
        if !self.may_trim() {
            return None;
        }
        // Pages that leave meanwhile find at least three times as many free slots.
        let (at, end) = self.pass.search(&self.owners, self.free / 4);
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

    /// Frees the slots again: they have no blocks, as far as is known.
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

    /// Returns `count` slots in chunks of 4, all of which have been taken and freed, except these.
    fn used(count: usize, kept: &[u32]) -> Slots {
        let mut slots = Slots::default();
        slots.set_chunk(4);
        slots.set_trims(true);
        slots.add(count);
        for number in 0..count as u32 {
            assert_eq!(slots.take(Page(number)), Some(Slot(number)));
        }
        let given = (0..count as u32).filter(|number| !kept.contains(number));
        given.for_each(|number| slots.give_back(Slot(number)));
        slots
    }

    /// Returns all that a pass finds.
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
        // The chunk of slot 6 ends the first search, and the next one begins with it.
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
    fn slots_are_not_handed_out_until_their_trim_has_ended() {
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
        slots.set_trims(true);
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
