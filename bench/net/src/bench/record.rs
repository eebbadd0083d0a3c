//! Results: the printed table and the keys of the JSON report, from one source.

use std::path::Path;

use anyhow::{Context, Result};
use report::{Host, Measured, Object, object, short};
use serde_json::{Value, json};
use vhost_net::drive::Report;

use super::Settings;
use super::server::Peer;

/// The six ratios at 64 bytes, whose geometric mean is a key of its own.
const CELLS: [&str; 6] = [
    "net_g2h_split_vs_dpdk",
    "net_h2g_split_vs_dpdk",
    "net_loop_split_vs_dpdk",
    "net_g2h_packed_vs_dpdk",
    "net_h2g_packed_vs_dpdk",
    "net_loop_packed_vs_dpdk",
];

/// A key of the report, with its goal if it has one.
pub struct Goal {
    /// The key.
    pub key: &'static str,
    /// Direction («at least» or «at most») and bound of its value.
    pub bound: Option<(&'static str, f64)>,
}

const fn at_least(key: &'static str, bound: f64) -> Goal {
    Goal {
        key,
        bound: Some(("at least", bound)),
    }
}

const fn at_most(key: &'static str, bound: f64) -> Goal {
    Goal {
        key,
        bound: Some(("at most", bound)),
    }
}

const fn shown(key: &'static str) -> Goal {
    Goal { key, bound: None }
}

/// Keys that every report has; null if they were not measured.
pub const KEYS: [Goal; 27] = [
    at_least("net_g2h_split_vs_dpdk", 0.7),
    at_least("net_h2g_split_vs_dpdk", 0.7),
    at_least("net_loop_split_vs_dpdk", 0.7),
    at_least("net_g2h_packed_vs_dpdk", 0.7),
    at_least("net_h2g_packed_vs_dpdk", 0.7),
    at_least("net_loop_packed_vs_dpdk", 0.7),
    at_least("net_geometric_mean_vs_dpdk", 0.9),
    shown("net_g2h_split_1518_vs_dpdk"),
    shown("net_h2g_split_1518_vs_dpdk"),
    shown("net_loop_split_1518_vs_dpdk"),
    shown("net_g2h_packed_1518_vs_dpdk"),
    shown("net_h2g_packed_1518_vs_dpdk"),
    shown("net_loop_packed_1518_vs_dpdk"),
    at_least("switch_vs_testpmd_io", 0.9),
    at_most("rr_p50_vs_dpdk", 1.3),
    at_most("quiet_port_p99_vs_alone", 2.0),
    shown("quiet_port_p99_vs_alone_dpdk"),
    at_most("disk_p99_vs_alone", 2.0),
    at_most("miss_unanswered_ms", 1000.0),
    at_most("miss_neighbour_p99_vs_alone", 1.5),
    at_least("jain_7", 0.99),
    shown("ports_saturated_at"),
    shown("copies_per_byte"),
    at_least("tap_tso_vs_bare_write", 0.7),
    at_most("lost_at_receiver", 0.0),
    at_most("wrong_at_receiver", 0.0),
    shown("checked_at_receiver"),
];

/// A row of the table: the measured windows of each server.
#[derive(Debug)]
pub struct Row {
    name: String,
    outcomes: Vec<Outcome>,
    said: Option<(Option<u64>, u64)>,
}

#[derive(Debug)]
struct Outcome {
    peer: Peer,
    values: Vec<f64>,
    reports: Vec<Report>,
    error: Option<String>,
}

impl Row {
    /// Creates a row without results.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            outcomes: Vec::new(),
            said: None,
        }
    }

    /// Adds a server that could not be measured.
    pub fn failed(&mut self, peer: Peer, error: &anyhow::Error) {
        self.outcomes.push(Outcome {
            peer,
            values: Vec::new(),
            reports: Vec::new(),
            error: Some(format!("{error:#}")),
        });
    }

    /// Adds a server's windows.
    pub fn measured(&mut self, peer: Peer, reports: &[Report], value: &dyn Fn(&Report) -> f64) {
        self.outcomes.push(Outcome {
            peer,
            values: reports.iter().map(value).collect(),
            reports: reports.to_vec(),
            error: None,
        });
    }

    /// Adds the number of frames that a sink reports as received, if it reports one, and the number
    /// that the client has sent.
    pub const fn said(&mut self, received: Option<u64>, taken: u64) {
        self.said = Some((received, taken));
    }

    fn values(&self, peer: Peer) -> Option<&[f64]> {
        let of = |outcome: &&Outcome| outcome.peer == peer && outcome.error.is_none();
        self.outcomes
            .iter()
            .find(of)
            .map(|outcome| outcome.values.as_slice())
    }

    /// Returns the windows of each server that was measured.
    pub fn reports(&self) -> impl Iterator<Item = (Peer, &[Report])> {
        let measured = self
            .outcomes
            .iter()
            .filter(|outcome| outcome.error.is_none());
        measured.map(|outcome| (outcome.peer, outcome.reports.as_slice()))
    }

    /// Returns this project's value divided by DPDK's, round by round.
    pub fn ratio(&self) -> Option<Measured> {
        let (ours, theirs) = (self.values(Peer::Ours)?, self.values(Peer::Dpdk)?);
        Measured::of(ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs))
    }
}

