//! Return of everything that a core keeps: unmapped IOVAs, idle mappings, cached IOVAs, empty
//! tables.

use iova::{CoreAllocator, IovaAllocator};
use lines::Ordering;

use super::MapperCore;
use super::cache::Cache;
use super::core_reclaim::CHUNKS;
use super::reclaim::Reclaim;
use super::shared::{AbandonedWork, Shared};
use crate::clock::Clock;
use crate::invalidate::{InvalidateError, Invalidator};
use crate::reuse::Progress;
use crate::table::IoMap;

/// Time between two reports of a reuse cache, in nanoseconds.
const PUBLISH_NS: u64 = 100_000_000;

/// Scope of a teardown of idle mappings of a core.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpireScope {
    /// Those that are due, and where none is and no place is free, the oldest; none while another
    /// thread tears down some of the core's.
    Due,
    /// All; none while another thread tears down some.
    AllUnlessBusy,
    /// All, after waiting for another thread that tears down some.
    All,
}

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Handles the notices of other cores: frees what flushes covered, idle mappings that were torn
    /// down, and tables; gives back cached IOVAs if it was asked to.
    #[cold]
    #[inline(never)]
    pub(super) fn process_notices(&mut self) {
        let line = &self.line;
        self.notices = line.flusher.notices.load(Ordering::Acquire);
        let looks = self.free_covered();
        self.release_covered();
        if let Cache::Idle(cache) = &mut self.cache {
            cache.sweep(|pinned| self.alloc.free_pinned(pinned));
        }
        if self.shared.has_orphans.load(Ordering::Relaxed) {
            self.free_abandoned();
        }
        let line = &self.line;
        if line.flusher.is_asked.load(Ordering::Relaxed) {
            line.flusher.is_asked.store(false, Ordering::Relaxed);
            if let Ok(false) = self.tear_down_idle(ExpireScope::AllUnlessBusy) {
                // The thread that does so leaves a notice when it is done: this core tries again
                // then.
                let line = &self.line;
                line.flusher.is_asked.store(true, Ordering::Relaxed);
            }
            self.alloc.park();
        }
        self.retire_chunks(looks);
    }

    /// Frees the covered part of the queue. Returns the number of chunks to consider for
    /// retirement.
    fn free_covered(&mut self) -> usize {
        let line = &self.line;
        // Acquire, and before the time: pairs with the flusher's stores in the other order.
        let covered = line.flusher.covered.load(Ordering::Acquire);
        let closed_ns = line.flusher.closed_ns.load(Ordering::Relaxed);
        line.counters.saw(self.queue.len() as u64);
        let Shared { reclaim, table, .. } = &*self.shared;
        let first = self.queue.first();
        // The clock is coarse: entries that have the same time are counted together.
        let (mut chunks, oldest_ns) = (0, self.queue.oldest_ns().unwrap_or(0));
        let (queue, alloc) = (&mut self.queue, &mut self.alloc);
        let close = |since_ns, count| {
            line.counters
                .closed(closed_ns.saturating_sub(since_ns), count);
        };
        let run = (oldest_ns, 0);
        let (since_ns, count) = queue.take(covered, run, |(since_ns, count), pinned, at| {
            Reclaim::free(reclaim.as_ref(), table, alloc, pinned, &mut chunks);
            if at == since_ns {
                return (since_ns, count + 1);
            }
            close(since_ns, count);
            (at, 1)
        });
        if self.queue.first() == first {
            return 0;
        }
        close(since_ns, count);
        self.set_oldest(self.queue.oldest_ns());
        CHUNKS + chunks
    }

    /// Tears down idle mappings of this core, with one invalidation for each batch of them; before
    /// that, those whose invalidation failed earlier. Returns `false` where another thread tears
    /// down some, and `which` says not to wait for it.
    ///
    /// # Errors
    /// [`InvalidateError`]: the mappings wait, counted as stale, for the next teardown of some of
    /// this core's.
    #[cold]
    pub(super) fn tear_down_idle(&mut self, which: ExpireScope) -> Result<bool, InvalidateError> {
        let Cache::Idle(cache) = &mut self.cache else {
            return Ok(true);
        };
        let shared = &*self.shared;
        let line = &self.line;
        let Some(mut leaving) = (match which {
            ExpireScope::All => Some(line.leaving.lock()),
            ExpireScope::Due | ExpireScope::AllUnlessBusy => line.leaving.try_lock(),
        }) else {
            return Ok(false);
        };
        let batch = leaving.batch();
        if !batch.is_empty()
            && let Some(expirer) = line.expirer()
        {
            shared.finish(line, &expirer, batch)?;
        }
        let mut free = |pinned| self.alloc.free_pinned(pinned);
        cache.sweep(&mut free);
        loop {
            let progress = match which {
                ExpireScope::All | ExpireScope::AllUnlessBusy => cache.drain(batch),
                ExpireScope::Due => {
                    cache.make_room(shared.clock.coarse(), batch);
                    Progress::Done
                }
            };
            if !batch.is_empty() {
                shared.clear(batch);
                shared.invalidate_batch(batch)?;
                cache.finish(batch, shared.clock.now(), &mut free);
            }
            if progress == Progress::Done {
                break;
            }
        }
        drop(leaving);
        if shared.clock.coarse().saturating_sub(self.published_ns) >= PUBLISH_NS {
            self.publish();
        }
        Ok(true)
    }

    /// Gives back all that it can: idle mappings, the queue, cached IOVAs, empty tables.
    #[cold]
    pub(super) fn give_back(&mut self) -> Result<(), InvalidateError> {
        let drained = self.tear_down_idle(ExpireScope::All);
        while let Ok(true) = self.free_completed() {}
        let (line, next) = (&self.line.flusher, self.queue.next());
        let is_open = || line.covered.load(Ordering::Acquire) < next;
        let flushed = match self.queue.is_empty() {
            true => Ok(()),
            false => self.shared.flush_if(is_open),
        };
        self.process_notices();
        self.alloc.park();
        self.retire_chunks(usize::MAX);
        self.close_quarantine();
        drained.map(drop).and(flushed)
    }

    /// Before a core rests: everything it keeps goes back, to the space and to the table's memory.
    /// The handle remains usable.
    ///
    /// A barrier for this core: when it returns `Ok`, no device reaches anything that was unmapped
    /// through this handle before. If a tick or a flush is in the middle of tearing some of it
    /// down, the call waits for that. (What other cores have unmapped stays theirs:
    /// [`DmaMapper::flush`](super::DmaMapper::flush).)
    ///
    /// # Errors
    /// [`InvalidateError`]: what it should have covered waits, counted in [`Risk`](crate::Risk),
    /// for the next flush, and for the next call here.
    pub fn park(&mut self) -> Result<(), InvalidateError> {
        let given = self.give_back();
        self.publish();
        given
    }
}

