//! Late accesses: a disk that accesses buffers again that the guest has released, under the
//! policies that keep mappings, with limits of 800 ms so that a run is short. The host counts.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::system::guest::{Guest, Mode};
use crate::system::host::Host;
use crate::system::late::{Attack, Counts, Policy};

/// Policies that keep mappings.
const POLICIES: [Policy; 2] = [Policy::OPTIMISTIC, Policy::RTC];

/// Names of their rows.
pub const NAMES: [&str; POLICIES.len()] = ["late_optimistic", "late_rtc"];

/// 1,000 late accesses, after which the disk makes none, and several times as many early ones. The
/// rounds would give more: a guest that is delayed loses buffers.
const ATTACK: Attack = Attack {
    buffers: 25,
    rounds: 70,
    late: 1_000,
};

/// Counts of late accesses, by policy.
#[derive(Default)]
pub struct Late(Vec<(&'static str, Counts)>);

impl Late {
    /// Measures the policies whose row `is_wanted`.
    pub fn measure(host: &Host, is_wanted: impl Fn(&str) -> bool) -> Result<Self> {
        let mut all = Vec::new();
        for (policy, name) in POLICIES.iter().zip(NAMES) {
            if is_wanted(name) {
                eprintln!("pviommu-lab: {name}");
                let counts = measure(host, policy).context(name)?;
                all.push((policy.name, counts));
            }
        }
        Ok(Self(all))
    }

    /// Returns the figures, by key. Late accesses are those of the worst policy, early ones the sum
    /// over all.
    pub fn values(&self) -> Vec<(String, Value)> {
        let mut values = Vec::new();
        let mut add = |key: String, value: u64| values.push((key, json!(value)));
        let before = |counts: &Counts| counts.early_allowed + counts.early_blocked;
        for (name, counts) in &self.0 {
            add(format!("stale_ms_max_{name}"), counts.stale_ms_max);
            add(format!("late_blocked_of_1000_{name}"), counts.late_blocked);
            add(format!("late_allowed_before_{name}"), counts.early_allowed);
            add(format!("late_attempts_before_{name}"), before(counts));
            let unjudged = counts.unjudged_allowed;
            add(format!("late_unjudged_allowed_{name}"), unjudged);
        }
        let counts = || self.0.iter().map(|(_, counts)| counts);
        if let Some(blocked) = counts().map(|of| of.late_blocked).min() {
            add("late_blocked_of_1000".into(), blocked);
            let allowed = counts().map(|of| of.early_allowed).sum();
            add("late_allowed_before".into(), allowed);
            add("late_attempts_before".into(), counts().map(before).sum());
        }
        values
    }

    /// Renders a line for each policy.
    pub fn table(&self) -> String {
        let line = |(name, counts): &(&str, Counts)| {
            format!(
                "  late accesses, {name}: {} of {} blocked after limit and period; before, {} of \
                 {} went through, \
                 the oldest after {} ms; not waited for, {} of {}\n",
                counts.late_blocked,
                counts.late_blocked + counts.late_allowed,
                counts.early_allowed,
                counts.early_allowed + counts.early_blocked,
                counts.stale_ms_max,
                counts.unjudged_allowed,
                counts.unjudged_allowed + counts.unjudged_blocked
            )
        };
        self.0.iter().map(line).collect()
    }
}

fn measure(host: &Host, policy: &Policy) -> Result<Counts> {
    let mut guest = Guest::new(Mode::Virtio, "");
    guest.driver = policy.driver;
    guest.limit = Duration::from_secs(600);
    super::pin(&mut guest, host);
    let disk = ATTACK.add(&mut guest, host, policy)?;
    let outcome = guest.run(host)?;
    Counts::of(&outcome, disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_the_worse_policy_s() {
        let counts = |late_blocked| Counts {
            early_blocked: 3,
            early_allowed: 7,
            late_blocked,
            late_allowed: 1000 - late_blocked,
            unjudged_blocked: 2,
            unjudged_allowed: 1,
            stale_ms_max: 390,
        };
        let late = Late(vec![("optimistic", counts(1000)), ("rtc", counts(998))]);
        let values: std::collections::BTreeMap<_, _> = late.values().into_iter().collect();
        assert_eq!(values["late_blocked_of_1000"], 998);
        assert_eq!(values["late_allowed_before"], 14);
        assert_eq!(values["late_attempts_before"], 20);
        assert_eq!(values["stale_ms_max_rtc"], 390);
        assert!(late.table().contains("rtc: 998 of 1000 blocked"));
        assert!(Late::default().values().is_empty());
    }
}
