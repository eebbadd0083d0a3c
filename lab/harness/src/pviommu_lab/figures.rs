//! The figures: one flat map, and a table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use crate::demo::{PerIo, rounded};
use crate::report_file;
use crate::system::host::Host;

/// Counts of a window for each of its operations: a read, a transaction, a MiB.
#[derive(Clone, Debug)]
pub struct Window {
    exits: PerIo,
    /// Requests to the IOMMU, MAPs and UNMAPs included.
    requests: f64,
    maps: f64,
    unmaps: f64,
    kicks: f64,
    /// Invalidations of an emulated unit.
    invalidations: f64,
}

impl Window {
    /// Computes the counts of a window of the ledger's JSON.
    pub fn of(window: &Value, operations: u32) -> Self {
        let exits = PerIo::of(window, operations);
        // Without such an IOMMU there are none.
        let asked = |key: &str| {
            let count = window["paravirtual"][key].as_f64();
            count.unwrap_or(0.0) / f64::from(operations)
        };
        let invalidations = window["owner"]["invalidations"].as_f64();
        Self {
            requests: asked("requests"),
            maps: asked("maps"),
            unmaps: asked("unmaps"),
            kicks: exits.cause("iommu_doorbell"),
            invalidations: invalidations.unwrap_or(f64::NAN) / f64::from(operations),
            exits,
        }
    }

    /// Returns the counts by the name of a figure, which ends in `_per_` and an operation.
    fn values(&self) -> [(&'static str, f64); 7] {
        [
            ("requests", self.requests),
            ("maps", self.maps),
            ("unmaps", self.unmaps),
            ("kicks", self.kicks),
            ("invalidations", self.invalidations),
            ("exits", self.exits.total),
            ("compared_exits", self.exits.compared()),
        ]
    }

    /// Returns the requests to the IOMMU.
    pub fn requests(&self) -> f64 {
        self.requests
    }

    /// Returns MAPs, UNMAPs, kicks, and exits but for timer, halt and delivery of interrupts.
    pub fn columns(&self) -> [f64; 4] {
        [self.maps, self.unmaps, self.kicks, self.exits.compared()]
    }
}

/// All figures.
pub struct Figures {
    values: BTreeMap<String, Value>,
    rows: Vec<(String, [Window; 2])>,
    host: &'static str,
}

impl Figures {
    /// Creates a set without figures but for the conditions.
    pub fn new(host: &Host, reads: u32) -> Result<Self> {
        let commit = option_env!("EXITLESS_COMMIT").unwrap_or("unknown");
        let conditions = [
            ("host", json!(host.label())),
            ("kernel", json!(host.kernel_release()?)),
            ("commit", json!(commit)),
            ("reads_per_window", json!(reads)),
        ];
        let conditions = conditions.map(|(key, value)| (key.to_owned(), value));
        Ok(Self {
            values: conditions.into(),
            rows: Vec::new(),
            host: host.label(),
        })
    }

    fn row(&self, name: &str) -> Option<&[Window; 2]> {
        let mut rows = self.rows.iter();
        rows.find(|(own, _)| own == name)
            .map(|(_, windows)| windows)
    }

    /// Adds a row: reads into one page, and into many.
    pub fn add(&mut self, name: &str, windows: &[Window; 2]) {
        for (window, suffix) in windows.iter().zip(["", "_512"]) {
            self.insert_window(&format!("{name}{suffix}"), "read", window);
        }
        self.rows.push((name.to_owned(), windows.clone()));
        self.derive();
    }

    /// Sets the figures of a window, in keys `NAME_…_per_OPERATION`.
    pub fn insert_window(&mut self, name: &str, operation: &str, window: &Window) {
        for (figure, value) in window.values() {
            self.insert(format!("{name}_{figure}_per_{operation}"), value);
        }
    }

    /// Sets one figure.
    pub fn insert(&mut self, key: String, value: f64) {
        self.values.insert(key, json!(rounded(value)));
    }

