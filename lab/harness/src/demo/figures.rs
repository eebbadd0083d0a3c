//! The figures of a demo: one flat map, as it is written to the report.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Value, json};

use super::scenarios::LATENCY_MS;
use crate::system::guest::Mode;
use crate::system::host::Host;

/// Exit causes of a window, as the ledger names them, what has none, and what two claim.
pub const CAUSES: [&str; 13] = [
    "iommu",
    "doorbell",
    "pci_config",
    "other_device",
    "interrupt",
    "apic",
    "hlt",
    "timer",
    "pause",
    "memory",
    "processor",
    "unattributed",
    "overlap",
];

/// Exits per read of one window.
#[derive(Clone, Debug, Default)]
pub struct PerRead {
    /// All exits.
    pub total: f64,
    /// By cause, in the order of [`CAUSES`].
    pub causes: [f64; CAUSES.len()],
    /// Invalidation-queue waits per read: what QEMU's VT-d takes an exit for.
    pub waits: f64,
    /// Interrupts that devices sent.
    pub interrupts: f64,
}

impl PerRead {
    /// From a window of the ledger's JSON.
    pub fn of(window: &Value, reads: u32) -> Self {
        let per = |value: &Value| value.as_f64().unwrap_or(f64::NAN) / f64::from(reads);
        let exits = &window["exits"];
        Self {
            total: per(&exits["total"]),
            causes: CAUSES.map(|cause| per(&exits[cause])),
            waits: per(&window["owner"]["waits"]),
            interrupts: per(&window["owner"]["interrupts"]),
        }
    }

    /// Exits per read of one cause.
    pub fn cause(&self, name: &str) -> f64 {
        let at = CAUSES
            .iter()
            .position(|cause| *cause == name)
            .expect("a cause of the ledger");
        self.causes[at]
    }

    /// Timer and halt: they depend on time, not on reads.
    pub fn timer_hlt(&self) -> f64 {
        self.cause("timer") + self.cause("hlt")
    }

    /// All but timer, halt, and delivery of interrupts: whether an interrupt takes an exit of its own or ends a halt is decided by
    /// what the guest's timer happens to do then. How many are sent is a figure of its own.
    pub fn compared(&self) -> f64 {
        self.total - self.timer_hlt() - self.cause("interrupt")
    }
}

/// Middle value; the mean of the two middle ones of an even number.
pub fn median(mut values: Vec<f64>) -> f64 {
    if values.is_empty() {
        return f64::NAN;
    }
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}

/// Everything a demo has found.
pub struct Figures {
    values: BTreeMap<String, Value>,
    windows: [Vec<PerRead>; Mode::ALL.len()],
    adaptive: [PerRead; Mode::ALL.len()],
    failed: Vec<String>,
}

