//! Frees by remote cores, on the owner's side: what they freed is collected, and abandoned chunks are reclaimed.
//!
//! # The path of a remote free
//! A remote core marks the range (`ranges`): in `given` if it is the chunk's designated remote freer, else in `freed`, and says so
//! in the chunk's tag: `GIVER` for as long as there is a designated one, a bit of `PENDING` for the word otherwise. The mark that comes to a chunk without any is counted for its owner
//! ([`Published::marked`](super::Published)).
//!
//! # What it costs the owner
//! * A free in a chunk without marks compares one tag. With marks it looks at those of its own word, and no further. Every
//!   [`MEETINGS`]th such free collects the chunk, so that a few remote frees do not slow the owner for long. What remains marked
//!   then has a designated remote freer, or is pinned by a remote core.
//! * To collect reads the tags of this core's chunks, and is paid for by the looks for words since the last time
//!   ([`CoreZone::pay`]); nothing is read where no mark has been counted. It goes for words that remote cores have emptied
//!   ([`Collect::EmptiedWords`]), so as not to disturb those they are filling, and for everything before a core takes one more chunk
//!   ([`Collect::All`]).
//!
//! # What it costs if the owner rests
//! All of this is done on the lists of the owner with its lock held, so another core can do it. One that finds no room collects for
//! all others, and has the chunks that are empty then. So an owner that rests keeps the ranges in its free lists, those that
//! remote cores freed under a pin, and the rest of the chunks in which these lie.
//!
//! What was freed under a pin is left to the owner ([`Collect::Unpinned`]). Cores that end the use of the same range pin it, and one
//! that comes second lets go again. An owner pins by a load and a store of the state: it may have loaded before a remote core
//! claimed, and store, now or when it lets go, after that core freed. As long as only the owner's thread takes the range
//! back, it is still allocated then, and the store changes nothing but the pin. Had another core taken it back meanwhile, it would
//! be left allocated in a word that has it free, or in a chunk of another core. To end that otherwise would take a
//! read-modify-write in every pin. A free without a pin says that no other core ends the use of the range.

use core::mem;

use lines::Ordering;

use super::Shared;
use super::core_zone::{CoreZone, CoreZones};
use super::handle::Local;
use super::layout::{
    Chunk, FULL, MARKS, MAX_ORDER, PENDING, WORD_PAGES, WORDS, bits, chunk_of, get, owner_of,
    pending, set,
};
use super::slow::known;
use super::state::State;
use super::trim::RetainEmpty;
use crate::CHUNK_PAGES;

/// Frees in chunks with marks after which an owner collects the chunk at hand.
pub(super) const MEETINGS: u32 = 16;

/// What to collect.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Collect {
    /// Words that remote cores have emptied.
    EmptiedWords,
    /// Everything that remote cores freed.
    All,
    /// The same without what they freed under a pin: for a core that is not the owner. See the module.
    Unpinned,
}

impl Local {
    /// Takes over an abandoned chunk that the caller took out of the zone's set.
    pub(super) fn reclaim(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
        page: u64,
    ) {
        let chunk = chunk_of(shared.zones[lane].make_block(page), page);
        // Read-modify-write: a remote core's mark of now stays.
        chunk.tag_word().fetch_or(self.owner, Ordering::AcqRel);
        self.hot.leave(page);
        let own = &mut zones.zones[lane];
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
        zones.drain(chunk, page, lane, Collect::All);
        zones.zones[lane].watch(chunk);
        zones.publish(shared);
    }

    /// Collects the chunk of a page in which this core has met marks so often, if it is still this core's.
    #[cold]
    #[inline(never)]
    pub(super) fn collect_met(&mut self, shared: &Shared, page: u64) {
        self.meetings = 0;
        let zones = &mut *shared.zones_of(self.id).lock();
        let Some(chunk) = self.hot.known(page) else {
            return;
        };
        if chunk.is_own(self.owner) {
            let first = page / CHUNK_PAGES * CHUNK_PAGES;
            zones.drain(chunk, first, chunk.lane(), Collect::All);
        }
    }
}

impl CoreZones {
    /// Collects what remote cores freed in any chunk of a zone, if there is something new and credit to look; `false` where
    /// only the credit is missing.
    pub(super) fn collect(&mut self, shared: &Shared, lane: usize, what: Collect) -> bool {
        if !self.may_find(shared, lane) {
            return true;
        }
        let chunks = self.zones[lane].own.len();
        let has_credit = self.zones[lane].pay(chunks);
        if has_credit {
            self.collect_now(shared, lane, what);
        }
        has_credit
    }

    /// Whether remote cores have freed, or may have freed without saying so, since everything was last collected.
    pub(super) fn may_find(&self, shared: &Shared, lane: usize) -> bool {
        // Acquire: a mark that is counted is seen.
        let marked = shared.cores[self.id.0].marked.load(Ordering::Acquire);
        let own = &self.zones[lane];
        marked != own.marked || !own.unannounced.is_empty()
    }

