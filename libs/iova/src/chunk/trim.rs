//! Giving back: ranges to their words, words to their chunks, chunks to the space or to whoever reclaims their leaf tables.
//!
//! A sweep visits the words that have something free; a deposit visits every chunk of this core.

use core::mem;

use lines::Ordering;

use super::Shared;
use super::core_zone::{CoreZone, CoreZones};
use super::handle::Local;
use super::layout::{
    AWAY, MAX_ORDER, NOBODY, WORD_PAGES, WORDS, bits, get, owner_of, pending, word_base, word_of,
};
use super::remote_free::Collect;
use super::slow::known;
use super::zone::Zone;
use crate::{CHUNK_PAGES, IovaPfn, RetiredChunk};

/// Emptied words after which a free that finds no room among the ready ranges sweeps: a core that only frees, and then does
/// nothing any more, keeps no more of them.
const MOST_EMPTIED: usize = 2 * WORDS;

/// How many empty chunks a sweep leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RetainEmpty {
    /// A core that maps one page at a time must not fetch a chunk for each.
    One,
    Nothing,
}

impl Local {
    /// Returns half of the ranges kept ready to their words, and one more that was freed.
    #[cold]
    #[inline(never)]
    pub(super) fn spill(&mut self, shared: &Shared, lane: usize, page: u64, order: usize) {
        let zones = &mut *shared.zones_of(self.id).lock();
        let half = self.ready.of(lane, order).spill();
        self.unready(shared, zones, lane, order, half);
        self.put_back(shared, zones, lane, page, order);
        // What was in free lists of this core alone can be had by others now.
        shared.count_returned(self.id);
        let own = &zones.zones[lane];
        // A sweep visits every word with something free: not for a few.
        if own.emptied >= MOST_EMPTIED.max(own.partial_words() / 8) {
            zones.sweep(shared, lane, RetainEmpty::One);
        }
    }

    /// Returns the `count` ranges of a class that were freed first to their words.
    fn unready(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
        order: usize,
        count: usize,
    ) {
        for at in 0..count {
            let page = self.ready.of(lane, order).get(at);
            self.put_back(shared, zones, lane, page, order);
        }
        self.ready.of(lane, order).forget(count);
    }

    /// Returns all ranges of a zone that are kept ready to their words.
    pub(super) fn unready_all(&mut self, shared: &Shared, zones: &mut CoreZones, lane: usize) {
        for order in 0..=MAX_ORDER {
            let all = self.ready.of(lane, order).len();
            self.unready(shared, zones, lane, order, all);
        }
    }

    /// Returns a range of a free list to its word.
    fn put_back(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
        page: u64,
        order: usize,
    ) {
        let Some(chunk) = self.hot.chunk(shared, page) else {
            return;
        };
        let span = chunk.span(word_of(page), page % WORD_PAGES, order);
        zones.zones[lane].unhold(chunk, word_base(page), span);
    }

    /// Gives back everything.
    pub(super) fn deposit_all(&mut self, shared: &Shared) {
        self.leave_all(shared);
        let zones = &mut *shared.zones_of(self.id).lock();
        (0..shared.zones.len()).for_each(|lane| self.deposit(shared, zones, lane));
    }

    /// Is the designated remote freer nowhere. What this core freed as one is counted as returned.
    pub(super) fn leave_all(&mut self, shared: &Shared) {
        if self.hot.is_giver() {
            self.hot.leave_all();
            shared.count_returned(self.id);
        }
    }

    /// Gives back everything of a zone: empty chunks to the space, the others without an owner.
    pub(super) fn deposit(&mut self, shared: &Shared, zones: &mut CoreZones, lane: usize) {
        let zone = &shared.zones[lane];
        if zones.zones[lane].own.is_empty() && self.ready.pages(lane) == 0 {
            return;
        }
        self.unready_all(shared, zones, lane);
        self.ready.clear(lane);
        zones.collect_now(shared, lane, Collect::All);
        let fresh = CoreZone::new(zones.zones[lane].answered);
        let own = mem::replace(&mut zones.zones[lane], fresh);
        for page in own.own {
            let chunk = known(zone, page);
            for word in 0..WORDS {
                let order = chunk.order(word);
                let held = get(chunk.held(word));
                if order <= MAX_ORDER && held == 0 {
                    chunk.unassign(word, order);
                }
                // A pin of this core's must be known to the core that owns the chunk next.
                for at in bits(held) {
                    let page = word as u64 * WORD_PAGES + at;
                    let state = chunk.state(page);
                    if state.is_pinned() {
                        chunk.claimed(word).fetch_or(1 << at, Ordering::AcqRel);
                        chunk.set_state(page, state.unpinned());
                        chunk.tag_word().fetch_or(pending(word), Ordering::AcqRel);
                    }
                }
            }
            if chunk.is_empty() {
                release(zone, page, shared.retires);
            } else {
                chunk.tag_word().fetch_and(!self.owner, Ordering::AcqRel);
                zone.orphans.put(zone.index(page));
            }
        }
        zones.publish(shared);
        shared.count_returned(self.id);
    }

