//! Lines shared by cores and flushers: one written by the core, one by the flushing thread.
//!
//! Each core numbers what it unmaps. A flush, by any thread, notes every core's number (Acquire:
//! the entries up to it were cleared before, since the core stores the number with Release after it
//! cleared them), carries out one invalidation, and writes the noted numbers back as *covered*. So
//! an unmap pays one plain store, no fence, and no load of a shared epoch; a flush pays two lines
//! per core that has anything waiting. The noted numbers are the start of an epoch, the covered
//! ones its end.
//!
//! Numbers belong to one handle. What is not covered when it is dropped becomes abandoned work of
//! the mapper. Of mappings the line then says that none is open, so that the core's next handle may
//! raise what is covered when tickets of its own complete. Of chunks, whose number flushers alone
//! raise, it goes on to say that they are open, until the next flush.

use alloc::sync::Arc;

use lines::{AtomicBool, AtomicU64, CachePadded, Lock, Ordering};

use super::cache::Cache;
use super::walks::Walks;
use crate::reuse::{Batch, Slab};
use crate::risk::{Counters, Counts};

/// Mappings that a core tears down together.
pub(super) const BATCH: usize = 64;

/// Words written by the core alone.
#[derive(Default)]
pub(super) struct OwnerLine {
    /// Mappings it has unmapped and left for a flush, ever.
    pub(super) queued: AtomicU64,
    /// Chunks it has retired, ever.
    pub(super) retired: AtomicU64,
    /// Time at which the oldest waiting mapping was unmapped, or earlier, in nanoseconds. Written
    /// before `queued`.
    pub(super) oldest_ns: AtomicU64,
    /// Time at which the oldest waiting chunk was retired, or earlier, in nanoseconds.
    pub(super) retired_ns: AtomicU64,
}

/// Words written by the holder of the flush lock, except that any thread writes `notices` and
/// `is_asked`, and the core also raises `covered`.
#[derive(Default)]
pub(super) struct FlusherLine {
    /// Grows when the core should read the rest: Release after it was written.
    pub(super) notices: AtomicU64,
    /// Number of unmapped mappings, the first ones, that no device can use any more.
    pub(super) covered: AtomicU64,
    /// The same of chunks.
    pub(super) retired_covered: AtomicU64,
    /// Time at which that became known, in nanoseconds. Written before `covered`, so that a core
    /// that reads it after `covered` sees this time or a later one.
    pub(super) closed_ns: AtomicU64,
    /// Another core found the space exhausted.
    pub(super) is_asked: AtomicBool,
}

impl FlusherLine {
    pub(super) fn notify(&self) {
        self.notices.fetch_add(1, Ordering::Release);
    }
}

/// Idle mappings of one core on their way out. A thread that takes some out of the core's cache,
/// its owner included, holds the lock from before the first is taken until they are torn down, or
/// left here because their invalidation failed. So the holder of the lock knows where each is:
/// idle, or in this batch, or gone.
#[derive(Default)]
pub(super) struct Leaving {
    /// If not empty when the lock is free: cleared mappings whose invalidation failed. To be
    /// invalidated before more are taken.
    batch: Option<Batch>,
}

impl Leaving {
    /// The mappings whose invalidation failed; empty if there are none.
    pub(super) fn batch(&mut self) -> &mut Batch {
        self.batch.get_or_insert_with(|| Batch::with_room(BATCH))
    }
}

/// One core's lines.
#[derive(Default)]
pub(super) struct CoreLines {
    pub(super) owner: CachePadded<OwnerLine>,
    pub(super) flusher: CachePadded<FlusherLine>,
    /// Written by the core when it looks up addresses that may not be its own.
    pub(super) walks: CachePadded<Walks>,
    /// Written by the core when it gives IOVAs back.
    pub(super) counters: CachePadded<Counters>,
    /// Access of any thread to this core's idle mappings; none where it keeps none.
    pub(super) expirer: Lock<Option<Arc<Slab>>>,
    pub(super) leaving: CachePadded<Lock<Leaving>>,
    /// Counts of its idle mappings that the core last published, beyond those of their slab.
    pub(super) reuse: Lock<Counts>,
    /// The empty reuse cache of the core's last owner: the next one goes on with it, and with its
    /// counts.
    pub(super) left: Lock<Cache>,
}

impl CoreLines {
    pub(super) fn expirer(&self) -> Option<Arc<Slab>> {
        self.expirer.lock().clone()
    }

    /// Counts of this core's idle mappings, `stale_max` no less than there are.
    pub(super) fn reuse_counts(&self) -> Counts {
        let mut counts = *self.reuse.lock();
        if let Some(slab) = self.expirer() {
            counts.add(&slab.counts());
        }
        counts.stale_max = counts.stale_max.max(counts.stale);
        counts
    }

    /// Called when the core is dropped, and all of its queue that is not covered is counted as
    /// abandoned work: from here on its numbers belong to no handle. Otherwise the first ticket of
    /// the core's next handle that completes would cover them.
    pub(super) fn settle(&self) {
        let queued = self.owner.queued.load(Ordering::Relaxed);
        // Release: pairs with `stale`. A thread that no longer finds them here finds them among the
        // abandoned work.
        self.flusher.covered.fetch_max(queued, Ordering::Release);
    }

    /// Stale mappings of the core's queue, as others see them: as many as there were at one moment
    /// of the call.
    ///
    /// Reads again while a flush ends in between: a thread that is stopped between the two numbers
    /// would count all that was unmapped and flushed meanwhile, many times the room of the queue.
    pub(super) fn stale(&self) -> u64 {
        // Acquire: pairs with `settle`, and keeps the three loads in their order. What is covered
        // only grows, so where it is the same before and after, it is what was covered when
        // `queued` was read.
        let mut covered = self.flusher.covered.load(Ordering::Acquire);
        loop {
            let queued = self.owner.queued.load(Ordering::Acquire);
            let again = self.flusher.covered.load(Ordering::Acquire);
            if again == covered {
                return queued.saturating_sub(covered);
            }
            covered = again;
        }
    }

    /// Whether something has waited for `age` at `now`.
    pub(super) fn is_due(&self, now: u64, age: u64) -> bool {
        let is_old = |since: &AtomicU64| now.saturating_sub(since.load(Ordering::Relaxed)) >= age;
        let has_mappings = self.owner.queued.load(Ordering::Acquire)
            > self.flusher.covered.load(Ordering::Relaxed);
        let has_chunks = self.owner.retired.load(Ordering::Acquire)
            > self.flusher.retired_covered.load(Ordering::Relaxed);
        has_mappings && is_old(&self.owner.oldest_ns)
            || has_chunks && is_old(&self.owner.retired_ns)
    }

    /// Returns whether idle mappings are to be torn down at `now`, or another thread is reading
    /// them.
    pub(super) fn is_idle_due(&self, now: u64) -> bool {
        let Some(expirer) = self.expirer.try_lock() else {
            return true;
        };
        let Some(expirer) = &*expirer else {
            return false;
        };
        let has_failed = |leaving: &Leaving| leaving.batch.as_ref().is_some_and(|b| !b.is_empty());
        let leaving = self.leaving.try_lock();
        leaving.is_none_or(|leaving| has_failed(&leaving)) || expirer.is_due(now)
    }
}
