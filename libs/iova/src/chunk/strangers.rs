//! Taking back what strangers freed, and taking over what nobody owns.
//!
//! A look reads the tags of this core's chunks, and is paid for by the looks for words since the last one
//! ([`Lane::pay`]). Whoever marks a chunk that has no marks says so to its owner
//! ([`Published::marked`](super::Published)), so that a core that is short of space need not look again for nothing. It goes for words that strangers have emptied ([`Look::Ripe`]), so as not to
//! disturb those they are filling, and for everything before a core takes one more chunk ([`Look::All`]).

use core::mem;

use lines::Ordering;

use super::Shared;
use super::handle::Local;
use super::lane::Lane;
use super::layout::{
    Chunk, FULL, MARKS, MAX_ORDER, PENDING, WORD_PAGES, WORDS, bits, chunk_of, get, owner_of, set,
};
use super::slow::known;
use super::state::State;

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
        let chunk = chunk_of(shared.zones[lane].make_block(page), page);
        // Read-modify-write: a stranger's mark of now stays.
        chunk.tag_word().fetch_or(self.owner, Ordering::AcqRel);
        self.hot.leave(page);
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
            self.ready.open(lane, order);
            let held = get(chunk.held(word));
            if held != FULL[order] {
                own.partial[order].push(page + word as u64 * WORD_PAGES);
            }
            own.emptied += usize::from(held == 0);
        }
        self.drain(chunk, page, lane);
        self.lanes[lane].watch(chunk);
        self.publish(shared);
    }

    /// Takes back what strangers freed in any chunk of a lane, if there is credit to look; whether there was.
    pub(super) fn collect(&mut self, shared: &Shared, lane: usize, look: Look) -> bool {
        let chunks = self.lanes[lane].own.len();
        let has_credit = self.lanes[lane].pay(chunks);
        if has_credit {
            self.collect_now(shared, lane, look);
        }
        has_credit
    }

    /// Takes back what strangers freed in any chunk of a lane.
    pub(super) fn collect_now(&mut self, shared: &Shared, lane: usize, look: Look) {
        let zone = &shared.zones[lane];
        // Acquire, and before the tags: a chunk marked from now on is one that raises it again.
        let marked = shared.cores[self.id.0].marked.load(Ordering::Acquire);
        for at in 0..self.lanes[lane].own.len() {
            let page = self.lanes[lane].own[at];
            let chunk = known(zone, page);
            let tag = chunk.tag();
            if tag & MARKS == 0 {
                continue;
            }
            match look {
                Look::All => self.drain(chunk, page, lane),
                Look::Ripe => self.harvest(chunk, page, lane, tag),
            }
        }
        if look == Look::All {
            let Lane { own, restless, .. } = &mut self.lanes[lane];
            restless.clear();
            restless.extend(
                own.iter()
                    .filter(|page| known(zone, **page).tag() & MARKS != 0),
            );
            self.lanes[lane].marked = marked;
        }
    }

    /// Takes back what strangers freed since the last look at everything; `false` where that costs more than is paid for.
    pub(super) fn catch_up(&mut self, shared: &Shared, lane: usize) -> bool {
        // Acquire: a mark that is counted is seen.
        let marked = shared.cores[self.id.0].marked.load(Ordering::Acquire);
        if marked != self.lanes[lane].marked {
            return self.collect(shared, lane, Look::All);
        }
        self.collect_restless(shared, lane);
        true
    }

    /// Takes back what strangers freed where they do not say so. All other chunks of a lane are known to have no marks.
    fn collect_restless(&mut self, shared: &Shared, lane: usize) {
        let zone = &shared.zones[lane];
        let mut restless = mem::take(&mut self.lanes[lane].restless);
        restless.retain(|page| {
            let chunk = known(zone, *page);
            let is_own = owner_of(chunk.tag()) == self.owner;
            if is_own {
                self.drain(chunk, *page, lane);
            }
            is_own && chunk.tag() & MARKS != 0
        });
        self.lanes[lane].restless = restless;
    }

    /// Takes back the words of a chunk of ours in which strangers have freed everything. `PENDING` stays, so that what is left is
    /// not forgotten; `tag` is as it was read.
    fn harvest(&mut self, chunk: &Chunk, page: u64, lane: usize, tag: u64) {
        for word in 0..WORDS {
            let given = chunk.given(word).load(Ordering::Acquire);
            let freed = if tag & PENDING != 0 {
                chunk.freed(word).load(Ordering::Acquire)
            } else {
                0
            };
            let back = given ^ get(chunk.taken(word)) | freed;
            if back != 0 && back == get(chunk.held(word)) {
                self.take_back(chunk, page, lane, word, given, freed);
                if freed != 0 {
                    chunk.freed(word).fetch_and(!freed, Ordering::AcqRel);
                }
            }
        }
    }

    /// Takes back what strangers freed in a chunk of ours.
    pub(super) fn drain(&mut self, chunk: &Chunk, page: u64, lane: usize) {
        let is_pending = chunk.tag() & PENDING != 0;
        // Before the words: a mark set after a word was read here is set by someone who then sees `PENDING` clear, because
        // his read-modify-write of the word follows ours. A giver is there (`GIVER`) until he lets go, which sets `PENDING`.
        if is_pending && !planted!(ForgetsMarks) {
            chunk.tag_word().fetch_and(!PENDING, Ordering::AcqRel);
        }
        let mut claimed = 0;
        for word in 0..WORDS {
            let given = chunk.given(word).load(Ordering::Acquire);
            if !is_pending {
                self.take_back(chunk, page, lane, word, given, 0);
                continue;
            }
            let mut freed = chunk.freed(word).load(Ordering::Acquire);
            // Ends when no stranger freed between two looks; each turn more takes one more range of at most 64.
            loop {
                self.take_back(chunk, page, lane, word, given, freed);
                let seen = chunk.freed(word).fetch_and(!freed, Ordering::AcqRel);
                if seen & !freed == 0 {
                    break;
                }
                freed = seen & !freed;
            }
            // Read-modify-write: a stranger who claims after it reads from it, and so sees `PENDING` clear and sets it. A load
            // might miss a claim whose maker still saw it set.
            claimed |= if planted!(LoadsClaims) {
                get(chunk.claimed(word))
            } else {
                chunk.claimed(word).fetch_or(0, Ordering::AcqRel)
            };
        }
        if is_pending && planted!(ForgetsMarks) {
            chunk.tag_word().fetch_and(!PENDING, Ordering::AcqRel);
        }
        if claimed != 0 {
            // Still pinned by strangers: our own frees must go on looking.
            chunk.tag_word().fetch_or(PENDING, Ordering::AcqRel);
        }
    }

    /// What strangers gave back in one word: `given` and `freed` as they were read. The state is cleared before the mark in
    /// `freed`, and together with that in `given`: at each moment one of them tells a second freer that he is too late.
    fn take_back(
        &mut self,
        chunk: &Chunk,
        page: u64,
        lane: usize,
        word: usize,
        given: u64,
        freed: u64,
    ) {
        let marked = given ^ get(chunk.taken(word)) | freed;
        if marked == 0 {
            return;
        }
        let base = page + word as u64 * WORD_PAGES;
        let mut back = 0;
        for at in bits(marked) {
            back |= chunk.span_at(word, at);
            chunk.set_state(base + at, State::NONE.at_turn(given >> at));
        }
        set(chunk.taken(word), given);
        if get(chunk.claimed(word)) & marked != 0 {
            chunk.claimed(word).fetch_and(!marked, Ordering::AcqRel);
        }
        if back != 0 {
            self.lanes[lane].unhold(chunk, base, back);
        }
    }
}
