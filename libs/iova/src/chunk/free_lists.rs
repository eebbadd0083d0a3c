//! Free lists of a core: plain memory of its handle, a stack per class.

use alloc::vec::Vec;
use core::mem;

use super::layout::{FULL, MAX_ORDER, WORD_PAGES, bits};
use super::zone::MAX_ZONES;

/// Ranges a core keeps ready at first, by class: 256 to 1536 pages of each. A loop over mixed sizes
/// allocates and frees of one class in a random walk, and each time it reaches an end costs a
/// search of words.
pub(super) const LIST_CAPACITY: [usize; MAX_ORDER + 1] = [256, 128, 128, 64, 48, 48, 16, 4, 2];

/// Factor by which a free list grows at most, if its class runs empty and over in turn, as bursts
/// make it.
const MOST: usize = 16;

/// Free ranges of one core, by zone and order. Room for [`LIST_CAPACITY`] is made with the first
/// word of a class.
#[derive(Debug)]
pub(super) struct FreeLists {
    /// Pages of one zone. Most devices ask for these alone, and a stack whose place does not depend
    /// on what is asked for takes a third less: its length need not go through memory from one
    /// operation to the next.
    pub(super) singles: FreeList,
    /// The zone whose pages [`Self::singles`] has.
    single_lane: usize,
    /// All others. More orders than there are: a power of two, so that a place needs no check.
    lists: [[FreeList; 16]; MAX_ZONES],
}

/// Free ranges of a class: the first pages, the one freed last on top. Of 32 bytes, which makes its
/// place a shift.
#[derive(Debug, Default)]
#[repr(align(32))]
pub(super) struct FreeList {
    pages: Vec<u64>,
    /// It ran over since it last ran empty.
    has_flushed: bool,
}

impl FreeLists {
    pub(super) fn new() -> Self {
        Self {
            singles: FreeList::default(),
            single_lane: 0,
            lists: Default::default(),
        }
    }

    /// Makes the pages of another zone those that have a place of their own.
    pub(super) fn single_out(&mut self, lane: usize) {
        mem::swap(
            &mut self.singles,
            &mut self.lists[self.single_lane % MAX_ZONES][0],
        );
        mem::swap(&mut self.singles, &mut self.lists[lane % MAX_ZONES][0]);
        self.single_lane = lane;
    }

    /// The ranges of an order; none of one that there is not.
    pub(super) fn of(&mut self, lane: usize, order: usize) -> &mut FreeList {
        match order {
            0 if lane == self.single_lane => &mut self.singles,
            _ => self.among_others(lane, order),
        }
    }

    /// The same of what is not singled out.
    #[inline(always)]
    pub(super) fn among_others(&mut self, lane: usize, order: usize) -> &mut FreeList {
        &mut self.lists[lane % MAX_ZONES][order % 16]
    }

    /// Whether there are no ranges at all.
    pub(super) fn is_clear(&self) -> bool {
        let mut others = self.lists.iter().flatten();
        self.singles.is_empty() && others.all(FreeList::is_empty)
    }

    /// All ranges.
    #[cfg(all(any(test, feature = "testing"), not(loom)))]
    pub(super) fn all(&self) -> Vec<crate::IovaRange> {
        let ranges = |order, list: &FreeList| {
            let range =
                move |page| crate::IovaRange::within_space(page, super::state::pages_of(order));
            list.pages.clone().into_iter().map(range)
        };
        let others = self.lists.iter().flat_map(|lists| lists.iter().enumerate());
        let others = others.flat_map(|(order, list)| ranges(order, list));
        ranges(0, &self.singles).chain(others).collect()
    }

    /// Pages of all ranges of a lane.
    pub(super) fn pages(&self, lane: usize) -> u64 {
        let is_single = lane == self.single_lane;
        let singles = if is_single { self.singles.len() } else { 0 };
        let others = self.lists[lane % MAX_ZONES].iter().enumerate();
        others.fold(singles as u64, |all, (order, list)| {
            all + ((list.len() as u64) << order)
        })
    }

    /// Makes room for a class.
    pub(super) fn open(&mut self, lane: usize, order: usize) -> &mut FreeList {
        let list = self.of(lane, order);
        if list.pages.capacity() == 0 {
            list.pages.reserve_exact(LIST_CAPACITY[order]);
        }
        list
    }

    /// Forgets the ranges of a lane, and how many there were room for.
    pub(super) fn clear(&mut self, lane: usize) {
        for (order, room) in LIST_CAPACITY.iter().enumerate() {
            let list = self.of(lane, order);
            list.pages.clear();
            list.pages.shrink_to(*room);
        }
    }
}

impl FreeList {
    /// The range that was kept last.
    #[inline(always)]
    pub(super) fn take(&mut self) -> Option<u64> {
        self.pages.pop()
    }

    #[inline(always)]
    pub(super) fn newest(&self) -> Option<u64> {
        self.pages.last().copied()
    }

    #[inline(always)]
    pub(super) fn has_room(&self) -> bool {
        self.pages.len() < self.pages.capacity()
    }

    /// Keeps a range ready; `false` where there are enough.
    #[inline(always)]
    pub(super) fn keep(&mut self, page: u64) -> bool {
        let has_room = self.has_room();
        if has_room {
            self.pages.push(page);
        }
        has_room
    }

    /// Keeps as many as there is room for of the ranges of a word whose first page is `base`:
    /// which, a bit each.
    pub(super) fn keep_all(&mut self, base: u64, free: u64, order: usize) -> u64 {
        let room = self.pages.capacity() - self.pages.len();
        if order <= 6 && free == FULL[order] && room >= (WORD_PAGES >> order) as usize {
            // All at once: the usual case of words that remote cores emptied.
            let starts = 0..WORD_PAGES >> order;
            self.pages.extend(starts.map(|at| base + (at << order)));
            return free;
        }
        let mut kept = 0;
        for at in bits(free).take(room) {
            self.pages.push(base + at);
            kept |= 1 << at;
        }
        kept
    }

    /// Whether more should be made ready, once something is: half of the first room, as far from
    /// the next refill as from the next spill.
    pub(super) fn is_short(&self, order: usize) -> bool {
        self.pages.len() < LIST_CAPACITY[order] / 2
    }

    /// Makes more room for a class that has run over since it last ran empty.
    pub(super) fn grow(&mut self, order: usize) {
        let room = self.pages.capacity();
        if mem::take(&mut self.has_flushed) && room < MOST * LIST_CAPACITY[order] {
            self.pages.reserve_exact(2 * room - self.pages.len());
        }
    }

    /// Returns the number of ranges, of those that were kept first, that are flushed to make room.
    pub(super) fn flush(&mut self) -> usize {
        self.has_flushed = true;
        self.pages.len() / 2
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }

    /// The range that was kept first but for `at` others.
    pub(super) fn get(&self, at: usize) -> u64 {
        self.pages[at]
    }

    /// Forgets the `count` ranges that were kept first.
    pub(super) fn forget(&mut self, count: usize) {
        self.pages.drain(..count);
    }

    /// The range of an order that was kept last of those that end at or below `bound`.
    pub(super) fn take_below(&mut self, order: usize, bound: u64) -> Option<u64> {
        let last = (1 << order) - 1;
        let at = self.pages.iter().rposition(|page| page + last <= bound)?;
        Some(self.pages.remove(at))
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
