//! What a core does when its free list has nothing: the other words it has, what remote cores freed, chunks without an
//! owner, the tree, and at last a search of everything (`search`) and a call to the other cores.
//!
//! Bounds: each turn for a word finds one, or makes something available at most three times. A failing allocation looks into
//! the sets of chunks and the tree; what it must walk beyond that is paid for ([`CoreZone::pay`](super::core_zone::CoreZone::pay),
//! `search`), and where it cannot pay it names this core among those that may have something.

use lines::{AtomicU64, Ordering};

use super::Shared;
use super::core_zone::CoreZones;
use super::handle::Local;
use super::layout::{
    AWAY, Chunk, FULL, MAX_ORDER, RUN, WORD_PAGES, chunk_of, get, set, word_of, words_of,
};
use super::remote_free::Collect;
use super::state::pages_of;
use super::trim::RetainEmpty;
use super::zone::Zone;
use crate::wanted::Wanted;
use crate::{AllocError, CHUNK_PAGES, IovaPfn, IovaRange, Request};

/// A starving core calls for drains at its first failure, the second after that, the fourth after that, and so on, and then at
/// every one in this many: a call makes every other core give up its chunks of a zone and take others.
const MOST_PATIENCE: u32 = 1024;

/// What is wanted: a range of an order, or, of whole chunks, so many pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    pub(super) pages: u64,
    pub(super) order: usize,
    pub(super) last: IovaPfn,
}

impl Local {
    #[cold]
    #[inline(never)]
    pub(super) fn alloc_slow(
        &mut self,
        shared: &Shared,
        request: Request,
    ) -> Result<IovaRange, AllocError> {
        self.answer(shared);
        let wanted = Wanted::of(&request)?;
        let want = Want {
            pages: wanted.pages,
            order: usize::from(wanted.order),
            last: request.last.min(shared.aperture.last()),
        };
        self.is_sure = true;
        let is_vain = self.is_vain(shared, &want);
        // Whole chunks are in no list of this core's: no lock is taken for them where there are some.
        if want.order > MAX_ORDER
            && !is_vain
            && let Some(range) = self.alloc_run_in_zones(shared, &want)
        {
            return Ok(range);
        }
        let zones = &mut *shared.zones_of(self.id).lock();
        let in_tree = || shared.rest.alloc(want.pages, wanted.order, want.last);
        let found = match is_vain {
            true => in_tree(),
            false => self
                .alloc_in_zones(shared, zones, &want, false)
                .or_else(in_tree)
                .or_else(|| self.search(shared, zones, &want)),
        };
        found.ok_or_else(|| {
            let asked = if request.asks {
                self.ask(shared, zones, want.last)
            } else {
                0
            };
            wanted.failure(&shared.aperture, asked + usize::from(!self.is_sure))
        })
    }

    /// A range of a zone; `is_last`: nothing else is left.
    pub(super) fn alloc_in_zones(
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
    fn alloc_run_in_zones(&mut self, shared: &Shared, want: &Want) -> Option<IovaRange> {
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
        // Each turn makes something available that the next one finds: at most one look, one sweep and one chunk.
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
                    bump(&shared.cores[self.id.0].returned);
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

    /// Makes ranges of a class ready out of words of other classes: what is free between smaller ones, or a word of larger
    /// ones, which serves this class from now on. Whether there was one at or below `bound`.
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
        let ready = self.ready.open(lane, order);
        let mut is_any = false;
        for smaller in (0..order).rev() {
            own.partial[smaller].retain(|base| {
                let (chunk, word) = (known(zone, *base), word_of(*base));
                while let Some(most) = bound.checked_sub(*base)
                    && ready.has_room()
                    && (!is_any || ready.is_short(order))
                    && let Some(at) = chunk.join(word, order, most)
                {
                    ready.keep(base + at);
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
                let free = full & !get(known(zone, *base).held(word_of(*base)));
                let lowest = base + u64::from(free.trailing_zeros());
                lowest + (1 << order) - 1 <= bound
            }) else {
                continue;
            };
            let base = own.partial[larger].swap_remove(at);
            own.drop_word(larger);
            own.add_word(order);
            own.partial[order].push(base);
            known(zone, base).split(word_of(base), order);
            let at = own.partial[order].len() - 1;
            return self.make_ready(shared, zones, lane, order, at);
        }
        is_any
    }

    /// A range that is kept ready and lies at or below `bound`.
    fn take_ready(
        &mut self,
        shared: &Shared,
        lane: usize,
        order: usize,
        bound: u64,
    ) -> Option<IovaRange> {
        let ready = self.ready.of(lane, order);
        let page = ready.take_below(order, bound)?;
        self.chunk(shared, page).hand_out(page, order);
        Some(IovaRange::within_space(page, pages_of(order)))
    }

    /// Where in its list a word of the class with something free at or below `bound` is; one was open before, if there was none.
    /// Where nothing else is left, it may be a word that the limit cuts.
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
            most.is_some_and(|most| {
                known(zone, *base).free_starts(word_of(*base), order, most) != 0
            })
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
            self.ready.open(lane, order);
            return Some(at);
        }
        None
    }

