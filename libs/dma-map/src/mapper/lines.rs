//! What cores and flushers tell each other: one line written by the core, one by whoever flushes.
//!
//! Each core numbers what it unmaps. A flush, by any thread, notes every core's number (Acquire: the entries up to it
//! were cleared before, since the core stores the number with Release after it cleared them), carries out
//! one invalidation, and writes the noted numbers back as *covered*. So an unmap pays one plain store, no fence, and no
//! look at a shared epoch; a flush pays two lines per core that has anything waiting. The noted numbers are the
//! start of an epoch, the covered ones its end.

use core::time::Duration;

use alloc::{sync::Arc, vec::Vec};
use iova::IovaRange;
use lines::{AtomicBool, AtomicU64, CachePadded, Lock, Ordering};

use super::core_map::Reused;
use crate::reuse::{Batch, Counts, Expire, Windows};
use crate::risk::Counters;

/// Written by the core alone.
#[derive(Default)]
pub(super) struct OwnerLine {
    /// Mappings it has unmapped and left for a flush, ever.
    pub(super) queued: AtomicU64,
    /// Chunks it has retired, ever.
    pub(super) retired: AtomicU64,
    /// When the oldest that waits was unmapped, or earlier. Written before `queued`.
    pub(super) oldest_ns: AtomicU64,
    /// When the oldest chunk that waits was retired, or earlier.
    pub(super) retired_ns: AtomicU64,
}

/// Written by whoever holds the flush lock. `notices` and `is_asked` are anybody's, `covered` is raised by the core as well.
#[derive(Default)]
pub(super) struct FlusherLine {
    /// Grows when the core should look at the rest: Release after it was written.
    pub(super) notices: AtomicU64,
    /// Unmapped mappings that no device can use any more: the first so many.
    pub(super) covered: AtomicU64,
    /// The same of chunks.
    pub(super) retired_covered: AtomicU64,
    /// When that became known, in nanoseconds. Written before `covered`, so that whoever reads it after sees this
    /// time or a later one.
    pub(super) closed_ns: AtomicU64,
    /// Another core found the space exhausted.
    pub(super) is_asked: AtomicBool,
}

impl FlusherLine {
    pub(super) fn notify(&self) {
        self.notices.fetch_add(1, Ordering::Release);
    }
}

/// What any thread needs to expire a core's idle mappings.
#[derive(Default)]
pub(super) struct Expiry {
    pub(super) expirer: Option<Arc<dyn Expire>>,
    pub(super) batch: Option<Batch>,
    /// The entries of `batch` are cleared, and its invalidation failed.
    pub(super) is_cleared: bool,
}

/// One core's lines.
#[derive(Default)]
pub(super) struct CoreLines {
    pub(super) owner: CachePadded<OwnerLine>,
    pub(super) flusher: CachePadded<FlusherLine>,
    /// Written by the core when it gives IOVAs back.
    pub(super) counters: CachePadded<Counters>,
    pub(super) expiry: CachePadded<Lock<Expiry>>,
    /// Idle mappings that others have torn down, by the place they had: the core frees their IOVAs.
    pub(super) returned: Lock<Vec<(u32, IovaRange)>>,
    /// What the core's reuse cache said of itself.
    pub(super) reuse: Lock<Told>,
    /// What its last owner reused mappings with: the next one goes on with it.
    pub(super) left: Lock<Option<Reused>>,
}

/// What a reuse cache said of itself.
#[derive(Default)]
pub(super) struct Told {
    pub(super) counts: Counts,
    /// The part of its windows that was counted by others who expired its mappings, which goes on without it.
    pub(super) outside: Windows,
}

impl CoreLines {
    /// Stale mappings that the reuse cache of this core keeps now, and most at one time; its windows are added.
    pub(super) fn add_reuse(&self, windows: &mut Windows) -> (u64, u64) {
        let expirer = self.expiry.lock().expirer.clone();
        let outside = expirer.map(|expirer| expirer.counts());
        let told = self.reuse.lock();
        windows.add(&told.counts.windows);
        let mut stale = told.counts.stale;
        if let Some(outside) = outside {
            stale = outside.stale;
            let mut since = outside.windows;
            for (bucket, told) in since.buckets.iter_mut().zip(&told.outside.buckets) {
                *bucket = bucket.saturating_sub(*told);
            }
            windows.add(&since);
        }
        (stale, told.counts.stale_max.max(stale))
    }
}

impl CoreLines {
    /// Stale mappings of the core's queue, as others see them.
    pub(super) fn stale(&self) -> u64 {
        // In this order a flush in between can only make the difference too large by what was unmapped meanwhile.
        let covered = self.flusher.covered.load(Ordering::Acquire);
        let queued = self.owner.queued.load(Ordering::Acquire);
        queued.saturating_sub(covered)
    }

    /// Whether something has waited for `age` at `now`.
    pub(super) fn is_due(&self, now: u64, age: Duration) -> bool {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        let is_old = |since: &AtomicU64| now.saturating_sub(since.load(Ordering::Relaxed)) >= age;
        let has_mappings = self.owner.queued.load(Ordering::Acquire)
            > self.flusher.covered.load(Ordering::Relaxed);
        let has_chunks = self.owner.retired.load(Ordering::Acquire)
            > self.flusher.retired_covered.load(Ordering::Relaxed);
        has_mappings && is_old(&self.owner.oldest_ns)
            || has_chunks && is_old(&self.owner.retired_ns)
    }
}
