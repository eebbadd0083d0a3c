//! Optimistic teardown: an unmapped mapping stays, in the hope of being mapped again.
//!
//! After vIOMMU (USENIX ATC 2011), §3.4: the mapping goes when more than a quota are idle (256 and 4096 in the
//! paper) or when it has been idle for its residency (10 ms by default), whichever comes first. An idle mapping
//! leaves the order when it is acquired and comes to its young end when it is released, so one list is the
//! first-in-first-out of ages and the least-recently-used order of eviction at once.
//!
//! One cache belongs to one core. What that core alone needs, the index and the order, is its plain memory; what others
//! have to see in order to expire the mappings of a core that is quiet lies in a slab of atomics (`slab.rs`, where
//! the protocol is). A mapping that is in use is not in here: it may be released on another core and then rests there.
//! Of several idle mappings of a page the youngest is acquired.
//!
//! The owner, while it runs, lets mappings go at three quarters of their residency, others at its end: they then find nothing
//! due in the cache of a core that runs.
//!
//! Room: the mapping that reaches the quota makes a batch of the oldest go, together; they count until their
//! invalidation is complete. Until then, should nothing else have gone, the youngest is refused. So there are
//! never more stale mappings than the quota. The mapper makes room itself, with a lock held that barriers wait for
//! (`release_at`, `make_room`); a batch whose invalidation failed is handed over to whoever tears down next (`hand_over`).
//!
//! Cost of a hit and the release that follows: one locked instruction, two plain stores that others see, two looks into the
//! index, and about five lines of the core's own. The locked instruction is what keeps the owner and whoever expires apart; to
//! do without it, those who expire would have to make the owner's processor finish its stores and loads (as Linux'
//! `membarrier` does), which needs an operating system.
//! Memory, allocated at construction: 60 bytes for each mapping of a quota that is a power of two, and what is kept beside it.
//!
//! Dropping the cache leaves its mappings where they are: its [`Expire`] still takes them.

use alloc::collections::VecDeque;
use alloc::sync::Arc;

use iova::IovaRange;

use super::batch::Taker;
use super::key::PackedRange;
use super::slab::Slab;
use super::slot_map::SlotMap;
use super::{
    Batch, Counts, Expire, Expired, Key, Progress, Released, ReuseCache, RiskContract, Windows,
};

/// Residency where nothing else is asked for: 10 ms.
pub const RESIDENCY_NS: u64 = 10_000_000;

/// Most mappings that are evicted together. More would empty the cache for a burst, fewer share the price of an
/// invalidation less.
const EVICT_MAX: usize = 64;

/// The idle mappings of one core. With each it keeps a `P` of its owner's.
pub struct OptimisticCache<P = ()> {
    slab: Arc<Slab>,
    /// By place: the slot's number.
    slots: SlotMap<P>,
    /// Places that somebody else had taken when the owner came; their slots were still EXPIRING.
    pending_free: VecDeque<u32>,
    /// When the owner lets one go.
    residency_ns: u64,
    evict: usize,
    /// Nothing is due before; the copy of what the slab was told.
    due_ns: u64,
    published: u64,
    own: Counts,
}

impl OptimisticCache {
    /// At most `quota` idle mappings (1 to 2^30; more or fewer are taken for the nearest), each for at most
    /// `residency_ns`.
    pub fn new(quota: usize, residency_ns: u64) -> Self {
        Self::keeping(quota, residency_ns)
    }
}

impl<P: Default + Send> OptimisticCache<P> {
    /// The same, with something of the owner's beside each mapping.
    pub(crate) fn keeping(quota: usize, residency_ns: u64) -> Self {
        let slots = SlotMap::new(quota);
        Self {
            slab: Arc::new(Slab::new(slots.places(), residency_ns)),
            pending_free: VecDeque::with_capacity(slots.places()),
            residency_ns: owners(residency_ns),
            evict: evicted_together(slots.places()),
            slots,
            due_ns: 0,
            published: 0,
            own: Counts::default(),
        }
    }

    fn taker(&self) -> Taker {
        Taker::Owner(self.slab.id())
    }

    /// Whether the look at the oldest mapping can wait. False as well where the clock has gone back by so much
    /// that `due_ns` would be late.
    #[inline]
    fn is_early(&self, now_ns: u64) -> bool {
        self.due_ns.wrapping_sub(now_ns).wrapping_sub(1) < self.residency_ns
    }

