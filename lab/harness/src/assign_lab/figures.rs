//! The figures of all boots, and their bars.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::assigned::Device;
use report::Object;
use report::object::round as rounded;
use serde_json::{Value, json};

use super::case::{Case, HostPolicy, Unmapping, Work};
use super::matrix::{Boot, Row};
use super::peer::Peer;
use crate::assign::runs::{Kills, Reclaimed};
use crate::assign::{AssignLab, Host, Mode};
use crate::judged::{Bar, judge};

/// Figures that are judged, where they were measured.
const BARS: [(&str, Bar); 13] = [
    ("trap_register_exits_per_map", Bar::AtLeast(0.9)),
    ("trap_register_exits_per_unmap", Bar::AtLeast(0.9)),
    ("shared_register_exits", Bar::AtMost(0.0)),
    ("shared_minus_none_exits_per_io", Bar::AtMost(0.05)),
    ("pinned_over_bound_max_pages", Bar::AtMost(0.0)),
    ("pinned_after_detach", Bar::AtMost(0.0)),
    ("host_dmar_faults", Bar::AtMost(0.0)),
    ("stale_over_contract", Bar::AtMost(0.0)),
    ("rogue_blocked_of_3", Bar::AtLeast(3.0)),
    ("resident_percent", Bar::AtMost(50.0)),
    ("reclaimed_percent", Bar::AtLeast(25.0)),
    ("kills_clean_of_20", Bar::AtLeast(20.0)),
    ("failed_runs", Bar::AtMost(0.0)),
];

/// Index of the guest with shared registers that is judged.
const SHARED: usize = 2;

/// Works that are judged: one request at a time.
const JUDGED: [Work; 2] = [Work::Write, Work::Read];

/// Figures so far.
pub struct Figures {
    object: Object,
    rows: Vec<Row>,
    table: Vec<Value>,
    after_detach_pages: Option<u64>,
    over_bound_pages: Option<f64>,
    faults: u64,
    io_under_reclaim: u64,
    failed: Vec<String>,
}

impl Figures {
    /// Creates a set of the conditions alone, and the native figures.
    pub fn new(host: &Host, count: u32, native: Option<&Object>) -> Result<Self> {
        let mut object = Object::new(&report::Host::read(), host.label());
        object.value("host_kernel", host.kernel_release()?);
        object.value("requests_per_window", count);
        add_native(&mut object, native);
        Ok(Self {
            object,
            rows: Vec::new(),
            table: Vec::new(),
            after_detach_pages: None,
            over_bound_pages: None,
            faults: 0,
            io_under_reclaim: 0,
            failed: Vec::new(),
        })
    }

    /// Adds the windows of a boot.
    pub fn add(&mut self, lab: &AssignLab, boot: Boot) {
        self.faults += boot.faults.faults.len() as u64 + boot.faults.suppressed;
        for row in &boot.rows {
            let address = lab.address(row.work.device());
            self.table.push(Value::Object(row.figures(address)));
        }
        let is_confined = boot.rows.iter().all(|row| row.case.mode != Mode::None);
        if is_confined {
            let after = boot.locked_after_detach_kib.div_ceil(4);
            let before = self.after_detach_pages.unwrap_or(0);
            self.after_detach_pages = Some(after.max(before));
            for over in over_bound(&boot) {
                let before = self.over_bound_pages.unwrap_or(f64::NEG_INFINITY);
                self.over_bound_pages = Some(over.max(before));
            }
        }
        self.rows.extend(boot.rows);
    }

    /// Notes that a run failed.
    pub fn failed(&mut self, what: &str, error: &anyhow::Error) {
        self.failed.push(format!("{what}: {error:#}"));
    }

    /// Adds the result of rogue DMA.
    pub fn rogue(&mut self, blocked: Result<u32>) {
        match blocked {
            Ok(blocked) => self.object.value("rogue_blocked_of_3", blocked),
            Err(error) => {
                self.object.value("rogue_blocked_of_3", 0);
                self.failed("rogue", &error);
            }
        }
    }