    /// Makes what is free in a word ready, as far as there is room. `at` is its place in the list of its class.
    pub(super) fn make_ready(
        &mut self,
        shared: &Shared,
        zones: &mut CoreZones,
        lane: usize,
        order: usize,
        at: usize,
    ) -> bool {
        let own = &mut zones.zones[lane];
        let base = own.partial[order][at];
        let Some(chunk) = self.hot.chunk(shared, base) else {
            return false;
        };
        let word = word_of(base);
        let mut held = get(chunk.held(word));
        let ready = self.ready.of(lane, order);
        held |= ready.keep_all(base, FULL[order] & !held, order);
        set(chunk.held(word), held);
        if held == FULL[order] {
            own.partial[order].swap_remove(at);
        }
        true
    }

    /// One more chunk: an abandoned one, a spent one, a free one. Where nothing else is left, it may be one that the limit cuts.
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
        if let Some(index) = zone.orphans.take_highest(highest) {
            shared.count_slow(self.id);
            self.reclaim(shared, zones, lane, zone.page(index));
            return true;
        }
        let Some(index) = zone.take_chunk(highest) else {
            return false;
        };
        shared.count_slow(self.id);
        self.patience = (self.patience / 2).max(1);
        let page = zone.page(index);
        let chunk = chunk_of(zone.make_block(page), page);
        // Its designated remote freer would find its own mark in it ever after.
        self.hot.leave(page);
        chunk.wipe();
        chunk.set_owner(self.owner);
        zones.zones[lane].add_chunk(page);
        zones.zones[lane].watch(chunk);
        zones.publish(shared);
        true
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
        // Nothing of them is assigned. Marks that remote cores leave by mistake are wiped off before the next words are.
        for chunk in index..index + count {
            let page = zone.page(chunk);
            chunk_of(zone.make_block(page), page).set_owner(AWAY);
        }
        let page = zone.page(index);
        let head = known(zone, page);
        head.claimed(0).fetch_and(!1, Ordering::AcqRel);
        head.set_kind(0, RUN);
        head.run().store(count as u64, Ordering::Release);
        IovaRange::new(IovaPfn::new(page), count as u64 * CHUNK_PAGES)
    }

    /// Answers calls for drains, of the zones that lack something.
    #[inline]
    pub(super) fn answer(&mut self, shared: &Shared) {
        // Acquire: with a call the number of its zone is seen.
        let called = shared.drain.load(Ordering::Acquire);
        if called != self.drained {
            self.drained = called;
            self.answer_call(shared);
        }
    }

    #[cold]
    #[inline(never)]
    fn answer_call(&mut self, shared: &Shared) {
        // What it gave there is seen by whoever looks next.
        self.leave_all(shared);
        let zones = &mut *shared.zones_of(self.id).lock();
        for (lane, zone) in shared.zones.iter().enumerate() {
            let calls = zone.calls.load(Ordering::Relaxed);
            if calls != zones.zones[lane].answered {
                zones.zones[lane].answered = calls;
                self.deposit(shared, zones, lane);
            }
        }
    }

    /// Calls on all others now and then; how many there are.
    fn ask(&mut self, shared: &Shared, zones: &mut CoreZones, last: IovaPfn) -> usize {
        let others = shared.others(self.id);
        self.waited += 1;
        if others == 0 || self.waited < self.patience {
            return others;
        }
        self.waited = 0;
        self.patience = (2 * self.patience).min(MOST_PATIENCE);
        for (lane, zone) in shared.zones.iter().enumerate() {
            if zone.base() <= last.raw() {
                let before = zone.calls.fetch_add(1, Ordering::Relaxed);
                // Our own call is not for us; another's of just now is.
                let answered = &mut zones.zones[lane].answered;
                *answered += u64::from(*answered == before);
            }
        }
        // Release: see `answer`. Who answers publishes what he gives back by the sets he puts it in.
        let before = shared.drain.fetch_add(1, Ordering::Release);
        self.drained += u64::from(self.drained == before);
        others
    }

    /// A chunk that is in use.
    pub(super) fn chunk(&mut self, shared: &Shared, page: u64) -> &Chunk {
        self.hot
            .chunk(shared, page)
            .expect("a chunk of ours is in the directory")
    }
}

/// The zones in which something lies within the limit, in turn, and the last page of each that does.
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

/// A chunk of a zone that was used before.
pub(super) fn known(zone: &Zone, page: u64) -> &Chunk {
    chunk_of(
        zone.block(page)
            .expect("a chunk in use is in the directory"),
        page,
    )
}

/// A counter that one core writes and others read now and then.
pub(super) fn bump(counter: &AtomicU64) {
    // Release: who sees it sees what it counts.
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Release);
}
