//! The policies that are compared, by the names of their keys.

use std::time::Duration;

use dma_map::Policy;
use dma_map::mapper::{Optimistic, Reuse, Teardown, Window};

/// A policy and its name in keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Named {
    /// The name.
    pub name: &'static str,
    /// The policy.
    pub policy: Policy,
}

const fn named(name: &'static str, policy: Policy) -> Named {
    Named { name, policy }
}

/// Deferred with the queue of workload d-def: 256 entries for 10 ms.
pub const DEFERRED_256: Policy = Policy::STRICT.with_teardown(Teardown::Deferred(Window {
    entries: 256,
    age: Duration::from_millis(10),
}));

/// Combining in which no core waits for others while the hardware is idle.
pub const COMBINING_AT_ONCE: Policy =
    Policy::STRICT.with_teardown(Teardown::Combining { looks: 0 });

const OPTIMISTIC_4096: Reuse = Reuse::Optimistic(Optimistic::of(4096));

/// Strict, one flush after the other behind one lock (`Costs::of`): what stock kernels do.
pub const STRICT_LOCK: &str = "strict_lock";

/// All of them; the last one is what the others' shares are of.
pub const POLICIES: [Named; 10] = [
    named(STRICT_LOCK, Policy::STRICT),
    named("strict", Policy::STRICT),
    named("strict_combining", Policy::STRICT_COMBINING),
    named("shared", Policy::SHARED),
    named("async", Policy::ASYNC),
    named("deferred", Policy::DEFERRED),
    named("optimistic256", Policy::optimistic(256)),
    named("optimistic4096", Policy::optimistic(4096)),
    named(
        "async_optimistic4096",
        Policy::ASYNC.with_reuse(OPTIMISTIC_4096),
    ),
    named("off", Policy::OFF),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_and_the_last_one_is_off() {
        let mut names: Vec<_> = POLICIES.iter().map(|named| named.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), POLICIES.len());
        assert!(POLICIES[POLICIES.len() - 1].policy.is_off);
    }
}
