//! Approximate sharing: a page that is mapped already is not mapped again.
//!
//! After vIOMMU (USENIX ATC 2011), §3.2 and 3.3: a reverse table from pages to live mappings, with
//! a count of users; the last user's unmap tears the mapping down, so nothing is ever stale. The
//! table is approximate: it is limited, and forgets the mapping it has not used for longest. A
//! forgotten mapping costs a second one of the same page, no more. It is forgotten only while it
//! has one user: that user's unmap finds nothing and tears down what is its alone.
//!
//! All cores share the table, since a mapping may be released where it was not made. It is cut into
//! shards by key, each under its own lock, taken once per call for a lookup of a few lines: two
//! cores meet only where they handle pages of the same shard at the same time.

use alloc::boxed::Box;
use alloc::sync::Arc;

use iova::IovaRange;
use lines::{CachePadded, Lock};

use super::Key;
use super::key::PackedRange;
use super::slots::{SlotMap, hash};
use crate::risk::Counts;

/// A live mapping, and its number of users.
#[derive(Default)]
struct Live {
    range: PackedRange,
    users: u64,
}

/// The live mappings of one key each; those of one user are linked.
struct Shard {
    slots: SlotMap<Live>,
    hits: u64,
    misses: u64,
    forgotten: u64,
}

/// The live mappings of a domain that its cores can find.
pub struct SharingTable {
    shards: Box<[CachePadded<Lock<Shard>>]>,
}

impl SharingTable {
    /// Remembers about `mappings` mappings in `shards` shards, rounded up to a power of two; four
    /// for each core keep cores apart.
    pub fn new(mappings: usize, shards: usize) -> Arc<Self> {
        let shards = shards.clamp(1, 1 << 16).next_power_of_two();
        let each = mappings.div_ceil(shards);
        let shard = || Shard {
            slots: SlotMap::new(each),
            hits: 0,
            misses: 0,
            forgotten: 0,
        };
        let shards = (0..shards).map(|_| CachePadded::new(Lock::new(shard())));
        Arc::new(Self {
            shards: shards.collect(),
        })
    }

    /// By bits of the hash that the shards' indexes do not use.
    #[inline]
    fn shard(&self, key: Key) -> &Lock<Shard> {
        &self.shards[(hash(key) >> 32) as usize & (self.shards.len() - 1)]
    }

    /// A mapping of `key` for one more user; `None`: the caller makes one, and
    /// [`insert`](Self::insert)s it.
    pub fn acquire(&self, key: Key) -> Option<IovaRange> {
        let shard = &mut *self.shard(key).lock();
        let Some(found) = shard.slots.find(key) else {
            shard.misses += 1;
            return None;
        };
        shard.hits += 1;
        let live = shard.slots.value_mut(found.place);
        live.users += 1;
        let range = live.range.range();
        if live.users == 2 {
            // From here on it cannot be forgotten.
            shard.slots.unlink(found.place);
        }
        Some(range)
    }

    /// A mapping was made after a miss, and has one user. One that is not remembered ends as any
    /// other.
    pub fn insert(&self, key: Key, range: IovaRange) {
        let Some(range) = PackedRange::new(range) else {
            return;
        };
        let shard = &mut *self.shard(key).lock();
        let slots = &mut shard.slots;
        if slots.find(key).is_some() {
            // Another core's, or the one remembered when this was made: one is enough.
            return;
        }
        if slots.is_full() {
            let Some(oldest) = slots.oldest() else {
                // All have several users.
                return;
            };
            slots.take_out(slots.locate(oldest));
            slots.give_back(oldest);
            shard.forgotten += 1;
        }
        if let Some(place) = slots.insert(key) {
            *slots.value_mut(place) = Live { range, users: 1 };
        }
    }

    /// Ends one use of a mapping. Returns `true` where others still use it; else the mapping is to
    /// be torn down.
    pub fn end_use(&self, key: Key, range: IovaRange) -> bool {
        let slots = &mut self.shard(key).lock().slots;
        let Some(found) = slots.find(key) else {
            return false;
        };
        let place = found.place;
        let live = slots.value_mut(place);
        if live.range.range() != range {
            return false;
        }
        live.users -= 1;
        match live.users {
            0 => {
                slots.take_out(found);
                slots.give_back(place);
                return false;
            }
            1 => slots.link(place),
            _ => {}
        }
        true
    }

    /// Counts since the start, of all cores. `evicted` are the mappings forgotten.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts {
            bytes: size_of_val(&*self.shards),
            ..Counts::default()
        };
        for shard in &self.shards {
            let shard = shard.lock();
            counts.hits += shard.hits;
            counts.misses += shard.misses;
            counts.entries += u64::from(shard.slots.occupied());
            counts.evicted += shard.forgotten;
            counts.bytes += shard.slots.bytes();
        }
        counts
    }
}
