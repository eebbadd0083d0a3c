//! The figures: keys that are judged, and a table of the pages that every run moved.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use super::beside::Exits;
use super::experiment::{ITERATIONS, PHASES, Run};
use super::memory_config::{LIMIT, MEMORY, MemoryConfig};
use super::watch::Disks;
use crate::demo::{median, rounded};
use crate::report_file;
use crate::system::host::Host;
use crate::system::squeezed::PREVENTER_LIMIT_US;

/// Least growth of the baseline's requests from its second iteration to its last: with less, the
/// runs show no decay to be compared with.
const DECAY: f64 = 1.1;

/// Bar of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bar {
    AtMost(f64),
    AtLeast(f64),
}

impl Bar {
    fn holds(self, found: f64) -> bool {
        match self {
            Self::AtMost(most) => found <= most,
            Self::AtLeast(least) => found >= least,
        }
    }
}

/// Figures that are judged. One exit more in a hundred pages has other causes: the guest's timer,
/// or the kernel's.
const BARS: [(&str, Bar); 15] = [
    ("mapper_vs_baseline_percent", Bar::AtMost(18.0)),
    ("both_vs_baseline_percent", Bar::AtMost(16.0)),
    ("both_vs_balloon_all_pages", Bar::AtMost(1.25)),
    ("preventer_alloc_percent", Bar::AtMost(45.0)),
    ("stale_pages_mapper", Bar::AtMost(0.0)),
    ("stale_pages_control", Bar::AtLeast(10_000.0)),
    ("pages_per_image_request", Bar::AtLeast(24.0)),
    ("prevented_percent", Bar::AtLeast(88.0)),
    ("baseline_decay", Bar::AtLeast(DECAY)),
    // A batch.
    ("over_limit_max_pages", Bar::AtMost(32.0)),
    ("killed_with_pager", Bar::AtMost(0.0)),
    ("disarmed_extra_exits", Bar::AtMost(0.01)),
    ("armed_exits_per_page", Bar::AtMost(2.0)),
    ("hangs_of_10", Bar::AtMost(0.0)),
    ("verified_operations", Bar::AtLeast(5_000.0)),
];

/// All runs, and their figures.
pub struct Figures {
    values: BTreeMap<String, Value>,
    runs: BTreeMap<MemoryConfig, Vec<Run>>,
    failed: Vec<String>,
    /// Number of failed runs with a pager.
    hangs: u64,
    host: &'static str,
}

/// Returns the pages moved between memory and the store, both ways.
fn store(disks: &Disks) -> u64 {
    disks.store.pages()
}

/// Returns the pages moved between memory and either disk, both ways.
fn all(disks: &Disks) -> u64 {
    disks.store.pages() + disks.image.pages()
}

/// Returns the requests to either disk, reads and writes.
fn requests(disks: &Disks) -> u64 {
    disks.store.requests() + disks.image.requests()
}

/// Returns the pages that come back while the file is read for the first time, and while memory is
/// written.
fn read_and_allocated(run: &Run) -> f64 {
    let pages = |phase: usize| run.phases[phase].store.pages_read;
    (pages(0) + pages(ITERATIONS)) as f64
}

/// Returns the growth of the store's reads from the second iteration to the last.
fn growth(run: &Run) -> f64 {
    let reads = |phase: usize| run.phases[phase].store.reads as f64;
    reads(ITERATIONS - 1) / reads(1)
}

/// Returns a part of a whole in percent; `None` if either is missing.
fn percent(part: Option<f64>, whole: Option<f64>) -> Option<f64> {
    Some(100.0 * part? / whole?)
}

