//! State shared by the cores of a mapper, with the operations of any thread: flush, expire, ask.

use alloc::{boxed::Box, sync::Arc, vec::Vec};

use iova::{IovaAllocator, IovaRange, Pinned, RetiredChunk};
use lines::{AtomicBool, AtomicUsize, CachePadded, Lock, Ordering};

use super::limits::DeviceLimits;
use super::lines::{BATCH, CoreLines, Leaving};
use super::policy::{Policy, Teardown};
use super::reclaim::Reclaim;
use super::walks::Walks;
use crate::clock::Clock;
use crate::invalidate::{Combiner, Command, InvalidateError, Invalidator};
use crate::reuse::{Batch, Progress, SharingTable, Slab};
use crate::risk::StaleTimeHistogram;
use crate::table::{IoMap, RetiredTable};

/// Deferred work of a dropped core, which a failed invalidation kept from being given back, with
/// the time since when, in nanoseconds.
pub(super) enum AbandonedWork {
    Mapping(Pinned, u64),
    Chunk(RetiredChunk, RetiredTable, u64),
}

/// Deferred work of dropped cores, before and after a flush.
#[derive(Default)]
pub(super) struct AbandonedQueue {
    pub(super) waiting: Vec<AbandonedWork>,
    pub(super) safe: Vec<AbandonedWork>,
    /// Most mappings that waited at one time.
    pub(super) stale_max: u64,
    /// Of mappings that no longer wait.
    pub(super) stale_times: StaleTimeHistogram,
}

impl AbandonedQueue {
    /// Number of mappings that wait. To be read after the lines: see [`CoreLines::settle`].
    pub(super) fn stale(&self) -> u64 {
        let is_mapping = |work: &&AbandonedWork| matches!(work, AbandonedWork::Mapping(..));
        self.waiting.iter().filter(is_mapping).count() as u64
    }

    /// Updates `stale_max` after more were added.
    pub(super) fn count(&mut self) {
        self.stale_max = self.stale_max.max(self.stale());
    }

    /// Whether something has waited for `age` at `now`.
    fn is_due(&self, now: u64, age: u64) -> bool {
        self.waiting.iter().any(|work| match work {
            AbandonedWork::Mapping(_, since_ns) | AbandonedWork::Chunk(.., since_ns) => {
                now.saturating_sub(*since_ns) >= age
            }
        })
    }
}

/// Scratch memory of a flush; its lock serializes flushes.
pub(super) struct Flush {
    /// By core: mappings and chunks noted at the start.
    pub(super) noted: Vec<(u64, u64)>,
}

/// One mapper. The order of its locks is in the head of `mapper/mod.rs`.
pub(super) struct Shared<A, T, I, C> {
    /// No other mapper of the program has it, before or after: a [`Mapping`](super::Mapping) may
    /// outlive its mapper, at whose address the next one may lie.
    pub(super) id: u64,
    pub(super) allocator: A,
    pub(super) table: T,
    pub(super) invalidator: I,
    pub(super) clock: C,
    pub(super) policy: Policy,
    /// The mapper's own limits.
    pub(super) limits: DeviceLimits,
    /// Age at which waiting work is flushed by a tick, nanoseconds.
    pub(super) age_ns: u64,
    pub(super) lines: Box<[Arc<CoreLines>]>,
    /// Lines from here on were never used.
    pub(super) used: AtomicUsize,
    pub(super) flush: CachePadded<Lock<Flush>>,
    pub(super) combiner: Combiner,
    pub(super) sharing: Option<Arc<SharingTable>>,
    /// Release of table pages; none where the mapper keeps them.
    pub(super) reclaim: Option<Reclaim<T>>,
    pub(super) abandoned: Lock<AbandonedQueue>,
    /// Some of them are safe. Written with the lock held.
    pub(super) has_orphans: AtomicBool,
}

