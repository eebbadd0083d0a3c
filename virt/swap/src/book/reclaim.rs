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

/// Limit of the pages in memory, and whether pages leave for it.
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

    /// Changes the limit; [`update`](Self::update) is to follow.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    pub fn is_reclaiming(&self) -> bool {
        self.is_reclaiming
    }

    /// Whether one more page may come, beside so many in memory.
    pub fn has_room(&self, present: usize, origin: FaultOrigin) -> bool {
        let beyond = match origin {
            FaultOrigin::Vcpu => BATCH,
            FaultOrigin::Device => BATCH - FOR_VCPUS,
        };
        present < self.limit + beyond
    }

    /// Whether there is room without taking a page away.
    pub fn is_below(&self, present: usize) -> bool {
        present < self.limit
    }

    /// Whether a quarter of the limit is left.
    pub fn has_plenty(&self, present: usize) -> bool {
        present < self.limit / 4 * 3
    }

    /// Claimed pages beyond what leaves room for four batches of those that come next.
    pub fn excess(&self, claimed: usize) -> usize {
        let low = self.limit - (self.limit / 16).min(4 * BATCH);
        claimed.saturating_sub(low)
    }

    /// Begins or ends to reclaim. Pages do not leave one by one: those that leave together lie
    /// together.
    pub fn update(&mut self, claimed: usize) {
        // Else what is read from a disk would be cut short.
        let high = self.limit - (self.limit / 32).min(2 * BATCH);
        let begins = claimed >= high;
        self.is_reclaiming = self.excess(claimed) > 0 && (self.is_reclaiming || begins);
    }

    /// Pages that should be leaving, or soft, beside those that are: all that have to leave, and a
    /// tenth of the limit for second chances.
    pub fn lacks(&self, claimed: usize, leaving: usize) -> usize {
        match self.excess(claimed) {
            0 => 0,
            excess => (excess + self.limit / 10).saturating_sub(leaving),
        }
    }

    /// Pages that the owner is asked for at once, unless they are the last ones.
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
        // All that have to leave, and 32 for second chances.
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
