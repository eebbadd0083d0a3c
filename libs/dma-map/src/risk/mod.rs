//! Risk, measured: which stale mappings there were, and for how long, beside what the policy promises.
//!
//! A mapping is *stale* from its unmap (with optimistic teardown: although its entries still stand) until no device
//! can use it any more: until the invalidation that covers it is known to be complete. Durations are counted from a
//! coarse time that lags, to the moment at which the completion was seen: too long rather than too short. The sum
//! of the cores' maxima stands for the maximum: too large rather than too small. A strict unmap that waits for its
//! invalidation is not stale meanwhile: it has not returned.
//!
//! Flow: each core counts in a line of its own ([`Counters`]), when it gives IOVAs back; [`DmaMapper::risk`] adds the
//! lines up on demand. Nothing here is written on the path of an unmap.
//!
//! [`DmaMapper::risk`]: crate::DmaMapper::risk

use lines::{AtomicU64, Ordering};

pub use crate::reuse::{RiskContract, Violation, Windows};

use crate::reuse::Counts;

/// What one mapper let go stale, and what it may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Risk {
    /// No translation at all: the device reaches everything, always. The other figures mean nothing then.
    pub is_unprotected: bool,
    /// Stale mappings now.
    pub stale_now: u64,
    /// Most stale mappings at one time, or more.
    pub stale_max: u64,
    /// How long mappings were stale, longest and histogram; those still stale are not in it.
    pub windows: Windows,
    /// What is promised, for all cores together.
    pub contract: RiskContract,
}

impl Risk {
    /// Compares with the promise. `slack_ns` is the longest time between two ticks plus that of an invalidation.
    ///
    /// # Errors
    /// The first bound that did not hold.
    pub fn check(&self, slack_ns: u64) -> Result<(), Violation> {
        let counts = Counts {
            stale_max: self.stale_max.max(self.stale_now),
            windows: self.windows,
            ..Counts::default()
        };
        self.contract.check(&counts, slack_ns)
    }

    /// A guest's mapper over its host's: what the guest unmapped stays in reach until both have let go of it, so
    /// counts and windows are summed. The histogram holds the windows of both, one beside the other.
    pub fn over(&self, host: &Self) -> Self {
        let mut windows = self.windows;
        windows.add(&host.windows);
        windows.max_ns = self.windows.max_ns.saturating_add(host.windows.max_ns);
        Self {
            is_unprotected: self.is_unprotected && host.is_unprotected,
            stale_now: self.stale_now.saturating_add(host.stale_now),
            stale_max: self.stale_max.saturating_add(host.stale_max),
            windows,
            contract: self.contract.and(host.contract),
        }
    }
}

/// One core's counts: written by the core alone, read by anybody. Loads and stores, no read-modify-write.
pub(crate) struct Counters {
    stale_max: AtomicU64,
    longest_ns: AtomicU64,
    buckets: [AtomicU64; Windows::BUCKETS],
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            stale_max: AtomicU64::new(0),
            longest_ns: AtomicU64::new(0),
            buckets: core::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl Counters {
    /// So many were stale at one time.
    #[inline]
    pub(crate) fn saw(&self, stale: u64) {
        if stale > self.stale_max.load(Ordering::Relaxed) {
            self.stale_max.store(stale, Ordering::Relaxed);
        }
    }

    /// `count` mappings were stale for `ns`.
    pub(crate) fn closed(&self, ns: u64, count: u64) {
        if ns > self.longest_ns.load(Ordering::Relaxed) {
            self.longest_ns.store(ns, Ordering::Relaxed);
        }
        let bucket = (u64::BITS - ns.leading_zeros()) as usize;
        let bucket = &self.buckets[bucket.min(Windows::BUCKETS - 1)];
        bucket.store(bucket.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    /// Adds what was counted to `windows`; gives the most at one time.
    pub(crate) fn add_to(&self, windows: &mut Windows) -> u64 {
        windows.add(&Windows {
            max_ns: self.longest_ns.load(Ordering::Relaxed),
            buckets: core::array::from_fn(|i| self.buckets[i].load(Ordering::Relaxed)),
        });
        self.stale_max.load(Ordering::Relaxed)
    }
}
