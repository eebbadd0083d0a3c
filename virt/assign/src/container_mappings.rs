//! The book of one container: the mappings through which its device may reach memory.
//!
//! ```text
//!             map            guest unmapped, kept           unmap             call
//!            called             by the policy               called          returned
//!  (nothing) ─────▶ live ────────────────────────▶ stale ─────────▶ leaving ────────▶ (nothing)
//!                   │ ▲──── found again (optimistic) ─┘                ▲
//!                   └───────────── guest unmapped, strict ─────────────┘
//! ```
//! A mapping is *entered* before the call that makes it and *leaves* after the call that ends it
//! has succeeded: in between [`Reach`] reports its pages as in use. Live and stale mappings have no
//! page in common. Each is one mapping of type 1, which can only be unmapped as a whole.

use std::collections::{BTreeMap, VecDeque};

use dma_map::iova::{Access, IovaPfn, IovaRange};

use crate::reach::Reach;

/// A mapping of the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First page of IOVA.
    pub first: u64,
    /// Pages, at least 1.
    pub pages: u64,
    /// First page of guest memory.
    pub gpa: u64,
    /// Access that the device has.
    pub access: Access,
}

impl Mapping {
    /// Last page of IOVA.
    pub fn last(&self) -> u64 {
        self.first + (self.pages - 1)
    }

    /// Returns its IOVAs; `None` past the end of the address space.
    pub fn range(&self) -> Option<IovaRange> {
        IovaRange::new(IovaPfn::new(self.first), self.pages)
    }
}

/// A mapping that the guest has unmapped and the device still reaches.
#[derive(Clone, Copy, Debug)]
pub struct Stale {
    /// The mapping.
    pub mapping: Mapping,
    /// Time at which the unmapping was seen, in ns.
    pub since: u64,
    /// The guest considers it unmapped: its WAIT has completed.
    pub is_counted: bool,
}

/// See the module's head.
#[derive(Default)]
pub struct ContainerMappings {
    reach: Reach,
    live: BTreeMap<u64, Mapping>,
    stale: BTreeMap<u64, Stale>,
    /// Stale mappings in the order in which they became stale; those that no longer are are
    /// skipped.
    order: VecDeque<(u64, u64)>,
    /// Pages of live mappings, now and at most.
    live_pages: u64,
    live_peak: u64,
    /// Pages of all mappings that were entered and have not left, now and at most.
    pages: u64,
    peak: u64,
}

impl ContainerMappings {
    /// Creates an empty book, whose mappings will be in use in `reach`.
    pub fn new(reach: Reach) -> Self {
        Self {
            reach,
            ..Self::default()
        }
    }

    /// Enters a mapping that is about to be made.
    pub fn enter(&mut self, mapping: Mapping) {
        self.reach.enter(mapping.gpa, mapping.pages);
        self.pages += mapping.pages;
        self.peak = self.peak.max(self.pages);
        self.add_live(mapping.pages);
        let old = self.live.insert(mapping.first, mapping);
        debug_assert!(old.is_none(), "{mapping:?} over {old:?}");
    }

    /// The call that ended a mapping has succeeded, or the one that was to make it has not.
    pub fn leave(&mut self, mapping: &Mapping) {
        self.reach.leave(mapping.gpa, mapping.pages);
        self.pages -= mapping.pages;
    }

    /// Takes a live mapping out, which still reaches its pages.
    pub fn take_live(&mut self, first: u64) -> Option<Mapping> {
        let mapping = self.live.remove(&first)?;
        self.live_pages -= mapping.pages;
        Some(mapping)
    }

    /// Takes a stale one out, likewise.
    pub fn take_stale(&mut self, first: u64) -> Option<Stale> {
        self.stale.remove(&first)
    }

    /// Keeps a mapping that was taken out.
    pub fn keep_stale(&mut self, mapping: Mapping, since: u64) {
        let stale = Stale {
            mapping,
            since,
            is_counted: false,
        };
        self.stale.insert(mapping.first, stale);
        self.order.push_back((since, mapping.first));
    }

    /// Makes a stale mapping live, since the guest has mapped it again.
    pub fn revive(&mut self, mapping: Mapping) {
        self.add_live(mapping.pages);
        self.live.insert(mapping.first, mapping);
    }

    fn add_live(&mut self, pages: u64) {
        self.live_pages += pages;
        self.live_peak = self.live_peak.max(self.live_pages);
    }

    /// Marks a mapping as unmapped for the guest, if it is still stale; returns whether it is.
    pub fn count_stale(&mut self, first: u64) -> bool {
        match self.stale.get_mut(&first) {
            Some(stale) if !stale.is_counted => {
                stale.is_counted = true;
                true
            }
            _ => false,
        }
    }

    /// Returns the oldest stale mapping: the time since which it is stale, in ns, and its first
    /// page.
    pub fn oldest(&mut self) -> Option<(u64, u64)> {
        while let Some(&(since, first)) = self.order.front() {
            if self
                .stale
                .get(&first)
                .is_some_and(|stale| stale.since == since)
            {
                return Some((since, first));
            }
            self.order.pop_front();
        }
        None
    }

    /// Returns a lower bound of the time since which the oldest stale mapping is stale, without a
    /// search.
    pub fn oldest_since(&self) -> Option<u64> {
        let known = self.order.front().filter(|_| !self.stale.is_empty());
        known.map(|(since, _)| *since)
    }

    /// The first live mapping with a page at or behind `from`, up to `last`.
    pub fn live_from(&self, from: u64, last: u64) -> Option<Mapping> {
        overlapping(&self.live, from, last, |mapping| *mapping)
    }

    /// The first stale one, likewise.
    pub fn stale_from(&self, from: u64, last: u64) -> Option<Mapping> {
        overlapping(&self.stale, from, last, |stale| stale.mapping)
    }

    /// Whether nothing is mapped from page `first` up to, not including, `end`.
    pub fn is_empty_between(&self, first: u64, end: u64) -> bool {
        self.live.range(first..end).next().is_none()
            && self.stale.range(first..end).next().is_none()
    }

    /// First pages of some stale mappings, at most `most`.
    pub fn some_stale(&self, most: usize) -> Vec<u64> {
        self.stale.keys().take(most).copied().collect()
    }

    /// First pages of some live mappings, likewise.
    pub fn some_live(&self, most: usize) -> Vec<u64> {
        self.live.keys().take(most).copied().collect()
    }

    /// Live and stale mappings.
    pub fn mappings(&self) -> usize {
        self.live.len() + self.stale.len()
    }

    /// Stale mappings.
    pub fn stale(&self) -> usize {
        self.stale.len()
    }

    /// Pages of live mappings, each mapping counted: now, and at most.
    pub fn live_pages(&self) -> (u64, u64) {
        (self.live_pages, self.live_peak)
    }

    /// Pages that are reached, each mapping counted: now, and at most.
    pub fn pages(&self) -> (u64, u64) {
        (self.pages, self.peak)
    }
}

fn overlapping<T>(
    mappings: &BTreeMap<u64, T>,
    from: u64,
    last: u64,
    of: impl Fn(&T) -> Mapping,
) -> Option<Mapping> {
    let before = mappings.range(..=from).next_back().map(|(_, one)| of(one));
    if let Some(before) = before.filter(|before| before.last() >= from) {
        return Some(before);
    }
    let from = from.checked_add(1)?;
    if from > last {
        return None;
    }
    mappings.range(from..=last).next().map(|(_, one)| of(one))
}
