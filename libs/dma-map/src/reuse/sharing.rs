//! Approximate sharing: a page that is mapped already is not mapped again.
//!
//! After vIOMMU (USENIX ATC 2011), §3.2 and 3.3: a reverse table from pages to live mappings, with a count of
//! users; the last user's unmap tears the mapping down, so nothing is ever stale. The table is approximate: it is
//! limited, and forgets the mapping it has not used for longest. A forgotten mapping costs a second one of the
//! same page, no more. It is forgotten only while it has one user: that user's unmap finds nothing and tears
//! down what is its alone.
//!
//! All cores share the table, since a mapping may be released where it was not made. It is cut into shards by
//! key, each under its own lock, taken once per call for a lookup of a few lines: two cores meet only where they
//! handle pages of the same shard at the same time.

use alloc::boxed::Box;
use alloc::sync::Arc;

use iova::IovaRange;
use lines::{CachePadded, Lock};

use super::index::hash;
use super::key::PackedRange;
use super::slot_map::{Found, SlotMap};
use super::{Batch, Counts, Expire, Key, Progress, Released, ReuseCache, RiskContract};

/// A live mapping, and its number of users.
#[derive(Default)]
struct Live {
    range: PackedRange,
    users: u64,
}

/// The live mappings of one key each; those of one user are linked.
struct Shard {
    slots: SlotMap<Live>,
    forgotten: u64,
}

impl Shard {
    fn acquire(&mut self, key: Key) -> Option<IovaRange> {
        let Found { place, .. } = self.slots.find(key)?;
        let live = self.slots.value_mut(place);
        live.users += 1;
        let range = live.range.range();
        if live.users == 2 {
            // From here on it cannot be forgotten.
            self.slots.unlink(place);
        }
        Some(range)
    }

    fn adopt(&mut self, key: Key, range: PackedRange) {
        if self.slots.find(key).is_some() {
            // Another core's, or the one remembered when this was made: one is enough.
            return;
        }
        if self.slots.is_full() {
            let Some(oldest) = self.slots.oldest() else {
                // All have several users.
                return;
            };
            let found = self.slots.locate(oldest);
            self.slots.take_out(found);
            self.slots.give_back(oldest);
            self.forgotten += 1;
        }
        if let Some(place) = self.slots.insert(key) {
            *self.slots.value_mut(place) = Live { range, users: 1 };
        }
    }

    fn release(&mut self, key: Key, range: IovaRange) -> Released {
        let Some(found) = self.slots.find(key) else {
            return Released::TearDown;
        };
        let place = found.place;
        let live = self.slots.value_mut(place);
        if live.range.range() != range {
            return Released::TearDown;
        }
        live.users -= 1;
        match live.users {
            0 => {
                self.slots.take_out(found);
                self.slots.give_back(place);
                return Released::TearDown;
            }
            1 => self.slots.link(place),
            _ => {}
        }
        Released::InUse
    }
}

/// The live mappings of a domain that its cores can find.
pub struct SharingTable {
    shards: Box<[CachePadded<Lock<Shard>>]>,
}

impl SharingTable {
    /// Remembers about `mappings` mappings in `shards` shards, rounded up to a power of two; four for each core
    /// keep cores apart.
    pub fn new(mappings: usize, shards: usize) -> Arc<Self> {
        let shards = shards.clamp(1, 1 << 16).next_power_of_two();
        let each = mappings.div_ceil(shards);
        let shard = || Shard {
            slots: SlotMap::new(each),
            forgotten: 0,
        };
        let shards = (0..shards).map(|_| CachePadded::new(Lock::new(shard())));
        Arc::new(Self {
            shards: shards.collect(),
        })
    }

    /// By the low bits of the hash: the shards' indexes use the high ones.
    #[inline]
    fn shard(&self, key: Key) -> &Lock<Shard> {
        &self.shards[hash(key) as usize & (self.shards.len() - 1)]
    }
}

/// One core's way into a [`SharingTable`].
pub struct SharingCache {
    table: Arc<SharingTable>,
    hits: u64,
    misses: u64,
}

impl SharingCache {
    /// A handle; any number of them share the table.
    pub fn new(table: Arc<SharingTable>) -> Self {
        Self {
            table,
            hits: 0,
            misses: 0,
        }
    }

    /// As [`ReuseCache::release`]: in use by others, or to be torn down.
    #[inline]
    pub(crate) fn end_use(&mut self, key: Key, range: IovaRange) -> Released {
        self.table.shard(key).lock().release(key, range)
    }
}

impl ReuseCache for SharingCache {
    #[inline]
    fn acquire(&mut self, key: Key, _now_ns: u64) -> Option<IovaRange> {
        let found = self.table.shard(key).lock().acquire(key);
        match found {
            Some(_) => self.hits += 1,
            None => self.misses += 1,
        }
        found
    }

    #[inline]
    fn adopt(&mut self, key: Key, range: IovaRange, _now_ns: u64) {
        if let Some(range) = PackedRange::new(range) {
            self.table.shard(key).lock().adopt(key, range);
        }
    }

    #[inline]
    fn release(
        &mut self,
        key: Key,
        range: IovaRange,
        _now_ns: u64,
        _batch: &mut Batch,
    ) -> Released {
        self.end_use(key, range)
    }

    fn expire(&mut self, _now_ns: u64, _batch: &mut Batch) -> Progress {
        Progress::Done
    }

    fn drain(&mut self, _batch: &mut Batch) -> Progress {
        Progress::Done
    }

    fn torn_down(&mut self, batch: &mut Batch, _now_ns: u64) {
        assert!(batch.is_empty(), "nothing is taken from a sharing table");
    }

    fn expirer(&self) -> Option<Arc<dyn Expire>> {
        None
    }

    fn contract(&self) -> RiskContract {
        RiskContract::STRICT
    }

    /// Hits and misses of this core; the rest of the whole table. `evicted` are the mappings forgotten.
    fn counts(&self) -> Counts {
        let mut counts = Counts {
            hits: self.hits,
            misses: self.misses,
            bytes: size_of_val(&*self.table.shards),
            ..Counts::default()
        };
        for shard in &self.table.shards {
            let shard = shard.lock();
            counts.entries += u64::from(shard.slots.occupied());
            counts.evicted += shard.forgotten;
            counts.bytes += shard.slots.bytes();
        }
        counts
    }
}
