//! Risk, measured: stale mappings and the duration of their windows, beside the bounds that the
//! policy promises.
//!
//! A mapping is *stale* from its unmap (with optimistic teardown: although its entries still stand)
//! until no device can use it any more: until the invalidation that covers it is known to be
//! complete. Durations are counted from a coarse time that lags, to the moment at which the
//! completion was seen: too long rather than too short. The sum of the cores' maxima stands for the
//! maximum: too large rather than too small. A strict unmap that waits for its invalidation is not
//! stale meanwhile: it has not returned.
//!
//! Flow: each core counts in a line of its own (`Counters`), when it gives IOVAs back;
//! [`DmaMapper::risk`] adds the lines up on demand. Nothing here is written on the path of an
//! unmap.
//!
//! [`DmaMapper::risk`]: crate::DmaMapper::risk

use core::fmt;

use lines::{AtomicU64, Ordering};
use thiserror::Error;

/// Stale mappings of one mapper, observed and promised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Risk {
    /// No translation at all: the device reaches everything, always. The other figures mean nothing
    /// then.
    pub is_unprotected: bool,
    /// Stale mappings now.
    pub stale_now: u64,
    /// Most stale mappings at one time, or more.
    pub stale_max: u64,
    /// Times for which mappings were stale: longest and histogram. Mappings that are still stale
    /// are not in it.
    pub stale_times: StaleTimeHistogram,
    /// Promised bounds, for all cores together.
    pub contract: RiskContract,
}

impl Risk {
    /// Compares with the promise. `slack_ns` is the longest time between two ticks plus that of an
    /// invalidation.
    ///
    /// # Errors
    /// The first bound that did not hold.
    pub fn check(&self, slack_ns: u64) -> Result<(), Violation> {
        let stale_max = self.stale_max.max(self.stale_now);
        self.contract.check(stale_max, &self.stale_times, slack_ns)
    }

    /// Combines a guest's mapper with its host's: memory that the guest unmapped stays in reach
    /// until both have released it, so counts and windows are summed. The histogram holds the
    /// windows of both, one beside the other.
    pub fn over(&self, host: &Self) -> Self {
        let mut stale_times = self.stale_times;
        stale_times.add(&host.stale_times);
        stale_times.max_ns = self
            .stale_times
            .max_ns
            .saturating_add(host.stale_times.max_ns);
        Self {
            is_unprotected: self.is_unprotected && host.is_unprotected,
            stale_now: self.stale_now.saturating_add(host.stale_now),
            stale_max: self.stale_max.saturating_add(host.stale_max),
            stale_times,
            contract: self.contract.and(host.contract),
        }
    }
}

/// Promised bounds: there are never more stale mappings, nor older ones, even where a core makes no
/// further call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RiskContract {
    /// Most mappings that are stale at one time; `None`: no bound.
    pub max_stale: Option<u64>,
    /// Longest time for which a mapping is stale, ns; `None`: no bound. It is exceeded at most by
    /// the period of the ticks, and by the time that the teardown takes.
    pub max_age_ns: Option<u64>,
}

/// A bound that did not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Violation {
    /// More stale mappings than promised.
    #[error("{seen} mappings were stale at one time, {bound} are allowed")]
    Stale {
        /// Most seen at one time.
        seen: u64,
        /// Most allowed.
        bound: u64,
    },
    /// A mapping was stale for longer than promised.
    #[error("a mapping was stale for {seen_ns} ns, {bound_ns} ns are allowed")]
    Age {
        /// Longest seen, ns.
        seen_ns: u64,
        /// Longest allowed, ns.
        bound_ns: u64,
    },
}

impl RiskContract {
    /// Nothing is ever stale.
    pub const STRICT: Self = Self {
        max_stale: Some(0),
        max_age_ns: Some(0),
    };

    /// No bound.
    pub const NONE: Self = Self {
        max_stale: None,
        max_age_ns: None,
    };

    /// Compares with what was seen; `slack_ns` is as in [`Risk::check`].
    ///
    /// # Errors
    /// The first bound that did not hold.
    pub fn check(
        &self,
        stale_max: u64,
        stale_times: &StaleTimeHistogram,
        slack_ns: u64,
    ) -> Result<(), Violation> {
        if let Some(bound) = self.max_stale
            && stale_max > bound
        {
            let seen = stale_max;
            return Err(Violation::Stale { seen, bound });
        }
        let seen_ns = stale_times.max_ns;
        match self.max_age_ns.map(|age| age.saturating_add(slack_ns)) {
            Some(bound_ns) if seen_ns > bound_ns => Err(Violation::Age { seen_ns, bound_ns }),
            _ => Ok(()),
        }
    }

    /// The bound where mappings go stale in two ways, each with its own: the sum.
    pub fn and(self, other: Self) -> Self {
        let sum = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b?));
        Self {
            max_stale: sum(self.max_stale, other.max_stale),
            max_age_ns: sum(self.max_age_ns, other.max_age_ns),
        }
    }
}

