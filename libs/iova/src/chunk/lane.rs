//! What one core keeps of one zone: plain memory of its handle, nobody else reads it.

use alloc::vec::Vec;

use super::layout::{Chunk, FULL, MARKS, MAX_ORDER, get, set, word_of};

/// Of [`Lane::marked`]: chunks with marks have come since the last look.
const UNKNOWN: u64 = u64::MAX;

/// One core's words and chunks of one zone.
///
/// A free range of a word is in the word (its `held` bit is clear) or in [`Ready`](super::ready::Ready) (it is set, as it is
/// for an allocated one). A word of a class with something free in it is in `partial`, a full one nowhere. An owned chunk with
/// an open word is in `roomy`. Every owned chunk is in `own`.
#[derive(Debug)]
pub(super) struct Lane {
    /// First pages of words of each class with something free. Has room for every word of the class, so that a free
    /// allocates no memory.
    pub(super) partial: [Vec<u64>; MAX_ORDER + 1],
    /// Words of each class.
    pub(super) words: [usize; MAX_ORDER + 1],
    /// First pages of chunks with open words.
    pub(super) roomy: Vec<u64>,
    /// First pages of all chunks of this core.
    pub(super) own: Vec<u64>,
    /// Words that became empty since the last sweep.
    pub(super) emptied: usize,
    /// How many chunks may be looked at for ranges that strangers freed, or in search of a place: 8 more with each look for a
    /// word and 64 more with each allocation that fails, so that looking costs a bounded share however many chunks there are.
    credit: usize,
    /// Nothing of this core's own has a range of this order, or a larger one, at or below this page, unless it was freed since.
    hopeless: Option<(usize, u64)>,
    /// How often strangers had marked chunks of this core when it last looked at all of this zone's, and which of these they
    /// may mark without saying so.
    pub(super) marked: u64,
    pub(super) restless: Vec<u64>,
    /// The last call for drains of the zone that was answered.
    pub(super) answered: u64,
}

impl Lane {
    pub(super) fn new(answered: u64) -> Self {
        Self {
            partial: Default::default(),
            words: [0; MAX_ORDER + 1],
            roomy: Vec::new(),
            own: Vec::new(),
            emptied: 0,
            credit: 0,
            hopeless: None,
            marked: UNKNOWN,
            restless: Vec::new(),
            answered,
        }
    }

    /// One more chunk with open words.
    pub(super) fn add_chunk(&mut self, page: u64) {
        self.own.push(page);
        self.roomy.push(page);
        self.hopeless = None;
    }

    /// A chunk that came with marks is one more that strangers may mark without saying so.
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
        self.hopeless = None;
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
        self.hopeless = None;
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

    /// Whether it is known that nothing of our own will do.
    pub(super) fn is_hopeless(&self, order: usize, bound: u64) -> bool {
        self.hopeless
            .is_some_and(|(least, most)| order >= least && bound <= most)
    }

    pub(super) fn give_up(&mut self, order: usize, bound: u64) {
        self.hopeless = Some((order, bound));
    }
}