    /// As [`ReuseCache::acquire`], with what was kept beside the mapping; a miss is not counted.
    #[inline(always)]
    pub(crate) fn hit(&mut self, key: Key, now_ns: u64) -> Option<(PackedRange, P)> {
        while let Some(found) = self.slots.find(key) {
            let place = found.place;
            let slot = self.slab.slot(place);
            if let Some(since_ns) = slot.idle_since()
                && slot.reuse(since_ns)
            {
                let range = slot.range();
                self.slots.take_out(found);
                self.slots.give_back(place);
                self.own.windows.record(now_ns.saturating_sub(since_ns));
                self.own.hits += 1;
                return Some((range, core::mem::take(self.slots.value_mut(place))));
            }
            self.slots.take_out(found);
            self.lose(place);
        }
        None
    }

    /// As [`hit`](Self::hit); a miss is counted.
    #[inline]
    pub(crate) fn acquire_at(&mut self, key: Key, now_ns: u64) -> Option<(IovaRange, P)> {
        match self.hit(key, now_ns) {
            Some((range, kept)) => Some((range.range(), kept)),
            None => {
                self.missed();
                None
            }
        }
    }

    /// A hit was none.
    #[inline]
    pub(crate) fn missed(&mut self) {
        self.own.misses += 1;
    }

    /// As [`ReuseCache::release`], but that no other mapping goes to make room: [`make_room`](Self::make_room) is the
    /// caller's to call, where the answer says so. Gives the place it has where it is kept, and `None` where no place is
    /// free. What is to be kept beside it goes to
    /// [`kept`](Self::kept) of the place.
    #[inline(always)]
    pub(crate) fn release_at(&mut self, key: Key, range: IovaRange, now_ns: u64) -> Option<Placed> {
        self.keep(key, PackedRange::new(range)?, now_ns)
    }

    /// A mapping was torn down because no place was free.
    #[cold]
    pub(crate) fn refused(&mut self) {
        self.own.evicted += 1;
    }

    /// What is kept with the mapping of a place, until it is taken out here. That of a mapping which others have torn
    /// down may still be there when its place has gone to the next.
    #[inline(always)]
    pub(crate) fn kept(&mut self, place: u32) -> &mut P {
        self.slots.value_mut(place)
    }

    /// A place that is no longer linked was taken by somebody else.
    #[cold]
    fn lose(&mut self, place: u32) {
        if self.slab.slot(place).is_owned() {
            self.slots.give_back(place);
        } else {
            self.pending_free.push_back(place);
        }
    }

    /// Frees places that have come back from those who expired them.
    fn reclaim(&mut self) {
        for _ in 0..self.pending_free.len() {
            let Some(place) = self.pending_free.pop_front() else {
                return;
            };
            self.lose(place);
        }
    }

    /// Takes a linked place out, and its mapping if nobody else has it.
    fn take(&mut self, place: u32, batch: &mut Batch) -> bool {
        let found = self.slots.locate(place);
        self.slots.take_out(found);
        let slot = self.slab.slot(place);
        let since_ns = slot.idle_since();
        let Some((since_ns, range)) =
            since_ns.and_then(|since_ns| Some((since_ns, slot.take(since_ns)?)))
        else {
            self.lose(place);
            return false;
        };
        let expired = Expired {
            range,
            since_ns,
            slot: place,
        };
        batch.push(self.taker(), expired);
        true
    }

    /// The invalidation of `batch`, which was filled here, has failed: whoever has the batch from here on gives the places
    /// back through the [`Expire`], as if it had taken them itself.
    #[cold]
    pub(crate) fn hand_over(&mut self, batch: &mut Batch) {
        batch.hand_over(self.taker(), Taker::Stranger(self.slab.id()));
        self.pending_free
            .extend(batch.entries().iter().map(|expired| expired.slot));
    }

