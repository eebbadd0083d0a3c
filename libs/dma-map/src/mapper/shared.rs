//! What the cores of a mapper share, and what any thread may do with it: flush, expire, ask.

use alloc::{boxed::Box, sync::Arc, vec::Vec};
use core::time::Duration;

use iova::{IovaAllocator, IovaPfn, IovaRange, Pinned, RetiredChunk};
use lines::{AtomicBool, AtomicUsize, CachePadded, Lock, Ordering};

use super::lines::{CoreLines, Expiry};
use super::policy::{DeviceLimits, Policy, Teardown, Window};
use crate::clock::Clock;
use crate::invalidate::{Combiner, Command, InvalidateError, Invalidator};
use crate::reuse::{Batch, Expired, Progress, SharingTable};
use crate::risk::Counters;
use crate::table::{PageTable, RetiredTable, UnmapError};

/// Mappings that a core tears down together.
pub(super) const BATCH: usize = 64;

/// What a dropped core could not give back because an invalidation failed.
pub(super) enum Orphan {
    Mapping(Pinned, u64),
    Chunk(RetiredChunk, RetiredTable),
}

/// Orphans before and after a flush.
#[derive(Default)]
pub(super) struct Orphans {
    pub(super) waiting: Vec<Orphan>,
    pub(super) safe: Vec<Orphan>,
}

/// Work of whoever flushes; its lock makes flushes one after the other.
#[derive(Default)]
pub(super) struct Flush {
    /// By core: mappings and chunks noted at the start.
    noted: Vec<(u64, u64)>,
}

/// Lock order: `flush` before `orphans`; `expiry` of a line before neither (a flush there takes no lock of ours).
pub(super) struct Shared<A, T, I, C> {
    pub(super) allocator: A,
    pub(super) table: T,
    pub(super) invalidator: I,
    pub(super) clock: C,
    pub(super) policy: Policy,
    pub(super) limits: DeviceLimits,
    pub(super) last_page: IovaPfn,
    /// What waits longer is flushed by a tick.
    pub(super) age: Duration,
    pub(super) lines: Box<[CoreLines]>,
    /// Lines from here on were never used.
    pub(super) used: AtomicUsize,
    pub(super) flush: CachePadded<Lock<Flush>>,
    /// The lock of `Teardown::StrictLock`.
    pub(super) strict: CachePadded<Lock<()>>,
    pub(super) combiner: Combiner,
    pub(super) sharing: Option<Arc<SharingTable>>,
    pub(super) reclaims: bool,
    pub(super) orphans: Lock<Orphans>,
    /// Some of them are safe. Written with the lock held.
    pub(super) has_orphans: AtomicBool,
    /// Windows of orphans: written under the flush lock.
    pub(super) orphan_windows: Counters,
}

impl<A: IovaAllocator, T: PageTable, I: Invalidator, C: Clock> Shared<A, T, I, C> {
    /// The lines of cores that ever had a handle.
    pub(super) fn lines(&self) -> &[CoreLines] {
        &self.lines[..self.used.load(Ordering::Acquire)]
    }

