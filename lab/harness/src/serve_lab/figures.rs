//! The figures: one flat map, and a table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use crate::demo::{CAUSES, PerIo, median, rounded};
use crate::report_file;
use crate::system::daemon::Totals;
use crate::system::host::Host;

/// Counts of one round.
pub struct Round {
    /// Window of each guest.
    pub windows: Vec<PerIo>,
    /// The daemon's counters, boots included.
    pub served: Totals,
}

/// A line of the table: policy, guests, and their counts.
struct Line {
    name: String,
    total: f64,
    causes: [f64; CAUSES.len()],
    interrupts: f64,
    kicks: f64,
    calls: f64,
}

/// All figures.
pub struct Figures {
    values: BTreeMap<String, Value>,
    lines: Vec<Line>,
    host: &'static str,
}

impl Figures {
    /// Creates a set without figures but for the conditions.
    pub fn new(host: &Host, reads: u32) -> Result<Self> {
        let mut this = Self {
            values: BTreeMap::new(),
            lines: Vec::new(),
            host: host.label(),
        };
        this.values.insert("host".into(), json!(host.label()));
        this.values
            .insert("kernel".into(), json!(host.kernel_release()?));
        this.values.insert(
            "commit".into(),
            json!(option_env!("EXITLESS_COMMIT").unwrap_or("unknown")),
        );
        this.set("reads_per_guest", f64::from(reads));
        Ok(this)
    }

    /// Sets one figure.
    pub fn set(&mut self, key: impl Into<String>, value: f64) {
        self.values.insert(key.into(), json!(value));
    }

    /// Adds a round: medians over its guests, and the spread of the total.
    pub fn add(&mut self, policy: &str, guests: u32, round: &Round) {
        let of = |figure: &dyn Fn(&PerIo) -> f64| -> Vec<f64> {
            round.windows.iter().map(figure).collect()
        };
        let prefix = format!("{policy}_{guests}");
        let totals = of(&|window| window.total);
        let spread = totals.iter().copied().fold(f64::MIN, f64::max)
            - totals.iter().copied().fold(f64::MAX, f64::min);
        let total = rounded(median(totals));
        self.set(format!("{prefix}_total_exits_per_io"), total);
        self.set(
            format!("{prefix}_total_exits_per_io_spread"),
            rounded(spread),
        );
        let causes = CAUSES.map(|cause| {
            let value = rounded(median(of(&|window| window.cause(cause))));
            self.set(format!("{prefix}_{cause}_exits_per_io"), value);
            value
        });
        let interrupts = rounded(median(of(&|window| {
            window.cause("interrupt") + window.cause("timer")
        })));
        self.set(
            format!("{prefix}_interrupt_and_timer_exits_per_io"),
            interrupts,
        );
        let without = rounded(median(of(&|window| {
            window.compared() - window.cause("interrupt")
        })));
        self.set(
            format!("{prefix}_exits_per_io_without_interrupt_timer_hlt"),
            without,
        );
        let served = &round.served;
        let per_1000 = |count: f64| rounded(1000.0 * count / served.requests);
        let (kicks, calls) = (per_1000(served.kicks), per_1000(served.calls));
        self.set(format!("{prefix}_daemon_kicks_per_1000"), kicks);
        self.set(format!("{prefix}_daemon_calls_per_1000"), calls);
        self.set(format!("{prefix}_daemon_requests"), served.requests);
        self.lines.push(Line {
            name: format!("{guests} guests, {policy}"),
            total,
            causes,
            interrupts,
            kicks,
            calls,
        });
    }

    /// Writes them to a file; creates its directory if need be.
    pub fn write(&self, path: &Path) -> Result<()> {
        report_file::write(path, &self.values)
    }

    /// Renders exits per 4 KiB read by cause, a line for each round.
    pub fn table(&self) -> String {
        // The column of interrupts has the device's and the timer's together: which of the two ends
        // a halt depends on time.
        const SHOWN: [(&str, &str); 8] = [
            ("doorbell", "doorbell"),
            ("hlt", "hlt"),
            ("apic", "apic"),
            ("other_device", "devices"),
            ("memory", "memory"),
            ("processor", "processor"),
            ("unattributed", "unattr."),
            ("overlap", "overlap"),
        ];
        let mut text = format!(
            "exits per 4 KiB read, medians over the guests ({})\n  {:<18}{:>9}",
            self.host, "", "total"
        );
        for (_, head) in SHOWN {
            let _ = write!(text, "{head:>11}");
        }
        text.push_str(" | interrupts and timer | daemon: kicks, calls per 1000 requests\n");
        for line in &self.lines {
            let _ = write!(text, "  {:<18}{:>9.3}", line.name, line.total);
            for (cause, _) in SHOWN {
                let value = CAUSES
                    .iter()
                    .position(|other| *other == cause)
                    .map_or(f64::NAN, |at| line.causes[at]);
                let _ = write!(text, "{value:>11.3}");
            }
            let _ = writeln!(
                text,
                " | {:>20.3} | {:>13.1}{:>8.1}",
                line.interrupts, line.kicks, line.calls
            );
        }
        text
    }
}
