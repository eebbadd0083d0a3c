//! Mappings of one domain: intervals that do not overlap, by their first address.
//!
//! Each MAP request makes one mapping, which is removed as a whole. Lookups cost O(log n); the unit
//! checks each endpoint's last hit before that.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One mapping, of at least one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// First address.
    pub first: u64,
    /// Last address.
    pub last: u64,
    /// Translation of the first address.
    pub phys: u64,
    /// Devices may read.
    pub can_read: bool,
    /// Devices may write.
    pub can_write: bool,
}

impl Mapping {
    /// Whether it has this address.
    #[inline]
    pub fn holds(&self, at: u64) -> bool {
        (self.first..=self.last).contains(&at)
    }

    /// Returns the translation of an address in it.
    #[inline]
    pub fn to_phys(&self, at: u64) -> u64 {
        self.phys + (at - self.first)
    }
}

/// The mappings of a domain.
#[derive(Clone, Debug, Default)]
pub struct Mappings {
    by_first: BTreeMap<u64, Mapping>,
}

impl Mappings {
    /// Number of mappings.
    pub fn len(&self) -> usize {
        self.by_first.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.by_first.is_empty()
    }

    /// All of them, by their addresses.
    pub fn iter(&self) -> impl Iterator<Item = &Mapping> {
        self.by_first.values()
    }

    /// The one that has this address.
    #[inline]
    pub fn find(&self, at: u64) -> Option<&Mapping> {
        let (_, mapping) = self.by_first.range(..=at).next_back()?;
        (at <= mapping.last).then_some(mapping)
    }

    /// The first that has an address of `first..=last`.
    pub fn first_in(&self, first: u64, last: u64) -> Option<&Mapping> {
        self.find(first).or_else(|| {
            let (_, mapping) = self.by_first.range(first..=last).next()?;
            Some(mapping)
        })
    }

    /// Adds one, unless it overlaps another: false, and nothing has changed.
    #[must_use]
    pub fn insert(&mut self, mapping: Mapping) -> bool {
        let is_free = self.first_in(mapping.first, mapping.last).is_none();
        if is_free {
            self.by_first.insert(mapping.first, mapping);
        }
        is_free
    }

    /// Whether one of the mappings lies in `first..=last` in part only.
    pub fn would_split(&self, first: u64, last: u64) -> bool {
        let begins_before = self.find(first).is_some_and(|own| own.first < first);
        let ends_behind = self.find(last).is_some_and(|own| own.last > last);
        begins_before || ends_behind
    }

    /// Removes mappings that begin in `first..=last`, at most `max` of them; how many. Fewer than
    /// `max`: there are no more.
    pub fn remove(&mut self, first: u64, last: u64, max: usize) -> usize {
        let mut removed = 0;
        while removed < max
            && let Some((&at, _)) = self.by_first.range(first..=last).next()
        {
            self.by_first.remove(&at);
            removed += 1;
        }
        removed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mapping(first: u64, last: u64) -> Mapping {
        Mapping {
            first,
            last,
            phys: first + 0x10_0000,
            can_read: true,
            can_write: false,
        }
    }

    /// The sequences of §5.13.6.6, each from a blank domain: mappings, the range to unmap, and the
    /// number of mappings removed; `None` if it is refused.
    #[test]
    fn the_examples_of_the_specification() {
        type Example = (&'static [(u64, u64)], (u64, u64), Option<usize>);
        let examples: [Example; 7] = [
            (&[], (0, 4), Some(0)),
            (&[(0, 9)], (0, 9), Some(1)),
            (&[(0, 4), (5, 9)], (0, 9), Some(2)),
            (&[(0, 9)], (0, 4), None),
            (&[(0, 4), (5, 9)], (0, 4), Some(1)),
            (&[(0, 4)], (0, 9), Some(1)),
            (&[(0, 4), (10, 14)], (0, 14), Some(2)),
        ];
        for (number, (made, (first, last), expected)) in (1..).zip(examples) {
            let mut all = Mappings::default();
            for &(first, last) in made {
                assert!(all.insert(mapping(first, last)));
            }
            let removed = (!all.would_split(first, last)).then(|| all.remove(first, last, 100));
            assert_eq!(removed, expected, "example ({number})");
            assert_eq!(all.len(), made.len() - expected.unwrap_or(0));
        }
    }

    proptest! {
        /// Compares with an array that has the translation of each address.
        #[test]
        fn as_an_array_of_addresses_has_it(
            steps in prop::collection::vec((0..3_u8, 0_u64..64, 0_u64..20), 1..200)
        ) {
            let mut all = Mappings::default();
            let mut naive: [Option<(u64, u64)>; 128] = [None; 128];
            for (what, first, len) in steps {
                let last = first + len;
                let range = first as usize..=last as usize;
                match what {
                    0 => {
                        let is_free = naive[range.clone()].iter().all(Option::is_none);
                        prop_assert_eq!(all.insert(mapping(first, last)), is_free);
                        if is_free {
                            naive[range].fill(Some((first, last)));
                        }
                    }
                    1 => {
                        let hit = |&(from, to): &(u64, u64)| from < first || to > last;
                        let splits = naive[range.clone()].iter().flatten().any(hit);
                        prop_assert_eq!(all.would_split(first, last), splits);
                        if !splits {
                            let mut gone: Vec<_> = naive[range.clone()].iter().flatten().copied().collect();
                            gone.dedup();
                            prop_assert_eq!(all.remove(first, last, 2), gone.len().min(2));
                            prop_assert_eq!(all.remove(first, last, 100), gone.len().saturating_sub(2));
                            naive[range].fill(None);
                        }
                    }
                    _ => {
                        let first_in = naive[range].iter().flatten().next().copied();
                        let found = all.first_in(first, last).map(|own| (own.first, own.last));
                        prop_assert_eq!(found, first_in);
                    }
                }
                for (at, own) in (0..).zip(naive) {
                    let found = all.find(at);
                    prop_assert_eq!(found.map(|found| (found.first, found.last)), own);
                    if let Some(found) = found {
                        prop_assert!(found.holds(at));
                        prop_assert_eq!(found.to_phys(at), at + 0x10_0000);
                    }
                }
            }
        }
    }
}