    /// One invalidation for everything that every core has unmapped or retired so far. The caller holds the lock.
    pub(super) fn flush_holding(&self, flush: &mut Flush) -> Result<(), InvalidateError> {
        self.note(flush);
        let orphans = self.orphans.lock().waiting.len();
        self.invalidator.flush(&[Command::Domain])?;
        #[cfg(shuttle)]
        if crate::planted::has(crate::planted::Mistake::NotesLate) {
            self.note(flush);
        }
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
            // Release: the owner who sees it frees what devices no longer use.
            mine.covered.fetch_max(queued, Ordering::Release);
            mine.retired_covered.store(retired, Ordering::Release);
            mine.notify();
        }
        if orphans > 0 {
            self.let_go_of_orphans(orphans, now);
        }
        Ok(())
    }

    fn note(&self, flush: &mut Flush) {
        flush.noted.clear();
        flush.noted.extend(self.lines().iter().map(|line| {
            // Acquire: pairs with the core's Release store, so that the cleared entries come before the submission.
            (
                line.owner.queued.load(Ordering::Acquire),
                line.owner.retired.load(Ordering::Acquire),
            )
        }));
    }

    #[cold]
    fn let_go_of_orphans(&self, count: usize, now: u64) {
        let mut orphans = self.orphans.lock();
        let covered: Vec<Orphan> = orphans.waiting.drain(..count).collect();
        for orphan in &covered {
            if let Orphan::Mapping(_, since_ns) = orphan {
                self.orphan_windows.closed(now.saturating_sub(*since_ns), 1);
            }
        }
        orphans.safe.extend(covered);
        self.has_orphans.store(true, Ordering::Relaxed);
        self.lines().iter().for_each(|line| line.flusher.notify());
    }

    /// Flushes if `is_needed` still says so when it is our turn.
    pub(super) fn flush_if(&self, is_needed: impl Fn() -> bool) -> Result<(), InvalidateError> {
        let mut flush = self.flush.lock();
        if !is_needed() {
            return Ok(());
        }
        self.flush_holding(&mut flush)
    }

    /// Invalidates `ranges`, whose entries are cleared, and waits.
    pub(super) fn invalidate(
        &self,
        core: usize,
        ranges: impl ExactSizeIterator<Item = IovaRange>,
        commands: &mut Vec<Command>,
    ) -> Result<(), InvalidateError> {
        commands.clear();
        if ranges.len() >= self.invalidator.whole_domain_from().max(1) {
            commands.push(Command::Domain);
        } else {
            commands.extend(ranges.map(Command::Pages));
        }
        match (self.policy.teardown, commands.as_slice()) {
            (Teardown::Combining(_), &[Command::Pages(range)]) => {
                self.combiner.flush(&self.invalidator, core, range)
            }
            (Teardown::StrictLock, commands) => {
                let _turn = self.strict.lock();
                self.invalidator.flush(commands)
            }
            (_, commands) => self.invalidator.flush(commands),
        }
    }

    /// Tears down idle mappings of all cores: those that are due at `now`, or all.
    pub(super) fn expire(&self, now: u64, all: bool) -> Result<(), InvalidateError> {
        let mut result = Ok(());
        for line in self.lines() {
            if let Some(mut expiry) = line.expiry.try_lock() {
                result = result.and(self.expire_core(line, &mut expiry, now, all));
            }
        }
        result
    }

    fn expire_core(
        &self,
        line: &CoreLines,
        expiry: &mut Expiry,
        now: u64,
        all: bool,
    ) -> Result<(), InvalidateError> {
        let Some(expirer) = expiry.expirer.clone() else {
            return Ok(());
        };
        let batch = expiry.batch.get_or_insert_with(|| Batch::with_room(BATCH));
        loop {
            let progress = match expiry.is_cleared {
                true => Progress::More,
                false if all => expirer.drain(batch),
                false => expirer.expire(now, batch),
            };
            if batch.is_empty() {
                return Ok(());
            }
            if !expiry.is_cleared {
                self.clear_expired(batch.entries());
                expiry.is_cleared = true;
            }
            // Room for a few: who unmaps much here does it in one domain command.
            let mut commands = Vec::new();
            let ranges = batch.entries().iter().map(|expired| expired.range());
            self.invalidate_directly(ranges, &mut commands)?;
            let gone = batch.entries().iter();
            let gone = gone.map(|expired| (expired.place(), expired.range()));
            line.returned.lock().extend(gone);
            // Before the places themselves are given back: whoever finds one free finds this too.
            line.flusher.notify();
            expirer.torn_down(batch, self.clock.now());
            expiry.is_cleared = false;
            if progress == Progress::Done {
                return Ok(());
            }
        }
    }

    /// As [`invalidate`](Self::invalidate), by a thread that is no core.
    fn invalidate_directly(
        &self,
        ranges: impl ExactSizeIterator<Item = IovaRange>,
        commands: &mut Vec<Command>,
    ) -> Result<(), InvalidateError> {
        if ranges.len() >= self.invalidator.whole_domain_from().max(1) {
            return self.invalidator.flush(&[Command::Domain]);
        }
        commands.extend(ranges.map(Command::Pages));
        self.invalidator.flush(commands)
    }

    /// Clears the entries of `range`, for which `allocated` was allocated. Gives what is to be invalidated: nothing where
    /// the entries are counted and others still use them.
    #[inline]
    pub(super) fn clear(
        &self,
        allocated: IovaRange,
        range: IovaRange,
    ) -> Result<Option<IovaRange>, UnmapError> {
        match self.allocator.is_counted(allocated) {
            true => self.table.unmap_counted(range),
            false => self.table.unmap(range).map(|()| Some(range)),
        }
    }

    /// Clears the entries of idle mappings. They are pinned by the core that kept them, so they are mapped.
    pub(super) fn clear_expired(&self, expired: &[Expired]) {
        for expired in expired {
            let cleared = self.clear(expired.range(), expired.range());
            debug_assert!(cleared.is_ok(), "an idle mapping is mapped: {cleared:?}");
        }
    }

    /// Asks every other core to give back what it caches. Gives how many were asked.
    pub(super) fn ask_others(&self, core: usize) -> usize {
        let mut asked = 0;
        for (other, line) in self.lines().iter().enumerate() {
            if other != core && !line.flusher.is_asked.swap(true, Ordering::Relaxed) {
                line.flusher.notify();
                asked += 1;
            }
        }
        asked
    }

    pub(super) fn tick(&self, now: u64) -> Result<(), InvalidateError> {
        self.clock.advance(now);
        let expired = self.expire(now, false);
        if !self.lines().iter().any(|line| line.is_due(now, self.age)) {
            return expired;
        }
        // Where somebody else flushes just now, the next tick sees whether it was enough.
        if let Some(mut flush) = self.flush.try_lock() {
            self.flush_holding(&mut flush)?;
        }
        expired
    }
}

/// The age after which a tick flushes what waits under a policy without a window: retired tables, and what
/// an invalidation failed for.
pub(super) const AGE: Duration = Window::DEFAULT.age;
