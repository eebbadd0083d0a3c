//! Verdicts on the clients of a self-test: a line, and a file for programs.
//!
//! A client is verified if its script passed; one that was skipped is not. Scripts print figures as
//! `key=number`. Of lost pings the sum over all scripts is kept, of other figures the largest
//! value.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use report::{Host, Object};
use serde_json::{Map, Value, json};

use super::clients::Ran;

/// Prefix of the clients of a block device behind an IOMMU, which have a count of their own.
const BLOCK_BEHIND_IOMMU: &str = "client: viommu.sh";

/// Keys that are always there, null if no script printed them.
const KEYS: [&str; 4] = [
    "ping_lost_strict",
    "ping_lost_lazy",
    "ping_lost_storm",
    "tap_frames_per_mib",
];

/// Verdict on one client.
enum Verdict {
    Verified(String),
    Skipped(String),
    Failed,
}

/// Verdicts on all clients.
#[derive(Default)]
pub struct Verdicts(Vec<(String, Verdict, f64)>);

impl Verdicts {
    /// Adds one, with its duration.
    pub fn add(&mut self, name: &str, ran: &Result<Ran>, seconds: f64) {
        let verdict = match ran {
            Ok(Ran::Passed(seen)) => Verdict::Verified(seen.clone()),
            Ok(Ran::Skipped(reason)) => Verdict::Skipped(reason.clone()),
            Err(_) => Verdict::Failed,
        };
        self.0.push((name.to_owned(), verdict, seconds));
    }

    fn count(&self, is: impl Fn(&Verdict) -> bool) -> usize {
        self.0.iter().filter(|(_, verdict, _)| is(verdict)).count()
    }

    /// Returns the numbers of verified, skipped and failed clients.
    fn counts(&self) -> [usize; 3] {
        [
            self.count(|verdict| matches!(verdict, Verdict::Verified(_))),
            self.count(|verdict| matches!(verdict, Verdict::Skipped(_))),
            self.count(|verdict| matches!(verdict, Verdict::Failed)),
        ]
    }

    /// Renders a summary for a reader; `None` if no client ran.
    pub fn summary(&self) -> Option<String> {
        let [verified, skipped, failed] = self.counts();
        if self.0.is_empty() {
            return None;
        }
        let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
        for (_, verdict, _) in &self.0 {
            if let Verdict::Skipped(reason) = verdict {
                *reasons.entry(reason).or_default() += 1;
            }
        }
        let reasons: Vec<_> = reasons
            .iter()
            .map(|(reason, count)| format!("{count}: {reason}"))
            .collect();
        let reasons = match reasons.is_empty() {
            true => String::new(),
            false => format!(" ({})", reasons.join("; ")),
        };
        Some(format!(
            "clients verified: {verified}, skipped: {skipped}{reasons}, failed: {failed}"
        ))
    }

    /// Writes the file for programs.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let object = self.object(&Host::read());
        object
            .write(path)
            .with_context(|| path.display().to_string())
    }

    fn object(&self, host: &Host) -> Object {
        let mut object = Object::new(host, "other people's programs on exitless serve");
        for key in KEYS {
            object.missing(key);
        }
        let counts = ["clients_verified", "clients_skipped", "clients_failed"];
        for (key, count) in counts.into_iter().zip(self.counts()) {
            object.number(key, count as f64);
        }
        let behind = self.0.iter().filter(|(name, verdict, _)| {
            name.starts_with(BLOCK_BEHIND_IOMMU) && matches!(verdict, Verdict::Verified(_))
        });
        object.number("viommu_blk_verified", behind.count() as f64);
        let mut all = Map::new();
        for (name, verdict, seconds) in &self.0 {
            let (word, said) = match verdict {
                Verdict::Verified(seen) => ("verified", seen.as_str()),
                Verdict::Skipped(reason) => ("skipped", reason.as_str()),
                Verdict::Failed => ("failed", ""),
            };
            if let Verdict::Verified(seen) = verdict {
                for (key, value) in figures(seen) {
                    let before = object.get(key);
                    let value = match key.starts_with("ping_lost_") {
                        true => before.unwrap_or(0.0) + value,
                        false => before.map_or(value, |before| before.max(value)),
                    };
                    if key.starts_with("ping_lost_") || KEYS.contains(&key) {
                        object.number(key, value);
                    }
                }
            }
            let seconds = report::object::round(*seconds, 1);
            let value = json!({ "verdict": word, "said": said, "seconds": seconds });
            all.insert(name.clone(), value);
        }
        object.value("clients", Value::Object(all));
        object
    }
}

/// Returns the words `key=number` of a script's output.
fn figures(said: &str) -> impl Iterator<Item = (&str, f64)> {
    let words = said.split([' ', ',', ';']);
    words.filter_map(|word| {
        let (key, value) = word.split_once('=')?;
        Some((key, value.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn verdicts() -> Verdicts {
        let mut verdicts = Verdicts::default();
        let passed = |seen: &str| Ok(Ran::Passed(seen.to_owned()));
        verdicts.add(
            "client: net.sh strict",
            &passed("strict: ping_lost_strict=0 tap_frames_per_mib=17 x=y"),
            1.25,
        );
        verdicts.add(
            "client: net.sh strict-ats",
            &passed("strict-ats: ping_lost_strict=2 tap_frames_per_mib=15"),
            2.0,
        );
        verdicts.add("client: viommu.sh strict", &passed("strict, 5 kills"), 3.0);
        for name in ["client: net-uml.sh", "client: uml.sh raw"] {
            let skipped = Ok(Ran::Skipped("linux.uml is missing".to_owned()));
            verdicts.add(name, &skipped, 0.0);
        }
        verdicts.add("client: dpdk.sh split", &Err(anyhow!("no")), 1.0);
        verdicts
    }

    #[test]
    fn a_skipped_client_is_not_verified_and_its_reason_is_said_once() {
        assert_eq!(Verdicts::default().summary(), None);
        assert_eq!(
            verdicts().summary().unwrap(),
            "clients verified: 3, skipped: 2 (2: linux.uml is missing), failed: 1"
        );
    }

    #[test]
    fn pings_lost_are_added_up_and_of_other_figures_the_worst_is_kept() {
        let object = verdicts().object(&Host::read());
        assert_eq!(object.get("clients_verified"), Some(3.0));
        assert_eq!(object.get("ping_lost_strict"), Some(2.0));
        assert_eq!(object.get("tap_frames_per_mib"), Some(17.0));
        assert_eq!(object.get("viommu_blk_verified"), Some(1.0));
        assert_eq!(object.keys()["ping_lost_lazy"], Value::Null);
        let clients = &object.keys()["clients"];
        assert_eq!(clients["client: uml.sh raw"]["verdict"], "skipped");
        assert_eq!(clients["client: dpdk.sh split"]["verdict"], "failed");
    }
}
