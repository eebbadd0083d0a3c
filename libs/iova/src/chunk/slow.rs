//! What a core does when its current word has nothing: the other words it has, what strangers gave back, chunks without an
//! owner, the tree, and at last a call to the other cores.
//!
//! Bounds: each turn for a word finds one, or makes something available at most three times.

use lines::{AtomicU64, Ordering};

use super::Shared;
use super::handle::Local;
use super::layout::{
    AWAY, Chunk, FULL, MAX_ORDER, RUN, TAIL, WORD_PAGES, class_of, get, set, word_base, word_of,
    words_of,
};
use super::strangers::Look;
use super::zone::Zone;
use crate::wanted::Wanted;
use crate::{AllocError, CHUNK_PAGES, IovaPfn, IovaRange, Request};

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
        if let Some(range) = self.alloc_anywhere(shared, &wanted, last) {
            return Ok(range);
        }
        // What this core keeps, and what nobody owns, may be what is missing.
        self.adopt_all(shared);
        self.deposit(shared);
        for zone in &shared.zones {
            while let Some(index) = zone.spent.take_highest(usize::MAX) {
                zone.free.put(index);
            }
        }
        if let Some(range) = self.alloc_anywhere(shared, &wanted, last) {
            return Ok(range);
        }
        let asked = self.ask(shared);
        Err(wanted.failure(&shared.aperture, asked))
    }

    fn alloc_anywhere(
        &mut self,
        shared: &Shared,
        wanted: &Wanted,
        last: IovaPfn,
    ) -> Option<IovaRange> {
        let (pages, order) = (wanted.pages, usize::from(wanted.order));
        let zones = shared.zones.len();
        for turn in 0..zones {
            let lane = if self.preferred == 0 {
                turn
            } else {
                zones - 1 - turn
            };
            let zone = &shared.zones[lane];
            if zone.base() > last.raw() {
                continue;
            }
            let bound = last.raw().min(zone.last());
            let found = if order <= MAX_ORDER {
                self.alloc_word(shared, lane, order, bound)
            } else {
                self.alloc_run(shared, lane, pages, order, bound)
            };
            if found.is_some() {
                return found;
            }
        }
        shared.rest.alloc(pages, order as u8, last)
    }

    /// A range of a class from a word whose pages all lie at or below `bound`.
    fn alloc_word(
        &mut self,
        shared: &Shared,
        lane: usize,
        order: usize,
        bound: u64,
    ) -> Option<IovaRange> {
        if let Some(range) = self.take_ready(shared, lane, order, bound) {
            return Some(range);
        }
        self.lanes[lane].credit += 8;
        if self.lanes[lane].partial[order].is_empty() {
            self.collect(shared, lane, Look::Ripe);
        }
        // Each turn makes something available that the next one finds: at most one look, one sweep and one chunk.
        let mut look = Look::All;
        loop {
            if let Some(at) = self.find_word(shared, lane, order, bound) {
                self.make_ready(shared, lane, order, at);
                return self.take_ready(shared, lane, order, bound);
            }
            if look == Look::All {
                self.collect(shared, lane, look);
                look = Look::Ripe;
            } else if self.lanes[lane].emptied > 0 {
                self.sweep(shared, lane, false);
            } else if !self.acquire(shared, lane, bound) {
                return None;
            }
        }
    }

    /// A range that is kept ready and lies at or below `bound`.
    fn take_ready(
        &mut self,
        shared: &Shared,
        lane: usize,
        order: usize,
        bound: u64,
    ) -> Option<IovaRange> {
        let ready = self.ready.of(class_of(lane, order));
        let page = ready.take_below(order, bound)?;
        self.chunk(shared, page).hand_out(page, order);
        Some(IovaRange::within_space(page, 1 << order))
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
        let class = class_of(lane, order);
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
            let lane = &mut self.lanes[lane];
            lane.add_word(order);
            if is_full {
                lane.roomy.swap_remove(at);
            }
            lane.partial[order].push(page + word as u64 * WORD_PAGES);
            let at = lane.partial[order].len() - 1;
            self.ready.open(class);
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
        let ready = self.ready.of(class_of(lane, order));
        held |= ready.keep_all(base, FULL[order] & !held, order);
        set(chunk.held(word), held);
        if held == FULL[order] {
            own.partial[order].swap_remove(at);
        }
        true
    }

    /// One more chunk: an emptied one of ours, an orphan, a spent one, a free one.
    fn acquire(&mut self, shared: &Shared, lane: usize, bound: u64) -> bool {
        let leaving = &mut self.lanes[lane].leaving;
        if let Some(at) = leaving
            .iter()
            .rposition(|page| page + CHUNK_PAGES - 1 <= bound)
        {
            let page = leaving.swap_remove(at);
            self.lanes[lane].own.push(page);
            self.lanes[lane].roomy.push(page);
            return true;
        }
        let zone = &shared.zones[lane];
        let Some(highest) = zone.highest_below(bound) else {
            return false;
        };
        shared.count_slow(self.id);
        if let Some(index) = zone.orphans.take_highest(highest) {
            self.adopt(shared, lane, zone.page(index));
            return true;
        }
        let Some(index) = zone
            .spent
            .take_highest(highest)
            .or_else(|| zone.free.take_highest(highest))
        else {
            return false;
        };
        let page = zone.page(index);
        let chunk = zone.make_block(page).chunk(page);
        chunk.wipe();
        chunk.set_owner(self.owner);
        self.lanes[lane].own.push(page);
        self.lanes[lane].roomy.push(page);
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
        let align = 1_usize.checked_shl(u32::try_from(order).ok()?.saturating_sub(9))?;
        let first = (zone.base() / CHUNK_PAGES) as usize & (align - 1);
        let offset = (align - first) & (align - 1);
        shared.count_slow(self.id);
        let index = zone
            .free
            .take_run(count, align, offset, zone.highest_below(bound)?)?;
        for chunk in index..index + count {
            let page = zone.page(chunk);
            let chunk = zone.make_block(page).chunk(page);
            chunk.wipe();
            chunk.set_owner(AWAY);
        }
        let page = zone.page(index);
        let head = known(zone, page);
        head.set_kind(0, RUN);
        head.run().store(count as u64, Ordering::Release);
        Some(IovaRange::within_space(page, count as u64 * CHUNK_PAGES))
    }

    /// Says how many chunks this core keeps.
    pub(super) fn publish(&self, shared: &Shared) {
        let own: usize = self
            .lanes
            .iter()
            .map(|lane| lane.own.len() + lane.leaving.len())
            .sum();
        let kept = (own + self.leaving_runs.len()) as u64;
        shared.cores[self.id.0]
            .chunks
            .store(kept, Ordering::Relaxed);
    }

    /// Answers a call for drains.
    pub(super) fn answer(&mut self, shared: &Shared) {
        let called = shared.drain.load(Ordering::Relaxed);
        if called != self.drained {
            self.drained = called;
            self.deposit(shared);
        }
    }

    /// Calls on all others; how many there are.
    fn ask(&mut self, shared: &Shared) -> usize {
        // Nothing is ordered by the call: who answers it publishes what he gives back by the sets he puts it in.
        self.drained = shared.drain.fetch_add(1, Ordering::Relaxed) + 1;
        shared.others(self.id)
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
    zone.block(page)
        .expect("a chunk in use is in the directory")
        .chunk(page)
}

/// A counter that one core writes and others read now and then.
pub(super) fn bump(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

/// The start of the range of a class in which a page of this word would lie.
pub(super) fn head_of(chunk: &Chunk, page: u64) -> Option<(u64, usize)> {
    let mut base = word_base(page);
    while chunk.kind(word_of(base)) == TAIL {
        base -= WORD_PAGES;
    }
    let order = chunk.order(word_of(base));
    let start = if order <= 6 {
        page & !((1 << order) - 1)
    } else {
        base
    };
    (order <= MAX_ORDER).then_some((start, order))
}
