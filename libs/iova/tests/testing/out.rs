//! Ranges that are out: a map by first page, which finds overlaps, and from which a range to free
//! is picked.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use super::{Random, Victim};
use crate::wanted::{place, range_at};
use crate::{Aperture, IovaRange};

/// State of a range that is out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum How {
    /// Allocated.
    Allocated,
    /// Allocated and pinned.
    Pinned,
    /// A chunk that was retired.
    Retired,
}

#[derive(Clone, Copy)]
struct Entry {
    pages: u64,
    how: How,
    /// Its index in `allocated`, if it is there.
    at: usize,
    /// Number of the allocation.
    number: u64,
}

/// The ranges that a player has out. Nothing here is clever: it is what allocators are compared
/// with.
#[derive(Default)]
pub struct Out {
    /// By first page.
    map: BTreeMap<u64, Entry>,
    /// First pages of what can be freed, in no order.
    allocated: Vec<u64>,
    /// First pages and numbers of allocations, oldest first; most of those that were freed are here
    /// still.
    history: VecDeque<(u64, u64)>,
    allocations: u64,
    /// Of what is allocated or pinned.
    ranges: u64,
    pages: u64,
    stretch: Stretch,
}

/// Ranges that are freed one after the other.
#[derive(Clone, Copy, Default)]
struct Stretch {
    /// Its next position, the number of ranges left, and its direction.
    at: u64,
    left: u64,
    is_upwards: bool,
}

impl Out {
    /// Ranges allocated or pinned.
    pub fn ranges(&self) -> u64 {
        self.ranges
    }

    /// Their pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether any page of `range` is out.
    pub fn overlaps(&self, range: IovaRange) -> bool {
        let below = self.map.range(..=range.last().raw()).next_back();
        below.is_some_and(|(&first, entry)| first + entry.pages > range.first().raw())
    }

    /// Pages and state of the range that starts at `first`.
    pub(super) fn at(&self, first: u64) -> Option<(u64, How)> {
        self.map.get(&first).map(|entry| (entry.pages, entry.how))
    }

    /// Adds a range that was allocated.
    ///
    /// # Panics
    /// If one that starts there is out.
    pub fn insert(&mut self, range: IovaRange) {
        self.insert_as(range, How::Allocated);
    }

    /// Removes a range that is allocated and not pinned.
    pub fn take(&mut self, victim: Victim, random: &mut Random) -> Option<IovaRange> {
        let range = self.pick(victim, random)?;
        Some(self.remove(range.first().raw()))
    }

    pub(super) fn insert_as(&mut self, range: IovaRange, how: How) {
        let first = range.first().raw();
        let (at, number) = (self.allocated.len(), self.allocations);
        if how == How::Allocated {
            self.allocated.push(first);
            self.history.push_back((first, number));
            self.allocations += 1;
        }
        if how != How::Retired {
            self.ranges += 1;
            self.pages += range.pages();
        }
        let pages = range.pages();
        let entry = Entry {
            pages,
            how,
            at,
            number,
        };
        assert!(self.map.insert(first, entry).is_none(), "{range} is out");
        // What was freed is forgotten when it is most of the history.
        if self.history.len() > 64 + 4 * self.allocated.len() {
            let map = &self.map;
            self.history
                .retain(|&(first, number)| Self::is_allocation(map, first, number));
        }
    }

    fn is_allocation(map: &BTreeMap<u64, Entry>, first: u64, number: u64) -> bool {
        let entry = map.get(&first);
        entry.is_some_and(|entry| entry.how == How::Allocated && entry.number == number)
    }

    /// Forgets the range that starts at `first`.
    pub(super) fn remove(&mut self, first: u64) -> IovaRange {
        let entry = self.map.remove(&first).expect("it is out");
        if entry.how == How::Allocated {
            self.allocated.swap_remove(entry.at);
            if let Some(moved) = self.allocated.get(entry.at) {
                self.map.get_mut(moved).expect("it is allocated").at = entry.at;
            }
        }
        if entry.how != How::Retired {
            self.ranges -= 1;
            self.pages -= entry.pages;
        }
        range_at(first, entry.pages)
    }