    /// Collects what remote cores freed in any chunk of a zone.
    pub(super) fn collect_now(&mut self, shared: &Shared, lane: usize, what: Collect) {
        let zone = &shared.zones[lane];
        // Acquire, and before the tags: a chunk marked from now on is one that raises it again.
        let marked = shared.cores[self.id.0].marked.load(Ordering::Acquire);
        let is_known = what != Collect::EmptiedWords && marked == self.zones[lane].marked;
        // All other chunks are known to have no marks.
        let pages = match is_known {
            true => mem::take(&mut self.zones[lane].unannounced),
            false => mem::take(&mut self.zones[lane].own),
        };
        for page in &pages {
            let chunk = known(zone, *page);
            let tag = chunk.tag();
            if tag & MARKS == 0 || owner_of(tag) != self.owner {
                continue;
            }
            match what {
                Collect::All | Collect::Unpinned => self.drain(chunk, *page, lane, what),
                Collect::EmptiedWords => self.drain_emptied(chunk, *page, lane, tag),
            }
        }
        let owner = self.owner;
        let is_marked = |page: &u64| {
            let tag = known(zone, *page).tag();
            tag & MARKS != 0 && owner_of(tag) == owner
        };
        let own = &mut self.zones[lane];
        if is_known {
            own.unannounced = pages;
            own.unannounced.retain(is_marked);
            return;
        }
        own.own = pages;
        if what != Collect::EmptiedWords {
            let CoreZone {
                own, unannounced, ..
            } = own;
            unannounced.clear();
            unannounced.extend(own.iter().copied().filter(is_marked));
            self.zones[lane].marked = marked;
        }
    }

    /// Takes back the words of a chunk of this core in which remote cores have freed everything. `PENDING` stays, so that what
    /// is left is not forgotten; `tag` is as it was read.
    fn drain_emptied(&mut self, chunk: &Chunk, page: u64, lane: usize, tag: u64) {
        for word in 0..WORDS {
            let given = chunk.given(word).load(Ordering::Acquire);
            let freed = if tag & pending(word) != 0 {
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

    /// Takes back what remote cores freed in a chunk of this core: all of it, or [`Collect::Unpinned`].
    pub(super) fn drain(&mut self, chunk: &Chunk, page: u64, lane: usize, what: Collect) {
        let marks = chunk.tag() & PENDING;
        // Before the words: a mark set after a word was read here is set by a core that then sees the word's bit of `PENDING`
        // clear, because its read-modify-write of the word follows ours. A designated remote freer is there (`GIVER`) until it
        // lets go, which sets all of `PENDING`.
        if marks != 0 && !planted!(ForgetsMarks) {
            chunk.tag_word().fetch_and(!marks, Ordering::AcqRel);
        }
        let mut claimed = 0;
        for word in 0..WORDS {
            let given = chunk.given(word).load(Ordering::Acquire);
            if marks & pending(word) == 0 {
                self.take_back(chunk, page, lane, word, given, 0);
                continue;
            }
            // After `freed`, whose maker claimed before it freed: a range freed under a pin is seen to be claimed.
            let taken = |freed: u64| match what {
                Collect::Unpinned if !planted!(TakesPinned) => freed & !get(chunk.claimed(word)),
                _ => freed,
            };
            let mut freed = taken(chunk.freed(word).load(Ordering::Acquire));
            // Ends when no remote core freed between two looks; each turn more takes one more range of at most 64.
            loop {
                self.take_back(chunk, page, lane, word, given, freed);
                let seen = chunk.freed(word).fetch_and(!freed, Ordering::AcqRel);
                freed = taken(seen & !freed);
                if freed == 0 {
                    break;
                }
            }
            // Read-modify-write: a remote core that claims after it reads from it, and so sees `PENDING` clear and sets it. A
            // load might miss a claim whose maker still saw it set.
            let claims = if planted!(LoadsClaims) {
                get(chunk.claimed(word))
            } else {
                chunk.claimed(word).fetch_or(0, Ordering::AcqRel)
            };
            if claims != 0 {
                claimed |= pending(word);
            }
        }
        if marks != 0 && planted!(ForgetsMarks) {
            chunk.tag_word().fetch_and(!marks, Ordering::AcqRel);
        }
        if claimed != 0 {
            // Still pinned by remote cores, or freed under a pin and left alone: the owner's frees must go on looking.
            chunk.tag_word().fetch_or(claimed, Ordering::AcqRel);
        }
    }

    /// What remote cores freed in one word: `given` and `freed` as they were read. The state is cleared before the mark in
    /// `freed`, and together with that in `given`: at each moment one of them tells a second freer that it is too late.
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
            self.zones[lane].unhold(chunk, base, back);
        }
    }

    /// Does for a core what it would do if it ran and parked, as far as its free lists are not needed: collects what remote cores
    /// freed in a zone and returns what is empty to the space. Called by another core, with the lock held.
    pub(super) fn give_up_unused(&mut self, shared: &Shared, lane: usize) {
        if self.zones[lane].own.is_empty() {
            return;
        }
        self.collect_now(shared, lane, Collect::Unpinned);
        if shared.retires {
            let zone = &shared.zones[lane];
            let own = self.zones[lane].own.iter().map(|page| known(zone, *page));
            let emptied = own.filter(|chunk| chunk.held_pages() == 0);
            emptied.for_each(Chunk::displace);
        }
        self.sweep(shared, lane, RetainEmpty::Nothing);
    }
}
