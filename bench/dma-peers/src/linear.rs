//! `LinearAllocator`: stock Linux as it was in 2015, one lock and a linear scan; and
//! `EiovaRAllocator`, the same with lists of freed ranges before it. Baselines and oracles, not for
//! use.
//!
//! Modelled from what the papers say of it (*Utilizing the IOMMU Scalably*, USENIX ATC 2015, §2 and
//! §4.1; *Efficient Intra-Operating System Protection Against Harmful DMAs*, FAST 2015, §3 and §4),
//! not from its code: the allocated ranges are kept in order of address; an allocation walks down
//! from a cached range, past every range that leaves no gap below it large enough, and what it
//! takes becomes the cached range; freeing at or above the cached range moves it up to the next
//! range above. A walk that reaches the bottom starts once more at the top. A request with a limit
//! of its own starts at the limit.
//!
//! FAST'15 found that ring buffers defeat the cached range, so that the walk is as long as the
//! ring; its EiovaR keeps freed ranges in lists by size, under the same lock, and falls back to the
//! walk. The paper's lists hold powers of two and so do ours: sizes are rounded up. At most
//! [`MAX_LISTED`] ranges are kept per size, and all are given back before an allocation fails.
//!
//! **Ownership.** All of it lies behind one [`lines::Lock`]; a walk happens under it.
//!
//! Cost: one contended line per operation; a walk of up to every range that is out. Here a step of
//! the walk is a step in a B-tree's leaf, cheaper than the pointer that Linux chased.

use alloc::{collections::BTreeMap, vec, vec::Vec};
use core::ops::Bound;

use iova::parts::{Wanted, order_of, place, range_at};
use iova::{AllocError, Aperture, CHUNK_PAGES, FreeError, IovaRange, Stats};

use crate::locked::{Space, locked_allocator};

locked_allocator! {
    /// The linear scan of stock Linux of 2015 behind one lock: the baseline.
    LinearAllocator, LinearCore, Linear
}

locked_allocator! {
    /// The linear scan with lists of freed ranges by size, under the same lock (EiovaR, FAST'15):
    /// the second baseline.
    EiovaRAllocator, EiovaRCore, EiovaR
}

/// Most ranges that [`EiovaRAllocator`] keeps of one size.
pub const MAX_LISTED: usize = 4096;

/// Sizes of up to 2^12 pages are listed.
const LISTS: usize = 13;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Allocated,
    Pinned,
    /// Freed, in a list of [`EiovaR`].
    Listed,
    Reserved,
}

#[derive(Clone, Copy)]
struct Range {
    last: u64,
    state: State,
}

impl Range {
    fn pages(&self, first: u64) -> u64 {
        self.last + 1 - first
    }
}

pub(crate) struct Linear {
    /// Ranges that are not free, by first page.
    ranges: BTreeMap<u64, Range>,
    aperture: Aperture,
    /// First page of the range below which the next walk starts.
    cached: Option<u64>,
    live_ranges: u64,
    live_pages: u64,
}

impl Linear {
    /// Takes the highest place that the walk meets, as [`State::Allocated`].
    fn take(&mut self, wanted: Wanted) -> Option<u64> {
        let top = self.aperture.last().raw();
        let is_full = wanted.last.raw() >= top;
        let limit = wanted.last.raw().min(top);
        let cached = self.cached.filter(|_| is_full);
        let start = match cached {
            Some(cached) => self
                .walk(Bound::Excluded(cached), cached.checked_sub(1), wanted)
                .or_else(|| self.walk(Bound::Unbounded, Some(limit), wanted)),
            None => self.walk(Bound::Included(limit), Some(limit), wanted),
        }?;
        let range = Range {
            last: start + (wanted.pages - 1),
            state: State::Allocated,
        };
        self.ranges.insert(start, range);
        if is_full {
            self.cached = Some(start);
        }
        Some(start)
    }

    /// Past the ranges that start within `below`, from page `highest` down.
    fn walk(&self, below: Bound<u64>, highest: Option<u64>, wanted: Wanted) -> Option<u64> {
        let mut highest = highest?;
        for (&first, range) in self.ranges.range((Bound::Unbounded, below)).rev() {
            if range.last < highest {
                let found = place(range.last + 1, highest, wanted.pages, wanted.order);
                if found.is_some() {
                    return found;
                }
            }
            highest = first.checked_sub(1)?;
        }
        place(
            self.aperture.first().raw(),
            highest,
            wanted.pages,
            wanted.order,
        )
    }

