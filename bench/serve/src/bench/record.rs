//! Rows and keys: the table people read and the object programs read, from one source.

use std::path::Path;

use anyhow::{Context, Result};
use report::{Host, Object, median, short};
use serde_json::{Value, json};

use super::plots;
use super::{Peer, Settings};
use vhost_blk::stats::{Report, micros};

/// Other people's programs, measured by another client on the machine of our notes: name, depth 1
/// and 32 polling, depth 1 sleeping (IOPS; p50/p99 in µs).
const QUOTED: [[&str; 4]; 6] = [
    [
        "SPDK null",
        "950 k; 1.02/1.17",
        "4799 k; 6.5/8.1",
        "43.8 k; 21.5/55",
    ],
    [
        "SPDK malloc",
        "577 k; 1.62/1.86",
        "1457 k; 21/48",
        "39.3 k; 22.8/64",
    ],
    [
        "Cloud Hypervisor tmpfs",
        "43.9 k; 24/46",
        "400 k; 77/116",
        "21.4 k; 44/83",
    ],
    [
        "Cloud Hypervisor tmpfs poll_queue",
        "324 k; 3.0/3.3",
        "407 k; 76/115",
        "40.7 k; 23.6/47",
    ],
    [
        "ubiblk tmpfs",
        "131 k; 5.3/6.5",
        "248 k; 86/2048",
        "32.8 k; 26/62",
    ],
    [
        "qemu-storage-daemon 7.2 null",
        "41.1 k; 23.0/60",
        "1761 k; 16.6/39",
        "21.6 k; 42.0/91",
    ],
];

/// The keys that are always there, null where they were not measured.
const KEYS: [&str; 41] = [
    "null_d1_vs_qsd",
    "null_d32_vs_qsd",
    "ram_d1_vs_qsd",
    "ram_d32_vs_qsd",
    "tmpfs_d1_vs_qsd",
    "tmpfs_d32_vs_qsd",
    "tmpfs_d32_vs_qsd_uring",
    "mixed_d32_vs_qsd_uring",
    "event_d1_p50_vs_qsd",
    "calls_awake_vs_spdk",
    "calls_halted_vs_spdk",
    "calls_awake_vs_reference",
    "calls_halted_vs_reference",
    "event_d1_slowest_window_vs_poll",
    "null_d1_p50_rtts",
    "kicks_per_1000_busy",
    "idle_cpu_percent_8",
    "idle_cpu_percent_256",
    "idle_own_kib_256",
    "jain_16",
    "jain_64",
    "weights_error_percent",
    "served_of_256",
    "quiet_p99_vs_alone_null",
    "quiet_p99_vs_alone_ram",
    "forced_sleeps",
    "lost_wakeups",
    "adaptive_worst_vs_best_fixed",
    "fixed_worst_vs_best_fixed",
    "adaptive_worst_vs_best_fixed_without_stalls",
    "fixed_worst_vs_best_fixed_without_stalls",
    "event_d1_vs_poll",
    "event_d1_slowest_window",
    "event_d32_vs_poll",
    "ram_filled_event_d32_vs_poll",
    "open20k_poisson_p50_us",
    "open20k_poisson_p90_us",
    "open20k_poisson_cpu_percent",
    "open20k_uniform_p50_us",
    "open20k_uniform_p90_us",
    "open20k_uniform_cpu_percent",
];

/// Medians over the repetitions of one row.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    pub iops: f64,
    pub mean_ns: f64,
    /// See [`Latency`](vhost_blk::stats::Latency).
    pub prompt_mean_ns: f64,
    pub stalled: f64,
    pub p50_ns: f64,
    pub p90_ns: f64,
    pub p99_ns: f64,
    /// Latencies of flushes alone; not a number where there were none.
    pub flush_p50_ns: f64,
    pub flush_p99_ns: f64,
    pub kicks_per_1000: f64,
    pub calls_per_1000: f64,
    /// Seconds of the server per second.
    pub server_cpu: f64,
    pub vm_min_iops: f64,
    pub vm_max_iops: f64,
    pub served: f64,
    pub jain: f64,
    /// Latency of each group of disks.
    pub group_p99_ns: Vec<f64>,
    /// The distance of the best and the worst repetition, in percent of the median of IOPS.
    pub spread_percent: f64,
    /// Not a median: all of them.
    pub lost_wakeups: u64,
    /// Not a median: all requests that never came back. (Where some failed, there is no row.)
    pub errors: u64,
}

