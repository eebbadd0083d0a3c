//! Frees and pins on the slow path: ranges in other cores' chunks and in abandoned ones, runs, the
//! tree's ranges, and erroneous calls.

use lines::Ordering;

use super::Local;
use crate::chunk::Shared;
use crate::chunk::layout::{
    AWAY, Chunk, FREE, MAX_ORDER, NO_CORE, RUN, TAIL, WORD_PAGES, bit_of, get, owner_of, word_base,
    word_of,
};
use crate::chunk::state::exact_order;
use crate::chunk::trim::release;
use crate::chunk::zone::Zone;
use crate::{CHUNK_PAGES, FreeError, IovaRange, Pinned};

/// Location of a range of a zone.
enum RangeLocation {
    /// In a chunk that is ours now.
    Own,
    /// In a chunk of another core, or of none.
    Foreign,
    /// It is whole chunks.
    Run,
}

impl Local {
    #[cold]
    #[inline(never)]
    pub(super) fn free_slow(&mut self, shared: &Shared, range: IovaRange) -> Result<(), FreeError> {
        self.drains.answer(shared, &mut self.cache);
        let Some((lane, zone, chunk)) = shared.locate(range)? else {
            shared.unzoned.free(range)?;
            shared.count_returned(self.cache.id());
            return Ok(());
        };
        match self.place(shared, lane, zone, chunk, range) {
            RangeLocation::Own => {
                if chunk.free_marked(self.cache.owner(), range) {
                    self.cache.keep(shared, lane, range);
                    return Ok(());
                }
                // It may have been taken from this core meanwhile: see `search`.
                if !chunk.is_own(self.cache.owner()) {
                    return self.free_slow(shared, range);
                }
                Err(diagnose(chunk, range))
            }
            RangeLocation::Run => {
                if is_run(chunk, range) && get(chunk.claimed(0)) & 1 != 0 {
                    return Err(FreeError::NotAllocated { range });
                }
                self.free_run(shared, zone, chunk, range, shared.retires)
            }
            RangeLocation::Foreign => {
                if !chunk.check_foreign(range) {
                    return Err(diagnose(chunk, range));
                }
                match chunk.give_back(shared, range) {
                    true => Ok(()),
                    false => Err(FreeError::NotAllocated { range }),
                }
            }
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn pin_slow(
        &mut self,
        shared: &Shared,
        range: IovaRange,
    ) -> Result<Pinned, FreeError> {
        self.drains.answer(shared, &mut self.cache);
        let Some((lane, zone, chunk)) = shared.locate(range)? else {
            shared.unzoned.pin(range)?;
            return Ok(Pinned::new(range, self.space, true));
        };
        let (word, bit) = (word_of(range.first().raw()), bit_of(range.first().raw()));
        match self.place(shared, lane, zone, chunk, range) {
            RangeLocation::Own => {
                if chunk.pin_marked(self.cache.owner(), range) {
                    return Ok(Pinned::new(range, self.space, false));
                }
                // As in `free_slow`.
                if !chunk.is_own(self.cache.owner()) {
                    return self.pin_slow(shared, range);
                }
                Err(diagnose(chunk, range))
            }
            RangeLocation::Run => {
                if !is_run(chunk, range) {
                    return Err(diagnose(chunk, range));
                }
                if chunk.claimed(0).fetch_or(1, Ordering::AcqRel) & 1 != 0 {
                    return Err(FreeError::NotAllocated { range });
                }
                if !is_run(chunk, range) {
                    // Freed between our look and our claim.
                    chunk.claimed(0).fetch_and(!1, Ordering::AcqRel);
                    return Err(FreeError::NotAllocated { range });
                }
                Ok(Pinned::new(range, self.space, true))
            }
            RangeLocation::Foreign => {
                if !chunk.check_foreign(range) {
                    return Err(diagnose(chunk, range));
                }
                if chunk.claimed(word).fetch_or(bit, Ordering::AcqRel) & bit != 0 {
                    return Err(FreeError::NotAllocated { range });
                }
                // A free or a retirement before our claim is seen now; one after it sees the claim.
                let is_freed = get(chunk.shared_freed(word)) & bit != 0;
                let is_gone = is_freed || !chunk.is_still_out(range);
                if is_gone {
                    chunk.claimed(word).fetch_and(!bit, Ordering::AcqRel);
                    return Err(FreeError::NotAllocated { range });
                }
                chunk.notify(shared, word);
                Ok(Pinned::new(range, self.space, true))
            }
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn free_pinned_slow(&mut self, shared: &Shared, pinned: Pinned, is_spent: bool) {
        pinned.check(self.space);
        self.drains.answer(shared, &mut self.cache);
        let range = pinned.range();
        let Ok(Some((lane, zone, chunk))) = shared.locate(range) else {
            shared.unzoned.free_pinned(range);
            return shared.count_returned(self.cache.id());
        };
        let (word, bit) = (word_of(range.first().raw()), bit_of(range.first().raw()));
        match self.place(shared, lane, zone, chunk, range) {
            RangeLocation::Own => {
                // A claim of a remote core's, or of this one's when it parked: like any other free.
                self.owner_side.changing(range.first().raw());
                let is_ours = chunk.free_pinned(range);
                self.owner_side.changed();
                if is_ours {
                    self.cache.keep(shared, lane, range);
                }
                if get(chunk.claimed(word)) & bit != 0 {
                    chunk.claimed(word).fetch_and(!bit, Ordering::AcqRel);
                }
                self.owner_side
                    .meet(shared, &self.cache, chunk.tag(), range.first().raw());
            }
            RangeLocation::Run => {
                let freed = self.free_run(shared, zone, chunk, range, is_spent);
                debug_assert!(freed.is_ok(), "a pinned run stays as it is: {freed:?}");
            }
            RangeLocation::Foreign => {
                let freed = chunk.give_back(shared, range);
                debug_assert!(freed, "a pinned range stays allocated");
            }
        }
    }

    #[cold]
    pub(super) fn unpin_slow(&mut self, shared: &Shared, pinned: Pinned) {
        pinned.check(self.space);
        let range = pinned.range();
        let Ok(Some((_, _, chunk))) = shared.locate(range) else {
            return shared.unzoned.unpin(range);
        };
        let page = range.first().raw();
        let order = exact_order(range.pages());
        // Each core clears its own mark: an owner and a remote core may both have pinned at the
        // same moment.
        let is_owners = pinned.is_own(self.space);
        if !is_owners || order.is_none_or(|order| !chunk.unpin_own(self.cache.owner(), page, order))
        {
            chunk
                .claimed(word_of(page))
                .fetch_and(!bit_of(page), Ordering::AcqRel);
        }
    }

    /// Finds the location of a range. Reclaims an abandoned chunk: some core must collect what is
    /// freed in it.
    fn place(
        &mut self,
        shared: &Shared,
        lane: usize,
        zone: &Zone,
        chunk: &Chunk,
        range: IovaRange,
    ) -> RangeLocation {
        let page = range.first().raw();
        match owner_of(chunk.tag_word().load(Ordering::Acquire)) {
            owner if owner == self.cache.owner() => RangeLocation::Own,
            AWAY if chunk.kind(0) == RUN => RangeLocation::Run,
            NO_CORE if zone.abandoned.take(zone.index(page)) => {
                let zones = &mut *shared.zones_of(self.cache.id()).lock();
                self.cache
                    .reclaim(shared, zones, lane, zone.page(zone.index(page)));
                RangeLocation::Own
            }
            _ => RangeLocation::Foreign,
        }
    }

    /// Frees whole chunks. If `is_spent`, their leaf tables are reclaimed before they are used
    /// again.
    fn free_run(
        &mut self,
        shared: &Shared,
        zone: &Zone,
        head: &Chunk,
        range: IovaRange,
        is_spent: bool,
    ) -> Result<(), FreeError> {
        let chunks = range.pages() / CHUNK_PAGES;
        let page = range.first().raw();
        // One of several freers wins.
        if !is_run(head, range)
            || head
                .run()
                .compare_exchange(chunks, 0, Ordering::AcqRel, Ordering::Relaxed)
                .is_err()
        {
            return Err(diagnose(head, range));
        }
        shared.count_slow(self.cache.id());
        head.set_kind(0, FREE);
        if get(head.claimed(0)) & 1 != 0 {
            head.claimed(0).fetch_and(!1, Ordering::AcqRel);
        }
        for chunk in (0..chunks).map(|at| page + at * CHUNK_PAGES) {
            release(zone, chunk, is_spent);
        }
        shared.count_returned(self.cache.id());
        Ok(())
    }
}

/// Whether exactly `range` is a run that starts in this chunk.
fn is_run(chunk: &Chunk, range: IovaRange) -> bool {
    range.first().raw().is_multiple_of(CHUNK_PAGES)
        && chunk.run().load(Ordering::Acquire) * CHUNK_PAGES == range.pages()
}

/// Returns the reason why `range` cannot be freed or pinned.
fn diagnose(chunk: &Chunk, range: IovaRange) -> FreeError {
    let page = range.first().raw();
    let is_taken = match head_of(chunk, page) {
        Some(start) => {
            let is_freed = get(chunk.shared_freed(word_of(start))) & bit_of(start) != 0;
            !is_freed && !chunk.is_exclusively_freed(start, chunk.state(start))
        }
        None => chunk.kind(0) == RUN,
    };
    let state = chunk.state(page);
    let is_exact = state.is_of(range);
    if is_taken && !is_exact {
        FreeError::Mismatch { range }
    } else {
        FreeError::NotAllocated { range }
    }
}

/// The start of the range that is allocated where a page lies, as far as its owner knows.
fn head_of(chunk: &Chunk, page: u64) -> Option<u64> {
    let mut base = word_base(page);
    while chunk.kind(word_of(base)) == TAIL {
        base -= WORD_PAGES;
    }
    let class = chunk.order(word_of(base));
    // In a word lie ranges of its class and larger ones.
    let mut starts = (class..=MAX_ORDER).map(|order| (page >> order << order).max(base));
    starts.find(|start| {
        let order = chunk.state(*start).order();
        order.is_some_and(|order| page - start < 1 << order)
    })
}
