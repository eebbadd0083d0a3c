//! Taking back what strangers freed, and taking over what nobody owns.
//!
//! A look reads the tags of this core's chunks, and is paid for by the looks for words since the last one
//! ([`Lane::credit`](super::lane::Lane::credit)). It goes for words that strangers have emptied ([`Look::Ripe`]), so as not to
//! disturb those they are filling, and for everything before a core takes one more chunk ([`Look::All`]).

use lines::Ordering;

use super::handle::Local;
use super::layout::{
    Chunk, FULL, MARKS, MAX_ORDER, PENDING, RIPE, WORD_PAGES, WORDS, class_of, get, set,
};
use super::slow::known;
use super::{Mutant, Shared, plants};

/// What to look for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// Words that strangers have emptied.
    Ripe,
    /// Everything that strangers freed.
    All,
}

impl Local {
    /// Takes over an orphan that the caller took out of the zone's set.
    pub(super) fn adopt(&mut self, shared: &Shared, lane: usize, page: u64) {
        let chunk = &shared.zones[lane].make_block(page).chunk(page);
        // Read-modify-write: a stranger's mark of now stays.
        chunk.tag_word().fetch_or(self.tag, Ordering::AcqRel);
        let own = &mut self.lanes[lane];
        own.own.push(page);
        if chunk.open() != 0 {
            own.roomy.push(page);
        }
        for word in 0..WORDS {
            let order = chunk.order(word);
            if order > MAX_ORDER {
                continue;
            }
            own.add_word(order);
            self.ready.open(class_of(lane, order));
            let held = get(chunk.held(word));
            if held != FULL[order] {
                own.partial[order].push(page + word as u64 * WORD_PAGES);
            }
            own.emptied += usize::from(held == 0);
        }
        self.drain(chunk, page, lane);
        self.publish(shared);
    }

    pub(super) fn adopt_all(&mut self, shared: &Shared) {
        for (lane, zone) in shared.zones.iter().enumerate() {
            while let Some(index) = zone.orphans.take_highest(usize::MAX) {
                self.adopt(shared, lane, zone.page(index));
            }
        }
    }

    /// Takes back what strangers freed in any chunk of a lane, if there is credit to look.
    pub(super) fn collect(&mut self, shared: &Shared, lane: usize, look: Look) {
        let own = &mut self.lanes[lane];
        if own.credit < own.own.len() {
            return;
        }
        own.credit -= own.own.len();
        self.collect_now(shared, lane, look);
    }

    /// Takes back what strangers freed in any chunk of a lane.
    pub(super) fn collect_now(&mut self, shared: &Shared, lane: usize, look: Look) {
        let zone = &shared.zones[lane];
        for at in 0..self.lanes[lane].own.len() {
            let page = self.lanes[lane].own[at];
            let chunk = known(zone, page);
            let tag = chunk.tag();
            if look == Look::All && tag & PENDING != 0 {
                self.drain(chunk, page, lane);
            } else if tag & RIPE != 0 {
                self.harvest(chunk, page, lane);
            }
        }
    }

    /// Takes back the words of a chunk of ours in which strangers have freed everything: whoever is filling another word is
    /// not disturbed.
    fn harvest(&mut self, chunk: &Chunk, page: u64, lane: usize) {
        // Before the words, as in `drain`; `PENDING` stays, so that what is left is not forgotten.
        chunk.tag_word().fetch_and(!RIPE, Ordering::AcqRel);
        for word in 0..WORDS {
            let freed = chunk.freed(word).load(Ordering::Acquire);
            if freed != 0 && freed == chunk.allocated(word) {
                self.take_back(chunk, page, lane, word, freed);
                chunk.freed(word).fetch_and(!freed, Ordering::AcqRel);
            }
        }
    }

    /// Takes back what strangers freed in a chunk of ours.
    pub(super) fn drain(&mut self, chunk: &Chunk, page: u64, lane: usize) {
        // Before the words: a mark set after a word was read here is set by someone who then sees `PENDING` clear, because
        // his read-modify-write of the word follows ours.
        if !plants(Mutant::ForgetsMarks) {
            chunk.tag_word().fetch_and(!MARKS, Ordering::AcqRel);
        }
        let mut claimed = 0;
        for word in 0..WORDS {
            let mut freed = chunk.freed(word).load(Ordering::Acquire);
            // Ends when no stranger freed between two looks; each turn more takes one more range of at most 64.
            loop {
                self.take_back(chunk, page, lane, word, freed);
                let seen = chunk.freed(word).fetch_and(!freed, Ordering::AcqRel);
                if seen & !freed == 0 {
                    break;
                }
                freed = seen & !freed;
            }
            claimed |= get(chunk.claimed(word));
        }
        if plants(Mutant::ForgetsMarks) {
            chunk.tag_word().fetch_and(!MARKS, Ordering::AcqRel);
        }
        if claimed != 0 {
            // Still pinned by strangers: our own frees must go on looking.
            chunk.tag_word().fetch_or(PENDING, Ordering::AcqRel);
        }
    }

    /// What strangers freed in one word. `out` is cleared before the marks that say so: at each moment one of
    /// them tells a second freer that he is too late.
    fn take_back(&mut self, chunk: &Chunk, page: u64, lane: usize, word: usize, freed: u64) {
        if freed == 0 {
            return;
        }
        let back = chunk.allocated(word) & freed;
        set(chunk.out(word), get(chunk.out(word)) & !freed);
        set(chunk.pinned(word), get(chunk.pinned(word)) & !freed);
        if get(chunk.claimed(word)) & freed != 0 {
            chunk.claimed(word).fetch_and(!freed, Ordering::AcqRel);
        }
        let order = chunk.order(word);
        if order <= MAX_ORDER && back != 0 {
            self.lanes[lane].unhold(chunk, page + word as u64 * WORD_PAGES, order, back);
        }
    }
}
