//! How a core unmaps, and where a mapping goes.

use address::{Iova, PAGE_SIZE, PhysAddr};
use iova::{Access, CoreAllocator, FreeError, IovaAllocator, IovaPfn, IovaRange, Pinned};
use lines::Ordering;

use super::core_map::Cache;
use super::error::DmaUnmapError;
use super::policy::Teardown;
use super::request::{Mapping, range_of};
use super::tear_down::{Idle, Wait};
use super::{MapperCore, first_pages};
use crate::clock::Clock;
use crate::invalidate::{Command, InvalidateError, Invalidator};
use crate::reuse::Key;
use crate::table::{IoMap, Translation, UnmapError};

/// How often the pin of a shared mapping is tried again that another user holds, who looks at the moment what is mapped
/// ([`MapperCore::unmap_at`], [`MapperCore::lookup`]): a few milliseconds. (A fuzz target has no other thread.)
const PIN_LOOKS: u32 = if cfg!(fuzzing) { 4 } else { 1 << 16 };
/// The same where something else seems to be allocated there. An allocator that finds a pin in its way looks what is there only
/// afterwards: where that pin has just been let go, it finds the range allocated, and can but blame its length.
const MISMATCH_LOOKS: u32 = 32;
/// Completed invalidations that one unmap gives IOVAs back for.
const POLLS: u32 = 4;

/// How often a pin that was refused is tried again.
struct Looks {
    pinned: u32,
    mismatched: u32,
}

impl Looks {
    const NONE: Self = Self {
        pinned: 0,
        mismatched: 0,
    };
    const SHARED: Self = Self {
        pinned: PIN_LOOKS,
        mismatched: MISMATCH_LOOKS,
    };

