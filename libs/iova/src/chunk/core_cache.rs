//! Cache of one core: its free lists, and the directory's blocks with the chunks in which those
//! ranges lie.
//!
//! ```text
//!              reclaim, acquire              make_ready, convert               take
//! chunks of ─────────────────▶ words with ───────────────────▶ free ─────────────────────────────▶ allocated
//! the space ◀───────────────── something ◀─────────────────── lists ◀─────────────────────────────
//!              deposit, sweep     free          spill, unready         free_ready, keep_single,
//!                                                                      keep_marked, free_any
//! ```
//! A step between the space, words and free lists is made with this core's lock held (`core_zone`):
//! those to the right are in `refill`, those to the left in `flush`. What is here works on plain
//! memory of the core and on the states of its pages, and takes no lock.
//!
//! Frees in chunks of other cores go through the directory's blocks as well, which say in which
//! this core is the designated remote freer ([`DirectoryCache::give`]).

mod flush;
mod refill;

use super::Shared;
use super::directory_cache::DirectoryCache;
use super::free_lists::{FreeList, FreeLists};
use super::layout::{Chunk, MARKS, MAX_ORDER, OWNER, REMOTE_FREER, lane_of, tag_in};
use super::state::{State, exact_order, order_of, pages_of};
use super::zone::{MAX_ZONES, Zone};
use crate::{CHUNK_PAGES, CoreId, IovaRange, Request};
pub(super) use refill::Want;

/// Free lists and cached directory blocks of one core.
#[derive(Debug)]
pub(super) struct CoreCache {
    id: CoreId,
    /// The owner of this core's chunks.
    owner: u64,
    /// The same if this core's frees need no fence of its CPU, and otherwise the owner of no chunk:
    /// then all frees are found to be [`Freed::Marked`], and the paths that follow make one.
    unfenced_owner: u64,
    directory: DirectoryCache,
    /// The last pages of the zones.
    lasts: [u64; MAX_ZONES],
    free_lists: FreeLists,
    single: Single,
    /// Number of free chunks taken from the space since the last [`Self::take_fresh`].
    fresh: u32,
}

/// Takes the range that was kept last.
#[inline(always)]
fn take_from(list: &mut FreeList, directory: &DirectoryCache, order: usize) -> Option<IovaRange> {
    let page = list.newest()?;
    directory.known(page)?.hand_out(page, order);
    list.take();
    Some(IovaRange::within_space(page, pages_of(order)))
}

/// Outcome of a free that accessed only this cache.
#[derive(Clone, Copy)]
pub(super) enum Freed {
    Done,
    /// It is allocated, in this state, in a chunk of ours that is cached and has marks of remote
    /// cores, or needs a fence.
    Marked(State),
    /// The same, in a chunk of another core, or of none.
    Remote(State),
    Unknown,
}

/// The zone whose single pages have a stack of their own ([`FreeLists::singles`]), with the limits
/// for which it is used.
#[derive(Debug)]
struct Single {
    /// Tag of this core's chunks of that zone that have no marks; no chunk's tag where its frees
    /// need a fence.
    tag: u64,
    /// The limit with which they were last asked for when there were none: a device's, which does
    /// not change.
    last: u64,
    /// The least limit for which it is the zone to take from, and from there to the greatest.
    least: u64,
    reach: u64,
}

impl Single {
    fn of(lane: usize, owner: u64, lasts: &[u64; MAX_ZONES], last: u64) -> Self {
        let greatest = lane
            .checked_sub(1)
            .map_or(u64::MAX, |above| lasts[above] - 1);
        Self {
            tag: tag_in(lane, owner),
            last,
            least: lasts[lane],
            reach: greatest - lasts[lane],
        }
    }

    #[inline(always)]
    fn is_for(&self, last: u64) -> bool {
        last == self.last || last.wrapping_sub(self.least) <= self.reach
    }
}

impl CoreCache {
    pub(super) fn new(id: CoreId, shared: &Shared) -> Self {
        let lasts = core::array::from_fn(|at| shared.zones.get(at).map_or(u64::MAX, Zone::last));
        let owner = id.0 as u64 + 1;
        let unfenced_owner = match shared.fences.is_by_kernel() {
            true => owner,
            false => u64::MAX,
        };
        Self {
            id,
            owner,
            unfenced_owner,
            directory: DirectoryCache::new(),
            lasts,
            single: Single::of(0, unfenced_owner, &lasts, u64::MAX),
            free_lists: FreeLists::new(),
            fresh: 0,
        }
    }

