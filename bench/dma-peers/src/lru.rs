//! The idle mappings of one core, kept by that core alone.
//!
//! It makes the same decisions as [`OptimisticCache`](dma_map::testing::reuse::OptimisticCache) in
//! the same order, without state that other cores could see. The difference in time is the cost of
//! the shared slab; its benefit is the age bound, which here ends with the owner's calls. The
//! property tests compare the two.

use iova::IovaRange;

use dma_map::testing::reuse::{
    Batch, Counts, Expired, Key, PackedRange, Progress, Released, ReuseCache, SlotMap,
    evicted_together, owners,
};

/// Residency where nothing else is asked for: 10 ms.
pub const RESIDENCY_NS: u64 = 10_000_000;

/// A mapping, and the time of its release.
#[derive(Clone, Copy, Default)]
struct Kept {
    range: PackedRange,
    since_ns: u64,
}

/// A least-recently-used list of idle mappings.
pub struct LruCache {
    slots: SlotMap<Kept>,
    /// Age at which an idle mapping expires, nanoseconds.
    residency_ns: u64,
    evict: usize,
    own: Counts,
}

impl LruCache {
    /// At most `quota` idle mappings (1 to 2^30; more or fewer are taken for the nearest), each for
    /// at most `residency_ns` while its owner calls.
    pub fn new(quota: usize, residency_ns: u64) -> Self {
        let slots = SlotMap::new(quota);
        let evict = evicted_together(slots.places());
        Self {
            slots,
            residency_ns: owners(residency_ns),
            evict,
            own: Counts::default(),
        }
    }

    fn is_due(&mut self, place: u32, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.slots.value_mut(place).since_ns) >= self.residency_ns
    }

    fn take(&mut self, place: u32, batch: &mut Batch) {
        let found = self.slots.locate(place);
        self.slots.take_out(found);
        let &mut Kept { range, since_ns } = self.slots.value_mut(place);
        batch.push(Expired {
            range: range.range(),
            since_ns,
            place,
        });
    }

    #[cold]
    fn make_room(&mut self, now_ns: u64, batch: &mut Batch) {
        let before = batch.entries().len();
        let _ = self.expire(now_ns, batch);
        if !self.slots.is_full() || batch.entries().len() > before {
            return;
        }
        for _ in 0..self.evict {
            if let Some(oldest) = self.slots.oldest()
                && !batch.is_full()
            {
                self.take(oldest, batch);
                self.own.evicted += 1;
            }
        }
    }
}

impl ReuseCache for LruCache {
    #[inline]
    fn acquire(&mut self, key: Key, now_ns: u64) -> Option<IovaRange> {
        let Some(found) = self.slots.find(key) else {
            self.own.misses += 1;
            return None;
        };
        self.slots.take_out(found);
        self.slots.give_back(found.place);
        let &mut Kept { range, since_ns } = self.slots.value_mut(found.place);
        self.own.stale_times.record(now_ns.saturating_sub(since_ns));
        self.own.hits += 1;
        Some(range.range())
    }

    #[inline]
    fn insert(&mut self, _key: Key, _range: IovaRange, _now_ns: u64) {}

    #[inline]
    fn release(&mut self, key: Key, range: IovaRange, now_ns: u64, batch: &mut Batch) -> Released {
        let place = |range| Some((range, self.slots.insert(key)?));
        let Some((range, place)) = PackedRange::new(range).and_then(place) else {
            self.make_room(now_ns, batch);
            self.own.evicted += 1;
            return Released::TearDown;
        };
        let since_ns = now_ns;
        *self.slots.value_mut(place) = Kept { range, since_ns };
        let occupied = u64::from(self.slots.occupied());
        self.own.stale_max = self.own.stale_max.max(occupied);
        let has_due = (self.slots.oldest()).is_some_and(|oldest| self.is_due(oldest, now_ns));
        if self.slots.is_full() || has_due {
            self.make_room(now_ns, batch);
        }
        Released::Kept
    }

    fn expire(&mut self, now_ns: u64, batch: &mut Batch) -> Progress {
        while let Some(oldest) = self.slots.oldest()
            && self.is_due(oldest, now_ns)
        {
            if batch.is_full() {
                return Progress::More;
            }
            self.take(oldest, batch);
            self.own.expired += 1;
        }
        Progress::Done
    }

    fn drain(&mut self, batch: &mut Batch) -> Progress {
        while let Some(oldest) = self.slots.oldest() {
            if batch.is_full() {
                return Progress::More;
            }
            self.take(oldest, batch);
        }
        Progress::Done
    }

    fn torn_down(&mut self, batch: &mut Batch, now_ns: u64) {
        for gone in batch.take() {
            let window = now_ns.saturating_sub(gone.since_ns);
            self.own.stale_times.record(window);
            self.slots.give_back(gone.place);
        }
    }

    fn counts(&self) -> Counts {
        let stale = u64::from(self.slots.occupied());
        Counts {
            stale,
            entries: stale,
            bytes: size_of::<Self>() + self.slots.bytes(),
            ..self.own
        }
    }
}