    /// Makes pages free again that start a range.
    fn give(&mut self, first: u64) {
        self.ranges.remove(&first);
        if self.cached.is_some_and(|cached| first >= cached) {
            self.cached = self.ranges.range(first..).next().map(|(&next, _)| next);
        }
    }

    fn count_in(&mut self, pages: u64) {
        self.live_ranges += 1;
        self.live_pages += pages;
    }

    fn count_out(&mut self, pages: u64) {
        self.live_ranges -= 1;
        self.live_pages -= pages;
    }

    /// Moves a range that is exactly `range` from one state to another.
    fn change(&mut self, range: IovaRange, from: State, to: State) -> Result<(), FreeError> {
        let first = range.first().raw();
        match self.ranges.get_mut(&first) {
            Some(found) if found.pages(first) == range.pages() && found.state == from => {
                found.state = to;
                Ok(())
            }
            _ => Err(self.refusal(range)),
        }
    }

    #[cold]
    fn refusal(&self, range: IovaRange) -> FreeError {
        if !self.aperture.allows(range) {
            return FreeError::Outside { range };
        }
        let first = range.first().raw();
        let is_exact = |r: &Range| r.last == range.last().raw();
        let exact = self.ranges.get(&first).is_some_and(is_exact);
        let mut overlapping = self.ranges.range(..=range.last().raw()).rev();
        let mut near = overlapping.by_ref().take_while(|(_, r)| r.last >= first);
        let is_out = |r: &Range| matches!(r.state, State::Allocated | State::Pinned);
        if !exact && near.any(|(_, r)| is_out(r)) {
            FreeError::Mismatch { range }
        } else {
            FreeError::NotAllocated { range }
        }
    }
}

impl Space for Linear {
    fn new(aperture: &Aperture) -> Self {
        let mut ranges = BTreeMap::new();
        // What lies between the usable ranges, so that a walk steps over it.
        for pair in aperture.usable().windows(2) {
            let range = Range {
                last: pair[1].first().raw() - 1,
                state: State::Reserved,
            };
            ranges.insert(pair[0].last().raw() + 1, range);
        }
        // And what lies before the first and after the last.
        let (first, last) = (aperture.usable().first(), aperture.usable().last());
        let bounds = first.zip(last).map(|(f, l)| (f.first(), l.last()));
        if let Some((first, last)) = bounds {
            if aperture.first() < first {
                let range = Range {
                    last: first.raw() - 1,
                    state: State::Reserved,
                };
                ranges.insert(aperture.first().raw(), range);
            }
            if last < aperture.last() {
                let range = Range {
                    last: aperture.last().raw(),
                    state: State::Reserved,
                };
                ranges.insert(last.raw() + 1, range);
            }
        }
        Self {
            ranges,
            aperture: aperture.clone(),
            cached: None,
            live_ranges: 0,
            live_pages: 0,
        }
    }

    fn alloc(&mut self, wanted: Wanted, aperture: &Aperture) -> Result<IovaRange, AllocError> {
        let start = self
            .take(wanted)
            .ok_or_else(|| wanted.failure(aperture, 0))?;
        self.count_in(wanted.pages);
        Ok(range_at(start, wanted.pages))
    }

    fn free(&mut self, range: IovaRange) -> Result<(), FreeError> {
        self.change(range, State::Allocated, State::Listed)?;
        self.give(range.first().raw());
        self.count_out(range.pages());
        Ok(())
    }

    fn set_pinned(&mut self, range: IovaRange, is_pinned: bool) -> Result<(), FreeError> {
        let (from, to) = match is_pinned {
            true => (State::Allocated, State::Pinned),
            false => (State::Pinned, State::Allocated),
        };
        self.change(range, from, to)
    }

