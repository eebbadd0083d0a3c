//! Frees by remote cores, on the owner's side: collecting what they freed, and reclaiming abandoned
//! chunks.
//!
//! # The path of a remote free
//! A remote core marks the range (`ranges`): in `exclusive_freed` if it is the chunk's designated
//! remote freer, else in `shared_freed`. It also marks the chunk's tag: one bit is set for as long
//! as there is a designated freer, and otherwise the word's bit of `PENDING`. The first mark of a
//! chunk without any is counted for its owner ([`Published::marked`](super::Published)).
//!
//! # What it costs the owner
//! * A free in a chunk without marks compares one tag. With marks it looks at those of its own
//!   word, and no further. Every [`MEETINGS`]th such free collects the chunk, so that a few remote
//!   frees do not slow the owner for long. What remains marked then has a designated remote freer,
//!   or is pinned by a remote core.
//! * To collect reads the tags of this core's chunks, and is paid for by the looks for words since
//!   the last time ([`CoreZone::pay`]); nothing is read where no mark has been counted. It goes for
//!   words that remote cores have emptied ([`Collect::EmptiedWords`]), so as not to disturb those
//!   they are filling, and for everything before a core takes one more chunk ([`Collect::All`]).
//!
//! # What it costs if the owner rests
//! All of this works on the owner's lists with its lock held, so another core can do it. A core
//! that finds no room collects for all others ([`CoreZones::collect_for_owner`]), and takes the
//! chunks that are then empty. So an owner that rests keeps the ranges in its free lists and the
//! rest of the chunks in which these lie.
//!
//! An owner that runs meanwhile takes no part in it, but for three things.
//! * It pins and frees by a load and a store of the state: had another core taken the range back in
//!   between, the range would be left pinned in a word that has it free, or in a chunk of another
//!   core, or be both in a free list and free in its word. (Two cores that unmap one range meet
//!   like this: both pin, or both free, and one comes second.) So an owner publishes the page that
//!   it is about to change ([`Published::changing`](super::Published)) before its loads, and
//!   withdraws it after its store. The other core, after it has read what was freed, leaves out
//!   that page and what the owner has pinned. With a fence on each side, either the owner sees that
//!   the range was freed, or the other core sees the page. The owner's fence costs nothing
//!   ([`Fences`](lines::Fences)).
//! * It allocates without publishing that. So the other core leaves out ranges that are not
//!   allocated: a range that both the owner and, by mistake, another core freed is in a free list,
//!   and may be allocated at any moment.
//! * It reads marks only where the tag has some. So the other core collects no others, and leaves
//!   `PENDING` as it is; the owner clears it.

use alloc::vec::Vec;
use core::mem;

use lines::Ordering;

use super::Shared;
use super::core_zone::{CoreZone, CoreZones};
use super::layout::{
    Chunk, MARKS, PENDING, WORD_PAGES, WORDS, bits, get, owner_of, pending, set, word_of,
};
use super::state::State;
use super::trim::RetainEmpty;
use super::zone::Zone;
use crate::CHUNK_PAGES;

/// Extent of a collection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Collect {
    /// Words that remote cores have emptied.
    EmptiedWords,
    /// Everything that remote cores freed.
    All,
}

/// Remote frees in one word, as another core than the owner has read them.
struct RemoteFrees {
    /// First page of the word.
    base: u64,
    /// Of [`Chunk::exclusive_freed`] and [`Chunk::shared_freed`].
    exclusive_freed: u64,
    shared_freed: u64,
}

impl CoreZones {
    /// Collects what remote cores freed in any chunk of a zone, if there is something new and
    /// credit to look; `false` where only the credit is missing.
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

    /// Returns whether remote cores have freed since everything was last collected, or may have
    /// done so without a counted mark.
    pub(super) fn may_find(&self, shared: &Shared, lane: usize) -> bool {
        // Acquire: a mark that is counted is seen.
        let marked = shared.cores[self.id.0].marked.load(Ordering::Acquire);
        let own = &self.zones[lane];
        marked != own.marked || !own.unannounced.is_empty()
    }

    /// Collects what remote cores freed in any chunk of a zone. By the owner.
    pub(super) fn collect_now(&mut self, shared: &Shared, lane: usize, what: Collect) {
        let zone = &shared.zones[lane];
        self.with_marked(shared, lane, what, |zones, pages| {
            for page in pages {
                let chunk = zone.known(*page);
                let tag = chunk.tag();
                if tag & MARKS == 0 || owner_of(tag) != zones.owner {
                    continue;
                }
                match what {
                    Collect::All => zones.drain(chunk, *page, lane),
                    Collect::EmptiedWords => zones.drain_emptied(chunk, *page, lane, tag),
                }
            }
        });
    }

