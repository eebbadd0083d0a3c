//! Reverse Translation Cache, as described by PVIOMMU (KSII TIIS 2016).
//!
//! An adaptive radix tree maps pages to mappings, and a first-in-first-out list holds *cycles*. A
//! mapping is in the tree from its first use on; its REUSING bit is set while a driver uses it. A
//! release clears the bit and adds the mapping to the list of the current cycle. When a cycle
//! leaves the list, the mappings that were released in it, and neither used nor released since, are
//! torn down. With four cycles of 10 s a released mapping is kept for 30 to 40 s.
//!
//! The entries, and so the stale mappings, are not bounded: the paper gives no bound, and none is
//! added here, so that the structure can be compared as published. No other core than the owner can
//! expire its entries. The tree and the lists grow; the memory of a removed entry is reused but not
//! freed.
//!
//! «From its first use on» is one reading of the paper. [`RtcCache::from_first_release`] implements
//! the other, in which a second release does not restart a mapping's lifetime.
//!
//! A page that is in use (REUSING) gives no second hit, since the bit does not count users. A
//! second mapping of such a page is unknown to the cache until its release, and is then torn down.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use iova::IovaRange;

use dma_map::testing::reuse::{
    Batch, Counts, Expired, Key, PackedRange, Progress, Released, ReuseCache,
};

use crate::art::Art;

/// Default length of a cycle: 10 s, in nanoseconds.
pub const CYCLE_NS: u64 = 10_000_000_000;
/// Number of cycles in the list: a mapping released at the start of one expires when four have
/// passed.
const CYCLES: u64 = 4;
/// Cycle of an entry that has not been released yet.
const NEVER: u64 = u64::MAX;

struct Entry {
    key: Key,
    range: PackedRange,
    /// Time of its last release.
    since_ns: u64,
    /// The cycle whose list holds it. Older lists may still name it, and are then ignored.
    cycle: u64,
    is_reusing: bool,
    /// Whether it is in the tree. Otherwise it is free, in a batch, or has expired while in use.
    is_indexed: bool,
}

/// The reverse translation cache of one core.
pub struct RtcCache {
    tree: Art,
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Entries released in each of the last cycles; the current cycle is at the back.
    cycles: VecDeque<VecDeque<u32>>,
    /// Entries released in cycles that have passed. Some were used since, and are in the list of a
    /// later cycle.
    due: VecDeque<u32>,
    /// Number of the current cycle.
    current: u64,
    /// Time at which the next cycle begins, in nanoseconds.
    turn_ns: u64,
    cycle_ns: u64,
    /// Number of cycles in the list.
    length: u64,
    /// The lifetime begins with the first release: a later release leaves the entry in its list.
    is_from_first: bool,
    own: Counts,
}

impl RtcCache {
    /// Creates an empty cache with cycles of `cycle_ns`, at least 1. Each release restarts a
    /// mapping's lifetime.
    pub fn new(cycle_ns: u64) -> Self {
        Self::with(cycle_ns, CYCLES, false)
    }

    /// Creates one whose lifetimes begin with the first release and end `cycles` (at most 2^16)
    /// cycles after that one, as in `exitless-iommu.ko`. A mapping that is in use when it expires
    /// gives no hits any more, and is torn down at its release.
    pub fn from_first_release(cycle_ns: u64, cycles: u64) -> Self {
        Self::with(cycle_ns, cycles.min(1 << 16) + 1, true)
    }

    fn with(cycle_ns: u64, length: u64, is_from_first: bool) -> Self {
        let mut cycles = VecDeque::with_capacity(length as usize + 1);
        cycles.push_back(VecDeque::new());
        Self {
            tree: Art::EMPTY,
            entries: Vec::new(),
            free: Vec::new(),
            cycles,
            due: VecDeque::new(),
            current: 0,
            turn_ns: cycle_ns.max(1),
            cycle_ns: cycle_ns.max(1),
            length,
            is_from_first,
            own: Counts::default(),
        }
    }

    /// Returns the bytes of the tree.
    pub fn tree_bytes(&self) -> usize {
        self.tree.bytes()
    }

    fn get(&self, key: Key) -> Option<u32> {
        let key_of = |number: u32| self.entries[number as usize].key.word();
        self.tree.get(key.word(), key_of)
    }

    /// Adds an entry that is in use. Its key is not in the tree.
    fn insert_node(&mut self, key: Key, range: PackedRange) -> u32 {
        let entry = Entry {
            key,
            range,
            since_ns: 0,
            cycle: NEVER,
            is_reusing: true,
            is_indexed: true,
        };
        let number = match self.free.pop() {
            Some(number) => {
                self.entries[number as usize] = entry;
                number
            }
            None => {
                self.entries.push(entry);
                u32::try_from(self.entries.len() - 1).expect("fewer than 2^29 entries")
            }
        };
        let entries = &self.entries;
        let key_of = |number: u32| entries[number as usize].key.word();
        let is_new = self.tree.insert(key.word(), number, key_of);
        assert!(is_new, "the key was looked up before");
        number
    }

    /// Removes an entry from the tree.
    fn forget(&mut self, number: u32) {
        let entries = &self.entries;
        let key_of = |number: u32| entries[number as usize].key.word();
        let key = key_of(number);
        let removed = self.tree.remove(key, key_of);
        assert!(removed == Some(number), "an entry is in the tree");
        self.entries[number as usize].is_indexed = false;
    }

