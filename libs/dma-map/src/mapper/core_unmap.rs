//! How a core unmaps, and how what it unmapped comes back.

use address::{Iova, PAGE_SIZE, PhysAddr};
use iova::{Access, CoreAllocator, FreeError, IovaAllocator, IovaPfn, IovaRange, Pinned};
use lines::Ordering;

use super::core_map::{Cache, LetGo, Reused};
use super::error::DmaUnmapError;
use super::policy::{Reuse, Teardown};
use super::request::{Mapping, range_of};
use super::{MapperCore, first_pages};
use crate::clock::Clock;
use crate::invalidate::{Command, InvalidateError, Invalidator, Ticket};
use crate::io_map::IoMap;
use crate::reuse::{Key, Progress};
use crate::table::{Translation, UnmapError};

/// How often an unmap looks again whether another user of a shared mapping, who ends his use at the moment, has let go
/// of the pin: by address, which may be nobody's, a few milliseconds (a fuzz target has no other thread);
const PIN_SPINS: u32 = if cfg!(fuzzing) { 4 } else { 1 << 16 };
/// with a mapping, which is the right to end it, as long as a machine may stop the other user in between.
const OWNED_PIN_SPINS: u32 = if cfg!(fuzzing) { 8 } else { 1 << 23 };
/// How often a pin is tried again that was refused because something else is allocated there. An allocator that finds a
/// pin in its way looks what is there only afterwards: where that pin has just been let go, it finds the range allocated,
/// and can but blame its length.
const MISMATCHES: u32 = 32;
/// Completed invalidations that one unmap gives IOVAs back for.
const POLLS: u32 = 4;
/// Time between two reports of a reuse cache, which look at all of its places, in nanoseconds.
const PUBLISH_NS: u64 = 100_000_000;

/// Which idle mappings are to go.
#[derive(Clone, Copy)]
pub(super) enum Idle {
    /// Those that are due; where none is and no place is free, the oldest.
    Due,
    All,
}

/// Whether others who tear down some of the same core's are waited for.
#[derive(Clone, Copy)]
pub(super) enum Wait {
    No,
    Yes,
}

/// How often a refused pin is tried again where mappings are shared.
struct Patience {
    spins: u32,
    mismatches: u32,
}

impl Patience {
    /// Whether another user of the same mapping, who ends his use at the moment, may be why it was refused.
    fn allows(&mut self, refused: FreeError) -> bool {
        let left = match refused {
            FreeError::NotAllocated { .. } => &mut self.spins,
            FreeError::Mismatch { .. } => &mut self.mismatches,
            FreeError::Outside { .. } => return false,
        };
        let may = *left > 0;
        *left = left.saturating_sub(1);
        may
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
        if domain == self.domain() && self.unmap_quickly(iova, len, allocated, key) {
            return Ok(());
        }
        self.unmap_carefully(iova, len, allocated, domain, key)
    }

    /// The common case of a deferred policy: the mapping is this core's, nobody left us anything to do, the queue takes it
    /// and is not due. `false` leaves things as they were, and [`unmap_carefully`](Self::unmap_carefully) does it or says
    /// why not.
    #[inline(always)]
    fn unmap_quickly(&mut self, iova: Iova, len: u64, allocated: u64, key: Option<Key>) -> bool {
        if let Some(key) = key {
            return self.keep_quickly(iova, len, allocated, key);
        }
        if !self.queues_each || !self.queue.is_between() {
            return self.shared.policy.is_off && self.shared.limits.bounce.is_none();
        }
        let Some(range) = range_of(iova, len) else {
            return false;
        };
        let shared = &*self.shared;
        let line = &shared.lines[self.core];
        let now = shared.clock.coarse();
        // Acquire: what was written before the notice is seen.
        if line.flusher.notices.load(Ordering::Acquire) != self.notices
            || now.saturating_sub(self.queue.oldest_ns()) >= self.age_ns
        {
            return false;
        }
        let Some(allocated) = IovaRange::new(range.first(), allocated) else {
            return false;
        };
        let Ok(pinned) = self.alloc.pin(allocated) else {
            return false;
        };
        if shared.table.unmap(range).is_err() {
            self.let_be(pinned);
            return false;
        }
        self.queue.push_another(pinned, now);
        // Release: a flush that notes this number comes after the entries were cleared.
        line.owner
            .queued
            .store(self.queue.next(), Ordering::Release);
        true
    }

