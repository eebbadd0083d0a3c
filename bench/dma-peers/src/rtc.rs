//! Reverse Translation Cache, as PVIOMMU (KSII TIIS 2016) describes it.
//!
//! A map from pages to mappings, an adaptive radix tree, and a first-in-first-out list of *cycles*.
//! A mapping is in the tree from its first use on; its REUSING bit says that a driver has it. A
//! release clears the bit and lists the mapping in the current cycle; the cycle that leaves the
//! list takes along what was released in it and neither used nor released since. With cycles of 10
//! s, four of them, a mapping rests for 30 to 40 s.
//!
//! There is no bound on the entries, and so none on stale mappings: the paper gives none, and none
//! is added here, so that the structure can be compared as it is. Nor can any other core than the
//! owner expire its entries. The tree and the lists grow; a removed entry's memory is used again
//! but not given back.
//!
//! *From its first use on* is one reading of the paper; [`RtcCache::from_first_release`] is the
//! other, in which a mapping's lifetime does not begin anew when it is released again.
//!
//! A page that is in use (REUSING) is not found a second time: the bit does not count users. A
//! second mapping of such a page is unknown here until its release, and is then torn down.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use iova::IovaRange;

use dma_map::testing::reuse::{
    Batch, Counts, Expired, Key, PackedRange, Progress, Released, ReuseCache,
};

use crate::art::Art;

/// Length of a cycle where nothing else is asked for: 10 s.
pub const CYCLE_NS: u64 = 10_000_000_000;
/// Cycles in the list: what is released at the very start of one goes when four have passed.
const CYCLES: u64 = 4;
/// Cycle of an entry that has not been released yet.
const NEVER: u64 = u64::MAX;

struct Entry {
    key: Key,
    range: PackedRange,
    /// Time of its last release.
    since_ns: u64,
    /// The cycle that lists it; older lists may still name it, and are wrong.
    cycle: u64,
    is_reusing: bool,
    /// In the tree. Otherwise free, in a batch, or over while it is in use.
    is_indexed: bool,
}

/// A reverse translation cache of one core.
pub struct RtcCache {
    tree: Art,
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Entries released in each of the last cycles, the current one at the back.
    cycles: VecDeque<VecDeque<u32>>,
    /// Entries released in cycles that have passed; some were used again, and are listed in a later
    /// one.
    due: VecDeque<u32>,
    /// Number of the current cycle.
    current: u64,
    /// Time at which the next one begins.
    turn_ns: u64,
    cycle_ns: u64,
    /// Cycles in the list.
    length: u64,
    /// A lifetime begins with the first release: what is released again stays in the list that has
    /// it.
    is_from_first: bool,
    own: Counts,
}

impl RtcCache {
    /// An empty cache with cycles of `cycle_ns`, at least 1; lifetimes begin anew with each
    /// release.
    pub fn new(cycle_ns: u64) -> Self {
        Self::with(cycle_ns, CYCLES, false)
    }

    /// The same with lifetimes from the first release on, `cycles` (at most 2^16) after the one of
    /// it, as `exitless-iommu.ko` has them: what is in use then is not found any more, and is torn
    /// down at its release.
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

    /// Bytes of the tree alone.
    pub fn tree_bytes(&self) -> usize {
        self.tree.bytes()
    }

    fn get(&self, key: Key) -> Option<u32> {
        let key_of = |number: u32| self.entries[number as usize].key.word();
        self.tree.get(key.word(), key_of)
    }

    /// Adds an entry in use; the key is not in the tree.
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

    /// Takes an entry out of the tree.
    fn forget(&mut self, number: u32) {
        let entries = &self.entries;
        let key_of = |number: u32| entries[number as usize].key.word();
        let key = key_of(number);
        let removed = self.tree.remove(key, key_of);
        assert!(removed == Some(number), "an entry is in the tree");
        self.entries[number as usize].is_indexed = false;
    }

    /// Takes an idle entry out of the tree.
    fn take(&mut self, number: u32, batch: &mut Batch) {
        self.forget(number);
        let entry = &self.entries[number as usize];
        batch.push(Expired {
            range: entry.range.range(),
            since_ns: entry.since_ns,
            place: number,
        });
    }

    /// The list that holds what was released longest ago.
    fn oldest_list(&mut self) -> Option<&mut VecDeque<u32>> {
        let mut lists = core::iter::once(&mut self.due).chain(&mut self.cycles);
        lists.find(|list| !list.is_empty())
    }

    /// Begins the cycles that have come, then lets those that have passed go as far as the batch
    /// has room.
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
                // Its release finds nothing, and tears it down.
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
            // Over while it was in use.
            None if self.is_from_first => return Released::TearDown,
            // Made on another core, or not adopted.
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
                // No list names it now; its release lists it again, in the cycle of that time.
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