    #[inline(always)]
    pub(super) fn id(&self) -> CoreId {
        self.id
    }

    /// The owner of this core's chunks.
    #[inline(always)]
    pub(super) fn owner(&self) -> u64 {
        self.owner
    }

    /// Returns the chunk of a page if it is cached.
    #[inline(always)]
    pub(super) fn known(&self, page: u64) -> Option<&Chunk> {
        self.directory.known(page)
    }

    /// Whether there are neither free ranges nor chunks in which this core is the designated remote
    /// freer.
    pub(super) fn is_clear(&self) -> bool {
        !self.directory.is_remote_freer() && self.free_lists.is_clear()
    }

    /// Returns and resets the number of free chunks taken from the space.
    pub(super) fn take_fresh(&mut self) -> u32 {
        core::mem::take(&mut self.fresh)
    }

    #[cfg(all(any(test, feature = "testing"), not(loom)))]
    pub(super) fn free_lists(&self) -> &FreeLists {
        &self.free_lists
    }

    /// The highest zone all of which lies at or below a limit.
    #[inline(always)]
    fn lane_below(&self, last: u64) -> Option<usize> {
        (0..MAX_ZONES).find(|lane| last >= self.lasts[*lane])
    }

    /// Takes a range from the free lists of the highest zone all of which lies within the limit.
    /// Calls no function, nor does [`Self::free_ready`], so that their inlined code saves no
    /// registers.
    #[inline(always)]
    pub(super) fn take(&mut self, request: &Request) -> Option<IovaRange> {
        let (align_order, last) = (usize::from(request.align_order), request.last.raw());
        if request.pages == 1 && align_order == 0 && self.single.is_for(last) {
            return take_from(&mut self.free_lists.singles, &self.directory, 0);
        }
        let order = order_of(request.pages).filter(|order| align_order <= *order)?;
        let lane = self.lane_below(last)?;
        take_from(
            self.free_lists.among_others(lane, order),
            &self.directory,
            order,
        )
    }

    /// The same of a request that it had nothing for: what the newest words have free is made ready
    /// before.
    #[inline]
    pub(super) fn take_refilled(
        &mut self,
        shared: &Shared,
        order: usize,
        last: u64,
    ) -> Option<IovaRange> {
        let lane = self.lane_below(last)?;
        if self.free_lists.of(lane, order).is_empty() {
            if order == 0 {
                self.single_out(lane, last);
            }
            self.refill(shared, lane, order);
        }
        if let Some(page) = self.free_lists.of(lane, order).newest() {
            self.directory.chunk(shared, page);
        }
        take_from(self.free_lists.of(lane, order), &self.directory, order)
    }

    /// Makes the pages of a zone those that have a place of their own.
    fn single_out(&mut self, lane: usize, last: u64) {
        self.free_lists.single_out(lane);
        self.single = Single::of(lane, self.unfenced_owner, &self.lasts, last);
    }

    /// Puts a range of this core's into its free list. The range is allocated or, where
    /// `is_pinned`, pinned.
    #[inline(always)]
    pub(super) fn free_ready(&mut self, range: IovaRange, is_pinned: bool) -> Freed {
        let page = range.first().raw();
        let Some(chunk) = self.directory.known(page) else {
            return Freed::Unknown;
        };
        let (state, tag) = (chunk.state(page), chunk.tag());
        let is_out = |order| match is_pinned {
            false => state.is_out(order),
            true => state.is_pinned_out(order),
        };
        let list = if range.pages() == 1 && tag == self.single.tag {
            if !is_out(0) {
                return Freed::Unknown;
            }
            &mut self.free_lists.singles
        } else {
            match exact_order(range.pages()) {
                Some(order) if is_out(order) => {
                    if tag & (OWNER | MARKS) != self.unfenced_owner {
                        return match tag & OWNER == self.owner {
                            true => Freed::Marked(state),
                            false => Freed::Remote(state),
                        };
                    }
                    // In branches: the next allocation waits for what is kept, which must not wait
                    // for the tag.
                    if page > self.lasts[1] {
                        self.free_lists.among_others(0, order)
                    } else {
                        self.free_lists.among_others(lane_of(tag), order)
                    }
                }
                _ => return Freed::Unknown,
            }
        };
        if !list.keep(page) {
            return Freed::Unknown;
        }
        chunk.set_state(page, state.none());
        Freed::Done
    }

