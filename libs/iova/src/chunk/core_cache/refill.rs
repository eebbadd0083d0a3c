//! From chunks to free lists, when a free list has nothing: the other words that the core has, what
//! remote cores freed, chunks without an owner, free chunks.
//!
//! Bounds: each turn for a word finds one, or makes something available at most three times. A
//! failing allocation looks into the sets of chunks; what it must walk beyond that is paid for
//! ([`CoreZone::pay`](crate::chunk::core_zone::CoreZone::pay)).

use lines::Ordering;

use super::CoreCache;
use crate::chunk::Shared;
use crate::chunk::core_zone::CoreZones;
use crate::chunk::layout::{
    AWAY, Chunk, FULL, MAX_ORDER, RUN, WORD_PAGES, WORDS, chunk_of, get, set, word_of, words_of,
};
use crate::chunk::remote_free::Collect;
use crate::chunk::state::pages_of;
use crate::chunk::trim::RetainEmpty;
use crate::chunk::zone::MAX_ZONES;
use crate::{CHUNK_PAGES, IovaPfn, IovaRange};

/// Requirements of a request: a range of an order, or, for whole chunks, a number of pages.
#[derive(Clone, Copy, Debug)]
pub(in crate::chunk) struct Want {
    pub(in crate::chunk) pages: u64,
    pub(in crate::chunk) order: usize,
    pub(in crate::chunk) last: IovaPfn,
}

impl CoreCache {
    /// Makes ranges of the newest words with something free ready; whether there was one.
    #[inline(never)]
    pub(super) fn refill(&mut self, shared: &Shared, lane: usize, order: usize) -> bool {
        let lane = lane % MAX_ZONES;
        let zones = &mut *shared.zones_of(self.id).lock();
        let mut is_any = false;
        self.free_lists.of(lane, order).grow(order);
        while self.free_lists.of(lane, order).is_short(order)
            && let Some(newest) = zones.zones[lane].partial[order].len().checked_sub(1)
            && self.make_ready(shared, zones, lane, order, newest)
        {
            is_any = true;
        }
        is_any
    }

    /// Takes a range of a zone. With `is_last` nothing else is left.
    pub(in crate::chunk) fn alloc_in_zones(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        want: &Want,
        is_last: bool,
    ) -> Option<IovaRange> {
        if want.order > MAX_ORDER {
            return self.alloc_run_in_zones(shared, want);
        }
        let mut in_limit = in_limit(shared, want);
        in_limit.find_map(|(lane, bound)| {
            self.alloc_word(shared, zones, lane, want.order, bound, is_last)
        })
    }

    /// The same of whole chunks.
    pub(in crate::chunk) fn alloc_run_in_zones(
        &mut self,
        shared: &Shared,
        want: &Want,
    ) -> Option<IovaRange> {
        let mut in_limit = in_limit(shared, want);
        in_limit.find_map(|(lane, bound)| self.alloc_run(shared, lane, want, bound))
    }

    /// A range of a class from a word with something free at or below `bound`.
    fn alloc_word(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
        order: usize,
        bound: u64,
        is_last: bool,
    ) -> Option<IovaRange> {
        if let Some(range) = self.take_ready(shared, lane, order, bound) {
            return Some(range);
        }
        zones.zones[lane].earn(8);
        if zones.zones[lane].partial[order].is_empty() {
            zones.collect(shared, lane, Collect::EmptiedWords);
        }
        // Each iteration makes something available that the next one finds: at most one collection,
        // one sweep and one chunk.
        let mut what = Collect::All;
        loop {
            if !zones.zones[lane].is_exhausted(order, bound)
                && let Some(at) = self.find_word(shared, zones, lane, order, bound, is_last)
            {
                self.make_ready(shared, zones, lane, order, at);
                return self.take_ready(shared, lane, order, bound);
            }
            if what == Collect::All {
                zones.collect(shared, lane, what);
                what = Collect::EmptiedWords;
            } else if zones.zones[lane].emptied > 0 {
                let before = zones.chunks();
                zones.sweep(shared, lane, RetainEmpty::One);
                if zones.chunks() != before {
                    shared.count_returned(self.id);
                }
            } else if !self.acquire(shared, zones, lane, order, bound, is_last) {
                if !is_last || zones.zones[lane].is_exhausted(order, bound) {
                    return None;
                }
                if self.convert(shared, zones, lane, order, bound) {
                    return self.take_ready(shared, lane, order, bound);
                }
                zones.zones[lane].set_exhausted(order, bound);
                return None;
            }
        }
    }