impl<A, T, I, C> Shared<A, T, I, C> {
    /// Returns whether all walks are over that can have found what this thread took out of the tree
    /// before.
    pub(super) fn are_walks_over(&self) -> bool {
        // All lines, whether they seem used or not: a core may have begun to use its own just now.
        Walks::are_over(self.lines.iter().map(|line| &*line.walks))
    }
}

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> Shared<A, T, I, C> {
    /// The lines of cores that ever had a handle.
    pub(super) fn lines(&self) -> &[Arc<CoreLines>] {
        &self.lines[..self.used.load(Ordering::Acquire)]
    }

    /// One invalidation for everything that every core has unmapped or retired so far. The caller
    /// holds the lock.
    pub(super) fn flush_holding(&self, flush: &mut Flush) -> Result<(), InvalidateError> {
        self.note(flush);
        let abandoned = self.abandoned.lock().waiting.len();
        self.invalidator.flush(&[Command::Domain])?;
        let now = self.clock.now();
        self.clock.advance(now);
        for (line, &(queued, retired)) in self.lines.iter().zip(&flush.noted) {
            let mine = &line.flusher;
            if mine.covered.load(Ordering::Relaxed) >= queued
                && mine.retired_covered.load(Ordering::Relaxed) == retired
            {
                continue;
            }
            mine.closed_ns.store(now, Ordering::Relaxed);
            // Release: the owner that sees it frees what devices no longer use.
            mine.covered.fetch_max(queued, Ordering::Release);
            mine.retired_covered.store(retired, Ordering::Release);
            mine.notify();
        }
        if abandoned > 0 {
            self.release_abandoned(abandoned, now);
        }
        Ok(())
    }

    fn note(&self, flush: &mut Flush) {
        flush.noted.clear();
        flush.noted.extend(self.lines().iter().map(|line| {
            // Acquire: pairs with the core's Release store, so that the cleared entries come before
            // the submission.
            (
                line.owner.queued.load(Ordering::Acquire),
                line.owner.retired.load(Ordering::Acquire),
            )
        }));
    }

    #[cold]
    fn release_abandoned(&self, count: usize, now: u64) {
        let abandoned = &mut *self.abandoned.lock();
        for work in abandoned.waiting.drain(..count) {
            if let AbandonedWork::Mapping(_, since_ns) = work {
                abandoned.stale_times.record(now.saturating_sub(since_ns));
            }
            abandoned.safe.push(work);
        }
        self.has_orphans.store(true, Ordering::Relaxed);
        self.lines().iter().for_each(|line| line.flusher.notify());
    }

    /// Flushes if `is_needed` still holds once the lock is taken.
    pub(super) fn flush_if(&self, is_needed: impl Fn() -> bool) -> Result<(), InvalidateError> {
        let mut flush = self.flush.lock();
        if !is_needed() {
            return Ok(());
        }
        self.flush_holding(&mut flush)
    }

    /// Invalidates pages that a core has cleared, and waits.
    #[inline]
    pub(super) fn invalidate(&self, core: usize, range: IovaRange) -> Result<(), InvalidateError> {
        match self.policy.teardown {
            Teardown::Combining { .. } => self.combiner.flush(&self.invalidator, core, range),
            _ => self.invalidator.flush(&[Command::Pages(range)]),
        }
    }

    /// Invalidates idle mappings that are cleared, and waits.
    pub(super) fn invalidate_batch(&self, batch: &Batch) -> Result<(), InvalidateError> {
        let (expired, mut commands) = (batch.entries(), [Command::Domain; BATCH]);
        let len = expired.len();
        if len >= self.invalidator.whole_domain_from().max(1) || len > BATCH {
            return self.invalidator.flush(&[Command::Domain]);
        }
        for (command, expired) in commands.iter_mut().zip(expired) {
            *command = Command::Pages(expired.range);
        }
        self.invalidator.flush(&commands[..len])
    }

    /// Tears down the idle mappings of all cores that are due at `now`, except for cores of which
    /// another thread, perhaps the owner, tears some down at the moment: the next tick checks
    /// again.
    pub(super) fn expire(&self, now: u64) -> Result<(), InvalidateError> {
        let mut result = Ok(());
        for line in self.lines() {
            let expirer = line.expirer.try_lock().and_then(|expirer| expirer.clone());
            if let (Some(expirer), Some(mut leaving)) = (expirer, line.leaving.try_lock()) {
                let take = |batch: &mut Batch| expirer.expire(now, batch);
                result = result.and(self.tear_down(line, &expirer, &mut leaving, take));
            }
        }
        result
    }

    /// Tears down the idle mappings of all cores, and waits for other threads that tear down some.
    pub(super) fn drain(&self) -> Result<(), InvalidateError> {
        let mut result = Ok(());
        for line in self.lines() {
            let Some(expirer) = line.expirer() else {
                continue;
            };
            let mut leaving = line.leaving.lock();
            let take = |batch: &mut Batch| expirer.drain(batch);
            result = result.and(self.tear_down(line, &expirer, &mut leaving, take));
        }
        result
    }

    /// Tears down the mappings whose invalidation failed, and then those that `take` takes. Called
    /// by a thread that is not the owner.
    fn tear_down(
        &self,
        line: &CoreLines,
        expirer: &Slab,
        leaving: &mut Leaving,
        take: impl Fn(&mut Batch) -> Progress,
    ) -> Result<(), InvalidateError> {
        let batch = leaving.batch();
        self.finish(line, expirer, batch)?;
        loop {
            let progress = take(batch);
            self.clear(batch);
            self.finish(line, expirer, batch)?;
            if progress == Progress::Done {
                return Ok(());
            }
        }
    }

    /// Invalidates idle mappings that were taken through `expirer` and are cleared, and gives them
    /// back. Where that fails they stay in the batch.
    pub(super) fn finish(
        &self,
        line: &CoreLines,
        expirer: &Slab,
        batch: &mut Batch,
    ) -> Result<(), InvalidateError> {
        if batch.is_empty() {
            return Ok(());
        }
        self.invalidate_batch(batch)?;
        expirer.torn_down(batch, self.clock.now());
        // The owner frees their IOVAs.
        line.flusher.notify();
        Ok(())
    }

    /// Clears the entries of idle mappings. They are pinned by the core that kept them, so they are
    /// mapped.
    pub(super) fn clear(&self, batch: &Batch) {
        for expired in batch.entries() {
            let cleared = self.table.unmap(expired.range);
            debug_assert!(cleared.is_ok(), "an idle mapping is mapped: {cleared:?}");
        }
    }

    /// Asks every other core to give back what it caches.
    pub(super) fn ask_others(&self, core: usize) {
        for (other, line) in self.lines().iter().enumerate() {
            if other != core && !line.flusher.is_asked.swap(true, Ordering::Relaxed) {
                line.flusher.notify();
            }
        }
    }

    /// Returns whether a tick would do something, or another context holds a lock that the answer
    /// needs. In an interrupt, that may be the interrupted one: this waits for no lock, and clones
    /// no [`Arc`], since dropping the last clone frees memory.
    pub(super) fn is_due(&self, now: u64) -> bool {
        self.clock.advance(now);
        let is_idle_due = self.lines().iter().any(|line| line.is_idle_due(now));
        let abandoned = self.abandoned.try_lock();
        is_idle_due || abandoned.is_none_or(|abandoned| self.is_flush_due(now, &abandoned))
    }

    /// Whether a flush would close something at `now`.
    fn is_flush_due(&self, now: u64, abandoned: &AbandonedQueue) -> bool {
        let mut lines = self.lines().iter();
        lines.any(|line| line.is_due(now, self.age_ns)) || abandoned.is_due(now, self.age_ns)
    }

    pub(super) fn tick(&self, now: u64) -> Result<(), InvalidateError> {
        self.clock.advance(now);
        let expired = self.expire(now);
        // Waits for the lock of the abandoned work, since an unnecessary flush costs all cores
        // more.
        let is_due = self.is_flush_due(now, &self.abandoned.lock());
        // Where another thread flushes just now, the next tick checks whether it was enough.
        if is_due && let Some(mut flush) = self.flush.try_lock() {
            self.flush_holding(&mut flush)?;
        }
        expired
    }
}
