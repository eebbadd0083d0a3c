//! What a core does when its current word has nothing: the other words it has, what strangers gave back, chunks without an
//! owner, the tree, and at last a call to the other cores.
//!
//! Bounds: a look for strangers' frees reads the tags of this core's chunks, and is paid for by the looks since the last one
//! ([`Lane::credit`]); a sweep visits the words that have something free; a deposit visits every chunk of this core.

use alloc::vec::Vec;
use core::mem;

use lines::{AtomicU64, Ordering};

use super::Shared;
use super::handle::{Local, order_of};
use super::layout::{
    AWAY, CLASSES_PER_LANE, Chunk, FULL, MARKS, MAX_ORDER, NOBODY, PENDING, RIPE, RUN, TAIL,
    WORD_PAGES, WORDS, bit_of, class_of, get, set, word_base, word_of, words_of,
};
use super::zone::Zone;
use super::{Mutant, plants};
use crate::wanted::Wanted;
use crate::{AllocError, CHUNK_PAGES, IovaPfn, IovaRange, Request, RetiredChunk};

/// What to look for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// Words that strangers have emptied.
    Ripe,
    /// Everything that strangers freed.
    All,
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
        let Request {
            pages, align_order, ..
        } = request;
        let last = request.last.min(shared.aperture.last());
        if let Some(range) = self.alloc_anywhere(shared, pages, align_order, last) {
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
        if let Some(range) = self.alloc_anywhere(shared, pages, align_order, last) {
            return Ok(range);
        }
        let asked = self.ask(shared);
        Err(wanted.failure(&shared.aperture, asked))
    }

    fn alloc_anywhere(
        &mut self,
        shared: &Shared,
        pages: u64,
        align_order: u8,
        last: IovaPfn,
    ) -> Option<IovaRange> {
        let order = order_of(pages).max(usize::from(align_order));
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
        let last = (1 << order) - 1;
        let at = ready.iter().rposition(|page| page + last <= bound)?;
        let page = ready.remove(at);
        let (word, chunk) = (word_of(page), self.chunk(shared, page));
        set(chunk.out(word), get(chunk.out(word)) | bit_of(page));
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
            chunk.assign(word, lane, order);
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
        while held != FULL[order] {
            let bit = FULL[order] & !held;
            if !self.ready.keep(
                class_of(lane, order),
                base + u64::from(bit.trailing_zeros()),
            ) {
                break;
            }
            held |= bit & bit.wrapping_neg();
        }
        set(chunk.held(word), held);
        if held == FULL[order] {
            own.partial[order].swap_remove(at);
        }
        true
    }

    /// Returns half of the ranges kept ready to their words, and one more that was freed.
    #[cold]
    #[inline(never)]
    pub(super) fn spill(&mut self, shared: &Shared, page: u64, class: u8) {
        let lane = usize::from(class) / CLASSES_PER_LANE;
        let order = usize::from(class) % CLASSES_PER_LANE;
        let half = self.ready.of(class).len() / 2;
        self.unready(shared, lane, order, half);
        self.put_back(shared, lane, page, order);
    }

    /// Returns the `count` ranges of a class that were freed first to their words.
    fn unready(&mut self, shared: &Shared, lane: usize, order: usize, count: usize) {
        let class = class_of(lane, order);
        for at in 0..count {
            let page = self.ready.of(class)[at];
            self.put_back(shared, lane, page, order);
        }
        self.ready.of(class).drain(..count);
    }

    fn put_back(&mut self, shared: &Shared, lane: usize, page: u64, order: usize) {
        let Some(chunk) = self.hot.chunk(shared, page) else {
            return;
        };
        self.lanes[lane].unhold(chunk, word_base(page), order, bit_of(page));
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
        chunk.tag_word().store(self.tag, Ordering::Release);
        self.lanes[lane].own.push(page);
        self.lanes[lane].roomy.push(page);
        self.publish(shared);
        true
    }

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

    /// Returns empty words to their chunks, and empty chunks but one to the space (or, where leaf tables are reclaimed, to
    /// the list of what may be retired). `deep`: what is kept ready is returned first.
    pub(super) fn sweep(&mut self, shared: &Shared, lane: usize, deep: bool) {
        let zone = &shared.zones[lane];
        for order in 0..=MAX_ORDER {
            if deep {
                let all = self.ready.of(class_of(lane, order)).len();
                self.unready(shared, lane, order, all);
            }
            let own = &mut self.lanes[lane];
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
        let own = &mut self.lanes[lane];
        own.emptied = 0;
        let empties = own
            .roomy
            .iter()
            .filter(|page| known(zone, **page).is_empty())
            .count();
        // The last chunk stays: whoever maps one page at a time must not fetch a chunk for each.
        let mut leave = empties.min(own.own.len().saturating_sub(1));
        if leave == 0 {
            return;
        }
        let gone = own.leaving.len();
        let leaving = &mut own.leaving;
        own.roomy.retain(|page| {
            let goes = leave > 0 && known(zone, *page).is_empty();
            if goes {
                leave -= 1;
                leaving.push(*page);
            }
            !goes
        });
        let mut left: Vec<u64> = leaving[gone..].to_vec();
        left.sort_unstable();
        own.own.retain(|page| left.binary_search(page).is_err());
        if !shared.retires {
            for page in mem::take(&mut own.leaving) {
                release(zone, page, false);
            }
        }
    }

    /// Gives back everything: empty chunks to the space, the others without an owner.
    pub(super) fn deposit(&mut self, shared: &Shared) {
        self.ready.clear();
        for (lane, zone) in shared.zones.iter().enumerate() {
            self.collect_now(shared, lane, Look::All);
            let own = &mut self.lanes[lane];
            own.emptied = 0;
            own.partial.iter_mut().for_each(Vec::clear);
            own.words = [0; MAX_ORDER + 1];
            own.roomy.clear();
            for page in own.own.drain(..).chain(own.leaving.drain(..)) {
                let chunk = known(zone, page);
                for word in 0..WORDS {
                    let order = chunk.order(word);
                    let allocated = chunk.allocated(word);
                    set(chunk.held(word), allocated);
                    if order <= MAX_ORDER && allocated == 0 {
                        chunk.unassign(word, order);
                    }
                    // A pin of ours must be known to whoever owns the chunk next.
                    let pinned = get(chunk.pinned(word));
                    if pinned != 0 {
                        chunk.claimed(word).fetch_or(pinned, Ordering::AcqRel);
                        set(chunk.pinned(word), 0);
                        set(chunk.out(word), allocated);
                        chunk.tag_word().fetch_or(PENDING, Ordering::AcqRel);
                    }
                }
                if chunk.is_empty() {
                    release(zone, page, shared.retires);
                } else {
                    chunk.tag_word().fetch_and(MARKS, Ordering::AcqRel);
                    zone.orphans.put(zone.index(page));
                }
            }
        }
        for page in self.leaving_runs.drain(..) {
            let (_, zone) = shared
                .zone_of(page)
                .expect("a run's chunk is one of a zone");
            release(zone, page, true);
        }
        self.publish(shared);
    }

    /// An emptied chunk whose leaf table may go.
    pub(super) fn retire_one(&mut self, shared: &Shared) -> Option<RetiredChunk> {
        if !shared.retires {
            return None;
        }
        if let Some(page) = self.leaving_runs.pop() {
            return Some(RetiredChunk {
                first: IovaPfn::new(page),
            });
        }
        for (lane, zone) in shared.zones.iter().enumerate() {
            let own = &mut self.lanes[lane];
            own.credit += 32;
            if own.leaving.is_empty() && own.own.len() > 1 {
                self.collect(shared, lane, Look::All);
                if self.lanes[lane].emptied > 0 {
                    self.sweep(shared, lane, true);
                }
            }
            let taken = match self.lanes[lane].leaving.pop() {
                Some(page) => Some(page),
                None => zone
                    .spent
                    .take_highest(usize::MAX)
                    .map(|index| zone.page(index)),
            };
            let Some(page) = taken else { continue };
            let chunk = known(zone, page);
            // Read-modify-write: a stranger who claims after this sees that nothing is allocated, and lets go.
            if (0..WORDS).any(|word| chunk.claimed(word).fetch_or(0, Ordering::AcqRel) != 0) {
                self.lanes[lane].leaving.insert(0, page);
                continue;
            }
            chunk.tag_word().store(AWAY, Ordering::Release);
            return Some(RetiredChunk {
                first: IovaPfn::new(page),
            });
        }
        None
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
            chunk.tag_word().store(AWAY, Ordering::Relaxed);
        }
        let page = zone.page(index);
        let head = known(zone, page);
        head.set_class(0, RUN);
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

/// Puts an emptied chunk where others find it.
pub(super) fn release(zone: &Zone, page: u64, is_spent: bool) {
    known(zone, page)
        .tag_word()
        .store(NOBODY, Ordering::Release);
    let set = if is_spent { &zone.spent } else { &zone.free };
    set.put(zone.index(page));
}

/// A counter that one core writes and others read now and then.
pub(super) fn bump(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

/// The start of the range of a class in which a page of this word would lie.
pub(super) fn head_of(chunk: &Chunk, page: u64) -> Option<(u64, usize)> {
    let mut base = word_base(page);
    while chunk.class(word_of(base)) == TAIL {
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
