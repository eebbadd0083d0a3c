//! How what a core has unmapped comes back, and everything else that it keeps.

use iova::{CoreAllocator, IovaAllocator};
use lines::Ordering;

use super::MapperCore;
use super::core_map::Cache;
use super::reclaim::{CHUNKS, Reclaim};
use super::shared::{Orphan, Shared};
use super::tear_down::{Idle, Wait, take_pin};
use crate::clock::Clock;
use crate::invalidate::{InvalidateError, Invalidator};
use crate::table::IoMap;

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Does what others have left for this core: frees what flushes covered, idle mappings that were torn down, tables;
    /// gives back what it caches where it was asked to.
    #[cold]
    #[inline(never)]
    pub(super) fn process_notices(&mut self) {
        let line = &self.line;
        self.notices = line.flusher.notices.load(Ordering::Acquire);
        let looks = self.free_covered();
        self.release_covered();
        self.free_returned();
        if self.shared.has_orphans.load(Ordering::Relaxed) {
            self.adopt_orphans();
        }
        let line = &self.line;
        if line.flusher.is_asked.load(Ordering::Relaxed) {
            line.flusher.is_asked.store(false, Ordering::Relaxed);
            if let Ok(false) = self.tear_down_idle(Idle::All, Wait::No) {
                // Whoever is at it leaves a notice when it is done: then again.
                let line = &self.line;
                line.flusher.is_asked.store(true, Ordering::Relaxed);
            }
            self.alloc.park();
        }
        self.retire_chunks(looks);
    }

    /// Frees the covered part of the queue. Entries of one coarse time are counted together. Gives for how many chunks it is worth
    /// to look.
    fn free_covered(&mut self) -> usize {
        let line = &self.line;
        // Acquire, and before the time: pairs with the flusher's stores in the other order.
        let covered = line.flusher.covered.load(Ordering::Acquire);
        let closed_ns = line.flusher.closed_ns.load(Ordering::Relaxed);
        line.counters.saw(self.queue.len() as u64);
        let (queue, alloc) = (&mut self.queue, &mut self.alloc);
        let Shared { reclaim, table, .. } = &*self.shared;
        let (mut looks, mut chunks) = (0, 0);
        while let Some((count, since_ns)) = queue.pop_run(covered, |pinned| {
            chunks += Reclaim::free(reclaim.as_ref(), table, alloc, pinned);
        }) {
            line.counters
                .closed(closed_ns.saturating_sub(since_ns), count);
            looks = CHUNKS;
        }
        if !queue.is_empty() {
            line.owner
                .oldest_ns
                .store(queue.oldest_ns(), Ordering::Relaxed);
        }
        looks + chunks
    }

    /// Frees idle mappings that others have torn down.
    fn free_returned(&mut self) {
        let Cache::Idle(cache) = &mut self.cache else {
            return;
        };
        let returned = core::mem::take(&mut *self.line.returned.lock());
        for (place, range) in returned {
            if let Some(pinned) = take_pin(cache, place, range.first()) {
                self.alloc.free_pinned(pinned);
            }
        }
    }

    /// Gives back what can be: idle mappings, the queue, cached IOVAs, empty tables.
    #[cold]
    pub(super) fn give_back(&mut self) -> Result<(), InvalidateError> {
        let drained = self.tear_down_idle(Idle::All, Wait::Yes);
        while let Ok(true) = self.free_completed() {}
        let flushed = match self.queue.is_empty() {
            true => Ok(()),
            false => self.flush_all(),
        };
        self.process_notices();
        self.alloc.park();
        self.reclaim_all();
        drained.map(drop).and(flushed)
    }

    /// Flushes until all of the queue is covered.
    fn flush_all(&mut self) -> Result<(), InvalidateError> {
        let shared = &*self.shared;
        let line = &self.line;
        let next = self.queue.next();
        shared.flush_if(|| line.flusher.covered.load(Ordering::Acquire) < next)
    }

    /// Before a core rests: everything it keeps goes back, to the space and to the table's memory. The handle
    /// remains usable.
    ///
    /// A barrier for this core: when it returns `Ok`, no device reaches anything that was unmapped through this handle before,
    /// also where a tick or a flush is in the middle of tearing it down, who is waited for. (What other cores have unmapped
    /// stays theirs: [`DmaMapper::flush`](super::DmaMapper::flush).)
    ///
    /// # Errors
    /// [`InvalidateError`]: what it should have covered waits, counted in [`Risk`](crate::Risk), for the next flush, and
    /// for the next call here.
    pub fn park(&mut self) -> Result<(), InvalidateError> {
        let given = self.give_back();
        self.publish();
        given
    }
}

/// As [`park`](MapperCore::park), and waits as it does. What an invalidation that fails keeps from being given back stays
/// counted in [`Risk`](crate::Risk) until a later one covers it: a tick's, a flush's, or another core's.
impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> Drop for MapperCore<A, T, I, C> {
    fn drop(&mut self) {
        // What that leaves behind is counted below.
        let _ = self.give_back();
        self.publish();
        let now = self.shared.clock.coarse();
        let line = &self.line;
        #[cfg(shuttle)]
        if crate::planted::has(crate::planted::Mistake::SettlesFirst) {
            line.settle();
        }
        let mut orphans = self.shared.orphans.lock();
        while let Some((pinned, since_ns)) = self.queue.pop() {
            orphans.waiting.push(Orphan::Mapping(pinned, since_ns));
        }
        let chunks = self.quarantine.take_all();
        orphans
            .waiting
            .extend(chunks.map(|(chunk, table)| Orphan::Chunk(chunk, table, now)));
        self.shared.count_orphans(&orphans);
        line.settle();
        drop(orphans);
        *line.left.lock() = core::mem::take(&mut self.cache);
    }
}