/// As [`park`](MapperCore::park), and waits as it does. Work that a failed invalidation keeps from
/// being given back stays counted in [`Risk`](crate::Risk) until a later one covers it: a tick's, a
/// flush's, or another core's.
impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> Drop for MapperCore<A, T, I, C> {
    fn drop(&mut self) {
        // Work that this leaves behind is counted below.
        let _ = self.give_back();
        self.publish();
        let now = self.shared.clock.coarse();
        let line = &self.line;
        // A tick may have torn some down since; from here on no other thread takes any of this
        // core's.
        let mut leaving = line.leaving.lock();
        let mut abandoned = self.shared.abandoned.lock();
        let mut wait = |pinned, since_ns| {
            abandoned
                .waiting
                .push(AbandonedWork::Mapping(pinned, since_ns))
        };
        if let Cache::Idle(cache) = &mut self.cache {
            // The mappings in the batch are cleared; those that are still idle will be, and wait
            // for the same flush.
            let batch = leaving.batch();
            loop {
                cache.give_up(batch, &mut wait);
                let _ = cache.drain(batch);
                if batch.is_empty() {
                    break;
                }
                self.shared.clear(batch);
            }
            cache.sweep(|pinned| self.alloc.free_pinned(pinned));
        }
        self.queue
            .take(u64::MAX, (), |(), pinned, since_ns| wait(pinned, since_ns));
        let chunks = self.quarantine.drain(..);
        abandoned
            .waiting
            .extend(chunks.map(|(chunk, table)| AbandonedWork::Chunk(chunk, table, now)));
        abandoned.count();
        line.settle();
        drop((abandoned, leaving));
        *line.left.lock() = core::mem::take(&mut self.cache);
    }
}