impl Figures {
    /// Nothing but the conditions.
    pub fn new(host: &Host, windows: u32, reads: u32) -> Result<Self> {
        let mut this = Self {
            values: BTreeMap::new(),
            windows: Default::default(),
            adaptive: Default::default(),
            failed: Vec::new(),
        };
        this.set(
            "mode",
            format!(
                "strict unmapping, one 4 KiB direct read at a time, disk latency {LATENCY_MS} to {} ms",
                LATENCY_MS * 5 / 3
            ),
        );
        this.set("host", host.label());
        this.set("machine", exit_ledger::conditions::cpu_model());
        this.set("kernel", host.kernel_release()?);
        this.set(
            "commit",
            option_env!("EXITLESS_COMMIT").unwrap_or("unknown"),
        );
        this.set("windows", windows);
        this.set("reads_per_window", reads);
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

    /// Adds a window of `mode`.
    pub fn add_window(&mut self, mode: Mode, window: PerRead) {
        self.windows[mode as usize].push(window);
    }

    /// Sets the window of `mode` with a sidecore that may sleep.
    pub fn set_adaptive(&mut self, mode: Mode, window: PerRead) {
        let name = mode.name();
        for (key, value) in [
            ("total", window.total),
            ("compared", window.compared()),
            ("timer_hlt", window.timer_hlt()),
            ("iommu", window.cause("iommu")),
            ("doorbell", window.cause("doorbell")),
            ("memory", window.cause("memory")),
            ("unattributed", window.cause("unattributed")),
            ("overlap", window.cause("overlap")),
        ] {
            self.set(format!("{name}_adaptive_{key}_exits_per_io"), round(value));
        }
        self.adaptive[mode as usize] = window;
    }

    /// The window of `mode` with a sidecore that may sleep.
    pub fn adaptive(&self, mode: Mode) -> &PerRead {
        &self.adaptive[mode as usize]
    }

    /// Median over the rounds of one figure of `mode`'s windows.
    pub fn median(&self, mode: Mode, of: impl Fn(&PerRead) -> f64) -> f64 {
        median(self.windows[mode as usize].iter().map(of).collect())
    }

    fn spread(&self, mode: Mode, of: impl Fn(&PerRead) -> f64) -> f64 {
        let values: Vec<f64> = self.windows[mode as usize].iter().map(of).collect();
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        max - min
    }

    /// Turns the windows into figures.
    pub fn summarize(&mut self) {
        for mode in Mode::ALL {
            let name = mode.name();
            let compared = self.median(mode, PerRead::compared);
            let rows = [
                ("total_exits_per_io", self.median(mode, |w| w.total)),
                ("compared_exits_per_io", compared),
                (
                    "compared_exits_per_io_spread",
                    self.spread(mode, PerRead::compared),
                ),
                (
                    "timer_hlt_exits_per_io",
                    self.median(mode, PerRead::timer_hlt),
                ),
                (
                    "interrupt_exits_per_io",
                    self.median(mode, |w| w.cause("interrupt")),
                ),
                (
                    "iommu_exits_per_io",
                    self.median(mode, |w| w.cause("iommu")),
                ),
                (
                    "doorbell_exits_per_io",
                    self.median(mode, |w| w.cause("doorbell")),
                ),
                (
                    "unattributed_exits_per_io",
                    self.median(mode, |w| w.cause("unattributed")),
                ),
                (
                    "overlap_exits_per_io",
                    self.median(mode, |w| w.cause("overlap")),
                ),
                ("waits_per_io", self.median(mode, |w| w.waits)),
                (
                    "interrupts_sent_per_io",
                    self.median(mode, |w| w.interrupts),
                ),
            ];
            for (key, value) in rows {
                self.set(format!("{name}_{key}"), round(value));
            }
        }
        let unattributed = self.median(Mode::Shared, |w| w.cause("unattributed"));
        self.set("unattributed_exits_per_io", round(unattributed));
        let overlap = self.median(Mode::Shared, |w| w.cause("overlap"));
        self.set("overlap_exits_per_io", round(overlap));
        let above = self.median(Mode::Shared, PerRead::compared)
            - self.median(Mode::None, PerRead::compared);
        self.set("shared_above_none_exits_per_io", round(above));
        let iommu = self.median(Mode::Shared, |w| w.cause("iommu"));
        let doorbell = self.median(Mode::Shared, |w| w.cause("doorbell"));
        self.claim("shared_has_no_iommu_exits", iommu == 0.0, || {
            format!("{iommu} per read")
        });
        self.claim("shared_has_no_doorbells", doorbell <= 0.01, || {
            format!("{doorbell} per read")
        });
        let sent = |mode| self.median(mode, |w| w.interrupts);
        let more = sent(Mode::Shared) - sent(Mode::None);
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

/// Four decimals: more would pretend.
pub fn round(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(Vec::new()).is_nan());
    }

    /// Figures of which every window has one interrupt a read, and those of `shared` so many.
    fn with_interrupts(shared: f64) -> Figures {
        let mut figures = Figures {
            values: BTreeMap::new(),
            windows: Default::default(),
            adaptive: Default::default(),
            failed: Vec::new(),
        };
        for mode in Mode::ALL {
            let interrupts = if mode == Mode::Shared { shared } else { 1.0 };
            let window = PerRead {
                interrupts,
                ..PerRead::default()
            };
            figures.add_window(mode, window);
        }
        figures.summarize();
        figures
    }

    #[test]
    fn an_interrupt_more_is_no_success() {
        assert!(with_interrupts(1.0).holds());
        let failed = with_interrupts(1.02).failed;
        assert_eq!(failed.len(), 1);
        assert!(failed[0].starts_with("shared_sends_no_more_interrupts: +0.020"));
    }

    #[test]
    fn a_window_is_divided_by_its_reads() {
        let window = json!({
            "exits": { "total": 800, "iommu": 400, "timer": 100, "hlt": 50, "interrupt": 10 },
            "owner": { "waits": 200, "interrupts": 400 }
        });
        let per = PerRead::of(&window, 400);
        assert_eq!((per.total, per.cause("iommu"), per.waits), (2.0, 1.0, 0.5));
        assert_eq!((per.timer_hlt(), per.interrupts), (0.375, 1.0));
        assert_eq!(per.compared(), 2.0 - 0.375 - 0.025);
        assert!(
            per.cause("doorbell").is_nan(),
            "a cause the ledger lacks is not zero"
        );
    }
}