    /// The common case of an optimistic policy: this core keeps the mapping. `false` as above.
    #[inline(always)]
    fn keep_quickly(&mut self, iova: Iova, len: u64, allocated: u64, key: Key) -> bool {
        let line = &self.shared.lines[self.core].flusher;
        let (Some(reused), Some(range)) = (&mut self.reused, range_of(iova, len)) else {
            return false;
        };
        let (Cache::Idle(cache), Some(allocated)) =
            (&mut reused.cache, IovaRange::new(range.first(), allocated))
        else {
            return false;
        };
        // Acquire: what was written before the notice is seen.
        if line.notices.load(Ordering::Acquire) != self.notices
            || self.queue.is_full()
            || !cache.has_room()
        {
            return false;
        }
        let Ok(pinned) = self.alloc.pin(allocated) else {
            return false;
        };
        let now = self.shared.clock.coarse();
        let Some(placed) = cache.release_at(key, range, now) else {
            self.let_be(pinned);
            return false;
        };
        let gone = cache.kept(placed.place).replace(pinned);
        if gone.is_some() || placed.wants_room {
            self.after_keeping(gone, placed.wants_room);
        }
        true
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
            let _ = self.let_idle_go(Idle::Due, Wait::No);
        }
    }

    /// It stays mapped.
    #[cold]
    #[inline(never)]
    fn let_be(&mut self, pinned: Pinned) {
        self.alloc.unpin(pinned);
    }

    /// All other cases, and those that [`unmap_quickly`](Self::unmap_quickly) gave up, from the start.
    #[inline(never)]
    fn unmap_carefully(
        &mut self,
        iova: Iova,
        len: u64,
        allocated: u64,
        domain: u64,
        key: Option<Key>,
    ) -> Result<(), DmaUnmapError<T::Error>> {
        if domain != self.domain() {
            return Err(DmaUnmapError::OtherDomain { iova });
        }
        if self.shared.policy.is_off {
            return self.unmap_off(iova, len);
        }
        let range = range_of(iova, len).ok_or(DmaUnmapError::NoRange { iova, len })?;
        self.make_ready(iova)?;
        let pinned = match IovaRange::new(range.first(), allocated) {
            Some(allocated) => self.pin(allocated)?,
            None => self.pin_found(range, OWNED_PIN_SPINS)?,
        };
        let pinned = match key {
            Some(key) => match self.let_go(key, range, pinned) {
                Some(pinned) => pinned,
                None => return Ok(()),
            },
            None => pinned,
        };
        self.tear_down(iova, range, pinned)
    }

    /// Ends the mapping of `len` bytes at `iova`, for callers that keep only these. Any `iova` and `len` that touch the
    /// same pages name the same mapping.
    ///
    /// Under a policy that shares, each user ends its use once; who ends another's is not found out. Such a mapping is
    /// refused as not allocated while another user, whom the machine has stopped in the middle of his unmap for more than
    /// some milliseconds, has it: try again then. [`unmap`](Self::unmap) waits longer.
    ///
    /// # Errors
    /// [`DmaUnmapError`]: nothing, or something else, is mapped there. Nothing has changed, except where it says so.
    pub fn unmap_at(&mut self, iova: Iova, len: u64) -> Result<(), DmaUnmapError<T::Error>> {
        let range = range_of(iova, len).ok_or(DmaUnmapError::NoRange { iova, len })?;
        if self.shared.policy.is_off {
            return self.unmap_off(iova, len);
        }
        self.make_ready(iova)?;
        let pinned = self.pin_found(range, PIN_SPINS)?;
        if self.reused.is_none() {
            return self.tear_down(iova, range, pinned);
        }
        let key = match self.key_of(range) {
            Ok(key) => key,
            Err(error) => {
                self.alloc.unpin(pinned);
                return Err(DmaUnmapError::Table(error));
            }
        };
        let pinned = match key {
            Some(key) => match self.let_go(key, range, pinned) {
                Some(pinned) => pinned,
                None => return Ok(()),
            },
            None => pinned,
        };
        self.tear_down(iova, range, pinned)
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
        let pinned = self.pin_found(range, PIN_SPINS).ok()?;
        let found = self.shared.table.lookup(at);
        self.alloc.unpin(pinned);
        found
    }

    /// What a reuse cache knows the mapping of `range` by; `None` where it is not one stretch of memory.
    fn key_of(&self, range: IovaRange) -> Result<Option<Key>, UnmapError<T::Error>> {
        let lookup = |page: u64| {
            let iova = IovaPfn::new(range.first().raw() + page).start();
            let found = self.shared.table.lookup(iova);
            found.ok_or(UnmapError::NotMapped { iova })
        };
        let first = lookup(0)?;
        let Some(key) = Key::new(
            first.phys,
            range.pages().min(u64::from(u16::MAX)),
            first.access,
        ) else {
            return Ok(None);
        };
        for page in 1..range.pages() {
            let found = lookup(page)?;
            if first.phys.checked_add(page * PAGE_SIZE) != Some(found.phys)
                || found.access != first.access
            {
                return Ok(None);
            }
        }
        Ok(Some(key))
    }

    /// Pins what is allocated exactly so. Where mappings are shared, another user may hold the pin for a moment.
    #[inline]
    fn pin(&mut self, allocated: IovaRange) -> Result<Pinned, DmaUnmapError<T::Error>> {
        match self.alloc.pin(allocated) {
            Ok(pinned) => Ok(pinned),
            Err(error) => self.pin_again(allocated, error),
        }
    }

    #[cold]
    fn pin_again(
        &mut self,
        allocated: IovaRange,
        mut error: FreeError,
    ) -> Result<Pinned, DmaUnmapError<T::Error>> {
        let mut patience = self.patience(OWNED_PIN_SPINS);
        while patience.allows(error) {
            lines::spin_loop();
            match self.alloc.pin(allocated) {
                Ok(pinned) => return Ok(pinned),
                Err(again) => error = again,
            }
        }
        Err(DmaUnmapError::NotAllocated(error))
    }

    /// None where a mapping has one user: nobody else has its pin.
    fn patience(&self, spins: u32) -> Patience {
        match self.shared.policy.reuse {
            Reuse::Shared | Reuse::SharedOptimistic(_) => Patience {
                spins,
                mismatches: MISMATCHES,
            },
            Reuse::Never | Reuse::Optimistic(_) => Patience {
                spins: 0,
                mismatches: 0,
            },
        }
    }

    /// Pins the allocation of which exactly `range` is mapped: that range, or the power of two that holds it, which some
    /// allocators give instead. Looks so often where another user may have it.
    fn pin_found(
        &mut self,
        range: IovaRange,
        spins: u32,
    ) -> Result<Pinned, DmaUnmapError<T::Error>> {
        let rounded = range
            .pages()
            .checked_next_power_of_two()
            .filter(|pages| *pages != range.pages())
            .and_then(|pages| IovaRange::new(range.first(), pages));
        let mut patience = self.patience(spins);
        loop {
            let refused = match self.alloc.pin(range) {
                Ok(pinned) => return Ok(pinned),
                Err(error) => error,
            };
            let why = match (refused, rounded) {
                (FreeError::Mismatch { .. }, Some(rounded)) => match self.alloc.pin(rounded) {
                    Ok(pinned) => return self.check_rounded(range, pinned),
                    Err(error) => error,
                },
                _ => refused,
            };
            if !patience.allows(why) {
                return Err(DmaUnmapError::NotAllocated(refused));
            }
            lines::spin_loop();
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

    /// Ends one use of a mapping that a cache may keep. Gives the pin back where it has to be torn down.
    #[inline]
    fn let_go(&mut self, key: Key, range: IovaRange, pinned: Pinned) -> Option<Pinned> {
        let has_room = |reused: &mut Reused| reused.cache.has_room();
        if !self.reused.as_mut().is_none_or(has_room) {
            // Should that fail, or somebody else be at it, the mapping is refused.
            let _ = self.let_idle_go(Idle::Due, Wait::No);
        }
        let Some(reused) = &mut self.reused else {
            return Some(pinned);
        };
        let now = self.shared.clock.coarse();
        match reused.release(key, range, pinned, now) {
            LetGo::Kept { gone, wants_room } => {
                self.after_keeping(gone, wants_room);
                None
            }
            LetGo::InUse(pinned) => {
                self.alloc.unpin(pinned);
                None
            }
            LetGo::TearDown(pinned) => Some(pinned),
        }
    }

    /// Tears down idle mappings of this core, with one invalidation for each batch of them; before that, what waits since an
    /// invalidation failed. False where somebody else tears down some, who was not to be waited for.
    ///
    /// # Errors
    /// [`InvalidateError`]: what was to go waits, counted as stale, for whoever tears down some of this core's next.
    #[cold]
    pub(super) fn let_idle_go(&mut self, which: Idle, wait: Wait) -> Result<bool, InvalidateError> {
        let is_done = self.let_idle_go_unseen(which, wait)?;
        let now = self.shared.clock.coarse();
        if now.saturating_sub(self.published_ns) >= PUBLISH_NS {
            self.publish();
        }
        Ok(is_done)
    }

    /// The same, without a report of what the cache has counted.
    fn let_idle_go_unseen(&mut self, which: Idle, wait: Wait) -> Result<bool, InvalidateError> {
        let Some(reused) = &mut self.reused else {
            return Ok(true);
        };
        let shared = &*self.shared;
        let line = &shared.lines[self.core];
        #[cfg(shuttle)]
        let nobodys = lines::Lock::new(super::lines::Leaving::default());
        let leaving = match wait {
            Wait::Yes => Some(line.leaving.lock()),
            Wait::No => line.leaving.try_lock(),
        };
        let Some(mut leaving) = leaving else {
            return Ok(false);
        };
        #[cfg(shuttle)]
        if crate::planted::has(crate::planted::Mistake::TakesUnlocked) {
            leaving = nobodys.lock();
        }
        let batch = leaving.batch();
        if !batch.is_empty()
            && let Some(expirer) = line.expirer()
        {
            shared.finish(line, &*expirer, batch)?;
        }
        loop {
            let progress = match which {
                Idle::All => reused.cache.any().drain(batch),
                Idle::Due => {
                    reused.cache.make_room(shared.clock.coarse(), batch);
                    Progress::Done
                }
            };
            if !batch.is_empty() {
                shared.clear_expired(batch.entries());
                let ranges = batch.entries().iter().map(|expired| expired.range());
                let done = shared.invalidate(self.core, ranges, &mut self.commands);
                if let Err(error) = done {
                    reused.cache.hand_over(batch);
                    return Err(error);
                }
                for at in 0..batch.entries().len() {
                    let expired = batch.entries()[at];
                    if let Some(pinned) = reused.take_pin(expired.place(), expired.range().first())
                    {
                        self.alloc.free_pinned(pinned);
                    }
                }
                reused.cache.any().torn_down(batch, shared.clock.now());
            }
            if progress == Progress::Done {
                return Ok(true);
            }
        }
    }

    /// Clears the entries and lets the policy decide when the IOVA is free.
    #[inline]
    fn tear_down(
        &mut self,
        iova: Iova,
        range: IovaRange,
        pinned: Pinned,
    ) -> Result<(), DmaUnmapError<T::Error>> {
        if let Err(error) = self.shared.table.unmap(range) {
            self.alloc.unpin(pinned);
            return Err(DmaUnmapError::Table(error));
        }
        let done = match self.shared.policy.teardown {
            Teardown::Deferred(_) => {
                self.enqueue(pinned, None);
                self.flush_when_due()
            }
            Teardown::Async(_) => self.submit(range, pinned),
            Teardown::StrictLock | Teardown::Strict | Teardown::Combining(_) => {
                self.invalidate_now(range, pinned)
            }
        };
        done.map_err(|source| DmaUnmapError::NotInvalidated { iova, source })
    }

    #[inline]
    fn invalidate_now(&mut self, range: IovaRange, pinned: Pinned) -> Result<(), InvalidateError> {
        let shared = &*self.shared;
        let commands = [Command::Pages(range)];
        let done = match shared.policy.teardown {
            Teardown::Combining(_) => shared.combiner.flush(&shared.invalidator, self.core, range),
            Teardown::StrictLock => {
                let _turn = shared.strict.lock();
                shared.invalidator.flush(&commands)
            }
            _ => shared.invalidator.flush(&commands),
        };
        if let Err(error) = done {
            self.enqueue(pinned, None);
            return Err(error);
        }
        self.alloc.free_pinned(pinned);
        self.count_freed();
        if !self.queue.is_empty() {
            // The hardware answers again: what it did not answer for can go.
            let _ = self.flush_queue();
        }
        Ok(())
    }

    /// Asynchronous: the ticket goes into the queue; what has completed comes out.
    fn submit(&mut self, range: IovaRange, pinned: Pinned) -> Result<(), InvalidateError> {
        let submitted = self.shared.invalidator.submit(&[Command::Pages(range)]);
        self.enqueue(pinned, submitted.ok());
        submitted?;
        for _ in 0..POLLS {
            if !self.free_completed()? {
                break;
            }
        }
        self.flush_when_due()
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
            self.alloc.free_pinned(pinned);
            let line = &self.shared.lines[self.core];
            line.counters.closed(now.saturating_sub(since_ns), 1);
            // What is not stale any more is as good as covered; only flushers and this core's own tickets
            // raise the number, under no common lock, hence the maximum.
            line.flusher
                .covered
                .fetch_max(self.queue.first(), Ordering::Relaxed);
        }
    }

    /// Adds to the queue, in which [`make_ready`](Self::make_ready) has seen room.
    #[inline]
    fn enqueue(&mut self, pinned: Pinned, ticket: Option<Ticket>) {
        let now = self.shared.clock.coarse();
        let line = &self.shared.lines[self.core];
        if self.queue.is_empty() {
            line.owner.oldest_ns.store(now, Ordering::Relaxed);
        }
        self.queue.push(pinned, now);
        self.queue.set_ticket(ticket);
        // Release: a flush that notes this number comes after the entries were cleared.
        line.owner
            .queued
            .store(self.queue.next(), Ordering::Release);
    }

    /// Flushes when the queue is full, or its oldest entry too old and nobody else is flushing.
    #[inline]
    fn flush_when_due(&mut self) -> Result<(), InvalidateError> {
        if self.queue.is_empty() {
            return Ok(());
        }
        let age_ns = (self.shared.clock.coarse()).saturating_sub(self.queue.oldest_ns());
        if !self.queue.is_full() && age_ns < self.age_ns {
            return Ok(());
        }
        self.flush_queue()
    }

    /// Waits until a flush has covered some of the queue, ours if it has to be, and frees what is covered.
    #[cold]
    fn flush_queue(&mut self) -> Result<(), InvalidateError> {
        let shared = &*self.shared;
        let line = &shared.lines[self.core];
        line.counters.saw(self.queue.len() as u64);
        let first = self.queue.first();
        let flushed = shared.flush_if(|| line.flusher.covered.load(Ordering::Acquire) <= first);
        self.heed();
        flushed
    }

    /// Looks whether others have left something for us, and sees to it that the queue has room for one.
    #[inline]
    fn make_ready(&mut self, iova: Iova) -> Result<(), DmaUnmapError<T::Error>> {
        let line = &self.shared.lines[self.core].flusher;
        // Acquire: what was written before the notice is seen.
        if line.notices.load(Ordering::Acquire) != self.notices {
            self.heed();
        }
        if self.queue.is_full() {
            let made = self.make_room();
            return made.map_err(|source| DmaUnmapError::NoRoom { iova, source });
        }
        Ok(())
    }

    /// Sees to it that the queue has room for one.
    pub(super) fn make_room(&mut self) -> Result<(), InvalidateError> {
        if !self.queue.is_full() {
            return Ok(());
        }
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
            Err(_) => self.enqueue(pinned, None),
        }
    }

    fn unmap_off(&mut self, iova: Iova, len: u64) -> Result<(), DmaUnmapError<T::Error>> {
        if let Some(bounce) = &self.shared.limits.bounce {
            // Memory that was not bounced needs nothing.
            let _ = bounce.unbounce(PhysAddr::new(iova.raw()), len);
        }
        Ok(())
    }
}
