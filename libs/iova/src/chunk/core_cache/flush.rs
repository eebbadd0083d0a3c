//! Flush: from free lists to their words, and all of a core's chunks to where other cores find
//! them.
//!
//! A deposit visits every chunk of this core.

use core::mem;

use lines::Ordering;

use super::CoreCache;
use crate::chunk::Shared;
use crate::chunk::core_zone::{CoreZone, CoreZones};
use crate::chunk::layout::{MAX_ORDER, WORD_PAGES, WORDS, bits, get, pending, word_base, word_of};
use crate::chunk::remote_free::Collect;
use crate::chunk::trim::{RetainEmpty, release, take_spent};
use crate::chunk::zone::Zone;
use crate::{CHUNK_PAGES, IovaPfn, RetiredChunk};

/// Number of emptied words at which a free that finds its free list full sweeps: a core that only
/// frees, and then goes idle, keeps no more of them.
const MOST_EMPTIED: usize = 2 * WORDS;

impl CoreCache {
    /// Returns half of the ranges of a free list to their words, and one more that was freed.
    #[cold]
    #[inline(never)]
    pub(super) fn flush(&mut self, shared: &Shared, lane: usize, page: u64, order: usize) {
        let zones = &mut *shared.zones_of(self.id).lock();
        let half = self.free_lists.of(lane, order).flush();
        self.flush_ranges(shared, zones, lane, order, half);
        self.put_back(shared, zones, lane, page, order);
        // Ranges of this core's free lists are available to other cores now.
        shared.count_returned(self.id);
        let own = &zones.zones[lane];
        // A sweep visits every word with something free: not for a few.
        if own.emptied >= MOST_EMPTIED.max(own.partial_words() / 8) {
            zones.sweep(shared, lane, RetainEmpty::One);
        }
    }

    /// Returns the `count` ranges of a class that were freed first to their words.
    fn flush_ranges(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
        order: usize,
        count: usize,
    ) {
        for at in 0..count {
            let page = self.free_lists.of(lane, order).get(at);
            self.put_back(shared, zones, lane, page, order);
        }
        self.free_lists.of(lane, order).forget(count);
    }

    /// Returns all ranges of a zone's free lists to their words.
    pub(in crate::chunk) fn unready_all(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
    ) {
        for order in 0..=MAX_ORDER {
            let all = self.free_lists.of(lane, order).len();
            self.flush_ranges(shared, zones, lane, order, all);
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
        let Some(chunk) = self.directory.chunk(shared, page) else {
            return;
        };
        let span = chunk.span(word_of(page), page % WORD_PAGES, order);
        zones.zones[lane].unhold(chunk, word_base(page), span);
    }

    /// Gives back everything.
    pub(in crate::chunk) fn deposit_all(&mut self, shared: &Shared) {
        self.leave_all(shared);
        let zones = &mut *shared.zones_of(self.id).lock();
        (0..shared.zones.len()).for_each(|lane| self.deposit(shared, zones, lane));
    }

    /// Gives up all roles of designated remote freer. What this core freed as one is counted as
    /// returned.
    pub(in crate::chunk) fn leave_all(&mut self, shared: &Shared) {
        if self.directory.is_remote_freer() {
            self.directory.leave_all();
            shared.count_returned(self.id);
        }
    }

    /// Gives back everything of a zone: empty chunks to the space, the others without an owner.
    pub(in crate::chunk) fn deposit(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
    ) {
        let zone = &shared.zones[lane];
        if zones.zones[lane].own.is_empty() && self.free_lists.pages(lane) == 0 {
            return;
        }
        self.unready_all(shared, zones, lane);
        self.free_lists.clear(lane);
        zones.collect_now(shared, lane, Collect::All);
        let fresh = CoreZone::new(zones.zones[lane].answered);
        let own = mem::replace(&mut zones.zones[lane], fresh);
        for page in own.own {
            let chunk = zone.known(page);
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
                zone.abandoned.put(zone.index(page));
            }
        }
        zones.publish(shared);
        shared.count_returned(self.id);
    }

    /// Returns whether at most half of the pages of this core's chunks is allocated. The ranges in
    /// free lists may lie in all chunks, a little in each word, and so be all that keeps them.
    fn is_mostly_free(&self, zone: &Zone, zones: &CoreZones, lane: usize) -> bool {
        let own = &zones.zones[lane].own;
        let all = own.len() as u64 * CHUNK_PAGES;
        let held: u64 = own.iter().map(|page| zone.known(*page).held_pages()).sum();
        held.saturating_sub(self.free_lists.pages(lane)) <= all / 2
    }

    /// Takes an emptied chunk whose leaf table may be reclaimed.
    pub(in crate::chunk) fn retire_one(&mut self, shared: &Shared) -> Option<RetiredChunk> {
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
                    space: shared.space,
                });
            }
        }
        None
    }
}