    /// Whether it is to be tried again after this refusal.
    fn allow(&mut self, refused: FreeError) -> bool {
        let left = match refused {
            FreeError::NotAllocated { .. } => &mut self.pinned,
            FreeError::Mismatch { .. } => &mut self.mismatched,
            FreeError::Outside { .. } => return false,
        };
        let Some(less) = left.checked_sub(1) else {
            return false;
        };
        *left = less;
        lines::spin_loop();
        true
    }
}

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Ends a mapping of this mapper, whichever core made it.
    ///
    /// # Errors
    /// [`DmaUnmapError`]. The mapping lives on, and [`unmap_at`](Self::unmap_at) can end it, where the error says so.
    // Inlined as `map` is; the parts of the mapping one by one, so that it stays in registers.
    #[inline(always)]
    pub fn unmap(&mut self, mapping: Mapping) -> Result<(), DmaUnmapError<T::Error>> {
        let Mapping {
            iova,
            len,
            allocated,
            domain,
            key,
        } = mapping;
        let len = len.get();
        if domain != self.domain() {
            return Err(DmaUnmapError::OtherDomain { iova });
        }
        if self.shared.policy.is_off {
            self.unmap_off(iova, len);
            return Ok(());
        }
        let Some(range) = range_of(iova, len) else {
            return Err(DmaUnmapError::NoRange { iova, len });
        };
        self.make_ready(iova)?;
        if let (Some(key), Cache::Shared(_)) = (key, &self.cache)
            && self.is_used_by_others(key, range)
        {
            return Ok(());
        }
        let pinned = match IovaRange::new(range.first(), allocated) {
            Some(allocated) => match self.alloc.pin(allocated) {
                Ok(pinned) => pinned,
                Err(error) => self.pin_again(allocated, error)?,
            },
            None => self.pin_found(range)?,
        };
        match key {
            Some(key) => self.keep(key, iova, range, pinned),
            None => self.tear_down(iova, range, pinned),
        }
    }

    /// One use of a shared mapping ends, which is not the last.
    #[inline(never)]
    fn is_used_by_others(&mut self, key: Key, range: IovaRange) -> bool {
        match &self.cache {
            Cache::Shared(table) => table.end_use(key, range, || ()),
            Cache::Never | Cache::Idle(_) => false,
        }
    }

    /// Ends the mapping of `len` bytes at `iova`, for callers that keep only these. Any `iova` and `len` that touch the
    /// same pages name the same mapping.
    ///
    /// Under a policy that shares, each user ends its use once; who ends another's is not found out. Such a mapping is
    /// refused as not allocated while another user, whom the machine has stopped in the middle of such a call for more than
    /// some milliseconds, looks at it: try again then.
    ///
    /// # Errors
    /// [`DmaUnmapError`]: nothing, or something else, is mapped there. Nothing has changed, except where it says so.
    pub fn unmap_at(&mut self, iova: Iova, len: u64) -> Result<(), DmaUnmapError<T::Error>> {
        let range = range_of(iova, len).ok_or(DmaUnmapError::NoRange { iova, len })?;
        if self.shared.policy.is_off {
            self.unmap_off(iova, len);
            return Ok(());
        }
        self.make_ready(iova)?;
        let mut pinned = Some(self.pin_found(range)?);
        let key = match self.cache {
            Cache::Never => Ok(None),
            _ => self.key_of(range),
        };
        if let (Ok(Some(key)), Cache::Shared(table)) = (&key, &self.cache) {
            // Unpinned before the next user can be told that it is the last one, who pins.
            let (alloc, pinned) = (&mut self.alloc, &mut pinned);
            let is_in_use = table.end_use(*key, range, || {
                pinned
                    .take()
                    .into_iter()
                    .for_each(|pinned| alloc.unpin(pinned))
            });
            if is_in_use {
                return Ok(());
            }
        }
        let pinned = pinned.expect("taken only where the mapping is in use");
        match key {
            Ok(Some(key)) => self.keep(key, iova, range, pinned),
            Ok(None) => self.tear_down(iova, range, pinned),
            Err(error) => {
                self.alloc.unpin(pinned);
                Err(DmaUnmapError::Table(error))
            }
        }
    }

    /// Where byte `offset` of a mapping goes, and what the device may do there; `None` past its last byte, or where it is
    /// another mapper's. Without translation every address goes to itself.
    ///
    /// The IOVA is pinned meanwhile, so that no core unmaps what is looked at. (That the mapping is borrowed exclusively keeps
    /// two cores from pinning it in the same moment, which an allocator need not find out.)
    pub fn lookup(&mut self, mapping: &mut Mapping, offset: u64) -> Option<Translation> {
        match mapping.domain == self.domain() {
            true => self.lookup_at(mapping.iova, mapping.len(), offset),
            false => None,
        }
    }

    /// As [`lookup`](Self::lookup), of the mapping that `iova` and `len` name as they do for [`unmap_at`](Self::unmap_at). `None`
    /// as well where nothing, or something else, is mapped there. No two cores may ask for the same mapping at once.
    pub fn lookup_at(&mut self, iova: Iova, len: u64, offset: u64) -> Option<Translation> {
        let range = range_of(iova, len)?;
        let at = iova.checked_add(offset).filter(|_| offset < len)?;
        if self.shared.policy.is_off {
            return Some(Translation {
                phys: PhysAddr::new(at.raw()),
                access: Access::ReadWrite,
                leaf_pages: 1,
            });
        }
        let pinned = self.pin_found(range).ok()?;
        let found = self.shared.table.lookup(at);
        self.alloc.unpin(pinned);
        found
    }

    /// What a reuse cache knows the mapping of `range` by; `None` where it is not one stretch of memory.
    fn key_of(&self, range: IovaRange) -> Result<Option<Key>, UnmapError<T::Error>> {
        if range.pages() > Key::MAX_PAGES {
            return Ok(None);
        }
        let lookup = |page: u64| {
            let iova = IovaPfn::new(range.first().raw() + page).start();
            let found = self.shared.table.lookup(iova);
            found.ok_or(UnmapError::NotMapped { iova })
        };
        let first = lookup(0)?;
        for page in 1..range.pages() {
            let found = lookup(page)?;
            if first.phys.checked_add(page * PAGE_SIZE) != Some(found.phys)
                || found.access != first.access
            {
                return Ok(None);
            }
        }
        Ok(Key::new(first.phys, range.pages(), first.access))
    }

    /// A pin was refused: where mappings are shared, perhaps by another user who looks at the mapping.
    #[cold]
    #[inline(never)]
    fn pin_again(
        &mut self,
        allocated: IovaRange,
        mut error: FreeError,
    ) -> Result<Pinned, DmaUnmapError<T::Error>> {
        let mut looks = self.pin_looks();
        while looks.allow(error) {
            match self.alloc.pin(allocated) {
                Ok(pinned) => return Ok(pinned),
                Err(again) => error = again,
            }
        }
        Err(DmaUnmapError::NotAllocated(error))
    }

    /// None where a mapping has one user: nobody else has its pin.
    fn pin_looks(&self) -> Looks {
        match self.cache {
            Cache::Shared(_) => Looks::SHARED,
            Cache::Never | Cache::Idle(_) => Looks::NONE,
        }
    }

    /// Pins the allocation of which exactly `range` is mapped: that range, or the power of two that holds it, which some
    /// allocators give instead.
    fn pin_found(&mut self, range: IovaRange) -> Result<Pinned, DmaUnmapError<T::Error>> {
        let rounded = range
            .pages()
            .checked_next_power_of_two()
            .filter(|pages| *pages != range.pages())
            .and_then(|pages| IovaRange::new(range.first(), pages));
        let mut looks = self.pin_looks();
        loop {
            let refused = match self.alloc.pin(range) {
                Ok(pinned) => return Ok(pinned),
                Err(error) => error,
            };
            if let (FreeError::Mismatch { .. }, Some(rounded)) = (refused, rounded)
                && let Ok(pinned) = self.alloc.pin(rounded)
            {
                return self.check_rounded(range, pinned);
            }
            if !looks.allow(refused) {
                return Err(DmaUnmapError::NotAllocated(refused));
            }
        }
    }

    /// The allocation is larger than `range`: whether anything is mapped in the rest.
    fn check_rounded(
        &mut self,
        range: IovaRange,
        pinned: Pinned,
    ) -> Result<Pinned, DmaUnmapError<T::Error>> {
        let beyond = IovaPfn::new(range.last().raw() + 1).start();
        if self.shared.table.lookup(beyond).is_none() {
            return Ok(pinned);
        }
        let last = pinned.range().last();
        self.alloc.unpin(pinned);
        Err(DmaUnmapError::Partial { range, last })
    }

    /// A mapping that ends stays, idle, where the policy keeps such and the cache has room; else it is torn down.
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
        let now = self.shared.clock.coarse();
        let Some(placed) = cache.keep(key, range, now) else {
            return self.keep_with_room(key, iova, range, pinned);
        };
        let gone = cache.kept(placed.place).replace(pinned);
        if gone.is_some() || placed.wants_room {
            self.after_keeping(gone, placed.wants_room);
        }
        Ok(())
    }

    /// No place is free: others go first, if nobody else tears some down at the moment.
    #[cold]
    #[inline(never)]
    fn keep_with_room(
        &mut self,
        key: Key,
        iova: Iova,
        range: IovaRange,
        pinned: Pinned,
    ) -> Result<(), DmaUnmapError<T::Error>> {
        let _ = self.tear_down_idle(Idle::Due, Wait::No);
        let now = self.shared.clock.coarse();
        let Cache::Idle(cache) = &mut self.cache else {
            return self.tear_down(iova, range, pinned);
        };
        let Some(placed) = cache.keep(key, range, now) else {
            cache.refused();
            return self.tear_down(iova, range, pinned);
        };
        let gone = cache.kept(placed.place).replace(pinned);
        self.after_keeping(gone, placed.wants_room);
        Ok(())
    }

    /// Others of the cache have to go, or the mapping has a place in which others tore down what was there: its pin is
    /// `gone`.
    #[cold]
    #[inline(never)]
    fn after_keeping(&mut self, gone: Option<Pinned>, wants_room: bool) {
        if let Some(gone) = gone {
            self.alloc.free_pinned(gone);
        }
        if wants_room {
            // Where it fails what goes stays counted as stale, and the next unmap, tick or flush tries again.
            let _ = self.tear_down_idle(Idle::Due, Wait::No);
        }
    }

    /// [`tear_down`](Self::tear_down), where another call of it is the one that matters.
    #[inline(never)]
    fn tear_down_here(
        &mut self,
        iova: Iova,
        range: IovaRange,
        pinned: Pinned,
    ) -> Result<(), DmaUnmapError<T::Error>> {
        self.tear_down(iova, range, pinned)
    }

    /// Clears the entries and lets the policy decide when the IOVA is free.
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
        if let Teardown::Deferred(_) = self.shared.policy.teardown {
            let now = self.enqueue(pinned);
            if !self.is_flush_due(now) {
                return Ok(());
            }
            let done = self.flush_queue();
            return done.map_err(|source| DmaUnmapError::NotInvalidated { iova, source });
        }
        let done = self.invalidate_now(range, pinned);
        done.map_err(|source| DmaUnmapError::NotInvalidated { iova, source })
    }

    /// It stays as it is.
    #[cold]
    #[inline(never)]
    fn not_mapped(
        &mut self,
        pinned: Pinned,
        error: UnmapError<T::Error>,
    ) -> Result<(), DmaUnmapError<T::Error>> {
        self.alloc.unpin(pinned);
        Err(DmaUnmapError::Table(error))
    }

    #[inline(never)]
    fn invalidate_now(&mut self, range: IovaRange, pinned: Pinned) -> Result<(), InvalidateError> {
        let shared = &*self.shared;
        let done = match shared.policy.teardown {
            Teardown::Async(_) => return self.submit(range, pinned),
            Teardown::Combining(_) => shared.combiner.flush(&shared.invalidator, self.core, range),
            _ => shared.invalidator.flush(&[Command::Pages(range)]),
        };
        if let Err(error) = done {
            self.enqueue(pinned);
            return Err(error);
        }
        self.free(pinned);
        if !self.queue.is_empty() {
            // The hardware answers again: what it did not answer for can go.
            let _ = self.flush_queue();
        }
        Ok(())
    }

    /// Asynchronous: the ticket goes into the queue; what has completed comes out.
    #[inline]
    fn submit(&mut self, range: IovaRange, pinned: Pinned) -> Result<(), InvalidateError> {
        let submitted = self.shared.invalidator.submit(&[Command::Pages(range)]);
        let now = self.enqueue(pinned);
        self.queue.set_ticket(submitted.as_ref().ok().copied());
        submitted?;
        for _ in 0..POLLS {
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
            Ok(false) => Ok(false),
            Ok(true) => {
                self.free_front(self.shared.clock.coarse());
                Ok(true)
            }
            Err(error) => {
                self.queue.void_ticket();
                Err(error)
            }
        }
    }

    /// The front of the queue cannot be used any more, as of `now`.
    fn free_front(&mut self, now: u64) {
        if let Some((pinned, since_ns)) = self.queue.pop() {
            let line = &self.line;
            line.counters.closed(now.saturating_sub(since_ns), 1);
            line.owner
                .oldest_ns
                .store(self.queue.oldest_ns(), Ordering::Relaxed);
            // What is not stale any more is as good as covered; only flushers and this core's own tickets
            // raise the number, under no common lock, hence the maximum.
            line.flusher
                .covered
                .fetch_max(self.queue.first(), Ordering::Relaxed);
            self.free(pinned);
        }
    }

    /// Adds to the queue, in which [`make_ready`](Self::make_ready) has seen room. Gives the time.
    #[inline(always)]
    fn enqueue(&mut self, pinned: Pinned) -> u64 {
        let now = self.shared.clock.coarse();
        let owner = &self.line.owner;
        if self.queue.push(pinned, now) {
            owner.oldest_ns.store(now, Ordering::Relaxed);
        }
        // Release: a flush that notes this number comes after the entries were cleared.
        owner.queued.store(self.queue.next(), Ordering::Release);
        now
    }

    /// Whether the queue, which is not empty, is full, or its oldest entry too old.
    #[inline(always)]
    fn is_flush_due(&self, now: u64) -> bool {
        self.queue.is_full() || now.saturating_sub(self.queue.oldest_ns()) >= self.age_ns
    }

    /// Waits until a flush has covered some of the queue, ours if it has to be, and frees what is covered.
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

    /// Looks whether others have left something for us, and sees to it that the queue has room for one.
    #[inline(always)]
    fn make_ready(&mut self, iova: Iova) -> Result<(), DmaUnmapError<T::Error>> {
        let line = &self.line.flusher;
        // Acquire: what was written before the notice is seen.
        if line.notices.load(Ordering::Acquire) != self.notices {
            self.process_notices();
        }
        if self.queue.is_full() {
            let made = self.make_room();
            return made.map_err(|source| DmaUnmapError::NoRoom { iova, source });
        }
        Ok(())
    }

    /// Sees to it that the queue has room for one.
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

    /// A list failed after `mapped` pages, which the device may have used: they go as after an unmap.
    #[cold]
    pub(super) fn undo(&mut self, allocated: IovaRange, mapped: u64) {
        let pinned = self
            .alloc
            .pin(allocated)
            .expect("this core has just allocated it");
        if mapped == 0 {
            self.alloc.free_pinned(pinned);
            return;
        }
        let range = first_pages(allocated, mapped);
        let cleared = self.shared.table.unmap(range);
        debug_assert!(cleared.is_ok(), "this core has just mapped it: {cleared:?}");
        match self.shared.invalidator.flush(&[Command::Pages(range)]) {
            Ok(()) => self.alloc.free_pinned(pinned),
            // `map_pages` has seen room.
            Err(_) => {
                self.enqueue(pinned);
                self.queue.set_ticket(None);
            }
        }
    }

    fn unmap_off(&mut self, iova: Iova, len: u64) {
        if let Some(bounce) = &self.shared.bounce {
            // Memory that was not bounced needs nothing.
            let _ = bounce.unbounce(PhysAddr::new(iova.raw()), len);
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_length_is_not_waited_for_as_another_users_pin_is() {
        let range = IovaRange::new(IovaPfn::new(1), 1).expect("a page");
        let allowed =
            |mut looks: Looks, refused| (0..).take_while(|_| looks.allow(refused)).count();
        assert_eq!(
            allowed(Looks::SHARED, FreeError::NotAllocated { range }),
            1 << 16
        );
        assert_eq!(allowed(Looks::SHARED, FreeError::Mismatch { range }), 32);
        assert_eq!(allowed(Looks::SHARED, FreeError::Outside { range }), 0);
        assert_eq!(allowed(Looks::NONE, FreeError::NotAllocated { range }), 0);
    }
}