/// Key of a figure, and its value, if there is one.
type Figure = (&'static str, Option<f64>);

/// Column of [`Figures::traffic`]: its head, and the count in one phase.
type Column = (&'static str, fn(&Disks) -> u64);

const TRAFFIC: [Column; 8] = [
    ("store out", |disks| disks.store.pages_written),
    ("store in", |disks| disks.store.pages_read),
    ("image out", |disks| disks.image.pages_written),
    ("image in", |disks| disks.image.pages_read),
    ("all pages", all),
    ("store requests", |disks| disks.store.requests()),
    ("image requests", |disks| disks.image.requests()),
    ("all requests", requests),
];

impl Figures {
    /// Creates a set without figures but for the conditions.
    pub fn new(host: &Host) -> Result<Self> {
        let commit = option_env!("EXITLESS_COMMIT").unwrap_or("unknown");
        let values = [
            ("host", json!(host.label())),
            ("kernel", json!(host.kernel_release()?)),
            ("commit", json!(commit)),
            ("memory_mib", json!(MEMORY)),
            ("limit_mib", json!(LIMIT)),
            // Longer for emulated vCPUs, which are slow to stop; otherwise 1000, as in the paper.
            ("preventer_limit_us", json!(PREVENTER_LIMIT_US)),
        ];
        Ok(Self {
            values: values.map(|(key, value)| (key.into(), value)).into(),
            runs: BTreeMap::new(),
            failed: Vec::new(),
            hangs: 0,
            host: host.label(),
        })
    }

    pub fn add(&mut self, way: MemoryConfig, run: Run) {
        self.runs.entry(way).or_default().push(run);
    }

    /// Notes that a run failed.
    pub fn failed(&mut self, way: MemoryConfig, error: &anyhow::Error) {
        self.hangs += u64::from(way.has_pager());
        self.failed.push(format!("{}: {error:#}", way.name()));
    }

    /// Adds the measurements beside the experiment.
    pub fn beside(&mut self, exits: Result<Exits>, verified: Result<u64>) {
        match exits {
            Ok(exits) => {
                let Exits {
                    free,
                    plain,
                    disarmed,
                    armed,
                } = exits;
                // All but interrupts, timer and halts. Without hardware support for a guest's ends
                // of interrupts each takes an exit if KVM's paravirtual one is hidden, which stores
                // to guest memory.
                let figures = [
                    ("free_exits", free.compared()),
                    ("plain_exits", plain.compared()),
                    (
                        "disarmed_extra_exits",
                        disarmed.compared() - plain.compared(),
                    ),
                    (
                        "disarmed_extra_exits_of_hidden_features",
                        plain.compared() - free.compared(),
                    ),
                    ("armed_exits_per_page", armed.cause("memory")),
                ];
                let figures = figures.map(|(key, value)| (key.into(), json!(rounded(value))));
                self.values.extend(figures);
            }
            Err(error) => self.failed.push(format!("exits of reads: {error:#}")),
        }
        match verified {
            Ok(operations) => {
                self.values
                    .insert("verified_operations".into(), json!(operations));
            }
            // A wrong byte is one such error: it ends the guest's workload.
            Err(error) => self.failed.push(format!("verified pages: {error:#}")),
        }
    }

    /// Returns whether a run failed, or a figure does not meet its bar.
    pub fn has_failed(&self) -> bool {
        let is_missed = self.judged().any(|(_, found, bar)| !bar.holds(found));
        !self.failed.is_empty() || is_missed
    }

    /// Returns each judged figure that was measured, and its bar.
    fn judged(&self) -> impl Iterator<Item = (&'static str, f64, Bar)> {
        BARS.iter()
            .filter_map(|&(key, bar)| Some((key, self.values.get(key)?.as_f64()?, bar)))
    }

    /// Returns all runs with a pager.
    fn paged(&self) -> impl Iterator<Item = &Run> {
        let runs = self.runs.iter().filter(|(way, _)| way.has_pager());
        runs.flat_map(|(_, runs)| runs)
    }

    /// Returns the median over a way's runs; `None` if there is none.
    fn median(&self, way: MemoryConfig, of: impl Fn(&Run) -> f64) -> Option<f64> {
        let runs = self.runs.get(&way)?;
        Some(median(runs.iter().map(of).collect()))
    }

    /// Returns the median of one of the pager's counts over all phases.
    fn counted(&self, way: MemoryConfig, key: &str) -> Option<f64> {
        // A ledger without the key has no such figure.
        self.median(way, |run| run.counted(key).map_or(f64::NAN, |it| it as f64))
            .filter(|value| !value.is_nan())
    }

    /// Computes the figures of the runs so far.
    pub fn finish(&mut self, wall: Duration) {
        let decay = self.median(MemoryConfig::Baseline, growth);
        let figures = [
            self.traffic_figures(),
            vec![("baseline_decay", decay)],
            self.counted_figures(),
            self.cost_figures(),
        ];
        for (key, value) in figures.concat() {
            let value = value.filter(|value| value.is_finite());
            self.values.insert(key.into(), json!(value.map(rounded)));
        }
        let is_void = decay.is_some_and(|decay| decay < DECAY);
        let pager = self.paged().count() as u64 + self.hangs;
        // Three rounds of three ways, and the control.
        let hangs_of_10 = (pager >= 10).then_some(self.hangs);
        let outcome = [
            ("is_void", json!(is_void)),
            ("hangs", json!(self.hangs)),
            ("pager_runs", json!(pager)),
            ("hangs_of_10", json!(hangs_of_10)),
            ("failed", json!(self.failed)),
            ("wall_s", json!(wall.as_secs())),
        ];
        let outcome = outcome.map(|(key, value)| (key.into(), value));
        self.values.extend(outcome);
        for (way, runs) in &self.runs {
            for (nth, run) in runs.iter().enumerate() {
                let key = format!("run_{}_{}", way.name().replace([' ', '+'], "_"), nth + 1);
                self.values.insert(key, moved(run));
            }
        }
    }

    /// Returns the traffic of each way relative to another's.
    fn traffic_figures(&self) -> Vec<Figure> {
        let later = |way, of: fn(&Disks) -> u64| self.median(way, |run| run.later(of) as f64);
        let against = |way, other, of| percent(later(way, of), later(other, of));
        let allocated = |way| self.median(way, read_and_allocated);
        vec![
            (
                "mapper_vs_baseline_percent",
                against(MemoryConfig::Mapper, MemoryConfig::Baseline, store),
            ),
            (
                "both_vs_baseline_percent",
                against(MemoryConfig::Both, MemoryConfig::Baseline, store),
            ),
            (
                "mapper_vs_baseline_all_pages_percent",
                against(MemoryConfig::Mapper, MemoryConfig::Baseline, all),
            ),
            (
                "both_vs_baseline_all_pages_percent",
                against(MemoryConfig::Both, MemoryConfig::Baseline, all),
            ),
            (
                "mapper_vs_baseline_all_requests_percent",
                against(MemoryConfig::Mapper, MemoryConfig::Baseline, requests),
            ),
            (
                "both_vs_baseline_all_requests_percent",
                against(MemoryConfig::Both, MemoryConfig::Baseline, requests),
            ),
            (
                "both_vs_balloon_all_pages",
                against(MemoryConfig::Both, MemoryConfig::Balloon, all).map(|it| it / 100.0),
            ),
            (
                "preventer_alloc_percent",
                percent(
                    allocated(MemoryConfig::Both),
                    allocated(MemoryConfig::Mapper),
                ),
            ),
        ]
    }

    /// Returns counts of the pager, and shares of them.
    fn counted_figures(&self) -> Vec<Figure> {
        let both = |key| self.counted(MemoryConfig::Both, key);
        let sum = |a: Option<f64>, b: Option<f64>| Some(a? + b?);
        vec![
            (
                "stale_pages_mapper",
                self.counted(MemoryConfig::Mapper, "stale_reads"),
            ),
            (
                "stale_pages_control",
                self.counted(MemoryConfig::Stale, "stale_reads"),
            ),
            (
                "pages_per_image_request",
                percent(both("image_pages"), both("image_requests")).map(|it| it / 100.0),
            ),
            (
                "prevented_percent",
                percent(both("prevented"), sum(both("prevented"), both("undecided"))),
            ),
            ("zero_pages", both("dropped_as_zeroes")),
        ]
    }

    /// Returns the memory, the processor time and the killed guests of the runs with a pager.
    fn cost_figures(&self) -> Vec<Figure> {
        let over_limit = self.paged().map(Run::over_limit).max();
        let over_limit = over_limit.map(|pages| pages as f64);
        let killed = self.paged().filter(|run| run.is_killed).count() as f64;
        let us_per_fault = |run: &Run| {
            let faults = run.whole.as_ref().and_then(|swap| swap["faults"].as_f64());
            match (run.pager_us, faults) {
                (Some(us), Some(faults)) => us as f64 / faults,
                _ => f64::NAN,
            }
        };
        vec![
            ("over_limit_max_pages", over_limit),
            ("killed_with_pager", over_limit.map(|_| killed)),
            (
                "pager_cpu_us_per_fault",
                self.median(MemoryConfig::Both, us_per_fault),
            ),
        ]
    }

    /// Writes them to a file; creates its directory if need be.
    pub fn write(&self, path: &Path) -> Result<()> {
        report_file::write(path, &self.values)
    }

    /// Renders the pages that every run moved, and the figures.
    pub fn table(&self) -> String {
        let mut text = format!(
            "pages out of memory to the swap device / in from it, {LIMIT} of {MEMORY} MiB in \
             memory ({})\n  {:<18}",
            self.host, ""
        );
        for phase in 0..PHASES {
            let name = match phase {
                iteration if iteration < ITERATIONS => format!("read {iteration}"),
                ITERATIONS => "alloc".to_owned(),
                _ => "check".to_owned(),
            };
            let _ = write!(text, "{name:>16}");
        }
        text.push('\n');
        for run in self.runs.values().flatten() {
            text.push_str(&run.lines());
        }
        self.traffic(&mut text);
        text.push('\n');
        let is_figure = |key: &str| !key.starts_with("run_");
        for (key, value) in self.values.iter().filter(|(key, _)| is_figure(key)) {
            let _ = writeln!(text, "  {key:<28} {value}");
        }
        text.push('\n');
        for (key, found, bar) in self.judged() {
            let verdict = if bar.holds(found) { "holds" } else { "MISSED" };
            let (most, bar) = match bar {
                Bar::AtMost(bar) => ("at most", bar),
                Bar::AtLeast(bar) => ("at least", bar),
            };
            let _ = writeln!(
                text,
                "  {key:<28}{found:>12.3}  {most:<8} {bar:<8} {verdict}"
            );
        }
        if self.values.get("is_void") == Some(&json!(true)) {
            text.push_str(
                "  VOID: the baseline's requests did not grow, so there is nothing to \
                 compare with\n",
            );
        }
        text
    }

    /// Appends all traffic of both disks from the second iteration on, medians of each way's runs.
    fn traffic(&self, text: &mut String) {
        let _ = write!(text, "\n  {:<18}", "reads 1 to 3");
        for (head, _) in TRAFFIC {
            let _ = write!(text, "{head:>16}");
        }
        text.push('\n');
        for way in self.runs.keys() {
            let _ = write!(text, "  {:<18}", way.name());
            for (_, of) in TRAFFIC {
                let sum = self.median(*way, |run| run.later(of) as f64);
                let _ = write!(text, "{:>16.0}", sum.unwrap_or(f64::NAN));
            }
            text.push('\n');
        }
    }
}

/// Returns the figures of one run, phase by phase.
pub fn moved(run: &Run) -> Value {
    let of = |count: fn(&Disks) -> u64| run.phases.iter().map(count).collect::<Vec<_>>();
    json!({
        "out": of(|disks| disks.store.pages_written),
        "in": of(|disks| disks.store.pages_read),
        "out_requests": of(|disks| disks.store.writes),
        "in_requests": of(|disks| disks.store.reads),
        "image_pages": of(|disks| disks.image.pages()),
        "image_pages_out": of(|disks| disks.image.pages_written),
        "image_requests": of(|disks| disks.image.requests()),
        "is_killed": run.is_killed,
        "swap": run.windows,
    })
}
