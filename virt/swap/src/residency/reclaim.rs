//! Numbers of pages that may come, and that have to leave.
//!
//! ```text
//!          less than two batches are left
//!  idle ───────────────────────────────────▶ reclaiming: unmapped pages leave
//!    ▲      room for four batches              │
//!    └─────────────────────────────────────────┘
//! ```
//! *Claimed* are pages in memory, and those that wait for room.

use super::policy::FaultOrigin;
use super::{BATCH, FOR_VCPUS};

/// Limit of the pages in memory, and whether pages leave because of it.
#[derive(Debug)]
pub(super) struct Reclaim {
    limit: usize,
    is_reclaiming: bool,
}

impl Reclaim {
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            is_reclaiming: false,
        }
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Changes the limit; [`update`](Self::update) must follow.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    pub fn is_reclaiming(&self) -> bool {
        self.is_reclaiming
    }

    /// Returns whether one more page may come, with `present` in memory.
    pub fn has_room(&self, present: usize, origin: FaultOrigin) -> bool {
        let beyond = match origin {
            FaultOrigin::Vcpu => BATCH,
            FaultOrigin::Device => BATCH - FOR_VCPUS,
        };
        present < self.limit + beyond
    }

    /// Returns whether there is room without evicting a page.
    pub fn is_below(&self, present: usize) -> bool {
        present < self.limit
    }

    /// Returns whether a quarter of the limit is left.
    pub fn has_plenty(&self, present: usize) -> bool {
        present < self.limit / 4 * 3
    }

    /// Returns the number of claimed pages beyond a number that leaves room for the next four
    /// batches.
    pub fn excess(&self, claimed: usize) -> usize {
        let low = self.limit - (self.limit / 16).min(4 * BATCH);
        claimed.saturating_sub(low)
    }

    /// Begins or ends to reclaim. Pages leave in groups, not one by one: those that leave together
    /// are adjacent in the store.
    pub fn update(&mut self, claimed: usize) {
        // Otherwise a disk's read-ahead would be cut short.
        let high = self.limit - (self.limit / 32).min(2 * BATCH);
        let begins = claimed >= high;
        self.is_reclaiming = self.excess(claimed) > 0 && (self.is_reclaiming || begins);
    }

    /// Returns the number of pages that should be leaving or unmapped, beyond those that are: the
    /// excess, and a tenth of the limit for second chances.
    pub fn lacks(&self, claimed: usize, leaving: usize) -> usize {
        match self.excess(claimed) {
            0 => 0,
            excess => (excess + self.limit / 10).saturating_sub(leaving),
        }
    }

    /// Returns the least number of pages that the owner is asked for at once, unless they are the
    /// last ones.
    pub fn least_asked(&self) -> usize {
        BATCH.min(1 + self.limit / 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_leave_from_a_32nd_below_the_limit_until_a_16th_is_free() {
        let mut reclaim = Reclaim::new(320);
        for (claimed, is_reclaiming) in [
            (309, false),
            (310, true),
            (301, true),
            (300, false),
            (309, false),
            (400, true),
        ] {
            reclaim.update(claimed);
            assert_eq!(reclaim.is_reclaiming(), is_reclaiming, "{claimed}");
        }
        assert_eq!((reclaim.excess(300), reclaim.excess(301)), (0, 1));
        // The excess of 1, and 32 for second chances, less 3 that are leaving.
        assert_eq!((reclaim.lacks(300, 0), reclaim.lacks(301, 3)), (0, 30));
    }

    #[test]
    fn vcpus_come_beyond_what_devices_may_have() {
        let reclaim = Reclaim::new(320);
        for (origin, most) in [
            (FaultOrigin::Device, 320 + BATCH - FOR_VCPUS),
            (FaultOrigin::Vcpu, 320 + BATCH),
        ] {
            assert!(reclaim.has_room(most - 1, origin), "{origin:?}");
            assert!(!reclaim.has_room(most, origin), "{origin:?}");
        }
        // All pages are beyond a limit of 0, and a batch may still be on its way.
        assert_eq!(Reclaim::new(0).excess(5), 5);
        assert!(Reclaim::new(0).has_room(0, FaultOrigin::Device));
    }
}
