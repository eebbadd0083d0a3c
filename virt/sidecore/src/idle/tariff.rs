//! What CPU time is worth: a price, and an allowance below it.

/// How many nanoseconds of CPU time one pays for one nanosecond of latency: 0.01 to 100, default 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Price {
    hundredths: u16,
}

impl Price {
    /// `price` ns of CPU time for 1 ns of latency, to the nearest hundredth within 0.01 to 100.
    pub fn new(price: f64) -> Self {
        Price {
            // Saturates; not a number becomes 0.
            hundredths: ((price * 100.0).round() as u16).clamp(1, 10_000),
        }
    }

    /// Nanoseconds of CPU time per nanosecond of latency.
    pub fn get(self) -> f64 {
        f64::from(self.hundredths) / 100.0
    }
}

impl Default for Price {
    fn default() -> Self {
        Price { hundredths: 100 }
    }
}

/// What the core's time costs: a price, and the first part of the core at a lower one.
///
/// With one price the best answer to requests at random times is one of the extremes, all of the
/// core or none, whichever side of the price their rate is on: at the edge 5 % more load costs half
/// a core more. Whoever has a core for this has it anyhow for the first half, in which no guest
/// would run well; the allowance says so. It is a share of time that may be spent where that is
/// worth it at the lower price, and never where it is not: a fleet without load still sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tariff {
    price: Price,
    /// Not below `price`: more CPU time for the same latency.
    allowed: Price,
    permille: u16,
}

impl Tariff {
    /// One price for the whole core.
    pub const fn flat(price: Price) -> Self {
        Tariff {
            price,
            allowed: price,
            permille: 0,
        }
    }

    /// `price` for the whole core, but the first `permille` thousandths of it (at most 1,000) for
    /// `allowed` ns of CPU time per ns of latency, or `price` if that is more.
    pub fn tiered(price: Price, permille: u16, allowed: Price) -> Self {
        Tariff {
            price,
            allowed: if allowed.hundredths > price.hundredths {
                allowed
            } else {
                price
            },
            permille: permille.min(1000),
        }
    }

    /// What is paid for latency with any of the core's time.
    pub const fn price(self) -> Price {
        self.price
    }

    /// What is paid for latency within the allowance.
    pub const fn allowed(self) -> Price {
        self.allowed
    }

    /// The allowance as a share of the core, 0 to 1.
    pub fn share(self) -> f64 {
        f64::from(self.permille) / 1000.0
    }
}

impl Default for Tariff {
    /// 1 ns for 1 ns, and the first 59.5 % of the core at 5 ns for 1 ns: as much as lets more than
    /// half of the requests that come at random every 50 µs find the core awake, where a park takes
    /// 14 µs of its time.
    fn default() -> Self {
        Tariff::tiered(Price::new(1.0), 595, Price::new(5.0))
    }
}
