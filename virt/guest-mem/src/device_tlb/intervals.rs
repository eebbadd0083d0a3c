//! Translations as intervals of IOVA, bounded in number.
//!
//! Ends are inclusive: an interval may hold the last address of the space. Neighbours that continue
//! each other (in IOVA, in guest-physical memory, with the same rights) are one interval, so
//! identity mappings that come page by page stay few. An interval that is cut in its middle becomes
//! two.
//!
//! Eviction, when there are too many: a hand goes round by address and takes the first interval
//! that was not looked up since it last came by (second chance), after [`LOOKS`] that were at most.

use std::collections::BTreeMap;

use super::{IovaRange, Rights};
use crate::addr::{Gpa, Iova};

/// Most intervals that the clock hand visits for one eviction.
const LOOKS: usize = 8;

/// Translation of a contiguous range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) range: IovaRange,
    /// Translation of the first address; that of the last one does not overflow.
    pub(super) gpa: Gpa,
    pub(super) rights: Rights,
}

impl Entry {
    /// The part of it inside `range`, which it overlaps.
    fn clip(&self, range: IovaRange) -> Self {
        let first = self.range.first().max(range.first());
        let last = self.range.last().min(range.last());
        Self {
            range: IovaRange::new(first, last).expect("they overlap"),
            gpa: self.at(first),
            rights: self.rights,
        }
    }

    /// Returns the translation of `iova`, which is inside it.
    fn at(&self, iova: Iova) -> Gpa {
        let inside = iova.raw() - self.range.first().raw();
        self.gpa.checked_add(inside).expect("checked when inserted")
    }

    /// Whether `next` begins where it ends, in both spaces.
    fn is_continued_by(&self, next: &Self) -> bool {
        let len = self.range.span().checked_add(1);
        let behind = |first: u64| len.and_then(|len| first.checked_add(len));
        self.rights == next.rights
            && behind(self.range.first().raw()) == Some(next.range.first().raw())
            && behind(self.gpa.raw()) == Some(next.gpa.raw())
    }
}

#[derive(Clone, Copy, Debug)]
struct Interval {
    last: u64,
    gpa: u64,
    rights: Rights,
    /// Looked up since the hand came by.
    is_used: bool,
}

impl Interval {
    fn entry(&self, first: u64) -> Entry {
        Entry {
            range: IovaRange::new(Iova::new(first), Iova::new(self.last)).expect("in order"),
            gpa: Gpa::new(self.gpa),
            rights: self.rights,
        }
    }
}

/// Disjoint intervals by their first address.
#[derive(Debug)]
pub(super) struct Intervals {
    map: BTreeMap<u64, Interval>,
    max: usize,
    hand: u64,
}

impl Intervals {
    /// None yet, and never more than `max`, at least 2.
    pub(super) fn new(max: usize) -> Self {
        Self {
            map: BTreeMap::new(),
            max: max.max(2),
            hand: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// The interval that has `iova`.
    pub(super) fn find(&mut self, iova: Iova) -> Option<Entry> {
        let (&first, interval) = self.map.range_mut(..=iova.raw()).next_back()?;
        if interval.last < iova.raw() {
            return None;
        }
        interval.is_used = true;
        Some(interval.entry(first))
    }

    /// As [`find`](Self::find), without an effect on eviction.
    pub(super) fn peek(&self, iova: Iova) -> Option<Entry> {
        let (&first, interval) = self.map.range(..=iova.raw()).next_back()?;
        (interval.last >= iova.raw()).then(|| interval.entry(first))
    }

    /// Removes the parts of intervals in `range` and returns them, in order of addresses.
    pub(super) fn cut(&mut self, range: IovaRange) -> Vec<Entry> {
        let (first, last) = (range.first().raw(), range.last().raw());
        let mut removed = Vec::new();
        let before = self.map.range(..first).next_back();
        if let Some((&at, interval)) = before
            && interval.last >= first
        {
            removed.push(self.cut_one(at, range));
        }
        while let Some((&at, _)) = self.map.range(first..=last).next() {
            removed.push(self.cut_one(at, range));
        }
        self.shrink(None);
        removed
    }

    /// Removes the part in `range` of the interval at `at`, which it overlaps.
    fn cut_one(&mut self, at: u64, range: IovaRange) -> Entry {
        let whole = self.map.remove(&at).expect("found by the caller");
        let entry = whole.entry(at);
        let first = range.first().raw();
        if at < first {
            let last = first - 1;
            self.map.insert(at, Interval { last, ..whole });
        }
        if let Some(behind) = range.last().checked_add(1)
            && behind.raw() <= whole.last
        {
            let gpa = entry.at(behind).raw();
            self.map.insert(behind.raw(), Interval { gpa, ..whole });
        }
        entry.clip(range)
    }

    /// Adds an interval that overlaps none.
    pub(super) fn insert(&mut self, mut entry: Entry) {
        if entry.rights == Rights::NONE {
            return;
        }
        let first = entry.range.first();
        if let Some((&at, before)) = self.map.range(..first.raw()).next_back() {
            let before = before.entry(at);
            if before.is_continued_by(&entry) {
                self.map.remove(&at);
                entry = join(before, entry);
            }
        }
        if let Some(behind) = entry.range.last().checked_add(1)
            && let Some(next) = self.map.get(&behind.raw())
        {
            let next = next.entry(behind.raw());
            if entry.is_continued_by(&next) {
                self.map.remove(&behind.raw());
                entry = join(entry, next);
            }
        }
        let at = entry.range.first().raw();
        let interval = Interval {
            last: entry.range.last().raw(),
            gpa: entry.gpa.raw(),
            rights: entry.rights,
            is_used: true,
        };
        self.map.insert(at, interval);
        self.shrink(Some(at));
    }

    /// Removes the translations to these guest addresses.
    pub(super) fn forget_memory(&mut self, first: Gpa, last: Gpa) {
        let doomed = self.map.iter().filter_map(|(&at, interval)| {
            let gpa_last = interval.gpa + (interval.last - at);
            let (from, to) = (interval.gpa.max(first.raw()), gpa_last.min(last.raw()));
            let inside = |gpa| Iova::new(at + (gpa - interval.gpa));
            (from <= to).then(|| IovaRange::new(inside(from), inside(to)))?
        });
        for range in doomed.collect::<Vec<_>>() {
            self.cut(range);
        }
    }

    /// Evicts until there are no more than may be; not the one at `keep`.
    fn shrink(&mut self, keep: Option<u64>) {
        while self.map.len() > self.max {
            let mut looks = LOOKS;
            loop {
                let at = self.next_at_hand();
                self.hand = at.wrapping_add(1);
                if Some(at) == keep {
                    continue;
                }
                looks -= 1;
                let interval = self.map.get_mut(&at).expect("found there");
                if looks != 0 && std::mem::take(&mut interval.is_used) {
                    continue;
                }
                self.map.remove(&at);
                break;
            }
        }
    }

    /// The first interval from the hand on, around the end of the space. There are several.
    fn next_at_hand(&self) -> u64 {
        let ahead = self.map.range(self.hand..).next();
        let (&at, _) = ahead
            .or_else(|| self.map.first_key_value())
            .expect("more than may be");
        at
    }
}

/// `second` continues `first`.
fn join(first: Entry, second: Entry) -> Entry {
    let range = IovaRange::new(first.range.first(), second.range.last());
    Entry {
        range: range.expect("in order"),
        ..first
    }
}