    /// Removes an idle entry from the tree and adds it to the batch.
    fn take(&mut self, number: u32, batch: &mut Batch) {
        self.forget(number);
        let entry = &self.entries[number as usize];
        batch.push(Expired {
            range: entry.range.range(),
            since_ns: entry.since_ns,
            place: number,
        });
    }

    /// Returns the list with the entries that were released longest ago.
    fn oldest_list(&mut self) -> Option<&mut VecDeque<u32>> {
        let mut lists = core::iter::once(&mut self.due).chain(&mut self.cycles);
        lists.find(|list| !list.is_empty())
    }

    /// Begins the cycles whose time has come, then expires the entries of passed cycles as far as
    /// the batch has room.
    fn turn(&mut self, now_ns: u64, batch: &mut Batch) -> Progress {
        if now_ns >= self.turn_ns {
            let now = now_ns / self.cycle_ns;
            let passed = now - self.current;
            for _ in 0..passed.min(self.length) {
                let mut list = VecDeque::new();
                if self.cycles.len() as u64 == self.length
                    && let Some(mut oldest) = self.cycles.pop_front()
                {
                    self.due.append(&mut oldest);
                    list = oldest;
                }
                self.cycles.push_back(list);
            }
            self.current = now;
            self.turn_ns = (now + 1).saturating_mul(self.cycle_ns);
        }
        let last = self.current.checked_sub(self.length);
        while let Some(&number) = self.due.front() {
            let entry = &self.entries[number as usize];
            let is_due = last.is_some_and(|last| entry.cycle <= last);
            if is_due && entry.is_indexed && !entry.is_reusing {
                if batch.is_full() {
                    return Progress::More;
                }
                self.take(number, batch);
                self.own.expired += 1;
            } else if is_due && entry.is_indexed && self.is_from_first {
                // Its release finds no entry, and tears the mapping down.
                self.forget(number);
                self.free.push(number);
                self.own.expired += 1;
            }
            self.due.pop_front();
        }
        Progress::Done
    }
}

impl ReuseCache for RtcCache {
    #[inline]
    fn acquire(&mut self, key: Key, now_ns: u64) -> Option<IovaRange> {
        if let Some(number) = self.get(key) {
            let entry = &mut self.entries[number as usize];
            if !entry.is_reusing {
                entry.is_reusing = true;
                self.own.stale -= 1;
                self.own
                    .stale_times
                    .record(now_ns.saturating_sub(entry.since_ns));
                self.own.hits += 1;
                return Some(entry.range.range());
            }
        }
        self.own.misses += 1;
        None
    }

    fn insert(&mut self, key: Key, range: IovaRange, _now_ns: u64) {
        if let Some(range) = PackedRange::new(range)
            && self.get(key).is_none()
        {
            self.insert_node(key, range);
        }
    }

    fn release(&mut self, key: Key, range: IovaRange, now_ns: u64, batch: &mut Batch) -> Released {
        let Some(range) = PackedRange::new(range) else {
            return Released::TearDown;
        };
        let number = match self.get(key) {
            // It expired while it was in use.
            None if self.is_from_first => return Released::TearDown,
            // It was mapped on another core, or `insert` did not add it.
            None => self.insert_node(key, range),
            Some(number) => number,
        };
        let entry = &mut self.entries[number as usize];
        if !entry.is_reusing || entry.range != range {
            return Released::TearDown;
        }
        if now_ns >= self.turn_ns || !self.due.is_empty() {
            let _ = self.turn(now_ns, batch);
        }
        let entry = &mut self.entries[number as usize];
        entry.is_reusing = false;
        entry.since_ns = now_ns;
        let is_listed = match self.is_from_first {
            true => entry.cycle != NEVER,
            false => entry.cycle == self.current,
        };
        if !is_listed {
            entry.cycle = self.current;
            if let Some(list) = self.cycles.back_mut() {
                list.push_back(number);
            }
        }
        self.own.stale += 1;
        self.own.stale_max = self.own.stale_max.max(self.own.stale);
        Released::Kept
    }

    fn expire(&mut self, now_ns: u64, batch: &mut Batch) -> Progress {
        self.turn(now_ns, batch)
    }

    fn drain(&mut self, batch: &mut Batch) -> Progress {
        while let Some(&number) = self.oldest_list().and_then(|list| list.front()) {
            let entry = &mut self.entries[number as usize];
            if entry.is_reusing {
                // No list names it now; its release adds it to the list of the cycle of that time.
                entry.cycle = NEVER;
            } else if entry.is_indexed {
                if batch.is_full() {
                    return Progress::More;
                }
                self.take(number, batch);
            }
            self.oldest_list().and_then(VecDeque::pop_front);
        }
        Progress::Done
    }

    fn torn_down(&mut self, batch: &mut Batch, now_ns: u64) {
        for gone in batch.take() {
            let window = now_ns.saturating_sub(gone.since_ns);
            self.own.stale_times.record(window);
            self.own.stale -= 1;
            self.free.push(gone.place);
        }
    }

    fn counts(&self) -> Counts {
        let lists = self.cycles.iter().chain([&self.due]);
        let lists = lists.map(VecDeque::capacity).sum::<usize>();
        Counts {
            entries: (self.entries.len() - self.free.len()) as u64,
            bytes: size_of::<Self>()
                + self.tree.bytes()
                + self.entries.capacity() * size_of::<Entry>()
                + (self.free.capacity() + lists) * size_of::<u32>(),
            ..self.own
        }
    }
}
