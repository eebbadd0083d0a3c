//! Rows for people and keys for programs, from one source.
//!
//! A row `ROW` of T threads has the keys `ROW_Tthr_ns` (a pair, per thread; `_spread` beside it),
//! `ROW_Tthr_mps` (all threads), and for two threads `ROW_2thr_rtt_ns` (the round trip before
//! them), `ROW_2thr_runs` and, of these, `ROW_2thr_disturbed`. What was not measured is null; so is
//! a ratio to Linux where its code could not be had: it is void.

use std::path::Path;

use anyhow::Result;
use report::object::round;
use report::{Host, Measured, Object, short};

use crate::measure::{Case, Outcome, Primitives, Turns};

/// The keys that are always there, null where they were not measured. The first are ours behind one
/// call / Linux's, or of what the kernel's code does as a whole: below 1 is faster.
pub const KEYS: [&str; 24] = [
    "linux_a1_ratio",
    "linux_b32_ratio",
    "linux_burst4096_ratio",
    "linux_fifo4096_ratio",
    "linux_random_65536_ratio",
    "linux_mask32_ratio",
    "linux_512p_ratio",
    "linux_xcore_ratio",
    "map_unmap_linux_ratio",
    "map_unmap_2mib_linux_ratio",
    "failing_alloc_ns",
    "exhaustion_neighbour_ratio",
    "combining_true_costs_vs_strict",
    "combining_2thr_500ns_vs_lock",
    "tables_after_park_512k",
    "a1_2thr_vs_separate",
    "c1_2thr_vs_separate",
    "map_unmap_2thr_vs_separate",
    "leaf_tables_c1",
    "leaf_tables_c1_2thr",
    "leaf_tables_after_epoch",
    "opt4096_share",
    "deferred_share",
    "strict_share",
];

/// Figures measured so far.
pub struct Record {
    object: Object,
}

impl Record {
    /// With the machine and its primitives as the first keys.
    pub fn new(host: &Host, turns: &Turns, primitives: &Primitives, is_quick: bool) -> Self {
        let mode = format!(
            "native, release, threads pinned, {} runs of {} ms{}",
            turns.runs,
            turns.time.as_millis(),
            if is_quick {
                ", quick: figures mean little"
            } else {
                ""
            }
        );
        let mut object = Object::new(host, &mode);
        for key in KEYS {
            object.missing(key);
        }
        object.measured("floor_ns", &primitives.floor_ns, 3);
        object.measured("lock_ns", &primitives.lock_ns, 3);
        object.measured("private_ns", &primitives.private_ns, 3);
        if let Some(two) = &primitives.private_2thr_ns {
            object.measured("private_2thr_ns", two, 3);
        }
        if let Some(rtt) = &primitives.rtt_ns {
            object.measured("rtt_ns", rtt, 1);
        }
        let private_ratio = primitives.private_ratio();
        println!("{}, Linux {}, commit {}", host, host.kernel, host.commit);
        println!("{mode}");
        if host.load_average > 1.0 {
            println!(
                "WARNING: others use this machine (load average {}): figures mean little",
                host.load_average
            );
        }
        println!(
            "floor {:.2} ns, lock {:.2} ns, private loop {:.2} ns, 2 threads x {}, round trip {} \
             ns",
            primitives.floor_ns.median,
            primitives.lock_ns.median,
            primitives.private_ns.median,
            or_dash(private_ratio, 3),
            or_dash(primitives.rtt_ns.map(|rtt| rtt.median), 0)
        );
        if private_ratio.is_some_and(|ratio| ratio > 1.1) {
            println!(
                "WARNING: two threads that share nothing disturb each other: figures of two mean \
                 little"
            );
        }
        Self { object }
    }

    /// A title, and the heads of the columns of [`row`](Self::row).
    pub fn section(&self, title: &str) {
        println!(
            "\n{title}\n{:40} {:>9} {:>9} {:>9} {:>9} {:>6}",
            "ns a pair, per thread", "min", "median", "max", "M/s", "RTT"
        );
    }