impl Summary {
    /// Summary of some repetitions.
    pub fn of(reports: &[Report]) -> Self {
        let of = |value: &dyn Fn(&Report) -> f64| median(reports.iter().map(value));
        let iops = of(&|r| r.iops);
        let least = reports.iter().map(|r| r.iops).fold(f64::INFINITY, f64::min);
        let most = reports.iter().map(|r| r.iops).fold(0.0, f64::max);
        let groups = reports.first().map_or(0, |report| report.groups.len());
        Self {
            iops,
            mean_ns: of(&|r| r.latency.mean_ns),
            prompt_mean_ns: of(&|r| r.latency.prompt_mean_ns),
            stalled: of(&|r| r.latency.stalled),
            p50_ns: of(&|r| r.latency.p50_ns as f64),
            p90_ns: of(&|r| r.latency.p90_ns as f64),
            p99_ns: of(&|r| r.latency.p99_ns as f64),
            flush_p50_ns: of(&|r| r.flushes.map_or(f64::NAN, |flushes| flushes.p50_ns as f64)),
            flush_p99_ns: of(&|r| r.flushes.map_or(f64::NAN, |flushes| flushes.p99_ns as f64)),
            kicks_per_1000: of(&Report::kicks_per_1000),
            calls_per_1000: of(&Report::calls_per_1000),
            server_cpu: of(&|r| r.server_cpu.unwrap_or(f64::NAN)),
            vm_min_iops: of(&|r| r.vm_min_iops),
            vm_max_iops: of(&|r| r.vm_max_iops),
            served: of(&|r| r.served as f64),
            jain: of(&|r| r.jain),
            group_p99_ns: (0..groups)
                .map(|group| of(&|r| r.groups[group].p99_ns as f64))
                .collect(),
            spread_percent: if iops > 0.0 {
                (most - least) / iops * 100.0
            } else {
                0.0
            },
            lost_wakeups: reports.iter().map(|r| r.lost_wakeups).sum(),
            errors: reports.iter().map(|r| r.unanswered).sum(),
        }
    }
}

/// Figures measured so far.
#[derive(Debug)]
pub struct Record {
    keys: Object,
    has_heading: bool,
}

impl Record {
    /// With the machine and the settings as its first keys.
    pub fn new(settings: &Settings) -> Self {
        let mut keys = Object::new(
            &Host::read(),
            "native, one CPU for the server, one for the client",
        );
        for key in KEYS {
            keys.missing(key);
        }
        let facts = [
            ("repetitions", json!(settings.repetitions)),
            ("seconds", json!(settings.seconds)),
            ("spinners", json!(settings.spinners)),
            ("idle_policy", json!(settings.idle)),
        ];
        for (key, value) in facts {
            keys.value(key, value);
        }
        Self {
            keys,
            has_heading: false,
        }
    }

    /// Prints what the run is.
    pub fn heading(&self) {
        for key in [
            "machine",
            "kernel",
            "mode",
            "commit",
            "repetitions",
            "seconds",
            "spinners",
        ] {
            println!(
                "{key:12} {}",
                self.keys.keys()[key].to_string().trim_matches('"')
            );
        }
        if self.get("load_average").is_some_and(|load| load > 1.0) {
            println!(
                "WARNING: others use this machine (load average {}): figures mean little",
                self.keys.keys()["load_average"]
            );
        }
    }

    /// Sets a key.
    pub fn number(&mut self, key: &str, value: f64) {
        self.keys.number(key, value);
    }

    /// A key's number, if it was measured.
    pub fn get(&self, key: &str) -> Option<f64> {
        self.keys.get(key)
    }

    /// Adds to the wake-ups lost by our server.
    pub fn lost(&mut self, count: u64) {
        let so_far = self.get("lost_wakeups").unwrap_or(0.0);
        self.number("lost_wakeups", so_far + count as f64);
    }

    /// A title between rows.
    pub fn section(&mut self, title: &str) {
        println!("\n{title}");
        self.has_heading = false;
    }

    fn columns(&mut self) {
        if !self.has_heading {
            self.has_heading = true;
            println!(
                "{:26} {:6} {:>9} {:>9} {:>8} {:>8} {:>9} {:>9} {:>6} {:>7}  disks",
                "",
                "",
                "IOPS",
                "per CPU s",
                "p50 µs",
                "p99 µs",
                "kicks/1k",
                "calls/1k",
                "CPU %",
                "± %"
            );
        }
    }

