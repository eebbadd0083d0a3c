//! Guests whose disk accesses buffers again that they have unmapped, and the host's count of these
//! accesses.
//!
//! The verdict is the host's: the age of a buffer is counted from the time when the guest had
//! certainly released it, on the host's clock, and an access at the limit's age or later must be
//! blocked. The limit is the policy's own plus one period of the worker of the guest's driver. Only
//! accesses are judged that the guest has waited for by its own clock, with a margin: a guest whose
//! processor does not run for a while, as happens in an emulated host, cannot unmap anything
//! meanwhile. Accesses at that age that the guest has not waited for are counted separately.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::guest::{Driver, Guest, Outcome};
use super::host::Host;
use super::workloads;

/// Policy of the guest's driver, and the time for which it may leave a released buffer accessible.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Its name.
    pub name: &'static str,
    /// Driver that has the policy.
    pub driver: Driver,
    /// The policy's own limit, in ms.
    limit_ms: u64,
    /// Period of the driver's worker, in ms.
    period_ms: u64,
}

impl Policy {
    /// `optimistic`, with a residency of 800 ms.
    pub const OPTIMISTIC: Self = Self {
        name: "optimistic",
        driver: Driver::Module(&["reuse=optimistic", "residency_ms=800"]),
        limit_ms: 800,
        period_ms: 100,
    };
    /// `rtc`: until the end of one cycle of 400 ms after that of the first release.
    pub const RTC: Self = Self {
        name: "rtc",
        driver: Driver::Module(&["reuse=rtc", "ttl_ms=400", "cycles=1"]),
        limit_ms: 800,
        period_ms: 50,
    };

    /// Returns the age from which on an access must be blocked, in ms.
    pub fn late_ms(&self) -> u64 {
        self.limit_ms + self.period_ms
    }
}

/// Number of accesses to be made.
#[derive(Clone, Copy, Debug)]
pub struct Attack {
    /// Buffers of a round.
    pub buffers: u64,
    /// Rounds.
    pub rounds: u64,
    /// Late accesses that are required. A buffer whose address is reused before its time does not
    /// count: an emulated guest that is slow to read into them loses as many.
    pub late: u64,
}

impl Attack {
    /// Adds such a disk to `guest`, whose driver has this policy, and the command that triggers its
    /// accesses to its script. Returns the number of the disk.
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
        // A console is slow, and the log of blocked accesses is long.
        guest.script.push_str(&match guest.script.is_empty() {
            true => format!("dmesg -n 1; {command}"),
            false => format!("; {command} || exit 1"),
        });
        Ok(disk)
    }
}

/// Counts of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Accesses before the limit that were blocked.
    pub early_blocked: u64,
    /// Accesses before the limit that were allowed.
    pub early_allowed: u64,
    /// Later accesses that were blocked.
    pub late_blocked: u64,
    /// Later accesses that were allowed.
    pub late_allowed: u64,
    /// Accesses at that age that the guest had not waited for, and that were blocked.
    pub unjudged_blocked: u64,
    /// The same that were allowed.
    pub unjudged_allowed: u64,
    /// Age of the oldest buffer that was accessed, in ms; 0 if none was.
    pub stale_ms_max: u64,
}

impl Counts {
    /// Returns the counts of disk number `disk` of a guest that succeeded.
    ///
    /// # Errors
    /// The ledger has none, or the guest has seen another number of changes than the host has made.
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

    /// Checks that every access after the limit was blocked, and that there were as many as
    /// `attack` requires.
    ///
    /// # Errors
    /// It was not so; with all counts.
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