    /// Adds the result of memory that was reclaimed under load.
    pub fn reclaimed(&mut self, of: Result<Reclaimed>) {
        match of {
            Ok(of) => {
                let reclaimed = of.full.saturating_sub(of.most) as f64 * 100.0 / of.memory as f64;
                let mut set = |key: &str, value: f64| self.object.number(key, rounded(value, 1));
                set("resident_percent", of.resident_percent());
                set("reclaimed_percent", reclaimed);
                set("reclaim_requests_verified", of.requests as f64);
                set("reclaim_seconds", of.seconds as f64);
                set("reclaim_looks", of.looks as f64);
                self.faults += of.run.faults.faults.len() as u64 + of.run.faults.suppressed;
                self.io_under_reclaim = of.requests;
                let after = of.locked_after_detach_kib.div_ceil(4);
                let before = self.after_detach_pages.unwrap_or(0);
                self.after_detach_pages = Some(after.max(before));
            }
            Err(error) => self.failed("reclaim", &error),
        }
    }

    /// Adds the result of QEMU in the same lab. If it does not run, that is no failure of ours.
    pub fn peer(&mut self, of: Result<[Peer; 2]>) {
        let peers = match of {
            Ok(peers) => peers,
            Err(error) => {
                eprintln!("assign-lab: QEMU: {error:#}");
                self.object.value("qemu_reason", format!("{error:#}"));
                return;
            }
        };
        for (name, peer) in ["qemu", "qemu_none"].into_iter().zip(peers) {
            for (work, counts) in [("read", &peer.read), ("write", &peer.write)] {
                for (count, value) in counts {
                    let key = format!("{name}_{work}_{count}_per_io");
                    self.object.number(&key, rounded(*value, 3));
                }
            }
            self.object
                .value(&format!("{name}_locked_kib"), peer.locked_kib);
        }
    }

    /// Adds the result of kills.
    pub fn kills(&mut self, of: Result<Kills>) {
        match of {
            Ok(of) => {
                self.object.value("kills_clean_of_20", of.clean);
                self.object.value("kills_pinned_pages", json!(of.held));
            }
            Err(error) => {
                self.object.value("kills_clean_of_20", 0);
                self.failed("kills", &error);
            }
        }
    }

    /// Returns the windows of `mode` and `unmapping`, polling with one vCPU under this policy,
    /// whose works are judged.
    fn judged(&self, mode: Mode, unmapping: Unmapping, idle: &str) -> Judged {
        let is_one = |row: &&Row| {
            let Case {
                mode: has,
                unmapping: unmaps,
                cpus,
                idle: idles,
                ..
            } = row.case;
            let policy = match mode {
                Mode::None => HostPolicy::Off,
                _ => HostPolicy::Strict,
            };
            (has, unmaps, cpus, idles, row.policy) == (mode, unmapping, 1, idle, policy)
                && JUDGED.contains(&row.work)
        };
        let mut sum = Judged::default();
        for row in self.rows.iter().filter(is_one) {
            let (sums, requests) = (row.sums(), f64::from(row.requests));
            sum.requests += requests;
            sum.register_exits += row.register_exits();
            sum.compared += row.per_io().compared() * requests;
            sum.maps += sums.maps;
            sum.unmaps += sums.unmaps;
            // A device of another domain counts them among the others.
            sum.domains += sums.domains_told;
        }
        sum
    }