    /// Fills a free list from words of other classes: from free space between smaller ranges, or
    /// from a word of larger ones, which serves this class from now on. Returns whether there was
    /// one at or below `bound`.
    fn convert(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
        order: usize,
        bound: u64,
    ) -> bool {
        if order > 6 {
            return false;
        }
        let zone = &shared.zones[lane];
        let own = &mut zones.zones[lane];
        let list = self.free_lists.open(lane, order);
        let mut is_any = false;
        for smaller in (0..order).rev() {
            own.partial[smaller].retain(|base| {
                let (chunk, word) = (zone.known(*base), word_of(*base));
                while let Some(most) = bound.checked_sub(*base)
                    && list.has_room()
                    && (!is_any || list.is_short(order))
                    && let Some(at) = chunk.join(word, order, most)
                {
                    list.keep(base + at);
                    is_any = true;
                }
                get(chunk.held(word)) != FULL[smaller]
            });
        }
        for (larger, full) in FULL.iter().enumerate().take(7).skip(order + 1) {
            if is_any {
                break;
            }
            let Some(at) = own.partial[larger].iter().rposition(|base| {
                // Some part of a free range is low enough.
                let free = full & !get(zone.known(*base).held(word_of(*base)));
                let lowest = base + u64::from(free.trailing_zeros());
                lowest + (1 << order) - 1 <= bound
            }) else {
                continue;
            };
            let base = own.partial[larger].swap_remove(at);
            own.drop_word(larger);
            own.add_word(order);
            own.partial[order].push(base);
            zone.known(base).split(word_of(base), order);
            let at = own.partial[order].len() - 1;
            return self.make_ready(shared, zones, lane, order, at);
        }
        is_any
    }

    /// Takes a range of a free list that lies at or below `bound`.
    fn take_ready(
        &mut self,
        shared: &Shared,
        lane: usize,
        order: usize,
        bound: u64,
    ) -> Option<IovaRange> {
        let list = self.free_lists.of(lane, order);
        let page = list.take_below(order, bound)?;
        self.chunk(shared, page).hand_out(page, order);
        Some(IovaRange::within_space(page, pages_of(order)))
    }

    /// Returns the list position of a word of the class with something free at or below `bound`;
    /// opens one before, if there is none. Where nothing else is left, it may be a word that the
    /// limit cuts.
    fn find_word(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
        order: usize,
        bound: u64,
        is_last: bool,
    ) -> Option<usize> {
        let zone = &shared.zones[lane];
        let partial = &zones.zones[lane].partial[order];
        let is_whole = |base: &u64| base + extent(order) <= bound;
        let has_low = |base: &u64| {
            let most = bound.checked_sub(*base).filter(|_| order <= 6);
            most.is_some_and(|most| zone.known(*base).free_starts(word_of(*base), order, most) != 0)
        };
        let at = partial.iter().rposition(is_whole);
        if let Some(at) = at.or_else(|| partial.iter().rposition(has_low).filter(|_| is_last)) {
            return Some(at);
        }
        let roomy = zones.zones[lane].roomy.len();
        for at in (0..roomy).rev() {
            let page = zones.zones[lane].roomy[at];
            let Some(most) = bound.checked_sub(page) else {
                continue;
            };
            let chunk = self.chunk(shared, page);
            let Some(word) = chunk.find_open(order, most) else {
                continue;
            };
            chunk.assign(word, order);
            let is_full = chunk.open() == 0;
            let own = &mut zones.zones[lane];
            own.add_word(order);
            if is_full {
                own.roomy.swap_remove(at);
            }
            own.partial[order].push(page + word as u64 * WORD_PAGES);
            let at = own.partial[order].len() - 1;
            self.free_lists.open(lane, order);
            return Some(at);
        }
        None
    }

    /// Makes what is free in a word ready, as far as there is room. `at` is its place in the list
    /// of its class.
    fn make_ready(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
        order: usize,
        at: usize,
    ) -> bool {
        let own = &mut zones.zones[lane];
        let base = own.partial[order][at];
        let Some(chunk) = self.directory.chunk(shared, base) else {
            return false;
        };
        let word = word_of(base);
        let mut held = get(chunk.held(word));
        let list = self.free_lists.of(lane, order);
        held |= list.keep_all(base, FULL[order] & !held, order);
        set(chunk.held(word), held);
        if held == FULL[order] {
            own.partial[order].swap_remove(at);
        }
        true
    }

