//! Calls for drains: a core that finds no room asks the others to give up their chunks of a zone,
//! and answers such calls itself.
//!
//! ```text
//!                        another core's `ask`
//! answered == the space's ──────────────────▶ answered != the space's: the next operation that is not the common
//!                         ◀────────────────── path answers
//!                               answer
//!
//!                ask: a failure                     ask: the last of `patience` failures
//! waited: n ────────────────────▶ n + 1     waited: patience - 1 ───────────────────▶ 0; patience doubled
//! patience ──relent: a free chunk was found──▶ halved
//! ```

use lines::Ordering;

use super::Shared;
use super::core_cache::CoreCache;
use super::core_zone::CoreZones;
use crate::IovaPfn;

/// A starving core calls for drains at its first failure, the second after that, the fourth after
/// that, and so on, and then at every one in this many: a call makes every other core give up its
/// chunks of a zone and take others.
const DRAIN_THRESHOLD_MAX: u32 = 1024;

/// Calls for drains of one core: those it answered, and those it made.
#[derive(Debug)]
pub(super) struct Drains {
    /// The last call that was answered.
    answered: u64,
    /// Allocations that failed since the last call, and how many must.
    waited: u32,
    drain_threshold: u32,
}

impl Drains {
    /// Those of a core that owns nothing yet.
    pub(super) fn new(shared: &Shared) -> Self {
        Self {
            // Acquire, as where calls are answered.
            answered: shared.drain.load(Ordering::Acquire),
            waited: 0,
            drain_threshold: 1,
        }
    }

    /// Whether there is no call to answer.
    #[inline(always)]
    pub(super) fn is_answered(&self, shared: &Shared) -> bool {
        shared.drain.load(Ordering::Relaxed) == self.answered
    }

    /// Answers calls for drains, of the zones that lack something.
    #[inline]
    pub(super) fn answer(&mut self, shared: &Shared, cache: &mut CoreCache) {
        // Acquire: with a call the number of its zone is seen.
        let called = shared.drain.load(Ordering::Acquire);
        if called != self.answered {
            self.answered = called;
            answer_call(shared, cache);
        }
    }

    /// Calls on all other cores now and then. Returns the number of them.
    pub(super) fn ask(&mut self, shared: &Shared, zones: &mut CoreZones, last: IovaPfn) -> usize {
        let others = shared.others(zones.id);
        self.waited += 1;
        if others == 0 || self.waited < self.drain_threshold {
            return others;
        }
        self.waited = 0;
        self.drain_threshold = (2 * self.drain_threshold).min(DRAIN_THRESHOLD_MAX);
        for (lane, zone) in shared.zones.iter().enumerate() {
            if zone.base() <= last.raw() {
                let before = zone.calls.fetch_add(1, Ordering::Relaxed);
                // Our own call needs no answer of ours; another core's that came just before does.
                let answered = &mut zones.zones[lane].answered;
                *answered += u64::from(*answered == before);
            }
        }
        // Release: see `answer`. A core that answers publishes what it gives back by the sets that
        // it puts it in.
        let before = shared.drain.fetch_add(1, Ordering::Release);
        self.answered += u64::from(self.answered == before);
        others
    }

    /// Halves `drain_threshold` once for each free chunk found.
    pub(super) fn relent(&mut self, fresh: u32) {
        self.drain_threshold = self.drain_threshold.checked_shr(fresh).unwrap_or(0).max(1);
    }
}

/// Gives up the chunks of all zones that were called for.
#[cold]
#[inline(never)]
fn answer_call(shared: &Shared, cache: &mut CoreCache) {
    // What this core gave as a designated remote freer is seen by the owner that looks next.
    cache.leave_all(shared);
    let zones = &mut *shared.zones_of(cache.id()).lock();
    for (lane, zone) in shared.zones.iter().enumerate() {
        let calls = zone.calls.load(Ordering::Relaxed);
        if calls != zones.zones[lane].answered {
            zones.zones[lane].answered = calls;
            cache.deposit(shared, zones, lane);
        }
    }
}