    fn set_register_exits(&mut self) {
        let strict = Unmapping::Strict;
        for mode in Mode::VTD {
            let name = mode.name();
            let sum = self.judged(mode, strict, "poll");
            if sum.requests == 0.0 {
                continue;
            }
            let lazy = self.judged(mode, Unmapping::Lazy, "poll");
            let both = sum.register_exits / (sum.maps + sum.unmaps);
            // Two windows, two unknowns: in a lazy guest's window nearly all invalidations are of
            // maps, one submission each.
            let per_map = match lazy.requests > 0.0 {
                true => {
                    (lazy.register_exits - per_submission(mode) * lazy.domains).max(0.0) / lazy.maps
                }
                false => both,
            };
            let per_unmap = (sum.register_exits - per_map * sum.maps) / sum.unmaps;
            for (key, value) in [
                ("register_exits", sum.register_exits),
                ("register_exits_per_map_or_unmap", both),
                ("register_exits_per_map", per_map),
                ("register_exits_per_unmap", per_unmap),
            ] {
                self.object
                    .number(&format!("{name}_{key}"), rounded(value, 3));
            }
        }
    }

    fn set_differences(&mut self) {
        for idle in ["poll", "adaptive"] {
            let none = self.judged(Mode::None, Unmapping::Strict, idle);
            for mode in Mode::VTD {
                let with = self.judged(mode, Unmapping::Strict, idle);
                if with.requests == 0.0 || none.requests == 0.0 {
                    continue;
                }
                let difference = with.compared / with.requests - none.compared / none.requests;
                let suffix = if idle == "poll" { "" } else { "_adaptive" };
                let key = format!("{}_minus_none_exits_per_io{suffix}", mode.name());
                self.object.number(&key, rounded(difference, 4));
            }
        }
    }

    /// Sets the share of maps of these works that found their page stale, with shared registers and
    /// so many mappings kept.
    fn set_hits(&mut self, key: &str, most: u32, works: &[Work]) {
        let case = Case::ALL[SHARED];
        let is_one = |row: &&Row| {
            row.case == case
                && row.policy == HostPolicy::Optimistic(most)
                && works.contains(&row.work)
        };
        let (mut hits, mut all) = (0.0, 0.0);
        for row in self.rows.iter().filter(is_one) {
            let sums = row.sums();
            hits += sums.hits;
            all += sums.hits + sums.misses;
        }
        if all > 0.0 {
            self.object.number(key, rounded(100.0 * hits / all, 2));
        }
    }

    fn set_policies(&mut self) {
        let over = self.rows.iter().map(over_contract);
        let over: Vec<String> = over.flatten().collect();
        self.object.value("stale_over_contract", over.len());
        self.object.value("stale_over_contract_of", json!(over));
        for most in [256, 4096] {
            self.set_hits(&format!("optimistic_{most}_hits_percent"), most, &JUDGED);
            for work in JUDGED {
                let key = format!("optimistic_{most}_{}_hits_percent", work.name());
                self.set_hits(&key, most, &[work]);
            }
        }
        let hits = self.object.get("optimistic_256_hits_percent");
        self.object.value("optimistic_hits_percent", json!(hits));
    }

    /// Writes all figures.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, path: &Path, wall: Duration) -> Result<Object> {
        self.set_register_exits();
        self.set_differences();
        self.set_policies();
        let verified = self.rows.iter().filter(|row| row.work.is_verified());
        let (drive, card): (Vec<&Row>, Vec<&Row>) =
            verified.partition(|row| row.work.device() == Device::Nvme);
        let requests = |rows: &[&Row]| rows.iter().map(|row| row.requests).sum::<u32>();
        let in_windows = u64::from(requests(&drive));
        self.object
            .value("io_verified", in_windows + self.io_under_reclaim);
        self.object.value("packets_verified", requests(&card));
        self.object.value("host_dmar_faults", self.faults);
        self.object
            .value("pinned_after_detach", json!(self.after_detach_pages));
        self.object
            .value("pinned_over_bound_max_pages", json!(self.over_bound_pages));
        self.object.missing("rogue_blocked_of_3");
        self.object.missing("resident_percent");
        self.object.missing("kills_clean_of_20");
        self.object.value("failed_runs", self.failed.len());
        self.object.value("failed", json!(self.failed));
        self.object.value("windows", json!(self.table));
        self.object.number("wall_s", wall.as_secs_f64().round());
        let (missed, judged) = self.judge();
        self.object.value("judged", json!(judged));
        self.object.value("missed", json!(missed));
        self.object
            .write(path)
            .with_context(|| format!("writing {}", path.display()))?;
        Ok(self.object.clone())
    }

    /// Returns the figures that miss their bars, and every bar with the figure found.
    fn judge(&self) -> (Vec<String>, Vec<String>) {
        judge(&self.object, BARS)
    }

    /// Returns whether all figures that were measured meet their bars.
    pub fn holds(&self) -> bool {
        self.judge().0.is_empty()
    }
}

