//! What a core does when its current word has nothing: the other words it has, what strangers gave back, chunks without an
//! owner, the tree, words of other classes, and at last a call to the other cores.
//!
//! Bounds: each turn for a word finds one, or makes something available at most three times. A failing allocation looks into
//! the sets of chunks and the tree, and at what changed since the last one failed: what it must walk for that is paid
//! for by earlier ones ([`Lane::pay`](super::lane::Lane::pay)), and where it cannot pay it names this core among those that
//! may have something.

use lines::{AtomicU64, Ordering};

use super::Shared;
use super::handle::Local;
use super::layout::{
    AWAY, Chunk, FULL, MAX_ORDER, RUN, WORD_PAGES, chunk_of, get, set, word_of, words_of,
};
use super::leave::Keep;
use super::state::pages_of;
use super::strangers::Look;
use super::zone::Zone;
use crate::wanted::Wanted;
use crate::{AllocError, CHUNK_PAGES, IovaPfn, IovaRange, Request};

/// A starving core calls for drains at its first failure, the second after that, the fourth after that, and so on, and then at
/// every one in this many: a call makes every other core give up its chunks of a zone and take others.
const MOST_PATIENCE: u32 = 1024;

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
        let last = request.last.min(shared.aperture.last());
        self.is_sure = true;
        let (pages, order) = (wanted.pages, usize::from(wanted.order));
        let found = self
            .alloc_in_zones(shared, pages, order, last, false)
            .or_else(|| shared.rest.alloc(pages, order as u8, last))
            .or_else(|| {
                // What this core keeps, and what nobody owns, may be what is missing.
                self.gather(shared, order, last);
                self.alloc_in_zones(shared, pages, order, last, true)
            });
        found.ok_or_else(|| {
            let asked = if request.asks {
                self.ask(shared, last)
            } else {
                0
            };
            wanted.failure(&shared.aperture, asked + usize::from(!self.is_sure))
        })
    }

    /// A range of a zone; `is_last`: nothing else is left.
    fn alloc_in_zones(
        &mut self,
        shared: &Shared,
        pages: u64,
        order: usize,
        last: IovaPfn,
        is_last: bool,
    ) -> Option<IovaRange> {
        let mut zones = shared.zones.iter().enumerate();
        zones.find_map(|(lane, zone)| {
            if zone.base() > last.raw() {
                return None;
            }
            let bound = last.raw().min(zone.last());
            if order <= MAX_ORDER {
                self.alloc_word(shared, lane, order, bound, is_last)
            } else {
                self.alloc_run(shared, lane, pages, order, bound)
            }
        })
    }

    /// Makes available what an allocation of this order lacked: what strangers gave back, what is kept ready of any class, and
    /// for whole chunks all that are empty.
    fn gather(&mut self, shared: &Shared, order: usize, last: IovaPfn) {
        for (lane, zone) in shared.zones.iter().enumerate() {
            if zone.base() > last.raw() {
                continue;
            }
            self.lanes[lane].earn(64);
            self.is_sure &= self.catch_up(shared, lane);
            self.unready_all(shared, lane);
            if order <= MAX_ORDER {
                continue;
            }
            while let Some(index) = zone.orphans.take_highest(usize::MAX) {
                self.adopt(shared, lane, zone.page(index));
            }
            let is_hopeless = self.lanes[lane].is_hopeless(order, zone.last());
            if !is_hopeless && self.pay_for_words(lane) {
                self.sweep(shared, lane, Keep::Nothing);
                self.lanes[lane].give_up(MAX_ORDER + 1, zone.last());
            }
            while let Some(index) = zone.spent.take_highest(usize::MAX) {
                zone.free.put(index);
            }
        }
    }

    /// Whether all words with something free may be looked at.
    fn pay_for_words(&mut self, lane: usize) -> bool {
        let words = self.lanes[lane].partial_words() / 8;
        let pays = self.lanes[lane].pay(words);
        self.is_sure &= pays;
        pays
    }

    /// A range of a class from a word whose pages all lie at or below `bound`.
    fn alloc_word(
        &mut self,
        shared: &Shared,
        lane: usize,
        order: usize,
        bound: u64,
        is_last: bool,
    ) -> Option<IovaRange> {
        if let Some(range) = self.take_ready(shared, lane, order, bound) {
            return Some(range);
        }
        self.lanes[lane].earn(8);
        if self.lanes[lane].partial[order].is_empty() {
            self.collect(shared, lane, Look::Ripe);
        }
        // Each turn makes something available that the next one finds: at most one look, one sweep and one chunk.
        let mut look = Look::All;
        loop {
            if !self.lanes[lane].is_hopeless(order, bound)
                && let Some(at) = self.find_word(shared, lane, order, bound)
            {
                self.make_ready(shared, lane, order, at);
                return self.take_ready(shared, lane, order, bound);
            }
            if look == Look::All {
                self.collect(shared, lane, look);
                look = Look::Ripe;
            } else if self.lanes[lane].emptied > 0 {
                self.sweep(shared, lane, Keep::One);
            } else if !self.acquire(shared, lane, bound) {
                if !is_last || self.lanes[lane].is_hopeless(order, bound) {
                    return None;
                }
                if self.convert(shared, lane, order, bound) {
                    return self.take_ready(shared, lane, order, bound);
                }
                if self.is_sure {
                    self.lanes[lane].give_up(order, bound);
                }
                return None;
            }
        }
    }

    /// Makes ranges of a class ready out of words of other classes: what is free between smaller ones, or a word of larger
    /// ones, which serves this class from now on. Whether there was one.
    fn convert(&mut self, shared: &Shared, lane: usize, order: usize, bound: u64) -> bool {
        if order > 6 || !self.pay_for_words(lane) {
            return false;
        }
        let zone = &shared.zones[lane];
        let fits = |base: &u64| base + WORD_PAGES - 1 <= bound;
        let own = &mut self.lanes[lane];
        let ready = self.ready.open(lane, order);
        let mut is_any = false;
        for smaller in (0..order).rev() {
            own.partial[smaller].retain(|base| {
                let (chunk, word) = (known(zone, *base), word_of(*base));
                while fits(base)
                    && ready.is_short(order)
                    && let Some(at) = chunk.join(word, order)
                {
                    ready.keep(base + at);
                    is_any = true;
                }
                get(chunk.held(word)) != FULL[smaller]
            });
        }
        for larger in order + 1..=6 {
            if is_any {
                break;
            }
            let Some(at) = own.partial[larger].iter().rposition(fits) else {
                continue;
            };
            let base = own.partial[larger].swap_remove(at);
            own.drop_word(larger);
            own.add_word(order);
            own.partial[order].push(base);
            known(zone, base).split(word_of(base), order);
            let at = own.partial[order].len() - 1;
            return self.make_ready(shared, lane, order, at);
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

    /// Where in its list a word of the class with something free is; one was open before, if there was none.
    fn find_word(
        &mut self,
        shared: &Shared,
        lane: usize,
        order: usize,
        bound: u64,
    ) -> Option<usize> {
        let partial = &self.lanes[lane].partial[order];
        if let Some(at) = partial
            .iter()
            .rposition(|base| base + extent(order) <= bound)
        {
            return Some(at);
        }
        let roomy = self.lanes[lane].roomy.len();
        for at in (0..roomy).rev() {
            let page = self.lanes[lane].roomy[at];
            if page + CHUNK_PAGES - 1 > bound {
                continue;
            }
            let chunk = self.chunk(shared, page);
            let Some(word) = chunk.find_open(order) else {
                continue;
            };
            chunk.assign(word, order);
            let is_full = chunk.open() == 0;
            let own = &mut self.lanes[lane];
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
        lane: usize,
        order: usize,
        at: usize,
    ) -> bool {
        let own = &mut self.lanes[lane];
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

    /// One more chunk: an orphan, a spent one, a free one.
    fn acquire(&mut self, shared: &Shared, lane: usize, bound: u64) -> bool {
        let zone = &shared.zones[lane];
        let Some(highest) = zone.highest_below(bound) else {
            return false;
        };
        if let Some(index) = zone.orphans.take_highest(highest) {
            shared.count_slow(self.id);
            self.adopt(shared, lane, zone.page(index));
            return true;
        }
        let Some(index) = zone.take_chunk(highest) else {
            return false;
        };
        shared.count_slow(self.id);
        self.patience = (self.patience / 2).max(1);
        let page = zone.page(index);
        let chunk = chunk_of(zone.make_block(page), page);
        // Its giver would find its own mark in it ever after.
        self.hot.leave(page);
        chunk.wipe();
        chunk.set_owner(self.owner);
        self.lanes[lane].add_chunk(page);
        self.lanes[lane].watch(chunk);
        self.publish(shared);
        true
    }

    /// Whole chunks.
    fn alloc_run(
        &mut self,
        shared: &Shared,
        lane: usize,
        pages: u64,
        order: usize,
        bound: u64,
    ) -> Option<IovaRange> {
        let zone = &shared.zones[lane];
        let count = usize::try_from(pages.div_ceil(CHUNK_PAGES)).ok()?;
        let index = zone.take_run(count, order as u32 - 9, zone.highest_below(bound)?)?;
        shared.count_slow(self.id);
        // Nothing of them is assigned. Marks that strangers leave by mistake are wiped off before the next words are.
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

    /// Says how many chunks this core keeps.
    pub(super) fn publish(&self, shared: &Shared) {
        let kept: usize = self.lanes.iter().map(|lane| lane.own.len()).sum();
        let chunks = &shared.cores[self.id.0].chunks;
        chunks.store(kept as u64, Ordering::Relaxed);
    }

    /// Answers calls for drains, of the zones that lack something.
    pub(super) fn answer(&mut self, shared: &Shared) {
        // Acquire: with a call the number of its zone is seen.
        let called = shared.drain.load(Ordering::Acquire);
        if called == self.drained {
            return;
        }
        self.drained = called;
        // What it gave there is seen by whoever looks next.
        self.hot.leave_all();
        for (lane, zone) in shared.zones.iter().enumerate() {
            let calls = zone.calls.load(Ordering::Relaxed);
            if calls != self.lanes[lane].answered {
                self.lanes[lane].answered = calls;
                self.deposit(shared, lane);
            }
        }
    }

    /// Calls on all others now and then; how many there are.
    fn ask(&mut self, shared: &Shared, last: IovaPfn) -> usize {
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
                let answered = &mut self.lanes[lane].answered;
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
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}
