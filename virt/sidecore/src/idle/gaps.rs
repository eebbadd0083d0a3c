//! How long to spin before sleeping, learnt from the gaps between busy periods and the price of CPU
//! time.
//!
//! Spinning for `T` and then sleeping costs, per unit of time in which the core has nothing to
//! serve,
//!
//! ```text
//!             E[min(gap, T)] + P(gap > T) × (C + w × (N + L × n × (1 + k/2)))
//! cost(T) =  ───────────────────────────────────────────────────────────
//!                        E[gap] + P(gap > T) × L
//! ```
//! where `C` is the CPU time of a park (arming, falling asleep, waking), `L` the latency that a
//! wake adds to the work that ended the gap, `n` how many requests are served before the next gap:
//! what the core is late for the first, it is late for all of them; `N` what it costs whoever has
//! to wake the core (an exit, an interrupt to another processor: time that a guest does not
//! compute), `k` how many more gaps would have ended meanwhile (what ends them waits for half of
//! `L`, and saves as many gaps: that is what the denominator is for), and `w` how many ns of CPU
//! one pays for 1 ns of latency. With `T = 0` that is notification, without end it is polling. The
//! limit chosen is the smallest whose cost is within 1 % of the least: as good, and it ends sooner
//! when the load does.
//!
//! The gaps are counted by the [`LIMITS`] between which they fall, number and sum, so that both
//! terms are **exact** for the gaps remembered; a logarithmic histogram would have to be
//! interpolated just where it matters. A gap's weight halves with every 177 later ones and every
//! 100 ms: whichever comes first.
//!
//! Pure. Cost: 5 ns per gap, 0.1 µs per choice.

use super::{Price, Tariff};

/// The limits to choose from, in nanoseconds; after them, for ever.
const LIMITS: [u64; 19] = [
    0, 2_000, 5_000, 10_000, 15_000, 20_000, 30_000, 50_000, 70_000, 100_000, 150_000, 200_000,
    300_000, 500_000, 700_000, 1_000_000, 2_000_000, 5_000_000, 20_000_000,
];
/// The limit that never comes.
pub(super) const FOREVER: u64 = u64::MAX;

/// What a notification costs the notifier, in nanoseconds: a system call that wakes somebody, or an
/// exit. It also decides for spinning where both are about as good: with a guest that waits for
/// each answer before it asks again, sleeping makes the gaps longer, which the gaps themselves do
/// not show.
const NOTIFY_NS: f64 = 5_000.0;

/// Weight of a gap relative to the one before it.
const GROWTH: f64 = 256.0 / 255.0;
/// In nanoseconds: the time in which weights halve.
const HALF_LIFE_NS: f64 = 100_000_000.0;
/// Requests that one late start delays, at most: those in flight. Of a busy period that goes on
/// longer the rest have not been asked for yet.
const MOST_LATE: u64 = 64;
/// Before weights are scaled down.
const LARGEST: f64 = 1e60;
/// A limit is as good as the best up to this factor.
const TIE: f64 = 1.01;
/// Chosen anew after this many gaps, or after this time in ns.
const GAPS_PER_CHOICE: u32 = 64;
const NS_PER_CHOICE: u64 = 200_000;

/// What one park costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Park {
    /// CPU time, in ns.
    pub(super) cpu_ns: f64,
    /// Latency added, in ns.
    pub(super) wake_ns: f64,
}

/// Gaps between two neighbouring limits.
#[derive(Clone, Copy, Debug, Default)]
struct Bin {
    weight: f64,
    sum_ns: f64,
    /// Requests that followed.
    requests: f64,
}

/// The gaps remembered, and the limit that suits them.
#[derive(Clone, Debug)]
pub(super) struct Gaps {
    /// `bins[i]`: longer than limit `i`, up to limit `i + 1`.
    bins: [Bin; LIMITS.len()],
    /// The weight of the next.
    unit: f64,
    /// Where the last one is counted.
    last: usize,
    limit_ns: u64,
    allowed_limit_ns: u64,
    since_choice: u32,
    ns_since_choice: u64,
}

impl Gaps {
    /// Without experience: spins for as long as a wake costs, which is never worse than twice the
    /// best.
    pub(super) fn new(park: Park, tariff: Tariff) -> Self {
        let as_a_wake = |price: Price| (park.cpu_ns + price.get() * park.wake_ns) as u64;
        Gaps {
            bins: [Bin::default(); LIMITS.len()],
            unit: 1.0,
            last: 0,
            limit_ns: as_a_wake(tariff.price()),
            allowed_limit_ns: as_a_wake(tariff.allowed()),
            since_choice: 0,
            ns_since_choice: 0,
        }
    }

