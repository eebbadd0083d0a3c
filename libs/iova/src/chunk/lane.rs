//! What one core keeps of one zone: plain memory of its handle, nobody else reads it.

use alloc::vec::Vec;

use super::layout::{Chunk, FULL, MAX_ORDER, get, set, word_of};

/// One core's words and chunks of one zone.
///
/// A free range of a word is in the word (its `held` bit is clear) or in [`Ready`](super::ready::Ready) (it is set, as it is
/// for an allocated one). A word of a class with something free in it is in `partial`, a full one nowhere. An owned chunk with
/// an open word is in `roomy`. Every owned chunk is in `own`.
#[derive(Debug)]
pub(super) struct Lane {
    /// Last page of the zone.
    pub(super) last: u64,
    /// First pages of words of each class with something free. Has room for every word of the class, so that a free
    /// allocates no memory.
    pub(super) partial: [Vec<u64>; MAX_ORDER + 1],
    /// Words of each class.
    pub(super) words: [usize; MAX_ORDER + 1],
    /// First pages of chunks with open words.
    pub(super) roomy: Vec<u64>,
    /// First pages of all chunks of this core.
    pub(super) own: Vec<u64>,
    /// Emptied chunks that wait to be retired: in no list, still tagged as this core's.
    pub(super) leaving: Vec<u64>,
    /// Words that became empty since the last sweep.
    pub(super) emptied: usize,
    /// How many chunks may be looked at for ranges that strangers freed: 8 more with each look for a word, so that looking
    /// costs a bounded share however many chunks there are.
    pub(super) credit: usize,
}

impl Lane {
    pub(super) fn new(last: u64) -> Self {
        Self {
            last,
            partial: Default::default(),
            words: [0; MAX_ORDER + 1],
            roomy: Vec::new(),
            own: Vec::new(),
            leaving: Vec::new(),
            emptied: 0,
            credit: 0,
        }
    }

    /// Returns ranges to their word; `base` is its first page.
    pub(super) fn unhold(&mut self, chunk: &Chunk, base: u64, order: usize, bits: u64) {
        let before = get(chunk.held(word_of(base)));
        let after = before & !bits;
        set(chunk.held(word_of(base)), after);
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
        let missing = self.words[order].saturating_sub(self.partial[order].len());
        self.partial[order].reserve(missing);
    }
}