/// Results measured so far.
#[derive(Debug)]
pub struct Record {
    keys: Object,
    has_heading: bool,
}

impl Record {
    /// Creates a record with the machine and the settings as its first keys. If this run is limited
    /// to some sections, the figures of the others are kept from the existing report.
    ///
    /// # Errors
    /// There is a report that cannot be read.
    pub fn open(settings: &Settings) -> Result<Self> {
        let mode = "native, one CPU for the server, one for the client, servers in turns";
        let mut keys = Object::new(&Host::read(), mode);
        if !settings.only.is_empty() && settings.report.is_file() {
            let path = settings.report.display().to_string();
            let before = Object::read(&settings.report).context(path)?;
            for (key, value) in before.keys() {
                if !keys.keys().contains_key(key) {
                    keys.value(key, value.clone());
                }
            }
        }
        for goal in KEYS {
            keys.missing(goal.key);
        }
        keys.value("rounds", json!(settings.rounds));
        keys.value("window_ms", json!(settings.window.as_millis() as u64));
        keys.value("idle_policy", json!(settings.idle));
        Ok(Self {
            keys,
            has_heading: false,
        })
    }

    /// Prints the conditions of the run.
    pub fn heading(&self) {
        for key in ["machine", "kernel", "mode", "commit", "rounds", "window_ms"] {
            let value = self.keys.keys()[key].to_string();
            println!("{key:12} {}", value.trim_matches('"'));
        }
        if let Some(load) = self.get("load_average").filter(|load| *load > 1.0) {
            println!("WARNING: others use this machine (load average {load}): figures mean little");
        }
    }

    /// Sets a key.
    pub fn number(&mut self, key: &str, value: f64) {
        self.keys.number(key, value);
    }

    /// Returns a key's number, if it was measured.
    pub fn get(&self, key: &str) -> Option<f64> {
        self.keys.get(key)
    }

    /// Sums lost, wrong and checked frames over all rows of this project's server, earlier runs
    /// included.
    fn sums(&mut self) {
        for what in ["lost", "wrong", "checked"] {
            let suffix = format!("_ours_{what}");
            let rows = self
                .keys
                .keys()
                .iter()
                .filter(|(key, _)| key.ends_with(&suffix));
            let counts: Vec<_> = rows.filter_map(|(_, count)| count.as_f64()).collect();
            if !counts.is_empty() {
                self.number(&format!("{what}_at_receiver"), counts.iter().sum());
            }
        }
    }

    /// Prints a section's title.
    pub fn section(&mut self, title: &str) {
        println!("\n{title}");
        self.has_heading = false;
    }

    /// Prints a row and sets its keys.
    pub fn row(&mut self, row: &Row) {
        if !self.has_heading {
            self.has_heading = true;
            println!(
                "{:34} {:5} {:>9} {:>9} {:>9} {:>6} {:>8} {:>8} {:>8}",
                "", "", "median", "min", "max", "CPU %", "lost", "wrong", "checked"
            );
        }
        for outcome in &row.outcomes {
            self.outcome(&row.name, outcome);
        }
        if let Some((Some(said), taken)) = row.said {
            let part = said as f64 / taken as f64;
            self.number(&format!("{}_dpdk_said_per_taken", row.name), part);
            println!(
                "{:34} testpmd itself counted {said} frames, {part:.4} of them",
                ""
            );
        }
    }

    fn outcome(&mut self, name: &str, outcome: &Outcome) {
        let peer = outcome.peer.name();
        let (Some(measured), None) = (Measured::of(outcome.values.iter().copied()), &outcome.error)
        else {
            let why = outcome.error.as_deref().unwrap_or("no windows");
            println!("{name:34} {peer:5} not measured: {why}");
            self.keys.value(&format!("{name}_{peer}"), Value::Null);
            return;
        };
        let sum = |of: &dyn Fn(&Report) -> u64| outcome.reports.iter().map(of).sum::<u64>();
        let lost = sum(&Report::lost);
        let wrong = sum(&Report::wrong);
        let checked = sum(&|report| report.ports.iter().map(|port| port.checked).sum());
        let sent = sum(&|report| report.ports.iter().map(|port| port.counts.sent).sum());
        let cpu = outcome
            .reports
            .iter()
            .filter_map(|report| report.server_cpu);
        let cpu = report::median(cpu) * 100.0;
        self.number(&format!("{name}_{peer}"), object::round(measured.median, 1));
        self.number(
            &format!("{name}_{peer}_min"),
            object::round(measured.min, 1),
        );
        self.number(
            &format!("{name}_{peer}_max"),
            object::round(measured.max, 1),
        );
        self.number(&format!("{name}_{peer}_lost"), lost as f64);
        self.number(&format!("{name}_{peer}_sent"), sent as f64);
        self.number(&format!("{name}_{peer}_wrong"), wrong as f64);
        self.number(&format!("{name}_{peer}_cpu_percent"), object::round(cpu, 1));
        self.number(&format!("{name}_{peer}_checked"), checked as f64);
        self.sums();
        let note = if self.is_near_ceiling(name, measured.median) {
            "  (near this client's ceiling)"
        } else {
            ""
        };
        println!(
            "{name:34} {peer:5} {:>9} {:>9} {:>9} {cpu:>6.1} {lost:>8} {wrong:>8} \
             {checked:>8}{note}",
            short(measured.median),
            short(measured.min),
            short(measured.max),
        );
    }