    /// Before or after a release: something is due, or no place is free.
    #[cold]
    pub(crate) fn make_room(&mut self, now_ns: u64, batch: &mut Batch) {
        let before = batch.entries().len();
        let _ = self.expire(now_ns, batch);
        if !self.slots.is_full() || batch.entries().len() > before {
            return;
        }
        self.reclaim();
        let mut wanted = self.evict;
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

    /// Keeps the mapping where a place is free.
    #[inline(always)]
    fn keep(&mut self, key: Key, range: PackedRange, now_ns: u64) -> Option<Placed> {
        let place = self.slots.insert(key)?;
        self.slab.slot(place).publish(range, now_ns);
        self.published += 1;
        self.slab.announce(self.published);
        let occupied = u64::from(self.slots.occupied());
        if occupied > self.own.stale_max {
            self.own.stale_max = occupied;
        }
        let wants_room = self.slots.is_full() || !self.is_early(now_ns);
        Some(Placed { place, wants_room })
    }
}

/// A mapping that is kept.
#[derive(Clone, Copy)]
pub(crate) struct Placed {
    /// Where.
    pub(crate) place: u32,
    /// Others have to go: they are due, or no place is free for the next.
    pub(crate) wants_room: bool,
}

/// By which part of the residency the owner lets its mappings go earlier than others take them: a quarter, which is more
/// than two ticks. Who looks from outside then finds nothing due in the cache of a core that runs, and leaves its lines
/// alone; with one time for both, each tick would fetch all that the owner has written since the last.
pub(super) const EARLIER: u64 = 4;

/// When the owner lets a mapping go of which others take what is idle for `residency_ns`.
pub fn owners(residency_ns: u64) -> u64 {
    residency_ns - residency_ns / EARLIER
}

/// How many go together where `quota` are kept: an eighth, at least 1.
pub fn evicted_together(quota: usize) -> usize {
    (quota / 8).clamp(1, EVICT_MAX)
}

impl<P: Default + Send> ReuseCache for OptimisticCache<P> {
    #[inline]
    fn acquire(&mut self, key: Key, now_ns: u64) -> Option<IovaRange> {
        let (range, ..) = self.acquire_at(key, now_ns)?;
        Some(range)
    }

    #[inline]
    fn adopt(&mut self, _key: Key, _range: IovaRange, _now_ns: u64) {}

    #[inline]
    fn release(&mut self, key: Key, range: IovaRange, now_ns: u64, batch: &mut Batch) -> Released {
        let Some(range) = PackedRange::new(range) else {
            return Released::TearDown;
        };
        let mut placed = self.keep(key, range, now_ns);
        if placed.is_none() {
            self.make_room(now_ns, batch);
            placed = self.keep(key, range, now_ns);
        }
        match placed {
            Some(placed) => {
                if placed.wants_room {
                    self.make_room(now_ns, batch);
                }
                Released::Kept
            }
            None => {
                self.refused();
                Released::TearDown
            }
        }
    }

    fn expire(&mut self, now_ns: u64, batch: &mut Batch) -> Progress {
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
        self.due_ns = from_ns.saturating_add(self.residency_ns);
        self.slab.set_due(self.due_ns);
        Progress::Done
    }

    fn drain(&mut self, batch: &mut Batch) -> Progress {
        while let Some(oldest) = self.slots.oldest() {
            if batch.is_full() {
                return Progress::More;
            }
            self.take(oldest, batch);
        }
        self.reclaim();
        Progress::Done
    }

    fn torn_down(&mut self, batch: &mut Batch, now_ns: u64) {
        for Expired { since_ns, slot, .. } in batch.take(self.taker()) {
            self.own.windows.record(now_ns.saturating_sub(since_ns));
            self.slab.slot(slot).finish();
            self.slots.give_back(slot);
        }
    }

    fn expirer(&self) -> Option<Arc<dyn Expire>> {
        Some(self.slab.clone())
    }

    fn contract(&self) -> RiskContract {
        RiskContract {
            max_stale: Some(self.slots.places() as u64),
            max_age_ns: Some(self.slab.residency_ns()),
            survives_quiet_owner: true,
        }
    }

    /// `stale_max` is what the owner saw: it counts a mapping that somebody else has torn down until the owner
    /// meets its slot.
    fn counts(&self) -> Counts {
        let (stale, expired, windows) = self.slab.counts();
        let mut counts = Counts {
            stale,
            expired: self.own.expired + expired,
            entries: stale,
            bytes: size_of::<Self>()
                + self.pending_free.capacity() * size_of::<u32>()
                + self.slots.bytes()
                + self.slab.bytes(),
            ..self.own
        };
        counts.windows = Windows::EMPTY;
        counts.windows.add(&self.own.windows);
        counts.windows.add(&windows);
        counts
    }
}
