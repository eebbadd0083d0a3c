//! Read-ahead: pages that come together with the one that is wanted.

use super::Residency;
use super::pages::{Backing, Page, Slot, State};
use super::policy::FaultOrigin;

/// Pages that are read from a disk at once, including the one that is wanted.
pub const READ_AHEAD: u32 = 32;

/// Slots that are read at once, if they are adjacent to the one that is wanted.
pub const CLUSTER: u32 = 8;

/// Pages of zeroes that come at once while there is plenty of memory.
const ZEROES: u32 = 16;

/// Read-ahead of the neighbours of a page in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadAhead {
    /// They are read: the page itself is to be read.
    Always,
    /// If vCPUs go through the store in order. For a fault that looks like a store: a page that is
    /// stored to is seldom followed by a read of the next, but a fault that a kernel thread
    /// resolves for a vCPU always looks like a store.
    InOrder,
    /// They are not read: pages are being overwritten, in the order in which they lie there.
    Never,
}

/// Order in which vCPUs go through the store.
#[derive(Debug, Default)]
pub(super) struct StoreOrder {
    last: Option<Slot>,
}

impl StoreOrder {
    /// Records that a vCPU reads this slot. Returns whether it lies shortly behind the previous
    /// one.
    fn follows(&mut self, slot: Slot) -> bool {
        let last = self.last.replace(slot);
        last.is_some_and(|last| (1..=CLUSTER).contains(&slot.0.wrapping_sub(last.0)))
    }
}

impl Residency {
    /// Returns whether the page lies in the store shortly behind the last one that was read from
    /// there.
    pub(super) fn follows_in_store(&mut self, page: Page) -> bool {
        match self.pages.backing(page) {
            Backing::Slot(slot) => self.store_order.follows(slot),
            Backing::Nowhere | Backing::Block(_) => false,
        }
    }

    /// Brings the neighbours of a page of zeroes too, if they are zeroes as well, while there is
    /// plenty of memory: a starting guest touches all of its memory, and each fault costs it more
    /// than the pages.
    pub(super) fn zero_around(&mut self, page: Page) {
        let first = page.0 / ZEROES * ZEROES;
        let end = (first + ZEROES).min(self.pages.len());
        for page in (first..end).map(Page) {
            if self.pages.is_absent_zeroes(page) && self.reclaim.has_plenty(self.pages.present()) {
                self.bring(page, false, FaultOrigin::Vcpu);
            }
        }
    }

    /// Reads the pages of the following blocks too, as far as there is room without evicting a
    /// page.
    pub(super) fn read_ahead_blocks(&mut self, page: Page) {
        let (State::Fetching, Backing::Block(first)) =
            (self.pages.state(page), self.pages.backing(page))
        else {
            return;
        };
        for count in 1..READ_AHEAD {
            let Some(block) = first.ahead(count) else {
                return;
            };
            let mut pages = self.pages.backed_by(block);
            let absent = pages.find(|page| self.pages.state(*page) == State::Absent);
            drop(pages);
            match absent {
                Some(page) if self.reclaim.is_below(self.pages.present()) => self.fetch(page),
                _ => return,
            }
        }
    }

    /// Reads the neighbours of the page in the store.
    pub(super) fn read_ahead_slots(&mut self, page: Page) {
        let (State::Fetching, Backing::Slot(slot)) =
            (self.pages.state(page), self.pages.backing(page))
        else {
            return;
        };
        let first = slot.0 / CLUSTER * CLUSTER;
        for slot in (first..first + CLUSTER).map(Slot) {
            let Some(page) = self.pages.slots().owner(slot) else {
                continue;
            };
            let is_there = self.pages.state(page) == State::Absent
                && self.pages.backing(page) == Backing::Slot(slot);
            if is_there && self.reclaim.is_below(self.pages.present()) {
                self.fetch(page);
            }
        }
    }
}
