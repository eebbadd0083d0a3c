//! One boot: a guest with an NVMe drive and a network card, whose host's policy changes while it
//! runs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::assigned::{Device, FaultLog};
use serde_json::{Map, Value};

use super::case::{Case, HostPolicy, Work};
use crate::assign::{AssignLab, Session};
use crate::demo::PerIo;

/// File in the emulated host with the policy of both devices.
const POLICY: &str = "policy";

/// Longest age of a stale mapping, ms: long compared with a request in an emulated machine, so that
/// numbers and not the lab's time decide when it is removed.
const AGE_MS: u32 = 10_000;

/// A window of the ledger, and its origin.
#[derive(Clone, Debug)]
pub struct Row {
    /// The guest.
    pub case: Case,
    /// Policy of the host in it.
    pub policy: HostPolicy,
    /// Kind of the requests.
    pub work: Work,
    /// Number of requests.
    pub requests: u32,
    /// The window.
    pub window: Value,
}

/// Result of a boot.
pub struct Boot {
    /// Its windows.
    pub rows: Vec<Row>,
    /// KiB that were locked after both devices had lost their drivers.
    pub locked_after_detach_kib: u64,
    /// Largest number of locked KiB: sampled ten times a second.
    pub locked_max_kib: u64,
    /// DMA that the host's IOMMU refused.
    pub faults: FaultLog,
}

/// Counts of both devices in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// Calls that map, and that unmap.
    pub maps: f64,
    /// See `maps`.
    pub unmaps: f64,
    /// Mappings that the calls ended.
    pub unmapped: f64,
    /// Invalidations of pages, of the domain, and others.
    pub pages_told: f64,
    /// See `pages_told`.
    pub domains_told: f64,
    /// See `pages_told`.
    pub others_told: f64,
    /// Stale mappings that were reused.
    pub hits: f64,
    /// Maps that found no stale mapping.
    pub misses: f64,
}

impl Row {
    /// Returns the exits per request.
    pub fn per_io(&self) -> PerIo {
        PerIo::of(&self.window, self.requests)
    }

    /// Returns the assigned devices in the window, with their addresses.
    pub fn devices(&self) -> &[Value] {
        self.window["devices"].as_array().map_or(&[], Vec::as_slice)
    }

    /// Returns a number of one device.
    pub fn number(device: &Value, key: &str) -> f64 {
        device[key].as_f64().unwrap_or(f64::NAN)
    }

    /// Returns the exits for registers of units in the whole window.
    pub fn register_exits(&self) -> f64 {
        self.window["exits"]["iommu"].as_f64().unwrap_or(f64::NAN)
    }

    /// Returns the counts of both devices.
    pub fn sums(&self) -> Sums {
        let of = |key: &str| self.devices().iter().map(|it| Self::number(it, key)).sum();
        Sums {
            maps: of("maps"),
            unmaps: of("unmaps"),
            unmapped: of("unmapped"),
            pages_told: of("pages_told"),
            domains_told: of("domains_told"),
            others_told: of("others_told"),
            hits: of("hits"),
            misses: of("misses"),
        }
    }

    /// Checks that the window was under its policy throughout, as far as its end shows it.
    fn check(&self) -> Result<()> {
        ensure!(
            self.window["histograms"].as_bool() == Some(true),
            "no exit histograms: tracefs is not available to `exitless run` in the lab"
        );
        for device in self.devices() {
            ensure!(
                device["policy"].as_str() == Some(self.policy.ledger_name()),
                "{}, {}: the policy is {}",
                self.case.name(),
                self.policy.name(),
                device["policy"]
            );
            if let Some(most) = self.policy.most() {
                let allowed = device["stale_allowed"].as_u64();
                ensure!(
                    allowed == Some(most),
                    "{allowed:?} stale mappings are allowed, not {most}"
                );
            }
        }
        Ok(())
    }

