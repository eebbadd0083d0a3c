//! Policies for mappings that a guest has unmapped: the time of the physical unmapping, and its
//! bounds.
//!
//! The policies are those of `dma-map`, for IOVAs that the *guest* chose: bounds are [`Window`] and
//! [`Optimistic`], guarantees a [`RiskContract`]. Under each policy, maps are synchronous, and a
//! page is unpinned only when its physical unmapping is complete.
//!
//! | policy | the guest's WAIT completes | a stale mapping is torn down |
//! |---|---|---|
//! | strict | after the physical unmapping | before the WAIT |
//! | async | once the unmapping is asked for | at once; at most `entries` are not complete |
//! | deferred | at once | when the window closes: `entries`, or `age` |
//! | optimistic | at once | beyond `quota`, oldest first, or after `residency`; found again, it needs no call |
//!
//! Under all of them a stale IOVA that the guest maps to something else is torn down first, and a
//! detach, a switch of the domain and translation that goes off tear everything down before they
//! complete.

use std::time::Duration;

use dma_map::mapper::{Optimistic, Window};
use dma_map::risk::{Risk, RiskContract, StaleTimeHistogram};

/// Time of the physical unmapping of a mapping that a guest has unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostPolicy {
    /// Before the guest's WAIT completes.
    Strict,
    /// Started at once; the guest's WAIT does not wait for it. Of the window, only the number of
    /// mappings counts.
    Async(Window),
    /// Delayed until the window closes, then all stale mappings together.
    Deferred(Window),
    /// Kept mapped, so that the guest may map it again without a call.
    Optimistic(Optimistic),
}

impl HostPolicy {
    /// Returns the bounds that the policy guarantees for mappings that a guest has unmapped.
    pub fn contract(&self) -> RiskContract {
        let of = |count: usize, age: Duration| RiskContract {
            max_stale: Some(count as u64),
            max_age_ns: Some(ns(age)),
        };
        match self {
            Self::Strict => RiskContract::STRICT,
            // Bounded by the duration of a teardown.
            Self::Async(window) => of(window.entries, Duration::ZERO),
            Self::Deferred(window) => of(window.entries, window.age),
            Self::Optimistic(bound) => of(bound.quota, bound.residency),
        }
    }

    /// Most mappings that may be stale.
    pub(crate) fn quota(&self) -> usize {
        match self {
            Self::Strict => 0,
            Self::Async(window) | Self::Deferred(window) => window.entries,
            Self::Optimistic(bound) => bound.quota,
        }
    }

    /// Returns the longest time for which a stale mapping may be kept, in ns.
    pub(crate) fn age_ns(&self) -> u64 {
        match self {
            Self::Strict | Self::Async(_) => 0,
            Self::Deferred(window) => ns(window.age),
            Self::Optimistic(bound) => ns(bound.residency),
        }
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Async(_) => "async",
            Self::Deferred(_) => "deferred",
            Self::Optimistic(_) => "optimistic",
        }
    }
}

fn ns(age: Duration) -> u64 {
    u64::try_from(age.as_nanos()).unwrap_or(u64::MAX)
}

/// Account of stale mappings: their number, and the durations for which they were stale.
#[derive(Clone, Debug, Default)]
pub(crate) struct Account {
    now: u64,
    max: u64,
    stale_times: StaleTimeHistogram,
}

impl Account {
    /// Counts one more stale mapping.
    pub(crate) fn begin(&mut self) {
        self.now += 1;
        self.max = self.max.max(self.now);
    }

    /// Records the end of a mapping that was stale for `ns`.
    pub(crate) fn end(&mut self, ns: u64) {
        self.now -= 1;
        self.stale_times.record(ns);
    }

    /// Stale mappings now.
    pub(crate) fn now(&self) -> u64 {
        self.now
    }

    /// Returns the account together with the bounds of `policy`.
    pub(crate) fn risk(&self, policy: &HostPolicy) -> Risk {
        Risk {
            is_unprotected: false,
            stale_now: self.now,
            stale_max: self.max,
            stale_times: self.stale_times,
            contract: policy.contract(),
        }
    }
}
