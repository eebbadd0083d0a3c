//! Measured cost of arming and disarming a register page on this host.
//!
//! The cost depends on the host's kernel (an SRCU grace period, a TLB shoot-down) and differs from
//! host to host by a factor of 50: at most 0.2 ms natively, 5 to 14 ms in the lab (an emulated
//! host). The idle policy weighs it against the time that a sidecore would sleep. With a constant a
//! sidecore would sleep too often on one host and too rarely on another.

use std::time::Instant;

/// Moving average of the cost of an arming and its disarming, in ns.
pub(super) struct ArmCost {
    average_ns: u64,
    /// Cost of the arming that the next disarming completes, in ns.
    armed_ns: u64,
}

impl ArmCost {
    /// Creates an average of `ns`, which is used until a cost has been measured.
    pub(super) fn new(ns: u64) -> Self {
        Self {
            average_ns: ns,
            armed_ns: 0,
        }
    }

    /// Returns the start of a measurement.
    pub(super) fn start() -> Instant {
        Instant::now()
    }

    /// Records that the page was armed, in a call that began at `start`.
    pub(super) fn armed(&mut self, start: Instant) {
        self.armed_ns = elapsed_ns(start);
    }

    /// Records that the page was disarmed, in a call that began at `start`. Each pair has the
    /// weight of a quarter, so that the effect of a single delay of the host decays soon.
    pub(super) fn disarmed(&mut self, start: Instant) {
        let arming = std::mem::take(&mut self.armed_ns);
        self.add(arming.saturating_add(elapsed_ns(start)));
    }

    fn add(&mut self, cost_ns: u64) {
        self.average_ns = self.average_ns - self.average_ns / 4 + cost_ns / 4;
    }

    /// Returns the average, in ns.
    pub(super) fn ns(&self) -> u64 {
        self.average_ns
    }
}

fn elapsed_ns(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_follows_the_host() {
        let mut cost = ArmCost::new(50_000);
        for _ in 0..20 {
            cost.add(8_000_000);
        }
        assert!(
            (7_900_000..=8_000_000).contains(&cost.ns()),
            "{}",
            cost.ns()
        );
        for _ in 0..40 {
            cost.add(100_000);
        }
        assert!((99_900..=200_000).contains(&cost.ns()), "{}", cost.ns());
    }

    #[test]
    fn arming_and_disarming_are_one_measurement() {
        let mut cost = ArmCost::new(0);
        let start = Instant::now();
        cost.armed(start);
        cost.disarmed(start);
        assert!(cost.ns() > 0 && cost.armed_ns == 0);
    }
}