    /// One more chunk: an abandoned one, a spent one, a free one. Where nothing else is left, it
    /// may be one that the limit cuts.
    fn acquire(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
        order: usize,
        bound: u64,
        is_last: bool,
    ) -> bool {
        let zone = &shared.zones[lane];
        // The chunk that has the limit in it, if something of the order ends there at the latest.
        let is_cut = |page: u64| page % CHUNK_PAGES + 1 >= 1 << order;
        let highest = match is_last && zone.contains(bound) && is_cut(bound) {
            true => Some(zone.index(bound)),
            false => zone.highest_below(bound),
        };
        let Some(highest) = highest else {
            return false;
        };
        if let Some(index) = zone.abandoned.take_highest(highest) {
            shared.count_slow(self.id);
            self.reclaim(shared, zones, lane, zone.page(index));
            return true;
        }
        let Some(index) = zone.take_chunk(highest) else {
            return false;
        };
        shared.count_slow(self.id);
        self.fresh += 1;
        let page = zone.page(index);
        let chunk = chunk_of(zone.make_block(page), page);
        // Its designated remote freer would find its own mark in it ever after.
        self.directory.leave(page);
        chunk.wipe();
        chunk.set_owner(self.owner);
        zones.zones[lane].add_chunk(page);
        zones.zones[lane].watch(chunk);
        zones.publish(shared);
        true
    }

    /// Takes over an abandoned chunk that the caller took out of the zone's set.
    pub(in crate::chunk) fn reclaim(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
        page: u64,
    ) {
        let chunk = chunk_of(shared.zones[lane].make_block(page), page);
        // Read-modify-write: a remote core's mark of now stays.
        chunk.tag_word().fetch_or(self.owner, Ordering::AcqRel);
        self.directory.leave(page);
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
            self.free_lists.open(lane, order);
            let held = get(chunk.held(word));
            if held != FULL[order] {
                own.partial[order].push(page + word as u64 * WORD_PAGES);
            }
            own.emptied += usize::from(held == 0);
        }
        zones.drain(chunk, page, lane);
        zones.zones[lane].watch(chunk);
        zones.publish(shared);
    }

    /// Makes whole chunks of a zone free that are empty.
    pub(in crate::chunk) fn gather_chunks(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
    ) {
        let zone = &shared.zones[lane];
        while let Some(index) = zone.abandoned.take_highest(usize::MAX) {
            self.reclaim(shared, zones, lane, zone.page(index));
        }
        zones.sweep(shared, lane, RetainEmpty::Nothing);
        while let Some(index) = zone.spent.take_highest(usize::MAX) {
            zone.free.put(index);
        }
    }

    /// Whole chunks.
    fn alloc_run(
        &mut self,
        shared: &Shared,
        lane: usize,
        want: &Want,
        bound: u64,
    ) -> Option<IovaRange> {
        let zone = &shared.zones[lane];
        let count = usize::try_from(want.pages.div_ceil(CHUNK_PAGES)).ok()?;
        let order = want.order as u32 - 9;
        let index = zone.take_run(count, order, zone.highest_below(bound)?)?;
        shared.count_slow(self.id);
        // Nothing of them is assigned. Marks that remote cores leave by mistake are wiped off
        // before the next words are.
        for chunk in index..index + count {
            let page = zone.page(chunk);
            chunk_of(zone.make_block(page), page).set_owner(AWAY);
        }
        let page = zone.page(index);
        let head = zone.known(page);
        head.claimed(0).fetch_and(!1, Ordering::AcqRel);
        head.set_kind(0, RUN);
        head.run().store(count as u64, Ordering::Release);
        IovaRange::new(IovaPfn::new(page), count as u64 * CHUNK_PAGES)
    }

    /// A chunk that is in use.
    fn chunk(&mut self, shared: &Shared, page: u64) -> &Chunk {
        self.directory
            .chunk(shared, page)
            .expect("a chunk of ours is in the directory")
    }
}

/// The zones in which something lies within the limit, in turn, and the last page of each that
/// does.
fn in_limit<'a>(shared: &'a Shared, want: &Want) -> impl Iterator<Item = (usize, u64)> + use<'a> {
    let last = want.last.raw();
    let zones = shared.zones.iter().enumerate();
    zones
        .filter(move |(_, zone)| zone.base() <= last)
        .map(move |(lane, zone)| (lane, last.min(zone.last())))
}

/// Pages of a class's words after the first page.
const fn extent(order: usize) -> u64 {
    WORD_PAGES * words_of(order) as u64 - 1
}
