//! Idle mappings of one core: unmapped by the driver, kept in the IO page table for reuse. All
//! threads share them, and exactly one thread takes each.
//!
//! A slot is one idle mapping, in two words: its state and its IOVA range.
//!
//! ```text
//!              owner: keep, publish(t)                  owner or anyone: take(t)
//!   OWNED ───────────────────────────────▶ IDLE(t) ───────────────────────────────▶ EXPIRING
//!     ▲ ▲                                     │                                         │
//!     │ └────── owner: hit, reuse(t) ─────────┘                                         │
//!     └─────────── the thread that took it, after the invalidation: finish ─────────────┘
//! ```
//!
//! *OWNED* slots belong to the owner: they are free, or their mapping has expired and the owner has
//! not noticed yet. An *IDLE(t)* slot was released at time t and may be taken by any thread. Both
//! transitions out of IDLE are a compare-and-swap, so exactly one thread gets the mapping: the
//! owner to map it again, or one thread to tear it down. *EXPIRING* slots belong to the thread that
//! took them.
//!
//! Pairs:
//! * `publish` stores IDLE with release; `take` acquires it. So the taker sees the range (a relaxed
//!   store before it) and everything its owner did while the mapping was live, page-table entries
//!   included.
//! * `finish` stores OWNED with release; [`Slot::is_owned`] and the owner's failed `reuse` acquire
//!   it. So the owner writes a new range only after the taker has read the old one, and the
//!   teardown is before the slot's next use.
//! * `reuse` and `take` fail if the other came first. A range changes only in OWNED, and a taker
//!   reads it after its swap has succeeded. So it does no harm if IDLE(t) is by then another idle
//!   period with the same t.
//!
//! The state EXPIRING records neither the thread that took the slot nor its progress.
//!
//! A slot stays occupied until `finish`. This bounds the stale mappings by the number of slots.

use alloc::boxed::Box;

use iova::IovaRange;
use lines::{AtomicU64, CachePadded, Lock, Ordering};

use super::key::PackedRange;
use super::{Batch, Expired, OWNER_LEAD, Progress};
use crate::risk::{Counts, StaleTimeHistogram};

/// The slot belongs to the owner. Also the state of a new slot.
const OWNED: u64 = 0;
/// The slot belongs to the thread that took it, until [`Slot::finish`].
const EXPIRING: u64 = 1;
/// Lowest bits of an idle state; the time lies above.
const IDLE: u64 = 2;
const STATE_BITS: u32 = 2;
const STATE_MASK: u64 = (1 << STATE_BITS) - 1;
/// Latest time a state can hold, ns: 146 years.
const LATEST: u64 = u64::MAX >> STATE_BITS;

/// The state of a mapping that is idle since `since_ns`.
#[inline]
fn idle(since_ns: u64) -> u64 {
    since_ns.min(LATEST) << STATE_BITS | IDLE
}

/// One idle mapping.
#[derive(Default)]
pub(super) struct Slot {
    state: AtomicU64,
    /// A [`PackedRange`]; written by the owner, in OWNED only.
    range: AtomicU64,
}

impl Slot {
    /// Called by the owner for an OWNED slot: offers the mapping to all threads.
    #[inline]
    pub(super) fn publish(&self, range: PackedRange, since_ns: u64) {
        self.range.store(range.0, Ordering::Relaxed);
        // Pairs with `take`: without it the taker could tear down the slot's previous range.
        self.state.store(idle(since_ns), Ordering::Release);
    }

    /// Returns the time since which the mapping is idle, if it is. Only a hint: it orders nothing,
    /// and `reuse` and `take` decide.
    #[inline]
    pub(super) fn idle_since(&self) -> Option<u64> {
        let state = self.state.load(Ordering::Relaxed);
        (state & STATE_MASK == IDLE).then_some(state >> STATE_BITS)
    }