    /// A range that is allocated and not pinned.
    pub(super) fn pick(&mut self, victim: Victim, random: &mut Random) -> Option<IovaRange> {
        let len = self.allocated.len();
        if len == 0 {
            return None;
        }
        let next = match victim {
            Victim::Stretch => self.next_of_stretch(),
            _ => None,
        };
        let mut any = || self.allocated[random.index(len)];
        let first = match victim {
            Victim::Any => any(),
            Victim::LowestOfEight => (0..8).map(|_| any()).min().expect("eight"),
            Victim::Highest => {
                let mut from_above = self.map.iter().rev();
                let (&first, _) = from_above.find(|(_, entry)| entry.how == How::Allocated)?;
                first
            }
            Victim::Oldest => loop {
                let &(first, number) = self.history.front()?;
                if Self::is_allocation(&self.map, first, number) {
                    break first;
                }
                self.history.pop_front();
            },
            Victim::Stretch => match next {
                Some(first) => first,
                None => {
                    let start = any();
                    let is_upwards = random.one_in(2);
                    // Downwards it begins at a hole, which it makes larger.
                    let at = match is_upwards {
                        true => start,
                        false => self.below_hole(start),
                    };
                    self.stretch = Stretch {
                        at,
                        left: random.below(len as u64),
                        is_upwards,
                    };
                    at
                }
            },
        };
        Some(range_at(first, self.map[&first].pages))
    }

    /// The last of the allocated ranges that follow each other from `first` on.
    fn below_hole(&self, mut first: u64) -> u64 {
        loop {
            let next = first + self.map[&first].pages;
            match self.map.get(&next) {
                Some(entry) if entry.how == How::Allocated => first = next,
                _ => return first,
            }
        }
    }

    fn next_of_stretch(&mut self) -> Option<u64> {
        let Stretch {
            at,
            left,
            is_upwards,
        } = self.stretch;
        self.stretch.left = left.checked_sub(1)?;
        let is_allocated = |(_, entry): &(&u64, &Entry)| entry.how == How::Allocated;
        let (&first, _) = match is_upwards {
            true => self.map.range(at..).find(is_allocated),
            false => self.map.range(..=at).rev().find(is_allocated),
        }?;
        self.stretch.at = first;
        Some(first)
    }

    /// Some range that is out, in whatever way.
    pub(super) fn any(&self, random: &mut Random) -> Option<(IovaRange, How)> {
        let (&lowest, _) = self.map.first_key_value()?;
        let (&highest, _) = self.map.last_key_value()?;
        let at = lowest + random.below(highest - lowest + 1);
        let (&first, entry) = self.map.range(at..).next()?;
        Some((range_at(first, entry.pages), entry.how))
    }

    /// Every first page.
    pub(super) fn firsts(&self) -> Vec<u64> {
        self.map.keys().copied().collect()
    }

    /// Whether `2^order` pages at a multiple of themselves are free at or below `last`.
    pub fn has_block(&self, aperture: &Aperture, order: u8, last: u64) -> bool {
        let pages = 1u64 << order;
        aperture.usable().iter().any(|usable| {
            let mut end = usable.last().raw().min(last);
            // The highest block at or below `end`; if something is in the way, the next end is
            // below that.
            while let Some(start) = place(usable.first().raw(), end, pages, order) {
                let block = range_at(start, pages);
                let below = self.map.range(..=block.last().raw()).next_back();
                match below {
                    Some((&first, entry)) if first + entry.pages > start => {
                        let Some(next) = first.checked_sub(1) else {
                            return false;
                        };
                        end = next;
                    }
                    _ => return true,
                }
            }
            false
        })
    }
}