    /// Whether at most half of what this core's chunks have is allocated. What is kept ready may lie in all of them, a little
    /// in each word, and so be all that keeps them.
    fn is_mostly_free(&self, zone: &Zone, zones: &CoreZones, lane: usize) -> bool {
        let own = &zones.zones[lane].own;
        let all = own.len() as u64 * CHUNK_PAGES;
        let held: u64 = own.iter().map(|page| known(zone, *page).held_pages()).sum();
        held.saturating_sub(self.ready.pages(lane)) <= all / 2
    }

    /// An emptied chunk whose leaf table may go.
    pub(super) fn retire_one(&mut self, shared: &Shared) -> Option<RetiredChunk> {
        if !shared.retires {
            return None;
        }
        let zones = &mut *shared.zones_of(self.id).lock();
        for (lane, zone) in shared.zones.iter().enumerate() {
            zones.zones[lane].earn(32);
            let page = take_spent(zone).or_else(|| {
                if zones.zones[lane].own.len() < 2 {
                    return None;
                }
                let has_looked = zones.collect(shared, lane, Collect::All);
                if zones.zones[lane].emptied > 0
                    || has_looked && self.is_mostly_free(zone, zones, lane)
                {
                    self.unready_all(shared, zones, lane);
                    zones.sweep(shared, lane, RetainEmpty::One);
                    shared.count_returned(self.id);
                }
                take_spent(zone)
            });
            if let Some(page) = page {
                return Some(RetiredChunk {
                    first: IovaPfn::new(page),
                    space: self.space,
                });
            }
        }
        None
    }
}

impl CoreZones {
    /// Returns empty words to their chunks, and empty chunks to the space (or, where leaf tables are reclaimed, to those that may be
    /// retired).
    pub(super) fn sweep(&mut self, shared: &Shared, lane: usize, retain: RetainEmpty) {
        let zone = &shared.zones[lane];
        let own = &mut self.zones[lane];
        for order in 0..=MAX_ORDER {
            let (words, roomy) = (&mut own.words[order], &mut own.roomy);
            own.partial[order].retain(|base| {
                let chunk = known(zone, *base);
                let word = word_of(*base);
                if get(chunk.held(word)) != 0 {
                    return true;
                }
                if chunk.open() == 0 {
                    roomy.push(base / CHUNK_PAGES * CHUNK_PAGES);
                }
                chunk.unassign(word, order);
                *words -= 1;
                false
            });
        }
        own.emptied = 0;
        let most = match retain {
            RetainEmpty::One => own.own.len().saturating_sub(1),
            RetainEmpty::Nothing => usize::MAX,
        };
        let mut left = 0;
        own.roomy.retain(|page| {
            let goes = left < most && known(zone, *page).is_empty();
            if goes {
                left += 1;
                release(zone, *page, shared.retires);
            }
            !goes
        });
        if left > 0 {
            let owner = self.owner;
            own.own
                .retain(|page| owner_of(known(zone, *page).tag()) == owner);
            self.publish(shared);
        }
    }

    /// Says how many chunks this core keeps.
    pub(super) fn publish(&self, shared: &Shared) {
        let chunks = &shared.cores[self.id.0].chunks;
        chunks.store(self.chunks() as u64, Ordering::Relaxed);
    }
}

/// Takes the highest of the emptied chunks in which no remote core has claimed a range, and makes it nobody's.
fn take_spent(zone: &Zone) -> Option<u64> {
    let mut bound = usize::MAX;
    loop {
        let index = zone.spent.take_highest(bound)?;
        let page = zone.page(index);
        let chunk = known(zone, page);
        // Read-modify-write: a remote core that claims after this sees that nothing is allocated, and lets go.
        if (0..WORDS).all(|word| chunk.claimed(word).fetch_or(0, Ordering::AcqRel) == 0) {
            chunk.set_owner(AWAY);
            return Some(page);
        }
        zone.put_spent(index);
        bound = index.checked_sub(1)?;
    }
}

/// Puts an emptied chunk where others find it.
pub(super) fn release(zone: &Zone, page: u64, is_spent: bool) {
    known(zone, page).set_owner(NOBODY);
    let index = zone.index(page);
    match is_spent {
        true => zone.put_spent(index),
        false => zone.free.put(index),
    }
}
