//! Guests whose disk touches buffers again that they have taken back, and the host's count of that.
//!
//! The host judges: the age of a buffer is counted from when the guest had released it for certain,
//! on the host's clock, and an access at the limit's age or later has to be blocked. The limit is
//! the policy's own and one period of the worker of the guest's driver. What is judged is an access
//! that the guest has waited for by its own clock, with a moment to spare: a guest whose processor
//! does not run for a while, as happens in an emulated host, can remove nothing meanwhile. Accesses
//! at such an age that it has not waited for are counted by themselves.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::guest::{Driver, Guest, Outcome};
use super::host::Host;
use super::workloads;

/// A policy of the guest's driver, and how long it may leave a released buffer within reach.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Its name.
    pub name: &'static str,
    /// The driver under it.
    pub driver: Driver,
    /// The policy's own limit, in ms.
    limit_ms: u64,
    /// Period of the driver's worker, in ms.
    period_ms: u64,
}

impl Policy {
    /// `optimistic`: for a residency of 800 ms.
    pub const OPTIMISTIC: Self = Self {
        name: "optimistic",
        driver: Driver::Module(&["reuse=optimistic", "residency_ms=800"]),
        limit_ms: 800,
        period_ms: 100,
    };
    /// `rtc`: for one cycle of 400 ms after that of the first release.
    pub const RTC: Self = Self {
        name: "rtc",
        driver: Driver::Module(&["reuse=rtc", "ttl_ms=400", "cycles=1"]),
        limit_ms: 800,
        period_ms: 50,
    };

    /// Age from which on an access has to be blocked, in ms.
    pub fn late_ms(&self) -> u64 {
        self.limit_ms + self.period_ms
    }
}

/// How many accesses there are to be.
#[derive(Clone, Copy, Debug)]
pub struct Attack {
    /// Buffers of a round.
    pub buffers: u64,
    /// Rounds.
    pub rounds: u64,
    /// Late accesses that there have to be. A buffer whose address comes again before its time
    /// is none any more: as many as an emulated guest that is slow to read to them loses.
    pub late: u64,
}

impl Attack {
    /// Adds a disk that does so to `guest`, whose driver has this policy, and the command that
    /// provokes it to its script. Returns the number of the disk.
    pub fn add(self, guest: &mut Guest, host: &Host, policy: &Policy) -> Result<usize> {
        let Self {
            buffers, rounds, ..
        } = self;
        let disk = guest.disks.len();
        let limit = policy.late_ms();
        guest.faults.push(format!("disk{disk}:late={limit}"));
        let node = workloads::disk_node(guest.mode, disk);
        workloads::add_disk(guest, host, 0, "")?;
        let command = format!(
            "workload late {node} --limit-ms {limit} --buffers {buffers} --rounds {rounds}"
        );
        // A console is slow, and a log of what is blocked long.
        guest.script.push_str(&match guest.script.is_empty() {
            true => format!("dmesg -n 1; {command}"),
            false => format!("; {command} || exit 1"),
        });
        Ok(disk)
    }
}

/// What the host has counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Accesses that came before the limit, and were blocked.
    pub early_blocked: u64,
    /// Accesses that came before the limit, and went through.
    pub early_allowed: u64,
    /// Accesses that came later, and were blocked.
    pub late_blocked: u64,
    /// Accesses that came later, and went through.
    pub late_allowed: u64,
    /// Accesses at that age that the guest had not waited for, and that were blocked.
    pub unjudged_blocked: u64,
    /// The same that went through.
    pub unjudged_allowed: u64,
    /// Age of the oldest buffer that was reached, in ms; 0 if none was.
    pub stale_ms_max: u64,
}

impl Counts {
    /// Of disk number `disk` of a guest that ended well.
    ///
    /// # Errors
    /// The ledger has none, or the guest has seen other changes than the host has made.
    pub fn of(outcome: &Outcome, disk: usize) -> Result<Self> {
        let found = &outcome.ledger["findings"][format!("disk{disk}")];
        let counts = Self::parse(found)?;
        let line = outcome.line("late ok ");
        let line = line.with_context(|| format!("no closing line\n{}", outcome.tail()))?;
        let mut words = line.split_whitespace();
        let seen = words.find_map(|word| word.strip_prefix("changed="));
        let seen: u64 = seen.context("no count of changes")?.parse()?;
        let made = counts.early_allowed + counts.late_allowed + counts.unjudged_allowed;
        ensure!(
            seen == made,
            "{made} accesses went through, and the guest saw {seen} changes: {line}"
        );
        Ok(counts)
    }

    fn parse(found: &Value) -> Result<Self> {
        let of = |key: &str| {
            let count = found[key].as_u64();
            count.with_context(|| format!("the ledger has no {key}: {found}"))
        };
        Ok(Self {
            early_blocked: of("early_blocked")?,
            early_allowed: of("early_allowed")?,
            late_blocked: of("late_blocked")?,
            late_allowed: of("late_allowed")?,
            unjudged_blocked: of("unjudged_blocked")?,
            unjudged_allowed: of("unjudged_allowed")?,
            stale_ms_max: found["allowed_max_ms"].as_u64().unwrap_or(0),
        })
    }

    /// Every access after the limit was blocked, and there were as many as `attack` wants.
    ///
    /// # Errors
    /// With all counts.
    pub fn check(&self, attack: Attack) -> Result<()> {
        ensure!(
            self.late_allowed == 0 && self.late_blocked >= attack.late,
            "late accesses, of which {} are wanted and all to be blocked: {self:?}",
            attack.late
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(late_blocked: u64, late_allowed: u64) -> Value {
        json!({
            "early_blocked": 1, "early_allowed": 2, "unjudged_blocked": 0, "unjudged_allowed": 3,
            "late_blocked": late_blocked, "late_allowed": late_allowed,
            "allowed_max_ms": null
        })
    }

    #[test]
    fn one_late_access_that_goes_through_or_is_missing_fails() {
        let attack = Attack {
            buffers: 5,
            rounds: 3,
            late: 10,
        };
        let check = |late_blocked, late_allowed| {
            let counts = Counts::parse(&found(late_blocked, late_allowed)).expect("counts");
            counts.check(attack)
        };
        assert!(check(10, 0).is_ok());
        assert!(check(9, 1).is_err());
        assert!(check(9, 0).is_err());
        assert!(check(11, 0).is_ok());
    }

    #[test]
    fn a_ledger_without_findings_is_no_ledger_of_zeroes() {
        assert!(Counts::parse(&Value::Null).is_err());
    }
}
