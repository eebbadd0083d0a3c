//! Exits per request of one window of the ledger.

use serde_json::Value;

/// Exit causes of a window, as the ledger names them, and its names for exits with no cause and
/// with two.
pub const CAUSES: [&str; 14] = [
    "iommu",
    "iommu_doorbell",
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

/// Exits per request of one window: per read or write, or per packet.
#[derive(Clone, Debug, Default)]
pub struct PerIo {
    /// All exits.
    pub total: f64,
    /// By cause, in the order of [`CAUSES`].
    pub causes: [f64; CAUSES.len()],
    /// Invalidation-queue waits per request, for which QEMU's VT-d takes an exit.
    pub waits: f64,
    /// Interrupts that devices sent.
    pub interrupts: f64,
    /// CPU time of the sidecore, in percent of the window's length: not per request.
    pub sidecore_percent: f64,
}

impl PerIo {
    /// Computes the counts from a window of the ledger's JSON.
    pub fn of(window: &Value, requests: u32) -> Self {
        let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        let per = |value: &Value| number(value) / f64::from(requests);
        let used = number(&window["sidecore"]["cpu_ns"]);
        let exits = &window["exits"];
        Self {
            total: per(&exits["total"]),
            causes: CAUSES.map(|cause| per(&exits[cause])),
            waits: per(&window["owner"]["waits"]),
            interrupts: per(&window["owner"]["interrupts"]),
            sidecore_percent: 100.0 * used / number(&window["duration_ns"]),
        }
    }

    /// Returns the exits per request of one cause.
    pub fn cause(&self, name: &str) -> f64 {
        let at = CAUSES
            .iter()
            .position(|cause| *cause == name)
            .expect("a cause of the ledger");
        self.causes[at]
    }

    /// Returns the exits of timer and halt: they depend on time, not on requests.
    pub fn timer_hlt(&self) -> f64 {
        self.cause("timer") + self.cause("hlt")
    }

    /// Returns all exits but those of timer, halt, and delivery of interrupts: whether an interrupt
    /// takes an exit of its own or ends a halt depends on the guest's timer at that moment. The
    /// number of interrupts sent is a figure of its own.
    pub fn compared(&self) -> f64 {
        self.total - self.timer_hlt() - self.cause("interrupt")
    }
}

/// Returns the middle value; the mean of the two middle ones of an even number.
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

/// Rounds to four decimals: more would not be significant.
pub fn round(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn a_window_is_divided_by_its_requests() {
        let window = json!({
            "exits": { "total": 800, "iommu": 400, "timer": 100, "hlt": 50, "interrupt": 10 },
            "owner": { "waits": 200, "interrupts": 400 },
            "sidecore": { "cpu_ns": 3_000 }, "duration_ns": 4_000
        });
        let per = PerIo::of(&window, 400);
        assert_eq!((per.total, per.cause("iommu"), per.waits), (2.0, 1.0, 0.5));
        assert_eq!((per.timer_hlt(), per.interrupts), (0.375, 1.0));
        assert_eq!(per.sidecore_percent, 75.0);
        assert_eq!(per.compared(), 2.0 - 0.375 - 0.025);
        assert!(
            per.cause("doorbell").is_nan(),
            "a cause the ledger lacks is not zero"
        );
    }
}
