//! Trade-off of CPU time against latency: a price, and an allowance at a lower one.

/// Nanoseconds of CPU time that one nanosecond of latency is worth: 0.01 to 100, default 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuPerLatency {
    hundredths: u16,
}

impl CpuPerLatency {
    /// Creates a price of `price` ns of CPU time for 1 ns of latency, to the nearest hundredth
    /// within 0.01 to 100.
    pub fn new(price: f64) -> Self {
        CpuPerLatency {
            // Saturates; not a number becomes 0.
            hundredths: ((price * 100.0).round() as u16).clamp(1, 10_000),
        }
    }

    /// Returns nanoseconds of CPU time per nanosecond of latency.
    pub fn get(self) -> f64 {
        f64::from(self.hundredths) / 100.0
    }
}

impl Default for CpuPerLatency {
    fn default() -> Self {
        CpuPerLatency { hundredths: 100 }
    }
}

/// Trade-off of a core's CPU time against latency: a price, and a lower one for the first part of
/// the core.
///
/// With one price the best policy for requests at random times is one of the extremes, all of the
/// core or none, by whether their rate is above or below the price: at the edge 5 % more load costs
/// half a core more. The first half of a dedicated core is of little use to anything else, since no
/// guest would run well in it; the allowance expresses that. It is a share of time that may be
/// spent where that is worth it at the lower price, and never where it is not: a fleet without load
/// still sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuLatencyTradeoff {
    price: CpuPerLatency,
    /// Not below `price`: more CPU time for the same latency.
    allowed: CpuPerLatency,
    permille: u16,
}

impl CpuLatencyTradeoff {
    /// Creates a trade-off with one price for the whole core.
    pub const fn flat(price: CpuPerLatency) -> Self {
        CpuLatencyTradeoff {
            price,
            allowed: price,
            permille: 0,
        }
    }

    /// Creates a trade-off of `price` for the whole core, except for its first `permille`
    /// thousandths (at most 1,000): there 1 ns of latency is worth `allowed` ns of CPU time, or
    /// `price` if that is more.
    pub fn tiered(price: CpuPerLatency, permille: u16, allowed: CpuPerLatency) -> Self {
        CpuLatencyTradeoff {
            price,
            allowed: if allowed.hundredths > price.hundredths {
                allowed
            } else {
                price
            },
            permille: permille.min(1000),
        }
    }

    /// Returns the price of latency for any of the core's time.
    pub const fn price(self) -> CpuPerLatency {
        self.price
    }

    /// Returns the price of latency within the allowance.
    pub const fn allowed(self) -> CpuPerLatency {
        self.allowed
    }

    /// Returns the allowance as a share of the core, 0 to 1.
    pub fn share(self) -> f64 {
        f64::from(self.permille) / 1000.0
    }
}

impl Default for CpuLatencyTradeoff {
    /// Returns 1 ns for 1 ns, and for the first 59.5 % of the core 5 ns for 1 ns. Where a park
    /// takes 14 µs of CPU time and requests come at random every 50 µs, more than half of them then
    /// find the core awake.
    fn default() -> Self {
        CpuLatencyTradeoff::tiered(CpuPerLatency::new(1.0), 595, CpuPerLatency::new(5.0))
    }
}
