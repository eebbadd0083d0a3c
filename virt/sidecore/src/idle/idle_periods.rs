//! Time to spin before sleeping, learnt from the idle periods between busy periods and the price of
//! CPU time.
//!
//! Spinning for `T` and then sleeping has this cost per unit of time in which the core has nothing
//! to serve (a gap is an idle period):
//!
//! ```text
//!             E[min(gap, T)] + P(gap > T) × (C + w × (N + L × n × (1 + k/2)))
//! cost(T) =  ───────────────────────────────────────────────────────────
//!                        E[gap] + P(gap > T) × L
//! ```
//! where `C` is the CPU time of a park (arming, falling asleep, waking), `L` the latency that a
//! wake adds to the work that ended the gap, `n` the number of requests served before the next gap,
//! for all of which the core is as late as for the first; `N` the cost to the thread that wakes the
//! core (an exit, an interrupt to another processor: time that a guest does not compute), `k` the
//! number of further gaps that would have ended meanwhile (the requests that end them wait for half
//! of `L` on average; the denominator counts the gaps saved), and `w` the ns of CPU time that 1 ns
//! of latency is worth. `T = 0` is notification, `T` without bound is polling. The limit chosen is
//! the smallest whose cost is within 1 % of the least: as good, and it ends sooner when the load
//! does.
//!
//! The gaps are counted in bins between neighbouring [`LIMITS`], number and sum, so that both terms
//! are **exact** for the gaps remembered; a logarithmic histogram would have to be interpolated
//! just where it matters. A gap's weight halves with every 177 later ones and every 100 ms:
//! whichever comes first.
//!
//! Pure. Cost: 5 ns per gap, 0.1 µs per choice.

use super::{CpuLatencyTradeoff, CpuPerLatency};

/// Limits to choose from, in nanoseconds; after them, without bound.
const LIMITS: [u64; 19] = [
    0, 2_000, 5_000, 10_000, 15_000, 20_000, 30_000, 50_000, 70_000, 100_000, 150_000, 200_000,
    300_000, 500_000, 700_000, 1_000_000, 2_000_000, 5_000_000, 20_000_000,
];
/// Unbounded limit.
pub(super) const FOREVER: u64 = u64::MAX;

/// Cost of a notification to the notifier, in nanoseconds: a system call that wakes a thread, or an
/// exit. It also decides for spinning where both are about as good: with a guest that waits for
/// each answer before its next request, sleeping makes the idle periods longer, which the periods
/// themselves do not show.
const NOTIFY_NS: f64 = 5_000.0;

/// Weight of an idle period relative to the one before it.
const GROWTH: f64 = 256.0 / 255.0;
/// In nanoseconds: the time in which weights halve.
const HALF_LIFE_NS: f64 = 100_000_000.0;
/// Most requests that one late start delays: those in flight. In a longer busy period the rest have
/// not been sent yet.
const MOST_LATE: u64 = 64;
/// Weight of a period at which all weights are scaled down.
const LARGEST: f64 = 1e60;
/// A limit is as good as the best up to this factor.
const TIE: f64 = 1.01;
/// Number of idle periods, and time in ns, after which the limit is chosen anew.
const GAPS_PER_CHOICE: u32 = 64;
const NS_PER_CHOICE: u64 = 200_000;

/// Cost of one park.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Park {
    /// CPU time, in ns.
    pub(super) cpu_ns: f64,
    /// Latency added, in ns.
    pub(super) wake_ns: f64,
}

/// Idle periods between two neighbouring limits.
#[derive(Clone, Copy, Debug, Default)]
struct Bin {
    weight: f64,
    sum_ns: f64,
    /// Requests that followed.
    requests: f64,
}

/// The idle periods remembered, and the limit that suits them.
#[derive(Clone, Debug)]
pub(super) struct IdlePeriods {
    /// `bins[i]`: longer than limit `i`, up to limit `i + 1`.
    bins: [Bin; LIMITS.len()],
    /// Weight of the next period.
    unit: f64,
    /// Bin of the last period.
    last: usize,
    limit_ns: u64,
    allowed_limit_ns: u64,
    since_choice: u32,
    ns_since_choice: u64,
}

impl IdlePeriods {
    /// Creates it without periods: spins for as long as a wake costs, which is never worse than
    /// twice the best.
    pub(super) fn new(park: Park, tradeoff: CpuLatencyTradeoff) -> Self {
        let as_a_wake = |price: CpuPerLatency| (park.cpu_ns + price.get() * park.wake_ns) as u64;
        IdlePeriods {
            bins: [Bin::default(); LIMITS.len()],
            unit: 1.0,
            last: 0,
            limit_ns: as_a_wake(tradeoff.price()),
            allowed_limit_ns: as_a_wake(tradeoff.allowed()),
            since_choice: 0,
            ns_since_choice: 0,
        }
    }

    /// Returns the limit chosen last.
    pub(super) fn limit_ns(&self) -> u64 {
        self.limit_ns
    }

    /// Returns the limit chosen last, at the price of the allowance.
    pub(super) fn allowed_limit_ns(&self) -> u64 {
        self.allowed_limit_ns
    }

    /// Records that `requests` were served between the period recorded last and the next.
    pub(super) fn was_followed_by(&mut self, requests: u64) {
        let late = requests.min(MOST_LATE) as f64;
        self.bins[self.last].requests += self.unit * late;
    }

    /// Records an idle period that has ended.
    pub(super) fn record(&mut self, gap_ns: u64, park: Park, tradeoff: CpuLatencyTradeoff) {
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
            self.choose(park, tradeoff);
        }
    }

    #[cold]
    fn choose(&mut self, park: Park, tradeoff: CpuLatencyTradeoff) {
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
        self.limit_ns = self.best_limit(total, park, tradeoff.price());
        self.allowed_limit_ns = if tradeoff.share() > 0.0 {
            self.best_limit(total, park, tradeoff.allowed())
        } else {
            self.limit_ns
        };
    }

    /// Returns the limit that costs least at a price, for the periods remembered, which are
    /// `total`.
    fn best_limit(&self, total: Bin, park: Park, price: CpuPerLatency) -> u64 {
        let price = price.get();
        let company = self.expect_company(total.weight, park.wake_ns);
        let late_ns = price * park.wake_ns * (1.0 + company / 2.0);
        let missed = park.cpu_ns + price * NOTIFY_NS;
        let mut costs = [0.0; LIMITS.len() + 1];
        let (mut shorter, mut sum_ns, mut requests) = (0.0, 0.0, 0.0);
        for (at, cost) in costs.iter_mut().enumerate() {
            // The last limit is unbounded: no period is longer.
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

    /// Returns the expected number of further periods that end during a wake: periods shorter than
    /// a wake follow each other until there is a longer one, or the wake is over.
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
