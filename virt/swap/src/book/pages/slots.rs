//! Slots of the store: which are taken, and by which page; which of the free ones can be given
//! back to what is below the store.
//!
//! A slot that was written and given back keeps its blocks, which no page needs: trimmed, they
//! are the file system's or the device's again. That goes by chunks of 1 MiB, aligned to their
//! size, all of whose slots are free. Until a trim has ended its slots are not: one that was
//! handed out meanwhile would lose its page. A pass over all chunks begins when a chunk's worth
//! of slots has been given back since the last one began.
//!
//! ```text
//!            take                give_back             trim                trimmed
//! UNUSED ───────────▶ a page's ────────────▶ FREE ───────────▶ TRIMMING ───────────▶ UNUSED
//!   └─────────────────────── trim, in a chunk with a FREE one ────▲
//! ```
//! A FREE one can be taken as well.

use super::entry::{Page, Slot};

/// Free, and written since it was last trimmed.
const FREE: u32 = u32::MAX;
/// Free, and nothing is behind it that could be given back.
const UNUSED: u32 = u32::MAX - 1;
/// Being trimmed: no page's.
const TRIMMING: u32 = u32::MAX - 2;

/// Slots of a chunk: 1 MiB.
const CHUNK: usize = 256;
/// Chunks that one search goes over, and that are trimmed together at most: 8 MiB.
const SEARCH: usize = 8;

/// Slots, 4 bytes each. They are given out in order and round: pages that leave one after the
/// other lie one after the other.
#[derive(Debug, Default)]
pub struct Slots {
    owners: Vec<u32>,
    free: usize,
    next: usize,
    /// Being trimmed.
    trimming: usize,
    pass: TrimPass,
}

/// Pass over the chunks, in search of those that can be trimmed.
#[derive(Debug)]
struct TrimPass {
    is_enabled: bool,
    /// Slots of a chunk.
    chunk: usize,
    /// Slots given back since the last pass began.
    given_back: usize,
    /// The next chunk of the pass that is going on, if one is.
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
    /// Whether a pass is going on, or there is enough for another one.
    fn has_work(&self) -> bool {
        self.is_enabled && (self.next.is_some() || self.given_back >= self.chunk)
    }

    /// Searches the next few chunks. Of those that can be trimmed, returns the first that lie side
    /// by side, at most so many: the position of their first slot, and that behind their last.
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
    /// With smaller chunks, for tests with few slots.
    #[cfg(test)]
    pub fn set_chunk(&mut self, chunk: usize) {
        self.pass.chunk = chunk;
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

    /// Takes the next free one, if there is any.
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
        // Below FREE, as `add` sees to.
        Some(Slot(at as u32))
    }

    pub(super) fn give_back(&mut self, slot: Slot) {
        let owner = &mut self.owners[slot.0 as usize];
        debug_assert!(*owner < TRIMMING, "a slot is given back once");
        *owner = FREE;
        self.free += 1;
        self.pass.given_back += 1;
    }

    /// The page whose it is.
    pub fn owner(&self, slot: Slot) -> Option<Page> {
        let owner = *self.owners.get(slot.0 as usize)?;
        (owner < TRIMMING).then_some(Page(owner))
    }

    /// Has slots trimmed from now on, or none.
    pub fn set_trims(&mut self, is_enabled: bool) {
        self.pass.is_enabled = is_enabled;
    }

    /// Whether a search may find something to trim.
    pub fn may_trim(&self) -> bool {
        self.trimming == 0 && self.pass.has_work()
    }

    /// Searches the next few chunks. Of those that can be trimmed, returns the first that lie
    /// side by side, as the first slot and how many: they are no page's until
    /// [`trimmed`](Self::trimmed). They are a quarter of the free ones at most.
    pub fn trim(&mut self) -> Option<(Slot, u32)> {
        if !self.may_trim() {
            return None;
        }
        // Pages that leave meanwhile find as many again and more.
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

    /// Frees them again: nothing is behind them, as far as is known.
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
        slots.set_trims(true);
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