    /// Returns all figures to be reported, by name; counts per 1,000 requests.
    pub fn figures(&self, device: &str) -> Map<String, Value> {
        let per = |value: f64| round(value * 1000.0 / f64::from(self.requests));
        let per_io = self.per_io();
        let mut row = Map::new();
        let mut set = |key: &str, value: Value| {
            row.insert(key.to_owned(), value);
        };
        set("guest", self.case.name().into());
        set("policy", self.policy.name().into());
        set("work", self.work.name().into());
        set("requests", self.requests.into());
        for cause in crate::demo::CAUSES {
            let exits = self.window["exits"][cause].as_f64().unwrap_or(f64::NAN);
            set(&format!("{cause}_exits_per_1000"), per(exits).into());
        }
        set("total_exits_per_1000", round(per_io.total * 1000.0).into());
        set(
            "compared_exits_per_1000",
            round(per_io.compared() * 1000.0).into(),
        );
        let sums = self.sums();
        for (key, value) in [
            ("maps", sums.maps),
            ("unmaps", sums.unmaps),
            ("mappings_unmapped", sums.unmapped),
            ("page_invalidations", sums.pages_told),
            ("domain_invalidations", sums.domains_told),
            ("hits", sums.hits),
            ("misses", sums.misses),
        ] {
            set(&format!("{key}_per_1000"), per(value).into());
        }
        let working = self.devices().iter();
        if let Some(device) = working.into_iter().find(|it| it["address"] == *device) {
            for key in [
                "pinned",
                "pinned_peak",
                "guest_pages",
                "stale",
                "stale_max",
                "stale_allowed",
                "stale_ns_max",
                "stale_ns_allowed",
                "longest_call_ns",
            ] {
                set(key, device[key].clone());
            }
        }
        row
    }
}

/// Returns the KiB that are locked once the owner has the last policy, and has removed the mappings
/// that the one before had kept, for which it gets some time.
fn locked_at_rest(guest: &Session<'_>) -> Result<u64> {
    let since = Instant::now();
    loop {
        let locked = guest.locked()?;
        if locked == 0 || since.elapsed() > MOMENT {
            return Ok(locked);
        }
    }
}

/// Time for that: shorter than any policy keeps stale mappings ([`AGE_MS`]).
const MOMENT: Duration = Duration::from_secs(5);

/// Rounds to two decimals.
pub fn round(value: f64) -> f64 {
    report::object::round(value, 2)
}

/// Boots the guest of `case` with both devices, and counts each of `works`, of about `count`
/// requests, under each of its policies.
///
/// # Errors
/// A step failed, data came back wrong, or a window was under another policy.
pub fn boot(lab: &AssignLab, case: Case, works: &[Work], count: u32) -> Result<Boot> {
    let name = case.name();
    let count = case.count(count);
    let host = lab.host();
    let first = case.policies.first().context("no policy")?;
    host.put(POLICY, first.text().as_bytes())?;
    let options = match first {
        HostPolicy::Off => String::new(),
        _ => format!(",policy-file={},age={AGE_MS}", host.path(POLICY)),
    };
    let devices = [(Device::Nvme, &*options), (Device::Net, &*options)];
    let mut guest = lab
        .begin(&case.guest(), &devices)
        .with_context(|| name.clone())?;
    if let Some(prepare) = case.prepare() {
        let said = guest.run(&prepare)?;
        ensure!(
            said.matches(case.says()).count() == 2,
            "{name}: {said:?} names no two groups that are {:?}",
            case.says()
        );
    }
    guest.run(&lab.network_script("eth0", 10))?;
    let peer = lab.peer_address();
    let mut plan = Vec::new();
    for policy in case.policies {
        if *policy != HostPolicy::Off {
            host.put(POLICY, policy.text().as_bytes())?;
        }
        for work in works {
            let began = Instant::now();
            let step = guest.run(&work.step(count, &peer));
            step.with_context(|| format!("{name}, {}, {}", policy.name(), work.name()))?;
            let (policy_name, seconds) = (policy.name(), began.elapsed().as_secs());
            eprintln!("assign-lab:   {policy_name}, {}: {seconds} s", work.name());
            plan.push((*policy, *work));
        }
    }
    // Without drivers nothing is mapped; with all memory pinned it stays mapped. Mappings that a
    // policy keeps do not belong to a driver.
    if *first != HostPolicy::Off {
        host.put(POLICY, HostPolicy::Strict.text().as_bytes())?;
    }
    let searches = [Device::Nvme, Device::Net].map(Device::search).join("; ");
    guest.run(&format!(
        "for a in $({searches}); do echo $a >/sys/bus/pci/devices/$a/driver/unbind || exit 1; done"
    ))?;
    let locked_after_detach_kib = locked_at_rest(&guest)?;
    let run = guest.end()?;
    run.outcome.check().with_context(|| name.clone())?;
    let windows = run.outcome.windows();
    ensure!(
        windows.len() == plan.len(),
        "{name}: {} windows for {} works",
        windows.len(),
        plan.len()
    );
    let rows = plan
        .into_iter()
        .zip(windows)
        .map(|((policy, work), window)| {
            let requests = work.requests(count);
            let window = window.clone();
            let row = Row {
                case,
                policy,
                work,
                requests,
                window,
            };
            row.check()?;
            Ok(row)
        });
    Ok(Boot {
        rows: rows.collect::<Result<_>>()?,
        locked_after_detach_kib,
        locked_max_kib: run.locked.max(),
        faults: run.faults,
    })
}