/// Times for which mappings were stale: a histogram by powers of two. `{:?}` names the non-empty
/// buckets by their lower bounds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct StaleTimeHistogram {
    /// Longest, ns.
    pub max_ns: u64,
    /// Bucket 0 counts 0 ns; bucket *i* counts 2^(i-1) ns up to, not including, 2^i ns; the last
    /// one also all above.
    pub buckets: [u64; Self::BUCKETS],
}

impl StaleTimeHistogram {
    /// The last bucket begins at 2^46 ns, which is 19 hours.
    pub const BUCKETS: usize = 48;

    /// Nothing yet.
    pub const EMPTY: Self = Self {
        max_ns: 0,
        buckets: [0; Self::BUCKETS],
    };

    /// Counts one window.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.max_ns = self.max_ns.max(ns);
        self.buckets[Self::bucket(ns)] += 1;
    }

    #[inline]
    fn bucket(ns: u64) -> usize {
        ((u64::BITS - ns.leading_zeros()) as usize).min(Self::BUCKETS - 1)
    }

    /// Adds what was counted elsewhere.
    pub fn add(&mut self, other: &Self) {
        self.max_ns = self.max_ns.max(other.max_ns);
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
    }

    /// Number of windows counted.
    pub fn total(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

impl fmt::Debug for StaleTimeHistogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        struct From(usize);
        impl fmt::Debug for From {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let begin = self.0.checked_sub(1).map_or(0, |shift| 1_u64 << shift);
                write!(f, "{begin}..")
            }
        }
        struct Counted<'a>(&'a [u64]);
        impl fmt::Debug for Counted<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let counted = self.0.iter().enumerate().filter(|(_, count)| **count != 0);
                f.debug_map()
                    .entries(counted.map(|(bucket, count)| (From(bucket), count)))
                    .finish()
            }
        }
        f.debug_struct("StaleTimeHistogram")
            .field("max_ns", &self.max_ns)
            .field("buckets", &Counted(&self.buckets))
            .finish()
    }
}

impl Default for StaleTimeHistogram {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// Counts of the reuse of mappings, and of the mappings held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Maps that found a mapping.
    pub hits: u64,
    /// Maps that had to make one.
    pub misses: u64,
    /// Stale mappings now: idle, or in a batch that is not torn down.
    pub stale: u64,
    /// Most stale mappings at one time.
    pub stale_max: u64,
    /// Times for which mappings were stale, including those that were found again.
    pub stale_times: StaleTimeHistogram,
    /// Mappings known now, live ones included.
    pub entries: u64,
    /// Mappings that had to go to make room.
    pub evicted: u64,
    /// Mappings that went because of their age.
    pub expired: u64,
    /// Bytes of bookkeeping.
    pub bytes: usize,
}

impl Counts {
    /// Adds the counts of another cache; of the most at one time, the sum of both.
    pub fn add(&mut self, other: &Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.stale += other.stale;
        self.stale_max += other.stale_max;
        self.stale_times.add(&other.stale_times);
        self.entries += other.entries;
        self.evicted += other.evicted;
        self.expired += other.expired;
        self.bytes += other.bytes;
    }

    /// Share of maps that found a mapping, 0 to 1; 0 before the first.
    pub fn hit_rate(&self) -> f64 {
        let total = self.hits + self.misses;
        if total == 0 {
            return 0.0;
        }
        self.hits as f64 / total as f64
    }
}

/// One core's counts: written by the core alone, read by any thread. Loads and stores, no
/// read-modify-write.
pub(crate) struct Counters {
    stale_max: AtomicU64,
    longest_ns: AtomicU64,
    buckets: [AtomicU64; StaleTimeHistogram::BUCKETS],
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
    /// Records the number of mappings that were stale at one time.
    #[inline]
    pub(crate) fn saw(&self, stale: u64) {
        if stale > self.stale_max.load(Ordering::Relaxed) {
            self.stale_max.store(stale, Ordering::Relaxed);
        }
    }

    /// Records that `count` mappings were stale for `ns`.
    pub(crate) fn closed(&self, ns: u64, count: u64) {
        if ns > self.longest_ns.load(Ordering::Relaxed) {
            self.longest_ns.store(ns, Ordering::Relaxed);
        }
        let bucket = &self.buckets[StaleTimeHistogram::bucket(ns)];
        bucket.store(bucket.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    /// Adds these counts to `stale_times`. Returns the most at one time.
    pub(crate) fn add_to(&self, stale_times: &mut StaleTimeHistogram) -> u64 {
        stale_times.add(&StaleTimeHistogram {
            max_ns: self.longest_ns.load(Ordering::Relaxed),
            buckets: core::array::from_fn(|i| self.buckets[i].load(Ordering::Relaxed)),
        });
        self.stale_max.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
