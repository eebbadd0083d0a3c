//! State that one core owns in each zone: lists of its chunks and words, under a lock of that core.
//!
//! A core takes its own lock for whatever is not the common path: to refill and flush its free
//! lists, to collect what remote cores freed, to take and to give back chunks. The common path
//! needs nothing of this: it works on the free lists, which are plain memory of the handle, and on
//! the states of pages that are allocated or in one of these lists. So the lists here can be worked
//! on by another core, with the lock held, while the owner rests or is in the middle of its common
//! path: a core that finds no room does for the others what they would do if they ran
//! ([`CoreZones::give_up_unused`]).
//!
//! Locks: a core waits for its own lock only, and takes those of others only where they are free,
//! one at a time.

use alloc::vec::Vec;

use super::layout::{Chunk, FULL, MARKS, MAX_ORDER, get, set, word_of};
use super::zone::MAX_ZONES;
use crate::CoreId;

/// Of [`CoreZone::marked`]: chunks with marks have come since everything was last collected.
const UNKNOWN: u64 = u64::MAX;

/// State of one core, for all zones.
#[derive(Debug)]
pub(super) struct CoreZones {
    pub(super) id: CoreId,
    /// The owner of its chunks.
    pub(super) owner: u64,
    /// One per zone, highest first; those past the last zone are never reached.
    pub(super) zones: [CoreZone; MAX_ZONES],
}

/// State of one core in one zone.
///
/// A free range of a word is in the word (its `held` bit is clear) or in a free list
/// ([`FreeLists`](super::free_lists::FreeLists)) of the owner (it is set, as it is for an allocated
/// one). A word of a class with something free in it is in `partial`, a full one nowhere. An owned
/// chunk with an open word is in `roomy`. Every owned chunk is in `own`.
#[derive(Debug)]
pub(super) struct CoreZone {
    /// First pages of words of each class with something free. Has room for every word of the
    /// class, so that a free allocates no memory.
    pub(super) partial: [Vec<u64>; MAX_ORDER + 1],
    /// Words of each class.
    pub(super) words: [usize; MAX_ORDER + 1],
    /// First pages of chunks with open words.
    pub(super) roomy: Vec<u64>,
    /// First pages of all chunks of this core.
    pub(super) own: Vec<u64>,
    /// Words that became empty since the last sweep.
    pub(super) emptied: usize,
    /// Number of chunks that may be searched for ranges that remote cores freed. Each search for a
    /// word adds 8, so that collecting costs a bounded share however many chunks there are.
    credit: usize,
    /// Nothing of this core's own has a range of this order, or a larger one, at or below this
    /// page, unless it was freed since.
    exhausted_below: Option<(usize, u64)>,
    /// Value of [`Published::marked`](super::Published) at which this core last collected all of
    /// this zone's chunks; and the chunks that remote cores may mark without raising it.
    pub(super) marked: u64,
    pub(super) unannounced: Vec<u64>,
    /// The last call for drains of the zone that was answered.
    pub(super) answered: u64,
}

impl CoreZones {
    pub(super) fn new(id: CoreId) -> Self {
        Self {
            id,
            owner: id.0 as u64 + 1,
            zones: core::array::from_fn(|_| CoreZone::new(0)),
        }
    }

    /// Whether remote cores may free in a chunk of this core without saying so.
    pub(super) fn has_unannounced(&self) -> bool {
        self.zones.iter().any(|zone| !zone.unannounced.is_empty())
    }

    /// Chunks of all zones.
    pub(super) fn chunks(&self) -> usize {
        self.zones.iter().map(|zone| zone.own.len()).sum()
    }
}

impl CoreZone {
    pub(super) fn new(answered: u64) -> Self {
        Self {
            partial: Default::default(),
            words: [0; MAX_ORDER + 1],
            roomy: Vec::new(),
            own: Vec::new(),
            emptied: 0,
            credit: 0,
            exhausted_below: None,
            marked: UNKNOWN,
            unannounced: Vec::new(),
            answered,
        }
    }

    /// One more chunk with open words.
    pub(super) fn add_chunk(&mut self, page: u64) {
        self.own.push(page);
        self.roomy.push(page);
        self.exhausted_below = None;
    }

    /// A chunk that came with marks is one more that remote cores may mark without saying so.
    pub(super) fn watch(&mut self, chunk: &Chunk) {
        if chunk.tag() & MARKS != 0 {
            self.marked = UNKNOWN;
        }
    }

    /// Returns ranges to their word; `base` is its first page.
    pub(super) fn unhold(&mut self, chunk: &Chunk, base: u64, bits: u64) {
        let word = word_of(base);
        let order = chunk.order(word);
        let before = get(chunk.held(word));
        let after = before & !bits;
        set(chunk.held(word), after);
        self.exhausted_below = None;
        if before == FULL[order] {
            self.partial[order].push(base);
        }
        if after == 0 {
            self.emptied += 1;
        }
    }

    /// One more word of a class, with something free in it or not.
    pub(super) fn add_word(&mut self, order: usize) {
        self.words[order] += 1;
        self.exhausted_below = None;
        let missing = self.words[order].saturating_sub(self.partial[order].len());
        self.partial[order].reserve(missing);
    }

    /// One word of a class less, which is in no list any more.
    pub(super) fn drop_word(&mut self, order: usize) {
        self.words[order] -= 1;
    }

    /// Words with something free.
    pub(super) fn partial_words(&self) -> usize {
        self.partial.iter().map(Vec::len).sum()
    }

    pub(super) fn earn(&mut self, chunks: usize) {
        self.credit += chunks;
    }

    /// Whether so many chunks may be looked at.
    pub(super) fn pay(&mut self, chunks: usize) -> bool {
        let has_credit = self.credit >= chunks;
        if has_credit {
            self.credit -= chunks;
        }
        has_credit
    }

    /// Whether it is known that nothing of this core's own will do.
    pub(super) fn is_exhausted(&self, order: usize, bound: u64) -> bool {
        self.exhausted_below
            .is_some_and(|(least, most)| order >= least && bound <= most)
    }

    pub(super) fn set_exhausted(&mut self, order: usize, bound: u64) {
        self.exhausted_below = Some((order, bound));
    }
}
