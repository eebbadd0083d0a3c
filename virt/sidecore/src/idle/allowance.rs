//! Token bucket of the part of a core's time that may be spent at the lower price.
//!
//! ```text
//! left += share × elapsed - awake          each time that an idle period has ended; within ± DEPTH
//! ```
//! While something is left, the policy spins for the limit at the lower price, otherwise for the
//! limit at the price of the whole core. So idle periods of one length, which no single limit
//! divides, are divided all the same: some are spun through and others slept through. All awake
//! time counts, serving too: a busy core has no cheap part left. The CPU time of the awake time is
//! measured now and then, and the difference corrected: a core that the host preempts is awake and
//! uses none, and the CPU time of a park is an estimate.

use crate::clock::Nanos;

/// Bound of the bucket, saved or owed, in nanoseconds: some dozens of idle periods where the
/// allowance matters.
const DEPTH_NS: f64 = 1_000_000.0;
/// Time between two measurements, in nanoseconds: each is a system call.
const MEASURE_EVERY_NS: u64 = 1_000_000;

#[derive(Clone, Debug)]
pub(super) struct Allowance {
    share: f64,
    left_ns: f64,
    settled: Nanos,
    asleep_ns: u64,
    /// Time counted as awake since the last measurement.
    counted_ns: u64,
    measured: Option<(Nanos, u64)>,
}

impl Allowance {
    pub(super) fn new(share: f64, now: Nanos) -> Self {
        Allowance {
            share,
            left_ns: 0.0,
            settled: now,
            asleep_ns: 0,
            counted_ns: 0,
            measured: None,
        }
    }

    /// Records that `asleep_ns` of the time until the next settlement was slept.
    pub(super) fn slept(&mut self, asleep_ns: u64) {
        self.asleep_ns += asleep_ns;
    }

    /// Settles the time until `now`.
    pub(super) fn settle(&mut self, now: Nanos) {
        let elapsed_ns = now.since(self.settled);
        let awake_ns = elapsed_ns.saturating_sub(std::mem::take(&mut self.asleep_ns));
        self.counted_ns += awake_ns;
        self.add(self.share * elapsed_ns as f64 - awake_ns as f64);
        self.settled = now;
    }

    /// Returns whether a measurement is due.
    pub(super) fn wants_measurement(&self, now: Nanos) -> bool {
        let is_due = |(at, _): (Nanos, u64)| now.since(at) >= MEASURE_EVERY_NS;
        self.share > 0.0 && self.measured.is_none_or(is_due)
    }

    /// Records the core's total CPU time.
    pub(super) fn measured(&mut self, now: Nanos, cpu_ns: u64) {
        self.settle(now);
        let counted_ns = std::mem::take(&mut self.counted_ns);
        if let Some((_, before_ns)) = self.measured {
            self.add(counted_ns as f64 - cpu_ns.saturating_sub(before_ns) as f64);
        }
        self.measured = Some((now, cpu_ns));
    }

    fn add(&mut self, ns: f64) {
        self.left_ns = (self.left_ns + ns).clamp(-DEPTH_NS, DEPTH_NS);
    }

    pub(super) fn is_left(&self) -> bool {
        self.left_ns > 0.0
    }
}
