//! The part of a core's time that may be spent at the lower price: a bucket.
//!
//! ```text
//! left += share × elapsed - awake          each time that a gap has ended; within ± DEPTH
//! ```
//! While something is left, the policy spins as long as the lower price says; otherwise as long as the price of the whole core says.
//! So gaps of one length, which no limit divides, are divided all the same: some are spun through and others slept through. All
//! awake time counts, serving too: a core that is busy has no cheap part left.

use crate::clock::Nanos;

/// As much as may be saved up or owed, in nanoseconds: some dozens of gaps where the allowance matters.
const DEPTH_NS: f64 = 1_000_000.0;

#[derive(Clone, Debug)]
pub(super) struct Allowance {
    share: f64,
    left_ns: f64,
    settled: Nanos,
    asleep_ns: u64,
}

impl Allowance {
    pub(super) fn new(share: f64, now: Nanos) -> Self {
        Allowance {
            share,
            left_ns: 0.0,
            settled: now,
            asleep_ns: 0,
        }
    }

    /// Of the time until the next settlement so much was slept.
    pub(super) fn slept(&mut self, asleep_ns: u64) {
        self.asleep_ns += asleep_ns;
    }

    /// Everything until `now` counts.
    pub(super) fn settle(&mut self, now: Nanos) {
        let elapsed_ns = now.since(self.settled);
        let awake_ns = elapsed_ns.saturating_sub(std::mem::take(&mut self.asleep_ns));
        let change_ns = self.share * elapsed_ns as f64 - awake_ns as f64;
        self.left_ns = (self.left_ns + change_ns).clamp(-DEPTH_NS, DEPTH_NS);
        self.settled = now;
    }

    pub(super) fn is_left(&self) -> bool {
        self.left_ns > 0.0
    }
}
