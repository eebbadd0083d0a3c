//! The figures of a demo: one flat map, as it is written to the report, and what it claims.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Value, json};

use super::column::Column;
use super::per_io::{PerIo, round};
use super::windows::Windows;
use crate::system::guest::Outcome;
use crate::system::host::Host;

/// Everything a demo has found.
#[derive(Default)]
pub struct Figures {
    values: BTreeMap<String, Value>,
    failed: Vec<String>,
}

impl Figures {
    /// Nothing but the conditions.
    pub fn new(host: &Host) -> Result<Self> {
        let mut this = Self::default();
        this.set("host", host.label());
        this.set("host_is_emulated", matches!(host, Host::Lab(_)));
        this.set("machine", exit_ledger::conditions::cpu_model());
        this.set("kernel", host.kernel_release()?);
        this.set(
            "commit",
            option_env!("EXITLESS_COMMIT").unwrap_or("unknown"),
        );
        Ok(this)
    }

    /// Sets one figure.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        self.values.insert(key.into(), value.into());
    }

    /// One figure.
    pub fn get(&self, key: &str) -> &Value {
        self.values.get(key).unwrap_or(&Value::Null)
    }

    /// One figure that is a text.
    pub fn text(&self, key: &str) -> &str {
        self.get(key).as_str().unwrap_or("?")
    }

    /// One figure that is a number.
    pub fn number(&self, key: &str) -> f64 {
        self.get(key).as_f64().unwrap_or(f64::NAN)
    }

    /// Sets a claim, which has to hold for the demo to succeed.
    pub fn claim(&mut self, key: &str, holds: bool, otherwise: impl FnOnce() -> String) {
        self.set(key, holds);
        if !holds {
            self.failed.push(format!("{key}: {}", otherwise()));
        }
    }

    /// Sets a claim that holds if its check succeeded.
    pub fn claim_ok(&mut self, key: &str, check: Result<()>) {
        self.claim(key, check.is_ok(), || {
            check.err().map_or_else(String::new, |e| format!("{e:#}"))
        });
    }

    /// Whether all claims held.
    pub fn holds(&self) -> bool {
        self.failed.is_empty()
    }

    /// Claims that did not hold, each with what was seen.
    pub fn failed(&self) -> &[String] {
        &self.failed
    }

    /// What the program chose for the guest that was left to its defaults.
    pub fn set_defaults(&mut self, outcome: &Outcome) {
        for (key, of) in [("default_iommu_mode", "mode"), ("default_idle", "idle")] {
            self.set(key, outcome.ledger[of].clone());
        }
    }

    /// Figures of the measured reads, and what is claimed of them.
    pub fn summarize(&mut self, windows: &Windows) {
        windows.set(self, |column| column.name().into(), "io");
        let median = |column, of: fn(&PerIo) -> f64| windows.median(column, of);
        let shared = |of: fn(&PerIo) -> f64| median(Column::Shared, of);
        let unattributed = shared(|w| w.cause("unattributed"));
        self.set("unattributed_exits_per_io", round(unattributed));
        let overlap = shared(|w| w.cause("overlap"));
        self.set("overlap_exits_per_io", round(overlap));
        let above = shared(PerIo::compared) - median(Column::None, PerIo::compared);
        self.set("shared_above_none_exits_per_io", round(above));
        for column in [Column::Shared, Column::LazyShared] {
            let iommu = median(column, |w| w.cause("iommu"));
            let key = format!("{}_has_no_iommu_exits", column.name());
            self.claim(&key, iommu == 0.0, || format!("{iommu} per read"));
        }
        let doorbell = shared(|w| w.cause("doorbell"));
        self.claim("shared_has_no_doorbells", doorbell <= 0.01, || {
            format!("{doorbell} per read")
        });
        let sent: fn(&PerIo) -> f64 = |w| w.interrupts;
        let more = shared(sent) - median(Column::None, sent);
        self.claim("shared_sends_no_more_interrupts", more <= 0.01, || {
            format!("{more:+.3} per read above no IOMMU")
        });
        self.claim("shared_total_is_that_of_none", above <= 0.05, || {
            format!("{above:+.3} per read above no IOMMU")
        });
    }

    /// All figures as one flat object.
    pub fn json(&self) -> Value {
        json!(self.values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures of which every window has one interrupt a read, and those of `shared` so many.
    fn with_interrupts(shared: f64) -> Figures {
        let mut figures = Figures::default();
        figures.summarize(&windows(|column| PerIo {
            interrupts: if column == Column::Shared {
                shared
            } else {
                1.0
            },
            ..PerIo::default()
        }));
        figures
    }

    /// One window of each column.
    fn windows(of: impl Fn(Column) -> PerIo) -> Windows {
        let mut windows = Windows::new(&Column::ALL);
        for column in Column::ALL {
            windows.add(column, of(column));
        }
        windows
    }

    #[test]
    fn an_interrupt_more_is_no_success() {
        assert!(with_interrupts(1.0).holds());
        let failed = with_interrupts(1.02).failed;
        assert_eq!(failed.len(), 1);
        assert!(failed[0].starts_with("shared_sends_no_more_interrupts: +0.020"));
    }

    #[test]
    fn an_exit_at_a_shared_register_is_no_success_lazy_or_not() {
        for (at, key) in [
            (Column::Shared, "shared_has_no_iommu_exits"),
            (Column::LazyShared, "lazy_shared_has_no_iommu_exits"),
        ] {
            let mut figures = Figures::default();
            figures.summarize(&windows(|column| {
                let mut window = PerIo::default();
                window.causes[0] = if column == at { 0.01 } else { 0.0 };
                window
            }));
            let [failed] = figures.failed() else {
                panic!("{:?}", figures.failed());
            };
            assert!(failed.starts_with(key), "{failed}");
        }
    }

    #[test]
    fn each_column_has_its_total_in_the_report() {
        let mut figures = Figures::default();
        let totals = [6.0, 11.0, 10.0, 6.25, 7.5, 6.5, 8.125];
        figures.summarize(&windows(|column| PerIo {
            total: totals[column as usize],
            ..PerIo::default()
        }));
        for (key, total) in [
            ("none_total_exits_per_io", 6.0),
            ("trap_total_exits_per_io", 11.0),
            ("shared_total_exits_per_io", 6.25),
            ("lazy_trap_total_exits_per_io", 7.5),
            ("lazy_shared_total_exits_per_io", 6.5),
            ("default_total_exits_per_io", 8.125),
        ] {
            assert_eq!(figures.number(key), total, "{key}");
        }
        let spread = figures.get("default_total_exits_per_io_spread");
        assert!(spread.is_null(), "one window has no spread: {spread}");
    }
}