    /// The same by another core, with the lock of this one held. This core may be in the middle of
    /// anything that takes no lock. See the module.
    fn collect_for_owner(&mut self, shared: &Shared, lane: usize) {
        let zone = &shared.zones[lane];
        self.with_marked(shared, lane, Collect::All, |zones, pages| {
            let seen = zones.see(zone, pages);
            // Without the fence the owner's accesses are not ordered with ours.
            if seen.is_empty() || shared.fences.heavy().is_err() {
                return;
            }
            // Acquire: the owner's store to a range that it changed before is seen.
            let changing = shared.cores[zones.id.0].changing.load(Ordering::Acquire);
            for word in seen {
                zones.take_back_seen(zone, lane, word, changing);
            }
        });
    }

    /// Reads which ranges remote cores have freed in chunks of this core.
    fn see(&self, zone: &Zone, pages: &[u64]) -> Vec<RemoteFrees> {
        let own = pages.iter().filter(|page| {
            let tag = zone.known(**page).tag();
            tag & MARKS != 0 && owner_of(tag) == self.owner
        });
        let words =
            own.flat_map(|page| (0..WORDS).map(move |word| page + word as u64 * WORD_PAGES));
        let seen = words.map(|base| {
            let (chunk, word) = (zone.known(base), word_of(base));
            // As the tag was before the fence: an owner that frees reads `shared_freed` only where
            // the tag announces marks.
            let is_pending = chunk.tag() & pending(word) != 0;
            let shared_freed = || chunk.shared_freed(word).load(Ordering::Acquire);
            RemoteFrees {
                base,
                exclusive_freed: chunk.exclusive_freed(word).load(Ordering::Acquire),
                shared_freed: if is_pending { shared_freed() } else { 0 },
            }
        });
        let is_any = |seen: &RemoteFrees| {
            let taken = get(zone.known(seen.base).taken(word_of(seen.base)));
            seen.exclusive_freed ^ taken | seen.shared_freed != 0
        };
        seen.filter(is_any).collect()
    }

    /// Takes back what was seen to be freed in a word, but for what the owner has pinned or has
    /// free, or may be about to.
    fn take_back_seen(&mut self, zone: &Zone, lane: usize, seen: RemoteFrees, changing: u64) {
        let RemoteFrees {
            base,
            exclusive_freed,
            shared_freed,
        } = seen;
        let (chunk, word) = (zone.known(base), word_of(base));
        let page = base / CHUNK_PAGES * CHUNK_PAGES;
        let taken = get(chunk.taken(word));
        let is_owners = |at: &u64| {
            let state = chunk.state(base + at);
            base + at == changing || state.is_pinned() || state.is_none()
        };
        let left = bits(exclusive_freed ^ taken | shared_freed)
            .filter(is_owners)
            .fold(0, |left, at| left | 1 << at);
        let (exclusive_freed, shared_freed) =
            (exclusive_freed & !left | taken & left, shared_freed & !left);
        self.take_back(chunk, page, lane, word, exclusive_freed, shared_freed);
        if shared_freed != 0 {
            chunk
                .shared_freed(word)
                .fetch_and(!shared_freed, Ordering::AcqRel);
        }
        // Read-modify-write: a remote core that claims after it reads from it, and so sees that the
        // range is gone.
        chunk.claimed(word).fetch_or(0, Ordering::AcqRel);
    }

    /// Calls `collect` with the chunks of a zone in which remote cores may have freed something,
    /// and records those that have marks afterwards.
    fn with_marked(
        &mut self,
        shared: &Shared,
        lane: usize,
        what: Collect,
        collect: impl FnOnce(&mut Self, &[u64]),
    ) {
        let zone = &shared.zones[lane];
        // Acquire, and before the loads of the tags: a chunk marked from now on raises it again.
        let marked = shared.cores[self.id.0].marked.load(Ordering::Acquire);
        let is_known = what == Collect::All && marked == self.zones[lane].marked;
        // All other chunks are known to have no marks.
        let pages = match is_known {
            true => mem::take(&mut self.zones[lane].unannounced),
            false => mem::take(&mut self.zones[lane].own),
        };
        collect(self, &pages);
        let owner = self.owner;
        let is_marked = |page: &u64| {
            let tag = zone.known(*page).tag();
            tag & MARKS != 0 && owner_of(tag) == owner
        };
        let own = &mut self.zones[lane];
        if is_known {
            own.unannounced = pages;
            own.unannounced.retain(is_marked);
            return;
        }
        own.own = pages;
        if what == Collect::All {
            let CoreZone {
                own, unannounced, ..
            } = own;
            unannounced.clear();
            unannounced.extend(own.iter().copied().filter(is_marked));
            self.zones[lane].marked = marked;
        }
    }