/// Adds the native figures. The machine is the same, but the conditions differ, so that keys of
/// both begin with `native_`.
pub fn add_native(object: &mut Object, native: Option<&Object>) {
    let Some(native) = native else {
        for pages in [1, 32] {
            object.missing(&format!("map_unmap_cycles_{pages}"));
        }
        return;
    };
    for (key, value) in native.keys() {
        let key = match CONDITIONS.contains(&key.as_str()) {
            true => format!("native_{key}"),
            false => key.clone(),
        };
        object.value(&key, value.clone());
    }
}

/// Keys that each report begins with.
const CONDITIONS: [&str; 5] = ["machine", "kernel", "mode", "commit", "load_average"];

/// Returns the register exits of an invalidation of no page.
fn per_submission(mode: Mode) -> f64 {
    match mode {
        Mode::Shared | Mode::None | Mode::Virtio => 0.0,
        Mode::Trap | Mode::Logged => 1.0,
    }
}

/// Sums of judged windows.
#[derive(Clone, Copy, Debug, Default)]
struct Judged {
    requests: f64,
    register_exits: f64,
    compared: f64,
    maps: f64,
    unmaps: f64,
    /// Invalidations of a domain.
    domains: f64,
}

/// Returns the pages that were pinned beyond the guest's mappings and the policy's bound, at each
/// window's end; and beyond the largest count in the ledger, by the kernel's count. Negative values
/// are within the bound by so many.
fn over_bound(boot: &Boot) -> Vec<f64> {
    let mut over = Vec::new();
    for row in &boot.rows {
        for device in row.devices() {
            let number = |key| Row::number(device, key);
            let allowed = device["stale_allowed"].as_f64().unwrap_or(0.0);
            // A mapping that one invalidation made may have several pages; here each has as many as
            // a request: 32 at most.
            over.push(number("pinned") - number("guest_pages") - allowed * 32.0);
        }
    }
    if let Some(last) = boot.rows.last() {
        let peaks = last.devices().iter();
        let peak: f64 = peaks.map(|device| Row::number(device, "pinned_peak")).sum();
        over.push(boot.locked_max_kib as f64 / 4.0 - peak);
    }
    over
}

/// Returns the violations of its policy's contract in a window.
fn over_contract(row: &Row) -> Vec<String> {
    let mut over = Vec::new();
    for device in row.devices() {
        let number = |key: &str| device[key].as_f64();
        let at = || {
            let (case, policy) = (row.case.name(), row.policy.name());
            format!(
                "{case}, {policy}, {}, {}",
                row.work.name(),
                device["address"]
            )
        };
        if let (Some(most), Some(allowed)) = (number("stale_max"), number("stale_allowed"))
            && most > allowed
        {
            over.push(format!("{}: {most} stale of {allowed}", at()));
        }
        // An unmap takes time, and the owner polls once between two calls.
        let slack = 2.0 * number("longest_call_ns").unwrap_or(0.0) + SLACK_NS;
        if let (Some(age), Some(allowed)) = (number("stale_ns_max"), number("stale_ns_allowed"))
            && age > allowed + slack
        {
            over.push(format!("{}: {age} ns stale of {allowed}", at()));
        }
    }
    over
}

/// Time for which an emulated CPU of the lab may be off its host's.
const SLACK_NS: f64 = 2e9;

#[cfg(test)]
mod tests;