    /// Returns whether the rate is above 80 % of this client's rate against a server that does
    /// nothing.
    fn is_near_ceiling(&self, name: &str, rate: f64) -> bool {
        let cell = name
            .strip_prefix("net_")
            .filter(|cell| !cell.ends_with("_1518"));
        let ceiling = cell.and_then(|cell| self.get(&format!("ceiling_{cell}_mpps")));
        ceiling.is_some_and(|ceiling| rate * 1.25 > ceiling * 1e6)
    }

    /// Sets and prints a row's ratio, with its extremes.
    pub fn ratio(&mut self, key: &str, row: &Row) {
        let Some(ratio) = row.ratio() else {
            self.keys.value(key, Value::Null);
            return;
        };
        self.measured(key, ratio);
        println!(
            "{:34} ours / dpdk {:.3} ({:.3} to {:.3})",
            "", ratio.median, ratio.min, ratio.max
        );
    }

    /// Sets a figure, with its extremes.
    pub fn measured(&mut self, key: &str, figure: Measured) {
        let parts = [
            ("", figure.median),
            ("_min", figure.min),
            ("_max", figure.max),
        ];
        for (part, value) in parts {
            self.number(&format!("{key}{part}"), object::round(value, 4));
        }
    }

    /// Sets the geometric mean of the six ratios, once all are measured.
    pub fn geometric_mean(&mut self) {
        let cells: Option<Vec<_>> = CELLS.iter().map(|key| self.get(key)).collect();
        if let Some(cells) = cells {
            let product: f64 = cells.iter().product();
            let mean = product.powf(1.0 / cells.len() as f64);
            self.number("net_geometric_mean_vs_dpdk", object::round(mean, 4));
        }
    }

    /// Writes the JSON report.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        self.keys
            .write(path)
            .with_context(|| path.display().to_string())
    }

    /// Prints the keys, and writes the report.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn finish(&self, path: &Path) -> Result<()> {
        println!();
        for goal in KEYS {
            println!("{:32} {}", goal.key, judged(&goal, &self.keys));
        }
        self.write(path)?;
        println!("\nwritten: {}", path.display());
        Ok(())
    }
}

/// Returns a key's value with its extremes, and whether it meets its goal.
pub fn judged(goal: &Goal, keys: &Object) -> String {
    let Some(value) = keys.get(goal.key) else {
        return "not measured".to_owned();
    };
    let extreme = |which: &str| keys.get(&format!("{}_{which}", goal.key));
    let spread = match (extreme("min"), extreme("max")) {
        (Some(min), Some(max)) => format!(" ({min:.3} to {max:.3})"),
        _ => String::new(),
    };
    let verdict = goal.bound.map_or(String::new(), |(word, bound)| {
        let is_met = match word {
            "at least" => value >= bound,
            _ => value <= bound,
        };
        let outcome = if is_met { "met" } else { "not met" };
        format!(", {word} {bound}: {outcome}")
    });
    let value = match value.fract() == 0.0 {
        true => format!("{value}"),
        false => format!("{value:.3}"),
    };
    format!("{value}{spread}{verdict}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_judged_by_its_bound_and_what_was_not_measured_is_not() {
        let mut keys = Object::default();
        let (least, most) = (at_least("a", 0.9), at_most("b", 2.0));
        assert_eq!(judged(&least, &keys), "not measured");
        keys.number("a", 0.85);
        keys.number("b", 1.5);
        assert_eq!(judged(&least, &keys), "0.850, at least 0.9: not met");
        assert_eq!(judged(&most, &keys), "1.500, at most 2: met");
        keys.number("a", 0.9);
        keys.number("a_min", 0.5);
        keys.number("a_max", 1.0);
        assert_eq!(
            judged(&least, &keys),
            "0.900 (0.500 to 1.000), at least 0.9: met"
        );
    }

    #[test]
    fn a_ratio_is_of_windows_of_one_round() {
        let mut row = Row::new("r");
        let windows = |rates: &[f64]| -> Vec<Report> {
            let of = |seconds: &f64| Report {
                seconds: *seconds,
                ..Report::default()
            };
            rates.iter().map(of).collect()
        };
        row.measured(Peer::Ours, &windows(&[10.0, 1.0, 4.0]), &|report| {
            report.seconds
        });
        assert_eq!(row.ratio(), None);
        row.measured(Peer::Dpdk, &windows(&[10.0, 2.0, 2.0]), &|report| {
            report.seconds
        });
        let ratio = row.ratio().unwrap();
        assert_eq!((ratio.median, ratio.min, ratio.max), (1.0, 0.5, 2.0));
    }
}