    /// Takes back the words of a chunk of this core in which remote cores have freed everything.
    /// `PENDING` stays set, so that the rest is not missed. `tag` is as it was read.
    fn drain_emptied(&mut self, chunk: &Chunk, page: u64, lane: usize, tag: u64) {
        for word in 0..WORDS {
            let exclusive_freed = chunk.exclusive_freed(word).load(Ordering::Acquire);
            let shared_freed = if tag & pending(word) != 0 {
                chunk.shared_freed(word).load(Ordering::Acquire)
            } else {
                0
            };
            let back = exclusive_freed ^ get(chunk.taken(word)) | shared_freed;
            if back != 0 && back == get(chunk.held(word)) {
                self.take_back(chunk, page, lane, word, exclusive_freed, shared_freed);
                if shared_freed != 0 {
                    chunk
                        .shared_freed(word)
                        .fetch_and(!shared_freed, Ordering::AcqRel);
                }
            }
        }
    }

    /// Takes back everything that remote cores freed in a chunk of this core. By the owner.
    pub(super) fn drain(&mut self, chunk: &Chunk, page: u64, lane: usize) {
        let marks = chunk.tag() & PENDING;
        // Before the loads of the words: a core that marks a word after it was read here sees the
        // word's bit of `PENDING` clear, because its read-modify-write of the word follows ours. A
        // designated remote freer's bit stays set until it gives the role up, which sets all of
        // `PENDING`.
        if marks != 0 {
            chunk.tag_word().fetch_and(!marks, Ordering::AcqRel);
        }
        let mut claimed = 0;
        for word in 0..WORDS {
            let exclusive_freed = chunk.exclusive_freed(word).load(Ordering::Acquire);
            if marks & pending(word) == 0 {
                self.take_back(chunk, page, lane, word, exclusive_freed, 0);
                continue;
            }
            let mut shared_freed = chunk.shared_freed(word).load(Ordering::Acquire);
            // Ends when no remote core freed between two reads; each further iteration takes at
            // least one more range of at most 64.
            loop {
                self.take_back(chunk, page, lane, word, exclusive_freed, shared_freed);
                let seen = chunk
                    .shared_freed(word)
                    .fetch_and(!shared_freed, Ordering::AcqRel);
                shared_freed = seen & !shared_freed;
                if shared_freed == 0 {
                    break;
                }
            }
            // Read-modify-write: a remote core that claims after it reads from it, and so sees
            // `PENDING` clear and sets it. A load might miss a claim whose maker still saw it set.
            if chunk.claimed(word).fetch_or(0, Ordering::AcqRel) != 0 {
                claimed |= pending(word);
            }
        }
        if claimed != 0 {
            // Still pinned by remote cores: the owner's frees must go on looking.
            chunk.tag_word().fetch_or(claimed, Ordering::AcqRel);
        }
    }

    /// Takes back ranges that remote cores freed in one word: `exclusive_freed` and `shared_freed`
    /// are as they were read. The state is cleared before the mark in `shared_freed`, and together
    /// with that in `exclusive_freed`: at each moment one of them tells a second freer that it is
    /// too late.
    fn take_back(
        &mut self,
        chunk: &Chunk,
        page: u64,
        lane: usize,
        word: usize,
        exclusive_freed: u64,
        shared_freed: u64,
    ) {
        let marked = exclusive_freed ^ get(chunk.taken(word)) | shared_freed;
        if marked == 0 {
            return;
        }
        let base = page + word as u64 * WORD_PAGES;
        let mut back = 0;
        for at in bits(marked) {
            back |= chunk.span_at(word, at);
            chunk.set_state(base + at, State::NONE.at_turn(exclusive_freed >> at));
        }
        set(chunk.taken(word), exclusive_freed);
        if get(chunk.claimed(word)) & marked != 0 {
            chunk.claimed(word).fetch_and(!marked, Ordering::AcqRel);
        }
        if back != 0 {
            self.zones[lane].unhold(chunk, base, back);
        }
    }

    /// Does for a core what it would do if it ran and parked, as far as its free lists are not
    /// needed: collects what remote cores freed in a zone and returns what is empty to the space.
    /// Called by another core, with the lock held.
    pub(super) fn give_up_unused(&mut self, shared: &Shared, lane: usize) {
        if self.zones[lane].own.is_empty() {
            return;
        }
        self.collect_for_owner(shared, lane);
        self.sweep(shared, lane, RetainEmpty::Nothing);
    }
}
