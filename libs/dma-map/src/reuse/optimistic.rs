//! Optimistic teardown: an unmapped mapping stays, in the hope of being mapped again.
//!
//! After vIOMMU (USENIX ATC 2011), §3.4: the mapping is torn down when more than a quota are idle
//! (256 and 4096 in the paper) or when it has been idle for its residency (10 ms by default),
//! whichever comes first. An idle mapping leaves the order when it is found and comes to its young
//! end when it is released, so one list is the first-in-first-out of ages and the
//! least-recently-used order of eviction at once.
//!
//! One cache belongs to one core. The index and the order, which that core alone needs, are its
//! plain memory. The state that others need in order to expire the mappings of a core that is quiet
//! is in a slab of atomics (`slab.rs`, with the protocol). A mapping that is in use is not in here:
//! it may be released on another core and is then idle there. Of several idle mappings of a page
//! the youngest is found.
//!
//! The owner, while it runs, expires mappings at three quarters of their residency, others at its
//! end: they then find nothing due in the cache of a core that runs.
//!
//! Room: the mapping that reaches the quota evicts a batch of the oldest together; they count until
//! their invalidation is complete. Until then, should nothing else have gone, the youngest is
//! refused. So there are never more stale mappings than the quota. The mapper makes room itself,
//! with a lock held that barriers wait for (`keep`, `make_room`). A place that was taken comes back
//! to the owner when its mapping is torn down, by any thread: a batch whose invalidation failed may
//! be left to the next thread that tears down.
//!
//! Cost of a hit and the release that follows: one locked instruction, two plain stores that others
//! see, two reads of the index, and about five lines of the core's own. The locked instruction
//! arbitrates between the owner and an expiring thread. Without it, an expiring thread would have
//! to make the owner's processor finish its stores and loads (as Linux' `membarrier` does), which
//! needs an operating system. Memory, allocated at construction: 76 bytes for each mapping of a
//! quota that is a power of two.
//!
//! Dropping the cache leaves its mappings where they are, without their pins: its [`Slab`] still
//! gives them out. (A mapper has them given up before.)

use alloc::sync::Arc;
use alloc::vec::Vec;

use iova::{IovaRange, Pinned};

use super::key::PackedRange;
use super::slab::Slab;
use super::slots::{Found, SlotMap};
use super::{Batch, Key, OWNER_LEAD, Progress};
use crate::risk::Counts;

/// Most mappings that are evicted together. More would empty the cache for a burst, fewer share the
/// price of an invalidation less.
const EVICT_MAX: usize = 64;

/// The idle mappings of one core, each with the value that keeps its IOVA allocated: for a mapper,
/// its pin.
pub struct OptimisticCache<P = Pinned> {
    slab: Arc<Slab>,
    /// By place: the slot's number. `None` where nothing is kept.
    slots: SlotMap<Option<P>>,
    /// Places that were taken, by any thread, and were not yet torn down when the owner last
    /// checked.
    pending_free: Vec<u32>,
    /// Time after which the owner expires a mapping, nanoseconds.
    residency_ns: u64,
    own: Counts,
}

impl<P> OptimisticCache<P> {
    /// At most `quota` idle mappings (1 to 2^30; more or fewer are taken for the nearest), each for
    /// at most `residency_ns`.
    pub fn new(quota: usize, residency_ns: u64) -> Self {
        let slots = SlotMap::new(quota);
        Self {
            slab: Arc::new(Slab::new(slots.places(), residency_ns)),
            pending_free: Vec::with_capacity(slots.places()),
            residency_ns: owners(residency_ns),
            slots,
            own: Counts::default(),
        }
    }

    /// Returns whether the check of the oldest mapping can wait. `false` also where the clock has
    /// gone back by so much that the slab's due time would be late.
    #[inline]
    fn is_early(&self, now_ns: u64) -> bool {
        self.slab.due().wrapping_sub(now_ns).wrapping_sub(1) < self.residency_ns
    }

    /// An idle mapping of `key`, with its pin: of exactly the key's memory and access. A miss is
    /// not counted.
    #[inline(always)]
    pub fn hit(&mut self, key: Key, now_ns: u64) -> Option<P> {
        while let Some(found) = self.slots.find(key) {
            let place = found.place;
            let slot = self.slab.slot(place);
            if let Some(since_ns) = slot.idle_since()
                && slot.reuse(since_ns)
            {
                self.slots.take_out(found);
                self.slots.give_back(place);
                self.own.stale_times.record(now_ns.saturating_sub(since_ns));
                self.own.hits += 1;
                return self.slots.value_mut(place).take();
            }
            self.lose(found);
        }
        None
    }

    /// Unlinks a place whose mapping was taken, by any thread.
    #[cold]
    fn lose(&mut self, found: Found) {
        self.slots.take_out(found);
        self.pending_free.push(found.place);
    }

    /// Counts a miss.
    #[inline]
    pub fn missed(&mut self) {
        self.own.misses += 1;
    }