    fn stats(&self) -> Stats {
        let (mut chunks, mut counted) = (0, None);
        let used = self.ranges.iter();
        for (&first, range) in used.filter(|(_, r)| r.state != State::Reserved) {
            let (from, to) = (first / CHUNK_PAGES, range.last / CHUNK_PAGES);
            chunks += to - from + 1 - u64::from(counted == Some(from));
            counted = Some(to);
        }
        Stats {
            live_ranges: self.live_ranges,
            live_pages: self.live_pages,
            chunks,
            // A B-tree's nodes are about 3/4 full.
            bytes: self.ranges.len() * size_of::<(u64, Range)>() * 4 / 3,
            ..Stats::default()
        }
    }

    #[cfg(debug_assertions)]
    fn check(&self) {
        let mut end = None;
        let (mut ranges, mut pages) = (0, 0);
        for (&first, range) in &self.ranges {
            assert!(end < Some(first) && first <= range.last, "ranges overlap");
            end = Some(range.last);
            if matches!(range.state, State::Allocated | State::Pinned) {
                ranges += 1;
                pages += range.pages(first);
            }
        }
        assert_eq!((ranges, pages), (self.live_ranges, self.live_pages));
    }
}

pub(crate) struct EiovaR {
    linear: Linear,
    /// First pages of freed ranges, by order; the last one in is the first one out.
    lists: Vec<Vec<u64>>,
    listed_pages: u64,
}

impl EiovaR {
    /// Gives every listed range back to the space.
    #[cold]
    fn drain(&mut self) {
        for first in self.lists.iter_mut().flat_map(|list| list.drain(..)) {
            self.linear.give(first);
        }
        self.listed_pages = 0;
    }

    fn pop(&mut self, wanted: &Wanted, order: u8) -> Option<u64> {
        let list = self.lists.get_mut(usize::from(order))?;
        let &first = list.last()?;
        // A block of this order lies where its alignment wants it; only the limit is left to check.
        if wanted.order > order || first + (wanted.pages - 1) > wanted.last.raw() {
            return None;
        }
        list.pop();
        self.listed_pages -= wanted.pages;
        Some(first)
    }
}

impl Space for EiovaR {
    fn new(aperture: &Aperture) -> Self {
        Self {
            linear: Linear::new(aperture),
            lists: vec![Vec::new(); LISTS],
            listed_pages: 0,
        }
    }

    fn alloc(&mut self, mut wanted: Wanted, aperture: &Aperture) -> Result<IovaRange, AllocError> {
        let order = order_of(wanted.pages);
        if usize::from(order) < LISTS {
            wanted.pages = 1 << order;
        }
        if let Some(first) = self.pop(&wanted, order) {
            let range = range_at(first, wanted.pages);
            let change = self.linear.change(range, State::Listed, State::Allocated);
            change.expect("what a list holds is listed");
            self.linear.count_in(wanted.pages);
            return Ok(range);
        }
        self.linear.alloc(wanted, aperture).or_else(|_| {
            self.drain();
            self.linear.alloc(wanted, aperture)
        })
    }

    fn free(&mut self, range: IovaRange) -> Result<(), FreeError> {
        let order = usize::from(order_of(range.pages()));
        let list = self.lists.get_mut(order);
        let Some(list) = list.filter(|list| list.len() < MAX_LISTED) else {
            return self.linear.free(range);
        };
        self.linear.change(range, State::Allocated, State::Listed)?;
        list.push(range.first().raw());
        self.listed_pages += range.pages();
        self.linear.count_out(range.pages());
        Ok(())
    }

    fn set_pinned(&mut self, range: IovaRange, is_pinned: bool) -> Result<(), FreeError> {
        self.linear.set_pinned(range, is_pinned)
    }

    fn stats(&self) -> Stats {
        let stats = self.linear.stats();
        let listed: usize = self.lists.iter().map(Vec::capacity).sum();
        Stats {
            cached_pages: self.listed_pages,
            bytes: stats.bytes + listed * size_of::<u64>(),
            ..stats
        }
    }

    #[cfg(debug_assertions)]
    fn check(&self) {
        self.linear.check();
        let is_listed = |first| self.linear.ranges.get(first).map(|r| r.state);
        for first in self.lists.iter().flatten() {
            assert_eq!(is_listed(first), Some(State::Listed));
        }
    }
}