    /// A row, printed and kept.
    pub fn row(&mut self, row: &str, case: &Case<'_>, outcome: &Result<Outcome>) {
        let key = format!("{row}_{}thr", case.threads);
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                println!("{:40} not measured: {error:#}", case.name);
                self.object.missing(&format!("{key}_ns"));
                return;
            }
        };
        let Measured { min, median, max } = outcome.ns;
        self.measured(&format!("{key}_ns"), &outcome.ns, 2);
        self.measured(&format!("{key}_mps"), &outcome.mps, 3);
        let rtt = outcome.rtt_ns.map(|rtt| rtt.median);
        if let Some(rtt) = rtt {
            self.number(&format!("{key}_rtt_ns"), rtt, 1);
            self.number(&format!("{key}_disturbed"), outcome.disturbed as f64, 0);
            self.number(&format!("{key}_runs"), outcome.runs.len() as f64, 0);
        }
        let note = match (outcome.disturbed, outcome.runs.len()) {
            (0, _) => String::new(),
            (some, all) if some == all => " (every run disturbed)".to_owned(),
            (some, all) => format!(" ({some} of {all} runs disturbed and left out)"),
        };
        println!(
            "{:40} {:>9} {:>9} {:>9} {:>9} {:>6} {note}",
            case.name,
            ns_text(min),
            ns_text(median),
            ns_text(max),
            short(outcome.mps.median),
            or_dash(rtt, 0)
        );
    }

    /// A figure with its spread.
    pub fn measured(&mut self, key: &str, measured: &Measured, digits: i32) {
        self.object.measured(key, measured, digits);
    }

    /// A number.
    pub fn number(&mut self, key: &str, value: f64, digits: i32) {
        self.object.number(key, round(value, digits));
    }

    /// The ratio of two cases' times, turn by turn, with its spread; void where there is nothing to
    /// compare with. Gives it.
    pub fn ratio(
        &mut self,
        key: &str,
        this: Option<&Outcome>,
        other: Option<&Outcome>,
    ) -> Option<f64> {
        let found = this.zip(other).and_then(|(this, other)| {
            this.turn_by_turn(other, |this, other| Some(this.ns / other.ns))
        });
        match found {
            Some(ratio) => {
                self.measured(key, &ratio, 3);
                println!(
                    "{key:40} {:>9.3} {:>9.3} {:>9.3}",
                    ratio.min, ratio.median, ratio.max
                );
            }
            None => {
                self.object.missing(key);
                println!("{key:40} {:>9}", "void");
            }
        }
        found.map(|ratio| ratio.median)
    }

    /// The same figure under another key, with its spread.
    pub fn copy(&mut self, key: &str, of: &str) {
        for suffix in ["", "_spread"] {
            if let Some(value) = self.get(&format!("{of}{suffix}")) {
                self.object.number(&format!("{key}{suffix}"), value);
            }
        }
    }

    /// Text.
    pub fn text(&mut self, key: &str, text: &str) {
        self.object.value(key, text);
    }

    /// A key's number, if it was measured.
    pub fn get(&self, key: &str) -> Option<f64> {
        self.object.get(key)
    }

    /// Says how many turns began on a busy machine so far.
    pub fn busy(&mut self, turns: &Turns) {
        self.object.number("busy_turns", turns.busy.get() as f64);
    }

    /// Writes what is there, so that nothing is lost if a later section fails.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        Ok(self.object.write(path)?)
    }

    /// Prints the keys that are always there.
    pub fn summary(&self) {
        println!("\n{:40} {:>10} {:>10}", "", "median", "spread");
        for key in KEYS {
            let value = self.get(key).map(|value| format!("{value:.3}"));
            let value = value.unwrap_or_else(|| "void".to_owned());
            let spread = or_dash(self.get(&format!("{key}_spread")), 3);
            println!("{key:40} {value:>10} {spread:>10}");
        }
    }
}

/// A number with so many decimals, or a dash.
pub fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

/// Nanoseconds with as many digits as they deserve.
pub fn ns_text(ns: f64) -> String {
    match ns {
        ns if ns < 100.0 => format!("{ns:.2}"),
        ns if ns < 10_000.0 => format!("{ns:.0}"),
        ns => short(ns),
    }
}
