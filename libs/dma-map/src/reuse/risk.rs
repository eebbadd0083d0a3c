//! What a cache promises about stale mappings, what it has seen, and whether the two agree.

use thiserror::Error;

/// The bound that a cache keeps: more stale mappings, or older ones, there never are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RiskContract {
    /// Most mappings that are stale at one time; `None`: no bound.
    pub max_stale: Option<u64>,
    /// Longest time for which a mapping is stale, ns; `None`: no bound. It is exceeded at most by the period of
    /// the calls that expire, and by the time that the teardown takes.
    pub max_age_ns: Option<u64>,
    /// Whether the age holds where the owner makes no further call.
    pub survives_quiet_owner: bool,
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
        survives_quiet_owner: true,
    };

    /// Compares with what was counted; `slack_ns` is the longest time between two calls that expire plus that of a
    /// teardown.
    ///
    /// # Errors
    /// The first bound that did not hold.
    pub fn check(&self, counts: &Counts, slack_ns: u64) -> Result<(), Violation> {
        if let Some(bound) = self.max_stale
            && counts.stale_max > bound
        {
            let seen = counts.stale_max;
            return Err(Violation::Stale { seen, bound });
        }
        if let Some(age) = self.max_age_ns {
            let bound_ns = age.saturating_add(slack_ns);
            let seen_ns = counts.windows.max_ns;
            if seen_ns > bound_ns {
                return Err(Violation::Age { seen_ns, bound_ns });
            }
        }
        Ok(())
    }

    /// The bound of two caches that are both in use: the sum.
    pub fn and(self, other: Self) -> Self {
        let sum = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b?));
        Self {
            max_stale: sum(self.max_stale, other.max_stale),
            max_age_ns: sum(self.max_age_ns, other.max_age_ns),
            survives_quiet_owner: self.survives_quiet_owner && other.survives_quiet_owner,
        }
    }
}

/// How long mappings were stale: a histogram by powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Longest, ns.
    pub max_ns: u64,
    /// Bucket 0 counts 0 ns; bucket *i* counts 2^(i-1) ns up to, not including, 2^i ns; the last one also all above.
    pub buckets: [u64; Self::BUCKETS],
}

impl Windows {
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
        let bucket = (u64::BITS - ns.leading_zeros()) as usize;
        self.buckets[bucket.min(Self::BUCKETS - 1)] += 1;
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

impl Default for Windows {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// What a cache has done, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Acquisitions that found a mapping.
    pub hits: u64,
    /// Acquisitions that did not.
    pub misses: u64,
    /// Stale mappings now: idle, or in a batch that is not torn down.
    pub stale: u64,
    /// Most stale mappings at one time.
    pub stale_max: u64,
    /// How long mappings were stale, those that were acquired again included.
    pub windows: Windows,
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
    /// Share of acquisitions that found a mapping, 0 to 1; 0 before the first.
    pub fn hit_rate(&self) -> f64 {
        let total = self.hits + self.misses;
        if total == 0 {
            return 0.0;
        }
        self.hits as f64 / total as f64
    }

    /// Bookkeeping bytes for each mapping that is known now; all of them where none is.
    pub fn bytes_per_entry(&self) -> f64 {
        self.bytes as f64 / self.entries.max(1) as f64
    }
}

#[cfg(test)]
mod tests;