    /// Keeps a mapping that has ended, where a place is free: `key` and `range` are those it was
    /// mapped with, on this core or another. Returns whether others have to go: they are due, or no
    /// place is free for the next.
    ///
    /// # Errors
    /// Its pin, where it is not kept: it is to be torn down, and others have to go as well.
    #[inline(always)]
    pub fn keep(&mut self, key: Key, range: IovaRange, pinned: P, now_ns: u64) -> Result<bool, P> {
        let place = |range| Some((range, self.slots.insert(key)?));
        let Some((range, place)) = PackedRange::new(range).and_then(place) else {
            self.own.evicted += 1;
            return Err(pinned);
        };
        *self.slots.value_mut(place) = Some(pinned);
        self.slab.publish(place, range, now_ns);
        let occupied = u64::from(self.slots.occupied());
        if occupied > self.own.stale_max {
            self.own.stale_max = occupied;
        }
        Ok(self.slots.is_full() || !self.is_early(now_ns))
    }

    /// Frees the places of mappings that have been torn down, by any thread, and passes their pins
    /// to `free`: of those taken out and those at the old end of the order. Places that others took
    /// behind older ones wait until these have gone.
    pub fn sweep(&mut self, mut free: impl FnMut(P)) {
        while let Some(oldest) = self.slots.oldest()
            && self.slab.slot(oldest).idle_since().is_none()
        {
            self.lose(self.slots.locate(oldest));
        }
        let (slab, slots) = (&*self.slab, &mut self.slots);
        self.pending_free.retain(|&place| {
            let is_free = slab.slot(place).is_owned();
            if is_free {
                if let Some(pinned) = slots.value_mut(place).take() {
                    free(pinned);
                }
                slots.give_back(place);
            }
            !is_free
        });
    }

    /// Takes a linked place out. Takes its mapping too, and returns `true`, unless another thread
    /// has it.
    fn take(&mut self, place: u32, batch: &mut Batch) -> bool {
        self.slots.take_out(self.slots.locate(place));
        self.pending_free.push(place);
        let since_ns = self.slab.slot(place).idle_since();
        since_ns.is_some_and(|since_ns| self.slab.take(place, since_ns, batch))
    }

    /// Before or after a release: moves due mappings to `batch`; where none is due and no place is
    /// free, the oldest.
    #[cold]
    pub fn make_room(&mut self, now_ns: u64, batch: &mut Batch) {
        let before = batch.entries().len();
        let _ = self.expire(now_ns, batch);
        if batch.entries().len() > before {
            return;
        }
        let mut wanted = evicted_together(self.slots.places());
        while self.slots.is_full() && wanted > 0 && !batch.is_full() {
            let Some(oldest) = self.slots.oldest() else {
                return;
            };
            if self.take(oldest, batch) {
                self.own.evicted += 1;
                wanted -= 1;
            }
        }
    }

    /// Moves the mappings whose residency has ended to `batch`, oldest first.
    pub fn expire(&mut self, now_ns: u64, batch: &mut Batch) -> Progress {
        let mut from_ns = now_ns;
        while let Some(oldest) = self.slots.oldest() {
            let since_ns = self.slab.slot(oldest).idle_since();
            if let Some(since_ns) = since_ns
                && now_ns.saturating_sub(since_ns) < self.residency_ns
            {
                // A clock that has gone back counts from where it is.
                from_ns = since_ns.min(now_ns);
                break;
            }
            if batch.is_full() {
                return Progress::More;
            }
            if self.take(oldest, batch) {
                self.own.expired += 1;
            }
        }
        self.slab.set_due(from_ns.saturating_add(self.residency_ns));
        Progress::Done
    }

    /// Moves every idle mapping to `batch`, oldest first.
    pub fn drain(&mut self, batch: &mut Batch) -> Progress {
        while let Some(oldest) = self.slots.oldest() {
            if batch.is_full() {
                return Progress::More;
            }
            self.take(oldest, batch);
        }
        Progress::Done
    }

    /// As [`Slab::torn_down`], by the owner, without waiting; and [`sweep`](Self::sweep)s.
    pub fn finish(&mut self, batch: &mut Batch, now_ns: u64, free: impl FnMut(P)) {
        for gone in batch.take() {
            let window = now_ns.saturating_sub(gone.since_ns);
            self.own.stale_times.record(window);
            self.slab.slot(gone.place).finish();
        }
        self.sweep(free);
    }

    /// Passes the mappings of `batch` to `to`, each with its pin and the time of its release: their
    /// invalidation failed, and the owner rests. They are not this cache's any more.
    pub fn give_up(&mut self, batch: &mut Batch, mut to: impl FnMut(P, u64)) {
        for gone in batch.take() {
            if let Some(pinned) = self.slots.value_mut(gone.place).take() {
                to(pinned, gone.since_ns);
            }
            self.slab.slot(gone.place).finish();
        }
    }

    /// The slab, through which other threads expire its mappings.
    pub fn slab(&self) -> Arc<Slab> {
        Arc::clone(&self.slab)
    }

    /// Counts and bytes of its owner, beyond those of the slab. `stale_max` is as the owner saw it:
    /// a mapping that another thread has torn down is included until the owner meets its slot.
    pub fn own_counts(&self) -> Counts {
        let pending = self.pending_free.capacity() * size_of::<u32>();
        Counts {
            bytes: size_of::<Self>() + pending + self.slots.bytes(),
            ..self.own
        }
    }
}

/// Time after which the owner expires a mapping, where other threads take mappings that are idle
/// for `residency_ns`.
pub fn owners(residency_ns: u64) -> u64 {
    residency_ns - residency_ns / OWNER_LEAD
}

/// Number of mappings that are evicted together where `quota` are kept: an eighth, at least 1.
pub fn evicted_together(quota: usize) -> usize {
    (quota / 8).clamp(1, EVICT_MAX)
}
