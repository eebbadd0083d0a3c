//! How what a core has unmapped comes back, and everything else that it keeps.

use iova::{CoreAllocator, IovaAllocator};
use lines::Ordering;

use super::MapperCore;
use super::shared::Orphan;
use crate::clock::Clock;
use crate::invalidate::{InvalidateError, Invalidator};
use crate::reuse::Progress;
use crate::table::PageTable;

impl<A: IovaAllocator, T: PageTable, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Does what others have left for this core: frees what flushes covered, idle mappings that were torn down, tables;
    /// gives back what it caches where it was asked to.
    #[cold]
    pub(super) fn heed(&mut self) {
        let line = &self.shared.lines[self.core];
        self.notices = line.flusher.notices.load(Ordering::Acquire);
        let freed = self.free_covered();
        self.release_covered();
        self.free_returned();
        if self.shared.has_orphans.load(Ordering::Relaxed) {
            self.adopt_orphans();
        }
        let line = &self.shared.lines[self.core];
        if line.flusher.is_asked.load(Ordering::Relaxed) {
            line.flusher.is_asked.store(false, Ordering::Relaxed);
            let _ = self.drain_cache();
            self.alloc.park();
        }
        if freed > 0 {
            self.retire_chunks();
        }
    }

    /// Frees the covered part of the queue. Entries of one coarse time are counted together.
    fn free_covered(&mut self) -> u64 {
        let line = &self.shared.lines[self.core];
        // Acquire, and before the time: pairs with the flusher's stores in the other order.
        let covered = line.flusher.covered.load(Ordering::Acquire);
        let closed_ns = line.flusher.closed_ns.load(Ordering::Relaxed);
        line.counters.saw(self.queue.len() as u64);
        let (queue, alloc) = (&mut self.queue, &mut self.alloc);
        let mut freed = 0;
        while let Some((count, since_ns)) =
            queue.pop_run(covered, |pinned| alloc.free_pinned(pinned))
        {
            line.counters
                .closed(closed_ns.saturating_sub(since_ns), count);
            freed += count;
        }
        if !queue.is_empty() {
            line.owner
                .oldest_ns
                .store(queue.oldest_ns(), Ordering::Relaxed);
        }
        freed
    }

    /// Frees idle mappings that others have torn down.
    fn free_returned(&mut self) {
        let Some(reused) = &mut self.reused else {
            return;
        };
        let returned = core::mem::take(&mut *self.shared.lines[self.core].returned.lock());
        for (place, range) in returned {
            if let Some(pinned) = reused.take_pin(place, range.first()) {
                self.alloc.free_pinned(pinned);
            }
        }
    }

    /// Tears down every idle mapping of this core.
    fn drain_cache(&mut self) -> Result<(), InvalidateError> {
        loop {
            self.tear_down_batch()?;
            let Some(reused) = &mut self.reused else {
                return Ok(());
            };
            let progress = reused.cache.any().drain(&mut reused.batch);
            self.tear_down_batch()?;
            if progress == Progress::Done {
                return Ok(());
            }
        }
    }

    /// Gives back what can be: idle mappings, the queue, cached IOVAs, empty tables.
    #[cold]
    pub(super) fn give_back(&mut self) -> Result<(), InvalidateError> {
        let drained = self.drain_cache();
        while let Ok(true) = self.free_completed() {}
        let flushed = match self.queue.is_empty() {
            true => Ok(()),
            false => self.flush_all(),
        };
        self.heed();
        self.alloc.park();
        self.retire_chunks();
        self.close_quarantine();
        drained.and(flushed)
    }

    /// Flushes until all of the queue is covered.
    fn flush_all(&mut self) -> Result<(), InvalidateError> {
        let shared = &*self.shared;
        let line = &shared.lines[self.core];
        let next = self.queue.next();
        shared.flush_if(|| line.flusher.covered.load(Ordering::Acquire) < next)
    }

    /// Before a core rests: everything it keeps goes back, to the space and to the table's memory. The handle
    /// remains usable.
    ///
    /// # Errors
    /// [`InvalidateError`]: what it should have covered waits for the next flush, and for the next call here.
    pub fn park(&mut self) -> Result<(), InvalidateError> {
        let given = self.give_back();
        self.publish();
        given
    }
}

impl<A: IovaAllocator, T: PageTable, I: Invalidator, C: Clock> Drop for MapperCore<A, T, I, C> {
    fn drop(&mut self) {
        let given = self.give_back();
        self.publish();
        let line = &self.shared.lines[self.core];
        let mut orphans = self.shared.orphans.lock();
        if given.is_err() || !self.queue.is_empty() {
            while let Some((pinned, since_ns)) = self.queue.pop() {
                orphans.waiting.push(Orphan::Mapping(pinned, since_ns));
            }
        }
        let chunks = self.quarantine.take_all();
        orphans
            .waiting
            .extend(chunks.map(|(chunk, table)| Orphan::Chunk(chunk, table)));
        drop(orphans);
        *line.left.lock() = self.reused.take();
    }
}