    /// A row, printed and kept.
    pub fn row(&mut self, name: &str, peer: &Peer, summary: &Summary) {
        self.columns();
        let prefix = format!("{name}_{}", peer.name());
        let numbers = [
            ("iops", summary.iops),
            ("mean_ns", summary.mean_ns),
            ("prompt_mean_ns", summary.prompt_mean_ns),
            ("stalled_percent", summary.stalled * 100.0),
            ("p50_ns", summary.p50_ns),
            ("p90_ns", summary.p90_ns),
            ("p99_ns", summary.p99_ns),
            ("kicks_per_1000", summary.kicks_per_1000),
            ("calls_per_1000", summary.calls_per_1000),
            ("server_cpu_percent", summary.server_cpu * 100.0),
            ("iops_per_cpu_second", summary.iops / summary.server_cpu),
            ("vm_min_iops", summary.vm_min_iops),
            ("vm_max_iops", summary.vm_max_iops),
            ("jain", summary.jain),
            ("spread_percent", summary.spread_percent),
            ("lost_wakeups", summary.lost_wakeups as f64),
            ("errors", summary.errors as f64),
        ];
        for (key, value) in numbers {
            self.number(&format!("{prefix}_{key}"), value);
        }
        let mut notes = String::new();
        if (summary.vm_max_iops - summary.iops).abs() > 1.0 {
            notes = format!(
                "{} served, {} to {}, Jain {:.3}",
                summary.served,
                short(summary.vm_min_iops),
                short(summary.vm_max_iops),
                summary.jain
            );
        }
        if self.is_near_ceiling(name, summary.iops) {
            notes += " (near this client's ceiling)";
        }
        if summary.lost_wakeups + summary.errors > 0 {
            notes += &format!(
                " {} without an answer for 500 ms, {} errors",
                summary.lost_wakeups, summary.errors
            );
        }
        if summary.flush_p50_ns.is_finite() {
            self.number(&format!("{prefix}_flush_p50_ns"), summary.flush_p50_ns);
            self.number(&format!("{prefix}_flush_p99_ns"), summary.flush_p99_ns);
            notes += &format!(
                " flush p50 {} µs, p99 {}",
                micros(summary.flush_p50_ns as u64),
                micros(summary.flush_p99_ns as u64)
            );
        }
        println!(
            "{name:26} {:6} {:>9} {:>9} {:>8} {:>8} {:>9.3} {:>9.3} {:>6.1} {:>7.1}  {}",
            peer.name(),
            short(summary.iops),
            short(summary.iops / summary.server_cpu),
            micros(summary.p50_ns as u64),
            micros(summary.p99_ns as u64),
            summary.kicks_per_1000,
            summary.calls_per_1000,
            summary.server_cpu * 100.0,
            summary.spread_percent,
            notes.trim()
        );
    }

    /// Whether this client reached less than 1.25 times as much against a server that does nothing.
    fn is_near_ceiling(&self, name: &str, iops: f64) -> bool {
        let ring = if name.contains("packed") {
            "packed"
        } else {
            "split"
        };
        let depth = if name.contains("_d1_") { 1 } else { 32 };
        let ceiling = self.get(&format!("ceiling_{ring}_d{depth}_iops"));
        ceiling.is_some_and(|ceiling| iops * 1.25 > ceiling)
    }

    /// A row without a result.
    pub fn failed_row(&mut self, name: &str, peer: &Peer, error: &anyhow::Error) {
        self.columns();
        println!("{name:26} {:6} not measured: {error:#}", peer.name());
        self.keys
            .value(&format!("{name}_{}_iops", peer.name()), Value::Null);
    }

    /// A line of text.
    pub fn line(&self, text: &str) {
        println!("{text}");
    }

    /// Writes the object.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        self.keys
            .write(path)
            .with_context(|| path.display().to_string())
    }

    /// Prints the keys and what is quoted, and draws the plots.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn finish(&self, path: &Path) -> Result<()> {
        println!(
            "\nquoted from our notes, another client and machine   d1 poll            d32 \
             poll           d1 event"
        );
        for [name, d1, d32, event] in QUOTED {
            println!("{name:50}  {d1:18} {d32:18} {event}");
        }
        println!();
        for key in KEYS {
            match self.get(key) {
                Some(value) => println!("{key:32} {value:.3}"),
                None => println!("{key:32} not measured"),
            }
        }
        self.write(path)?;
        plots::draw(&self.keys, path)?;
        println!("\nwritten: {} and plots beside it", path.display());
        Ok(())
    }
}