    /// The limit chosen last.
    pub(super) fn limit_ns(&self) -> u64 {
        self.limit_ns
    }

    /// The one at the price of the allowance.
    pub(super) fn allowed_limit_ns(&self) -> u64 {
        self.allowed_limit_ns
    }

    /// After the gap that was recorded last so many requests were served until the next.
    pub(super) fn was_followed_by(&mut self, requests: u64) {
        let late = requests.min(MOST_LATE) as f64;
        self.bins[self.last].requests += self.unit * late;
    }

    /// A gap has ended.
    pub(super) fn record(&mut self, gap_ns: u64, park: Park, tariff: Tariff) {
        let is_within = |&limit: &u64| gap_ns <= limit;
        let at = LIMITS[1..].iter().position(is_within);
        let at = at.unwrap_or(LIMITS.len() - 1);
        self.unit *= GROWTH;
        if gap_ns > 100_000 {
            self.unit *= (gap_ns as f64 / HALF_LIFE_NS).min(100.0).exp2();
        }
        self.last = at;
        self.bins[at].weight += self.unit;
        self.bins[at].sum_ns += self.unit * gap_ns as f64;
        self.since_choice += 1;
        self.ns_since_choice = self.ns_since_choice.saturating_add(gap_ns);
        if self.since_choice >= GAPS_PER_CHOICE || self.ns_since_choice >= NS_PER_CHOICE {
            self.choose(park, tariff);
        }
    }

    #[cold]
    fn choose(&mut self, park: Park, tariff: Tariff) {
        (self.since_choice, self.ns_since_choice) = (0, 0);
        if self.unit > LARGEST {
            let scale = 1.0 / self.unit;
            self.unit = 1.0;
            for bin in &mut self.bins {
                bin.weight *= scale;
                bin.sum_ns *= scale;
                bin.requests *= scale;
            }
        }
        let total: Bin = self.bins.iter().fold(Bin::default(), |sum, bin| Bin {
            weight: sum.weight + bin.weight,
            sum_ns: sum.sum_ns + bin.sum_ns,
            requests: sum.requests + bin.requests,
        });
        self.limit_ns = self.best_limit(total, park, tariff.price());
        self.allowed_limit_ns = if tariff.share() > 0.0 {
            self.best_limit(total, park, tariff.allowed())
        } else {
            self.limit_ns
        };
    }

    /// The limit that costs least at a price, for the gaps remembered, which are `total`.
    fn best_limit(&self, total: Bin, park: Park, price: Price) -> u64 {
        let price = price.get();
        let company = self.expect_company(total.weight, park.wake_ns);
        let late_ns = price * park.wake_ns * (1.0 + company / 2.0);
        let missed = park.cpu_ns + price * NOTIFY_NS;
        let mut costs = [0.0; LIMITS.len() + 1];
        let (mut shorter, mut sum_ns, mut requests) = (0.0, 0.0, 0.0);
        for (at, cost) in costs.iter_mut().enumerate() {
            // The last limit is for ever: nothing is longer.
            let (limit, longer, late) = match LIMITS.get(at) {
                Some(&ns) => {
                    let longer = (total.weight - shorter).max(0.0);
                    (ns as f64, longer, (total.requests - requests).max(longer))
                }
                None => (0.0, 0.0, 0.0),
            };
            *cost = (sum_ns + longer * (limit + missed) + late * late_ns)
                / (total.sum_ns + longer * park.wake_ns);
            if let Some(bin) = self.bins.get(at) {
                shorter += bin.weight;
                sum_ns += bin.sum_ns;
                requests += bin.requests;
            }
        }
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let best = costs.iter().position(|&cost| cost <= least * TIE);
        best.and_then(|at| LIMITS.get(at).copied())
            .unwrap_or(FOREVER)
    }

    /// Gaps shorter than a wake follow each other until there is a longer one, or the wake is over.
    fn expect_company(&self, total: f64, wake_ns: f64) -> f64 {
        let (mut short, mut short_ns) = (0.0, 1.0);
        for (bin, &from) in self.bins.iter().zip(&LIMITS) {
            if (from as f64) < wake_ns {
                short += bin.weight;
                short_ns += bin.sum_ns;
            }
        }
        let runs = short / (total - short).max(1e-9 * total);
        runs.min(wake_ns * short / short_ns)
    }
}