    /// Called by the owner: takes back a mapping that it published with the same time. Returns
    /// false if another thread is expiring the mapping, or has done so.
    #[inline]
    pub(super) fn reuse(&self, since_ns: u64) -> bool {
        let from = idle(since_ns);
        self.state
            .compare_exchange(from, OWNED, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// Called by any thread: takes a mapping that is idle since `since_ns`, to tear it down.
    #[inline]
    pub(super) fn take(&self, since_ns: u64) -> Option<IovaRange> {
        let from = idle(since_ns);
        self.state
            .compare_exchange(from, EXPIRING, Ordering::AcqRel, Ordering::Relaxed)
            .ok()?;
        // No thread writes the range before `finish`.
        Some(PackedRange(self.range.load(Ordering::Relaxed)).range())
    }

    /// Called by the thread that took the slot, after the teardown: returns the slot to the owner.
    #[inline]
    pub(super) fn finish(&self) {
        // Relaxed: the taker itself stored EXPIRING, or got the batch from the thread that did.
        let state = self.state.load(Ordering::Relaxed);
        assert!(
            state == EXPIRING,
            "a mapping is torn down once, by who took it"
        );
        // Pairs with `is_owned` and `reuse`.
        self.state.store(OWNED, Ordering::Release);
    }

    /// Returns whether the slot belongs to the owner. After another thread took it, this means that
    /// the teardown is complete.
    #[inline]
    pub(super) fn is_owned(&self) -> bool {
        self.state.load(Ordering::Acquire) == OWNED
    }
}

/// Hints from the owner to expiring threads whether some mapping may be due. Written by the owner
/// only.
#[derive(Default)]
struct OwnerHints {
    /// Nothing is due for the owner before this time, ns.
    due_ns: AtomicU64,
    /// Number of mappings published.
    published: AtomicU64,
}

/// State shared by the threads that scan for expired mappings. Its lock is held during the scan,
/// not during the teardown.
#[derive(Default)]
struct ExpiryScan {
    /// `OwnerHints::published` at the last complete scan of the slots, and the oldest release time,
    /// in ns, that this scan left.
    looked: Option<(u64, u64)>,
    expired: u64,
    stale_times: StaleTimeHistogram,
}

/// The slots of one core.
pub struct Slab {
    residency_ns: u64,
    owner_hints: CachePadded<OwnerHints>,
    expiry_scan: CachePadded<Lock<ExpiryScan>>,
    slots: Box<[Slot]>,
}

impl Slab {
    pub(super) fn new(slots: usize, residency_ns: u64) -> Self {
        Self {
            residency_ns,
            owner_hints: CachePadded::default(),
            expiry_scan: CachePadded::default(),
            slots: (0..slots).map(|_| Slot::default()).collect(),
        }
    }

    #[inline]
    pub(super) fn slot(&self, place: u32) -> &Slot {
        &self.slots[place as usize]
    }

    /// Called by the owner: publishes a mapping in the slot of `place`, and counts that. The count
    /// is stored with release, after the slot: a thread that reads the count also sees all mappings
    /// that it includes, so its scan of the slots misses none of them.
    #[inline]
    pub(super) fn publish(&self, place: u32, range: PackedRange, since_ns: u64) {
        self.slot(place).publish(range, since_ns);
        let published = self.owner_hints.published.load(Ordering::Relaxed);
        self.owner_hints
            .published
            .store(published + 1, Ordering::Release);
    }

    /// Returns the time that the owner last [set](Self::set_due), in ns.
    #[inline]
    pub(super) fn due(&self) -> u64 {
        self.owner_hints.due_ns.load(Ordering::Relaxed)
    }

    /// Called by the owner: records that nothing is due before `due_ns`. Relaxed: a thread that
    /// reads the old value scans without need, or one call late.
    #[inline]
    pub(super) fn set_due(&self, due_ns: u64) {
        self.owner_hints.due_ns.store(due_ns, Ordering::Relaxed);
    }

    /// Called by any thread: moves the mapping of a place to `batch`, which has room, if it is idle
    /// since `since_ns`. Returns whether it was moved.
    pub(super) fn take(&self, place: u32, since_ns: u64, batch: &mut Batch) -> bool {
        let taken = self.slot(place).take(since_ns);
        if let Some(range) = taken {
            batch.push(Expired {
                range,
                since_ns,
                place,
            });
        }
        taken.is_some()
    }

    /// Returns the release time up to which mappings are due at `now_ns`; `None` as long as the
    /// owner is expected to expire its mappings itself.
    fn last_due(&self, now_ns: u64) -> Option<u64> {
        let last_ns = now_ns.checked_sub(self.residency_ns)?;
        // The owner expires at `due`. Other threads begin later, by a part of the residency.
        (now_ns >= self.due().saturating_add(self.residency_ns / OWNER_LEAD)).then_some(last_ns)
    }

    /// Returns whether the last scan of the slots left nothing that is idle since `last_ns`, and no
    /// mapping has been published since.
    fn has_looked(&self, expiry_scan: &ExpiryScan, last_ns: u64) -> bool {
        expiry_scan.looked.is_some_and(|(published, oldest)| {
            published == self.owner_hints.published.load(Ordering::Acquire) && oldest > last_ns
        })
    }

    /// Takes mappings that are idle since `last_ns` or longer. The slots are scanned in their
    /// order, not by age.
    fn collect(&self, expiry_scan: &mut ExpiryScan, last_ns: u64, batch: &mut Batch) -> Progress {
        let published = self.owner_hints.published.load(Ordering::Acquire);
        let mut oldest_left = u64::MAX;
        for (place, slot) in (0u32..).zip(&self.slots) {
            let Some(since_ns) = slot.idle_since() else {
                continue;
            };
            if since_ns > last_ns {
                oldest_left = oldest_left.min(since_ns);
                continue;
            }
            if batch.is_full() {
                return Progress::More;
            }
            expiry_scan.expired += u64::from(self.take(place, since_ns, batch));
        }
        expiry_scan.looked = Some((published, oldest_left));
        Progress::Done
    }

    /// Counts that need no call of the owner: stale mappings now, the number of mappings that
    /// threads took by [`expire`](Self::expire) and [`drain`](Self::drain), and the stale times of
    /// those that were [torn down](Self::torn_down).
    pub fn counts(&self) -> Counts {
        let stale = self.slots.iter().filter(|slot| !slot.is_owned()).count() as u64;
        let expiry_scan = self.expiry_scan.lock();
        Counts {
            stale,
            entries: stale,
            bytes: size_of::<Self>() + size_of_val(&*self.slots),
            expired: expiry_scan.expired,
            stale_times: expiry_scan.stale_times,
            ..Counts::default()
        }
    }

    /// Moves the mappings whose residency has ended to `batch`. Returns at once, `Done`, where
    /// another thread scans.
    ///
    /// While the owner runs and expires its mappings itself, this reads one cache line. Otherwise
    /// it scans all slots once for each time that something was published or has become due.
    pub fn expire(&self, now_ns: u64, batch: &mut Batch) -> Progress {
        let Some(last_ns) = self.last_due(now_ns) else {
            return Progress::Done;
        };
        let Some(mut expiry_scan) = self.expiry_scan.try_lock() else {
            return Progress::Done;
        };
        if self.has_looked(&expiry_scan, last_ns) {
            return Progress::Done;
        }
        self.collect(&mut expiry_scan, last_ns, batch)
    }

    /// Returns whether [`expire`](Self::expire) would find something at `now_ns` if no other thread
    /// scans. Never waits and allocates nothing, so an interrupt handler may call it in any
    /// context.
    pub fn is_due(&self, now_ns: u64) -> bool {
        let Some(last_ns) = self.last_due(now_ns) else {
            return false;
        };
        // If the lock is free, the last scan's result may save a scan. The slots need no lock.
        let expiry_scan = self.expiry_scan.try_lock();
        let has_looked =
            expiry_scan.is_some_and(|expiry_scan| self.has_looked(&expiry_scan, last_ns));
        let mut idle = self.slots.iter().filter_map(Slot::idle_since);
        !has_looked && idle.any(|since_ns| since_ns <= last_ns)
    }

    /// Moves every idle mapping to `batch`. Once it has returned `Done`, each mapping that was idle
    /// at the call is in `batch`, or in one that another thread or the owner has filled and not
    /// reported as torn down. It may wait for other scanning threads. A caller that has to know
    /// when *those* are torn down uses a common lock: `Leaving` in the mapper's `lines.rs`.
    pub fn drain(&self, batch: &mut Batch) -> Progress {
        // The wait is short: the holder of the lock scans or counts, and calls nothing that waits.
        // `try_lock` would be wrong: if the holder is only counting, `Done` is not true.
        let mut expiry_scan = self.expiry_scan.lock();
        self.collect(&mut expiry_scan, u64::MAX, batch)
    }

    /// Reports that no device can use the mappings of `batch` any more: their entries are cleared
    /// and the invalidation that covers them is complete. Empties the batch; until then they count
    /// as stale.
    ///
    /// # Panics
    /// A mapping of the batch was not taken from here, or is reported twice: a mistake of the
    /// caller.
    pub fn torn_down(&self, batch: &mut Batch, now_ns: u64) {
        if batch.is_empty() {
            return;
        }
        let mut expiry_scan = self.expiry_scan.lock();
        for gone in batch.take() {
            expiry_scan
                .stale_times
                .record(now_ns.saturating_sub(gone.since_ns));
            self.slot(gone.place).finish();
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

#[cfg(test)]
#[cfg(loom)]
#[path = "slab/tests/model.rs"]
mod model;
