//! Giving back: ranges to their words, words to their chunks, chunks to the space or to whoever reclaims their leaf tables.
//!
//! A sweep visits the words that have something free; a deposit visits every chunk of this core.

use alloc::vec::Vec;
use core::mem;

use lines::Ordering;

use super::Shared;
use super::handle::Local;
use super::layout::{
    AWAY, CLASSES, CLASSES_PER_LANE, MAX_ORDER, NOBODY, PENDING, WORD_PAGES, WORDS, bit_of, bits,
    class_of, get, set, word_base, word_of,
};
use super::slow::known;
use super::strangers::Look;
use super::zone::Zone;
use crate::{CHUNK_PAGES, IovaPfn, RetiredChunk};

impl Local {
    /// Returns half of the ranges kept ready to their words, and one more that was freed.
    #[cold]
    #[inline(never)]
    pub(super) fn spill(&mut self, shared: &Shared, page: u64, class: u8) {
        let lane = usize::from(class) % CLASSES / CLASSES_PER_LANE;
        let order = usize::from(class) % CLASSES_PER_LANE;
        let half = self.ready.of(class).len() / 2;
        self.unready(shared, lane, order, half);
        self.put_back(shared, lane, page, order);
    }

    /// Returns the `count` ranges of a class that were freed first to their words.
    fn unready(&mut self, shared: &Shared, lane: usize, order: usize, count: usize) {
        let class = class_of(lane, order);
        for at in 0..count {
            let page = self.ready.of(class).get(at);
            self.put_back(shared, lane, page, order);
        }
        self.ready.of(class).forget(count);
    }

    fn put_back(&mut self, shared: &Shared, lane: usize, page: u64, order: usize) {
        let Some(chunk) = self.hot.chunk(shared, page) else {
            return;
        };
        self.lanes[lane].unhold(chunk, word_base(page), order, bit_of(page));
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
        self.hot.leave_all();
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
                    for page in bits(allocated).map(|at| word as u64 * WORD_PAGES + at) {
                        let state = chunk.state(page);
                        if state.is_pinned() {
                            chunk.claimed(word).fetch_or(bit_of(page), Ordering::AcqRel);
                            chunk.set_state(page, state.unpinned());
                            chunk.tag_word().fetch_or(PENDING, Ordering::AcqRel);
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
        }
        for page in self.leaving_runs.drain(..) {
            let (_, zone) = shared
                .zone_of(page)
                .expect("a run's chunk is one of a zone");
            release(zone, page, true);
        }
        self.publish(shared);
    }

    /// Whether at most half of what this core's chunks have is allocated. What is kept ready may lie in all of them, a little
    /// in each word, and so be all that keeps them.
    fn is_mostly_free(&self, zone: &Zone, lane: usize) -> bool {
        let own = &self.lanes[lane].own;
        let all = own.len() as u64 * CHUNK_PAGES;
        let held: u64 = own.iter().map(|page| known(zone, *page).held_pages()).sum();
        held - self.ready.pages(lane) <= all / 2
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
                let has_looked = self.collect(shared, lane, Look::All);
                if self.lanes[lane].emptied > 0 || has_looked && self.is_mostly_free(zone, lane) {
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
            chunk.set_owner(AWAY);
            return Some(RetiredChunk {
                first: IovaPfn::new(page),
            });
        }
        None
    }
}

/// Puts an emptied chunk where others find it.
pub(super) fn release(zone: &Zone, page: u64, is_spent: bool) {
    known(zone, page).set_owner(NOBODY);
    let set = if is_spent { &zone.spent } else { &zone.free };
    set.put(zone.index(page));
}
