//! The windows of one workload, by column, for the table and for the report's figures.

use std::fmt::Write;

use super::column::Column;
use super::figures::Figures;
use super::per_io::{CAUSES, PerIo, median, round};

/// Counts of the guests of each column.
pub struct ColumnWindows {
    of: [Vec<PerIo>; Column::ALL.len()],
    columns: &'static [Column],
    idle: &'static str,
}

impl ColumnWindows {
    /// Creates a set without windows, of these columns, whose sidecores poll.
    pub fn new(columns: &'static [Column]) -> Self {
        Self::with_idle(columns, "poll")
    }

    /// Creates the same, of sidecores with this `--idle`.
    pub fn with_idle(columns: &'static [Column], idle: &'static str) -> Self {
        Self {
            of: Default::default(),
            columns,
            idle,
        }
    }

    /// Adds a window of `column`.
    pub fn add(&mut self, column: Column, window: PerIo) {
        self.of[column as usize].push(window);
    }

    /// Returns the median of one figure of `column`'s windows.
    pub fn median(&self, column: Column, of: impl Fn(&PerIo) -> f64) -> f64 {
        median(self.of[column as usize].iter().map(of).collect())
    }

    /// Returns the largest value less the smallest.
    pub fn spread(&self, column: Column, of: impl Fn(&PerIo) -> f64) -> f64 {
        let values = self.of[column as usize].iter().map(of);
        let (min, max) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), value| {
            (min.min(value), max.max(value))
        });
        max - min
    }

    /// Sets figures with these names: `name` of a column, the figure, and `per`: `io` or `packet`.
    pub fn set(&self, figures: &mut Figures, name: impl Fn(Column) -> String, per: &str) {
        for column in self.columns.iter().copied() {
            let name = name(column);
            let mut set =
                |key: String, value: f64| figures.set(format!("{name}_{key}"), round(value));
            let is_one = self.of[column as usize].len() == 1;
            type Sum = fn(&PerIo) -> f64;
            let sums: [(&str, Sum); 3] = [
                ("total", |w| w.total),
                ("compared", PerIo::compared),
                ("timer_hlt", PerIo::timer_hlt),
            ];
            for (key, of) in sums {
                set(format!("{key}_exits_per_{per}"), self.median(column, of));
                // One window has no spread.
                if !is_one {
                    set(
                        format!("{key}_exits_per_{per}_spread"),
                        self.spread(column, of),
                    );
                }
            }
            for (at, cause) in CAUSES.iter().enumerate() {
                let value = self.median(column, |w| w.causes[at]);
                set(format!("{cause}_exits_per_{per}"), value);
            }
            set(format!("waits_per_{per}"), self.median(column, |w| w.waits));
            let interrupts = self.median(column, |w| w.interrupts);
            set(format!("interrupts_sent_per_{per}"), interrupts);
            let sidecore = self.median(column, |w| w.sidecore_percent);
            set("sidecore_cpu_percent".into(), sidecore);
        }
    }

    /// Renders a table of medians under `title`: of all causes and the rest, or of these causes.
    pub fn table(&self, text: &mut String, title: &str, rows: &[&str]) {
        self.heads(text, title);
        for (at, cause) in CAUSES.iter().enumerate() {
            let is_shown = rows.is_empty() || rows.contains(cause);
            // A cause that no request of the demo has is listed only if there was one.
            let is_rare = ["pci_config", "pause"].contains(cause);
            let is_seen = || {
                self.columns
                    .iter()
                    .any(|column| self.median(*column, |w| w.causes[at]) > 0.0)
            };
            if is_shown && (!is_rare || is_seen()) {
                self.row(text, heading(cause), 3, |w| w.causes[at]);
            }
        }
        if rows.is_empty() {
            self.row(text, "total", 3, |w| w.total);
        }
        self.row(text, "total without *", 3, PerIo::compared);
        if rows.is_empty() {
            self.row(text, "unmaps waited for", 3, |w| w.waits);
            self.row(text, "interrupts sent", 3, |w| w.interrupts);
        }
        self.row(text, "sidecore, % of a CPU *", 1, |w| w.sidecore_percent);
    }

    fn heads(&self, text: &mut String, title: &str) {
        // A head of several columns begins at the first of them.
        let mut above = String::new();
        let mut last = String::new();
        for (at, column) in self.columns.iter().enumerate() {
            let (head, _) = column.heads(self.idle);
            if head != last {
                let begin = 2 + at * WIDTH;
                above.push_str(&" ".repeat(begin.saturating_sub(above.len())));
                above.push_str(&head);
            }
            last = head;
        }
        let blank = "";
        let _ = write!(text, "\n  {title:<LABEL$}{above}\n  {blank:LABEL$}");
        for column in self.columns {
            let _ = write!(text, "{:>WIDTH$}", column.heads(self.idle).1);
        }
        text.push('\n');
    }

    fn row(&self, text: &mut String, name: &str, digits: usize, of: impl Fn(&PerIo) -> f64) {
        let _ = write!(text, "  {name:<LABEL$}");
        for column in self.columns.iter().copied() {
            // Adding zero turns negative zero into zero.
            let value = self.median(column, &of) + 0.0;
            let _ = write!(text, "{value:>WIDTH$.digits$}");
        }
        text.push('\n');
    }
}

/// Width of a row's name, and of a column, in characters.
const LABEL: usize = 30;
const WIDTH: usize = 10;

fn heading(cause: &str) -> &str {
    match cause {
        "iommu" => "IOMMU registers",
        "iommu_doorbell" => "IOMMU doorbells",
        "doorbell" => "doorbells",
        "pci_config" => "PCI configuration",
        "other_device" => "other devices",
        "interrupt" => "interrupt delivery *",
        "apic" => "local APIC",
        "hlt" => "hlt *",
        "timer" => "timer *",
        other => other,
    }
}
