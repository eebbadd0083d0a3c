//! Unmap operations of a core.

use core::iter::once;

use address::{Iova, PAGE_SIZE};
use iova::{CoreAllocator, FreeError, IovaAllocator, IovaPfn, IovaRange, Pinned};
use lines::Ordering;

use super::MapperCore;
use super::cache::Cache;
use super::core_return::ExpireScope;
use super::error::DmaUnmapError;
use super::policy::Teardown;
use super::request::{Mapping, range_of, range_within};
use crate::clock::Clock;
use crate::invalidate::{Command, InvalidateError, Invalidator, Ticket};
use crate::reuse::Key;
use crate::table::{IoMap, UnmapError};

/// Completed invalidations for which one unmap gives IOVAs back.
const POLLS: u32 = 4;

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Ends a mapping of this mapper, whichever core made it.
    ///
    /// # Errors
    /// [`DmaUnmapError`]. The mapping lives on, and [`unmap_at`](Self::unmap_at) can end it, where
    /// the error says so.
    // Inlined as `map` is; the parts of the mapping one by one, so that it stays in registers.
    #[inline(always)]
    pub fn unmap(&mut self, mapping: Mapping) -> Result<(), DmaUnmapError<T::Error>> {
        self.unmap_ref(&mapping)
    }

    #[inline(always)]
    pub(super) fn unmap_ref(&mut self, mapping: &Mapping) -> Result<(), DmaUnmapError<T::Error>> {
        let Some((range, pinned)) = self.begin_unmap(mapping)? else {
            return Ok(());
        };
        match mapping.key {
            Some(key) => self.keep(key, mapping.iova, range, pinned),
            None => self.tear_down(mapping.iova, range, pinned),
        }
    }

    /// The first half of an unmap: checks, room in the queue for one, and the pin. Returns `None`
    /// where nothing is to be torn down: others still use the mapping, or there is no translation.
    #[inline(always)]
    pub(super) fn begin_unmap(
        &mut self,
        mapping: &Mapping,
    ) -> Result<Option<(IovaRange, Pinned)>, DmaUnmapError<T::Error>> {
        let &Mapping {
            iova,
            len,
            allocated,
            domain,
            key,
        } = mapping;
        let len = len.get();
        if domain != self.shared.id {
            return Err(DmaUnmapError::OtherDomain { iova });
        }
        if self.shared.policy.is_off {
            return Ok(None);
        }
        let Some(range) = range_within(iova, len) else {
            return Err(DmaUnmapError::NoRange { iova, len });
        };
        self.make_ready(iova)?;
        if let (Some(key), Cache::Shared(_)) = (key, &self.cache)
            && self.is_used_by_others(key, range)
        {
            return Ok(None);
        }
        let pinned = match IovaRange::new(range.first(), allocated) {
            Some(allocated) => match self.alloc.pin(allocated) {
                Ok(pinned) => pinned,
                Err(error) => return Err(DmaUnmapError::NotAllocated(error)),
            },
            None => self.pin_found(range)?,
        };
        Ok(Some((range, pinned)))
    }

    /// Ends one use of a shared mapping. Returns whether others remain.
    #[inline(never)]
    fn is_used_by_others(&mut self, key: Key, range: IovaRange) -> bool {
        match &self.cache {
            Cache::Shared(table) => table.end_use(key, range),
            Cache::Never | Cache::Idle(_) => false,
        }
    }

    /// Ends the mapping of `len` bytes at `iova`, for callers that keep only these. Any `iova` and
    /// `len` that touch the same pages name the same mapping.
    ///
    /// Under a policy that shares, each user ends its use once; a user that ends another's use is
    /// not detected.
    ///
    /// # Errors
    /// [`DmaUnmapError`]: nothing, or something else, is mapped there. Nothing has changed, except
    /// where it says so.
    pub fn unmap_at(&mut self, iova: Iova, len: u64) -> Result<(), DmaUnmapError<T::Error>> {
        let range = range_of(iova, len).ok_or(DmaUnmapError::NoRange { iova, len })?;
        if self.shared.policy.is_off {
            return Ok(());
        }
        self.make_ready(iova)?;
        // Not pinned, which only the last user does: the caller's own use keeps it mapped
        // meanwhile.
        if let Cache::Shared(_) = self.cache
            && let Some(key) = self.key_of(range)
            && self.is_used_by_others(key, range)
        {
            return Ok(());
        }
        let pinned = self.pin_found(range)?;
        let key = match self.cache {
            // Pinned, so that the mapping that is kept is the one that is mapped, whatever an
            // erroneous caller has ended meanwhile.
            Cache::Idle(_) => self.key_of(range),
            Cache::Never | Cache::Shared(_) => None,
        };
        match key {
            Some(key) => self.keep(key, iova, range, pinned),
            None => self.tear_down(iova, range, pinned),
        }
    }

    /// Returns the reuse key of the mapping of `range`; `None` where it is not one stretch of
    /// memory, or not all mapped.
    fn key_of(&mut self, range: IovaRange) -> Option<Key> {
        if range.pages() > Key::MAX_PAGES {
            return None;
        }
        self.walk(|table| {
            let first = table.lookup(range.start())?;
            let is_stretch = (1..range.pages()).all(|page| {
                let at = IovaPfn::new(range.first().raw() + page).start();
                table.lookup(at).is_some_and(|found| {
                    found.access == first.access
                        && first.phys.checked_add(page * PAGE_SIZE) == Some(found.phys)
                })
            });
            is_stretch.then(|| Key::new(first.phys, range.pages(), first.access))?
        })
    }

    /// Pins the allocation of which exactly `range` is mapped: that range, or the power of two that
    /// holds it, to which some allocators round up.
    fn pin_found(&mut self, range: IovaRange) -> Result<Pinned, DmaUnmapError<T::Error>> {
        let refused = match self.alloc.pin(range) {
            Ok(pinned) => return Ok(pinned),
            Err(refused) => refused,
        };
        let rounded = range.pages().checked_next_power_of_two();
        let rounded = rounded.and_then(|pages| IovaRange::new(range.first(), pages));
        let (FreeError::Mismatch { .. }, Some(rounded)) = (refused, rounded) else {
            return Err(DmaUnmapError::NotAllocated(refused));
        };
        let Ok(pinned) = self.alloc.pin(rounded) else {
            return Err(DmaUnmapError::NotAllocated(refused));
        };
        let beyond = IovaPfn::new(range.last().raw() + 1).start();
        if self.shared.table.lookup(beyond).is_none() {
            return Ok(pinned);
        }
        let last = rounded.last();
        self.alloc.unpin(pinned);
        Err(DmaUnmapError::Partial { range, last })
    }

    /// Keeps a mapping that ends, idle, where the policy keeps such and the cache has room; else
    /// tears it down.
    #[inline(always)]
    fn keep(
        &mut self,
        key: Key,
        iova: Iova,
        range: IovaRange,
        pinned: Pinned,
    ) -> Result<(), DmaUnmapError<T::Error>> {
        let Cache::Idle(cache) = &mut self.cache else {
            return self.tear_down_here(iova, range, pinned);
        };
        match cache.keep(key, range, pinned, self.shared.clock.coarse()) {
            Ok(false) => {}
            Ok(true) => self.make_idle_room(),
            Err(pinned) => return self.refuse(iova, range, pinned),
        }
        Ok(())
    }

    /// Tears down other idle mappings: they are due, or no place is free for the next.
    #[cold]
    #[inline(never)]
    fn make_idle_room(&mut self) {
        // Where it fails, the mappings stay counted as stale, and the next unmap, tick or flush
        // tries again.
        let _ = self.tear_down_idle(ExpireScope::Due);
    }

    /// Tears a mapping down for which no place is free, since another thread was tearing some down
    /// when others were to be, or since that failed. Makes room for the next.
    #[cold]
    #[inline(never)]
    fn refuse(
        &mut self,
        iova: Iova,
        range: IovaRange,
        pinned: Pinned,
    ) -> Result<(), DmaUnmapError<T::Error>> {
        self.make_idle_room();
        self.tear_down_here(iova, range, pinned)
    }

    /// [`tear_down`](Self::tear_down), out of line, so that only the other call of it is inlined.
    #[inline(never)]
    fn tear_down_here(
        &mut self,
        iova: Iova,
        range: IovaRange,
        pinned: Pinned,
    ) -> Result<(), DmaUnmapError<T::Error>> {
        self.tear_down(iova, range, pinned)
    }

    /// Clears the entries. The policy decides when the IOVA is free.
    #[inline(always)]
    fn tear_down(
        &mut self,
        iova: Iova,
        range: IovaRange,
        pinned: Pinned,
    ) -> Result<(), DmaUnmapError<T::Error>> {
        if let Err(error) = self.shared.table.unmap(range) {
            return self.not_mapped(pinned, error);
        }
        let done = match self.shared.policy.teardown {
            Teardown::Deferred(_) => {
                let now = self.enqueue(pinned);
                if !self.is_flush_due(now) {
                    return Ok(());
                }
                self.flush_queue()
            }
            _ => self.invalidate_now(range, pinned),
        };
        done.map_err(|source| DmaUnmapError::NotInvalidated { iova, source })
    }

    /// Leaves the mapping as it is.
    #[cold]
    #[inline(never)]
    pub(super) fn not_mapped(
        &mut self,
        pinned: Pinned,
        error: UnmapError<T::Error>,
    ) -> Result<(), DmaUnmapError<T::Error>> {
        self.alloc.unpin(pinned);
        Err(DmaUnmapError::Table(error))
    }

    #[inline(never)]
    fn invalidate_now(&mut self, range: IovaRange, pinned: Pinned) -> Result<(), InvalidateError> {
        if let Teardown::Async(_) = self.shared.policy.teardown {
            return self.submit(range, pinned);
        }
        let done = self.shared.invalidate(self.core, range);
        self.free_invalidated(once(pinned), done)
    }

    /// Frees mappings that were invalidated at once. Where that failed they wait in the queue, in
    /// which there is room for each.
    #[inline]
    pub(super) fn free_invalidated(
        &mut self,
        gone: impl Iterator<Item = Pinned>,
        done: Result<(), InvalidateError>,
    ) -> Result<(), InvalidateError> {
        if done.is_err() {
            gone.for_each(|pinned| {
                self.enqueue(pinned);
            });
            return done;
        }
        gone.for_each(|pinned| self.free(pinned));
        if !self.queue.is_empty() {
            // The hardware answers again: mappings that an earlier failure left can be freed.
            let _ = self.flush_queue();
        }
        Ok(())
    }

    /// Asynchronous: the ticket goes into the queue; completed entries come out.
    #[inline]
    fn submit(&mut self, range: IovaRange, pinned: Pinned) -> Result<(), InvalidateError> {
        let submitted = self.shared.invalidator.submit(&[Command::Pages(range)]);
        self.queue_submitted(once(pinned), submitted)
    }

    /// Queues mappings that were submitted at once, for each of which there is room; frees
    /// completed entries.
    #[inline]
    pub(super) fn queue_submitted(
        &mut self,
        gone: impl Iterator<Item = Pinned>,
        submitted: Result<Ticket, InvalidateError>,
    ) -> Result<(), InvalidateError> {
        let (mut now, mut polls) = (0, 0);
        for pinned in gone {
            now = self.enqueue(pinned);
            self.queue.cover(submitted.as_ref().ok().copied());
            polls += POLLS;
        }
        submitted?;
        for _ in 0..polls {
            if !self.free_completed()? {
                break;
            }
        }
        match !self.queue.is_empty() && self.is_flush_due(now) {
            true => self.flush_queue(),
            false => Ok(()),
        }
    }

    /// Frees the oldest entry if its own invalidation is complete.
    pub(super) fn free_completed(&mut self) -> Result<bool, InvalidateError> {
        let Some(ticket) = self.queue.ticket() else {
            return Ok(false);
        };
        match self.shared.invalidator.poll(ticket) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) => {
                self.queue.void_ticket();
                return Err(error);
            }
        }
        let (now, first) = (self.shared.clock.coarse(), self.queue.first());
        let front = |_, pinned, since_ns| Some((pinned, since_ns));
        if let Some((pinned, since_ns)) = self.queue.take(first + 1, None, front) {
            self.set_oldest(self.queue.oldest_ns());
            let line = &self.line;
            line.counters.closed(now.saturating_sub(since_ns), 1);
            // A mapping that is not stale any more is as good as covered. Only flushers and this
            // core's own tickets raise the number, under no common lock, hence the maximum.
            line.flusher
                .covered
                .fetch_max(self.queue.first(), Ordering::Relaxed);
            self.free(pinned);
        }
        Ok(true)
    }

    /// Adds to the queue, in which [`make_ready`](Self::make_ready) has ensured room. Returns the
    /// time.
    #[inline(always)]
    fn enqueue(&mut self, pinned: Pinned) -> u64 {
        let now = self.shared.clock.coarse();
        if self.queue.is_empty() {
            self.set_oldest(Some(now));
        }
        self.queue.push(pinned, now);
        // Release: a flush that notes this number comes after the entries were cleared.
        self.line
            .owner
            .queued
            .store(self.queue.next(), Ordering::Release);
        now
    }

    /// Publishes the time at which the oldest entry of the queue was pushed. (Where there is none
    /// the line keeps its old value, which means nothing.)
    pub(super) fn set_oldest(&mut self, since_ns: Option<u64>) {
        let Some(since_ns) = since_ns else {
            return;
        };
        self.line.owner.oldest_ns.store(since_ns, Ordering::Relaxed);
        self.due_ns = since_ns.saturating_add(self.shared.age_ns);
    }

    /// Returns whether the queue, which is not empty, is full, or its oldest entry too old.
    #[inline(always)]
    fn is_flush_due(&self, now: u64) -> bool {
        self.queue.is_full() || now >= self.due_ns
    }

    /// Waits until a flush has covered some of the queue, ours if necessary, and frees the covered
    /// entries.
    #[cold]
    #[inline(never)]
    fn flush_queue(&mut self) -> Result<(), InvalidateError> {
        let shared = &*self.shared;
        let line = &self.line;
        line.counters.saw(self.queue.len() as u64);
        let first = self.queue.first();
        let flushed = shared.flush_if(|| line.flusher.covered.load(Ordering::Acquire) <= first);
        self.process_notices();
        flushed
    }

    /// Handles notices of other cores, and ensures that the queue has room for one.
    #[inline(always)]
    fn make_ready(&mut self, iova: Iova) -> Result<(), DmaUnmapError<T::Error>> {
        let line = &self.line.flusher;
        // Acquire: the stores before the notice are seen.
        if line.notices.load(Ordering::Acquire) != self.notices {
            self.process_notices();
        }
        if self.queue.is_full() {
            let made = self.make_room();
            return made.map_err(|source| DmaUnmapError::NoRoom { iova, source });
        }
        Ok(())
    }

    /// Ensures that the queue has room for one.
    #[cold]
    #[inline(never)]
    pub(super) fn make_room(&mut self) -> Result<(), InvalidateError> {
        // Tickets that have completed meanwhile; where none has, or none counts, a flush.
        while let Ok(true) = self.free_completed() {}
        match self.queue.is_full() {
            true => self.flush_queue(),
            false => Ok(()),
        }
    }

    /// Frees an allocation that is not needed: its first `mapped` pages, which the device may have
    /// used, are torn down as after an unmap.
    #[cold]
    pub(super) fn undo(&mut self, allocated: IovaRange, mapped: u64) {
        let pinned = self.alloc.pin(allocated);
        let pinned = pinned.expect("this core has just allocated it");
        let Some(range) = IovaRange::new(allocated.first(), mapped) else {
            self.alloc.free_pinned(pinned);
            return;
        };
        let cleared = self.shared.table.unmap(range);
        debug_assert!(cleared.is_ok(), "this core has just mapped it: {cleared:?}");
        // Where that fails it waits in the queue, in which there is room, counted as stale.
        let _ = self.invalidate_now(range, pinned);
    }
}
