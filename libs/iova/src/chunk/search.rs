//! The last resort of a request: a search of everything that no core has allocated.
//!
//! Before a request is refused, its core looks wherever a range for it may be: it collects what
//! remote cores freed, returns its free lists to their words, does the same for every other core as
//! far as those cores need not run ([`CoreZones::give_up_unused`]), and takes ranges out of words
//! of other classes and out of what a limit cuts. So a request is refused only while every range
//! that would do touches one that is
//!
//! * allocated or pinned, or in a chunk of another core in which something is;
//! * in a free list of another core, or being pinned or freed by it (`remote_free` says why), or in
//!   a chunk of another core that has such a range: at most 16 times
//!   [`LIST_CAPACITY`](super::free_lists::LIST_CAPACITY) of a class, 32 ranges of 256 pages to
//!   4,096 pages. These it gives back when it next runs (`asked` counts the cores);
//! * or half in the last zone and half in the tree, where the space is larger than the zone.
//!
//! A search costs in proportion to the chunks in use, so it is paid for. A core begins with credit
//! for [`BANK`] chunks, and a request that fails earns [`EARNED`]. Where nothing has come back
//! since the last search ([`Shared::returned`] counts that), another is made only after as many
//! requests as there are chunks, for what comes back without being counted: ranges that their owner
//! itself freed last in a chunk, or that a designated remote freer did. So of requests that fail
//! one after the other at latest the one numbered `chunks + 1` has seen what was free when the
//! first failed.

use lines::Ordering;

use super::Shared;
use super::core_cache::{CoreCache, Want};
use super::core_zone::CoreZones;
use super::layout::MAX_ORDER;
use super::remote_free::Collect;
use crate::{CoreId, IovaRange};

/// Chunks for which a core may look before any of its requests has failed: those of 8 GiB.
const BANK: usize = 4096;
/// Chunks for which a request may look that fails.
const EARNED: usize = 64;

/// Credit of a core for searches, and the last request for which one found nothing.
#[derive(Debug)]
pub(super) struct Search {
    /// Chunks that may be looked at where something has come back.
    credit: usize,
    /// Requests that failed since the last search although nothing has come back.
    unchanged: usize,
    /// Request for which nothing was found in any zone, with the value of [`Shared::returned`]
    /// then.
    vain: Option<(Want, u64)>,
    /// Whether the allocation that is under way has searched wherever a range could be.
    searched_all: bool,
}

impl Search {
    pub(super) fn new() -> Self {
        Self {
            credit: BANK,
            unchanged: 0,
            vain: None,
            searched_all: true,
        }
    }

    /// Chunks that may be looked at.
    #[cfg(all(test, not(any(loom, shuttle))))]
    pub(super) fn credit(&self) -> usize {
        self.credit
    }

    /// Returns whether nothing was found for as much or less, and nothing has come back since.
    /// `returned` reads a line of every core.
    fn found_nothing(&self, want: &Want, returned: impl FnOnce() -> u64) -> bool {
        self.vain.is_some_and(|(vain, seen)| {
            // Whole chunks may be fewer than their alignment says.
            let is_less = want.order > MAX_ORDER && want.pages < vain.pages;
            let is_same = vain.order <= MAX_ORDER || !is_less;
            want.order >= vain.order && is_same && want.last <= vain.last && seen == returned()
        })
    }

    /// Whether a search of so many chunks is paid for, where something has come back.
    fn pay(&mut self, chunks: usize) -> bool {
        self.credit = (self.credit + EARNED).min(chunks.max(BANK));
        let has_credit = self.credit >= chunks;
        if has_credit {
            self.credit -= chunks;
        }
        has_credit
    }

    /// Returns whether the request that came last to [`Self::is_vain`] was searched for wherever a
    /// range could be.
    pub(super) fn searched_all(&self) -> bool {
        self.searched_all
    }

    /// Returns whether a request can skip all zones: an earlier search found nothing, nothing has
    /// come back, and no repeated search is due.
    pub(super) fn is_vain(&mut self, shared: &Shared, cache: &CoreCache, want: &Want) -> bool {
        self.searched_all = true;
        let is_vain = self.found_nothing(want, || shared.returned());
        if !is_vain || !cache.is_clear() {
            return false;
        }
        self.unchanged += 1;
        let is_vain = self.unchanged <= shared.kept_chunks() as usize;
        if is_vain && shared.zones_of(cache.id()).lock().has_unannounced() {
            self.searched_all = false;
        }
        is_vain
    }

    /// A range from wherever there is one, if the search is paid for.
    pub(super) fn find(
        &mut self,
        shared: &Shared,
        cache: &mut CoreCache,
        zones: &mut CoreZones,
        want: &Want,
    ) -> Option<IovaRange> {
        let is_overdue = self.found_nothing(want, || shared.returned());
        if !is_overdue && !self.pay(shared.kept_chunks() as usize) {
            self.searched_all = false;
            return None;
        }
        // Publishes what this core has freed by plain stores, and returns its free lists to their
        // words.
        cache.leave_all(shared);
        let in_limit = |lane: &usize| shared.zones[*lane].base() <= want.last.raw();
        let lanes = || (0..shared.zones.len()).filter(in_limit);
        lanes().for_each(|lane| cache.unready_all(shared, zones, lane));
        let returned = shared.returned();
        self.unchanged = 0;
        self.relieve_others(shared, cache.id(), lanes());
        for lane in lanes() {
            zones.collect_now(shared, lane, Collect::All);
            if want.order > MAX_ORDER {
                cache.gather_chunks(shared, zones, lane);
            }
        }
        let found = cache.alloc_in_zones(shared, zones, want, true);
        if found.is_none() && self.searched_all {
            self.vain = Some((*want, returned));
        }
        found
    }

    /// Makes other cores give up what they do not use, whether they run or not.
    fn relieve_others(
        &mut self,
        shared: &Shared,
        id: CoreId,
        lanes: impl Iterator<Item = usize> + Clone,
    ) {
        for (core, other) in shared.cores.iter().enumerate() {
            if core == id.0 || other.chunks.load(Ordering::Relaxed) == 0 {
                continue;
            }
            // Never waits for the lock: its core is running, and may wait for ours.
            let Some(mut zones) = other.zones.try_lock() else {
                self.searched_all = false;
                continue;
            };
            let before = zones.chunks();
            lanes
                .clone()
                .for_each(|lane| zones.give_up_unused(shared, lane));
            if zones.chunks() != before {
                shared.count_returned(id);
            }
        }
    }
}

impl Shared {
    /// Returns the number of times that something has come back that any core may allocate, apart
    /// from returns that are not counted (see the module).
    fn returned(&self) -> u64 {
        // Acquire: what is counted is seen.
        self.cores.iter().fold(0, |sum, core| {
            let marked = core.marked.load(Ordering::Acquire);
            let returned = core.returned.load(Ordering::Acquire);
            sum.wrapping_add(marked).wrapping_add(returned)
        })
    }

    /// Chunks that cores keep.
    fn kept_chunks(&self) -> u64 {
        let kept = |core: &super::Published| core.chunks.load(Ordering::Relaxed);
        self.cores.iter().map(|core| kept(core)).sum()
    }
}