    /// Keeps a single page of the zone singled out ready, in a chunk of this core with a designated
    /// remote freer, which has not freed it, and no other marks; `false` where anything of this is
    /// not so. For as long as there is one, all frees in its chunk come here.
    #[inline(always)]
    pub(super) fn keep_single(&mut self, range: IovaRange, state: State) -> bool {
        let page = range.first().raw();
        let Some(chunk) = self.directory.known(page) else {
            return false;
        };
        let is_single = range.pages() == 1 && chunk.tag() == self.single.tag | REMOTE_FREER;
        if !is_single
            || chunk.is_exclusively_freed(page, state)
            || !self.free_lists.singles.keep(page)
        {
            return false;
        }
        chunk.set_state(page, state.none());
        true
    }

    /// Puts a range of a marked chunk of this core's into its free list. Returns the chunk's tag;
    /// `None` where a remote core has marked the range itself.
    #[inline(always)]
    pub(super) fn keep_marked(
        &mut self,
        shared: &Shared,
        range: IovaRange,
        state: State,
    ) -> Option<u64> {
        let page = range.first().raw();
        let chunk = self.directory.known(page)?;
        let tag = chunk.tag();
        // The state again: a core that collects for this one clears it before the mark. The tag was
        // read again, too: a chunk that has been taken from this one meanwhile has no marks of what
        // was freed in it.
        let is_own = tag & OWNER == self.owner;
        if !is_own || chunk.is_met(tag, page, state) || chunk.state(page) != state {
            return None;
        }
        chunk.set_state(page, state.none());
        self.keep(shared, lane_of(tag), range);
        Some(tag)
    }

    /// Keeps a freed range of ours ready for the next request of its class.
    #[inline]
    pub(super) fn keep(&mut self, shared: &Shared, lane: usize, range: IovaRange) {
        let order = exact_order(range.pages()).unwrap_or(MAX_ORDER);
        let page = range.first().raw();
        if !self.free_lists.of(lane, order).keep(page) {
            self.flush(shared, lane, page, order);
        }
    }

    /// Frees a range of a chunk in the directory, of this core or of another; `false` where the
    /// slow path must find out what is wrong or special.
    #[inline]
    pub(super) fn free_any(&mut self, shared: &Shared, range: IovaRange) -> bool {
        if range.pages() >= CHUNK_PAGES {
            return false;
        }
        let Some(chunk) = self.directory.chunk(shared, range.first().raw()) else {
            return false;
        };
        if chunk.free_marked(self.owner, range) {
            let lane = chunk.lane();
            self.keep(shared, lane, range);
            return true;
        }
        self.directory.free_foreign(shared, self.owner, range)
    }

    /// Frees the allocated range at a page, which is in this state, in a cached chunk of another
    /// core, if this core is the chunk's designated remote freer. Returns whether it did.
    #[inline(always)]
    pub(super) fn give(&self, page: u64, state: State) -> bool {
        self.directory.give(self.owner, page, state)
    }

    /// Pins a range of this core's, in a cached chunk without marks. Returns whether it did.
    #[inline(always)]
    pub(super) fn pin(&self, range: IovaRange) -> bool {
        let page = range.first().raw();
        if let Some(order) = exact_order(range.pages())
            && let Some(chunk) = self.directory.known(page)
        {
            return chunk.pin_own(self.owner, page, order);
        }
        false
    }

    /// The same in a chunk of the directory with marks or without.
    #[inline]
    pub(super) fn pin_any(&mut self, shared: &Shared, range: IovaRange) -> bool {
        if range.pages() >= CHUNK_PAGES {
            return false;
        }
        let chunk = self.directory.chunk(shared, range.first().raw());
        chunk.is_some_and(|chunk| chunk.pin_marked(self.owner, range))
    }

    /// Releases a pin of this core. Returns whether there was one.
    #[inline(always)]
    pub(super) fn unpin(&mut self, range: IovaRange) -> bool {
        let page = range.first().raw();
        exact_order(range.pages())
            .zip(self.directory.known(page))
            .is_some_and(|(order, chunk)| chunk.unpin_own(self.owner, page, order))
    }
}