    /// Adds the figures that combine several rows, or say whether a bar is met.
    fn derive(&mut self) {
        let mut derived = Vec::new();
        for (name, key) in [("stock", "polled"), ("stock_lazy", "polled_lazy")] {
            if let Some([window, _]) = self.row(name) {
                let per_1000 = 1000.0 * window.kicks / window.requests;
                derived.push((format!("{key}_kicks_per_1000"), per_1000));
                if let Some([bare, _]) = self.row("no_iommu") {
                    let more = window.exits.compared() - bare.exits.compared();
                    derived.push((format!("{key}_more_exits_per_read"), more));
                }
            }
        }
        for (name, key) in [
            ("stock_trap", "trap_exits_per_request"),
            ("stock_lazy_trap", "lazy_trap_exits_per_request"),
        ] {
            if let Some([window, _]) = self.row(name) {
                derived.push((key.into(), window.kicks / window.requests));
            }
        }
        let none = self.row("none").map(|[_, many]| many.requests);
        for policy in ["shared", "async", "optimistic", "rtc"] {
            if let (Some(none), Some([_, many])) = (none, self.row(policy)) {
                let removed = 100.0 * (1.0 - many.requests / none);
                derived.push((format!("block512_removed_percent_{policy}"), removed));
            }
        }
        for (key, value) in derived {
            self.insert(key, value);
        }
    }

    /// Sets a figure that belongs to no row.
    pub fn put(&mut self, key: &str, value: Value) {
        self.values.insert(key.to_owned(), value);
    }

    /// Returns whether there are rows.
    pub fn has_rows(&self) -> bool {
        !self.rows.is_empty()
    }

    /// Writes them to a file; creates its directory if need be.
    pub fn write(&self, path: &Path) -> Result<()> {
        report_file::write(path, &self.values)
    }

    /// Renders requests and exits of each read, a line for each row.
    pub fn table(&self) -> String {
        let mut text = format!(
            "for each 4 KiB read, Linux 6.12, 1 vCPU ({})\n  {:<18}{:>8}{:>8}{:>8}{:>9}{:>9} | \
             {:>9}{:>9} with 512 pages\n",
            self.host, "", "map", "unmap", "kicks", "invalid.", "exits *", "requests", "kicks"
        );
        for (name, [one, many]) in &self.rows {
            let _ = writeln!(
                text,
                "  {name:<18}{:>8.3}{:>8.3}{:>8.3}{:>9.3}{:>9.3} | {:>9.3}{:>9.3}",
                one.maps,
                one.unmaps,
                one.kicks,
                one.invalidations,
                one.exits.compared(),
                many.requests,
                many.kicks
            );
        }
        text.push_str("  * without timer, halt and delivery of interrupts\n");
        for key in [
            "polled_kicks_per_1000",
            "polled_more_exits_per_read",
            "trap_exits_per_request",
            "lazy_trap_exits_per_request",
            "block512_removed_percent_optimistic",
            "block512_removed_percent_rtc",
        ] {
            if let Some(value) = self.values.get(key) {
                let _ = writeln!(text, "  {key:<38}{value:>9}");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_divided_by_its_reads() {
        let window = json!({
            "exits": { "total": 800, "iommu_doorbell": 8, "timer": 100, "hlt": 50, "interrupt": 10 },
            "paravirtual": { "requests": 800, "maps": 400, "unmaps": 396 },
            "owner": { "invalidations": 396 }
        });
        let window = Window::of(&window, 100);
        assert_eq!(
            (window.requests, window.maps, window.unmaps),
            (8.0, 4.0, 3.96)
        );
        assert_eq!((window.kicks, window.invalidations), (0.08, 3.96));
        let bare = Window::of(&json!({ "exits": { "iommu_doorbell": 0 } }), 100);
        assert_eq!((bare.requests, bare.kicks), (0.0, 0.0));
        assert!(bare.exits.total.is_nan(), "what a ledger lacks is not zero");
    }
}
