//! The idle policy: how a sidecore waits when no poller has work.
//!
//! It balances two costs. A poller that sleeps costs its waker a system call (about 12 µs when it
//! really wakes a thread) and itself about 20 µs until it runs; one that spins costs a core. So it
//! spins about as long as one wake costs, longer when past idle periods suggest that work is about
//! to come, and not at all when they suggest that it is not:
//!
//! ```text
//! since the last work:   0 … eager ns              Spin   (full speed)
//!                        … limit                   Pause  (umwait, tpause, mwaitx, or PAUSEs)
//!                        after that                Sleep  (see park.rs)
//! limit = clamp(4 × predicted period, min_spin, max_spin);  0 when the predicted period is long
//!         at least arm_factor × the cost of arming;         1 × that when the period is long
//! long period: > max_spin and > 10 × arm_factor × the cost of arming
//! predicted period = moving average (weight 1/8) of the idle times between busy sweeps, each
//!         counted at most as 4 × the long period, so that one quiet night is forgotten after a
//!         dozen requests
//! ```
//! That is the policy `Adaptive`, made for pollers that are expensive to arm. `Priced` weighs CPU
//! time against latency, at a price that the user sets, over the idle periods that it has seen: see
//! [`idle_periods`]. A part of the core may have a lower price: see [`CpuLatencyTradeoff`] and
//! [`allowance`]. `Poll`, `Sleep` and `Spin` are fixed, for comparison and for users who know their
//! load.
//!
//! Pure: no clock, no system call; time is an argument. Owned by the loop in `run.rs`.

mod allowance;
mod idle_periods;
mod tradeoff;

use crate::clock::Nanos;
use allowance::Allowance;
use idle_periods::{IdlePeriods, Park};
pub use tradeoff::{CpuLatencyTradeoff, CpuPerLatency};

/// Condition for a change from polling to sleeping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdlePolicy {
    /// Never: the core belongs to this sidecore. The lowest latency and repeatable counts.
    Poll,
    /// After a time that follows the load.
    Adaptive(Adaptive),
    /// At the first sweep without work.
    #[default]
    Sleep,
    /// After this time without work, in nanoseconds.
    Spin(u64),
    /// After the time that costs least for the idle periods seen, at a price of CPU time against
    /// latency.
    Priced(CpuLatencyTradeoff),
}

impl IdlePolicy {
    /// Returns the adaptive policy with its default times.
    pub const fn adaptive() -> Self {
        IdlePolicy::Adaptive(Adaptive::DEFAULT)
    }

    /// Returns the priced policy, with one price for the whole core.
    pub fn priced(price: f64) -> Self {
        IdlePolicy::Priced(CpuLatencyTradeoff::flat(CpuPerLatency::new(price)))
    }

    /// Returns the priced policy with the default trade-off: little latency for half a core, the
    /// whole core only where it is worth it.
    pub fn tiered() -> Self {
        IdlePolicy::Priced(CpuLatencyTradeoff::default())
    }
}

/// The times of the adaptive policy, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adaptive {
    /// Time after work for which it spins at full speed; later it pauses between sweeps.
    pub eager_ns: u64,
    /// Least time to poll after work, unless a long idle period is predicted. Default 50 µs: above
    /// the 20 to 32 µs that a wake-up costs both sides.
    pub min_spin_ns: u64,
    /// Longest time to poll after work (but see `arm_factor`). A predicted idle period above it is
    /// long: sleep at once. Default 1 ms.
    pub max_spin_ns: u64,
    /// Where arming costs something ([`Poller::arm_cost`](crate::Poller::arm_cost)), least time to
    /// poll before arming, as a multiple of that cost. Default 10, so that arming adds at most a
    /// tenth to the time spent awake.
    pub arm_factor: u64,
}

impl Adaptive {
    /// The default times: 10 µs, 50 µs, 1 ms, 10 times.
    pub const DEFAULT: Adaptive = Adaptive {
        eager_ns: 10_000,
        min_spin_ns: 50_000,
        max_spin_ns: 1_000_000,
        arm_factor: 10,
    };
}

impl Default for Adaptive {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Way to wait after a sweep without work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Sweep again at once.
    Spin,
    /// Pause about a microsecond, then sweep again.
    Pause,
    /// Arm everything and sleep.
    Sleep,
}

/// Properties of the pollers at a sweep without work.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hints {
    /// Cost of arming and disarming them all, in nanoseconds.
    pub arm_cost_ns: u64,
    /// Their earliest deadline.
    pub deadline: Option<Nanos>,
}

/// Shortest sleep before a deadline that is worth its wake-up, and, until they have been measured,
/// the assumed latency that a wake adds and CPU time of a park; in nanoseconds.
const WAKE_COST_NS: u64 = 30_000;
const PARK_CPU_NS: u64 = 10_000;
/// Range within which a measured wake is believed, in nanoseconds. A longer one was delayed by the
/// host.
const WAKE_NS: std::ops::RangeInclusive<f64> = 2_000.0..=200_000.0;
/// Time for which the priced policy spins at full speed, in nanoseconds; later it pauses between
/// sweeps.
const PRICED_EAGER_NS: u64 = 50_000;
/// The priced policy measures one of this many parks.
const PARKS_PER_MEASUREMENT: u8 = 16;
/// Times without another try after a failure to arm, in nanoseconds: the first, and the longest.
const ARM_RETRY_FIRST_NS: u64 = 10_000_000;
const ARM_RETRY_LAST_NS: u64 = 1_000_000_000;

/// The state of the idle policy of one sidecore.
#[derive(Clone, Debug)]
pub struct IdleState {
    policy: IdlePolicy,
    last_work: Nanos,
    /// The sweep before this one found nothing.
    is_idle: bool,
    /// Expected length of the idle period until the next work (0 without experience).
    predicted_gap_ns: u64,
    /// Last reported value; it scales the bound of a long idle period.
    arm_cost_ns: u64,
    /// Arming failed: no sleep before this time.
    awake_until: Nanos,
    retry_ns: u64,
    /// For the priced policy.
    idle_periods: IdlePeriods,
    allowance: Allowance,
    /// Moving average, without the pollers' arming.
    park: Park,
    /// Requests since the last idle period.
    burst: u64,
    /// It has slept since the last work.
    has_slept: bool,
    /// Parks until the next one that is measured.
    until_measured: u8,
}

impl IdleState {
    /// Starts awake: `now` counts as the last work, and the prediction as neither short nor long.
    pub fn new(policy: IdlePolicy, now: Nanos) -> Self {
        let park = Park {
            cpu_ns: PARK_CPU_NS as f64,
            wake_ns: WAKE_COST_NS as f64,
        };
        let tradeoff = match policy {
            IdlePolicy::Priced(tradeoff) => tradeoff,
            _ => CpuLatencyTradeoff::flat(CpuPerLatency::default()),
        };
        IdleState {
            idle_periods: IdlePeriods::new(park, tradeoff),
            allowance: Allowance::new(tradeoff.share(), now),
            park,
            burst: 0,
            has_slept: false,
            until_measured: 0,
            policy,
            last_work: now,
            is_idle: false,
            predicted_gap_ns: 0,
            arm_cost_ns: 0,
            awake_until: Nanos(0),
            retry_ns: ARM_RETRY_FIRST_NS,
        }
    }

    /// Records that a sweep that ended at `now` found work: `requests` whose senders wait for an
    /// answer.
    pub fn busy(&mut self, now: Nanos, requests: u64) {
        if self.is_idle {
            self.is_idle = false;
            let gap_ns = now.since(self.last_work);
            match self.policy {
                IdlePolicy::Adaptive(times) => self.learn(gap_ns, times),
                IdlePolicy::Priced(tradeoff) => self.record(now, gap_ns, tradeoff),
                _ => {}
            }
            self.burst = 0;
        }
        self.burst = self.burst.saturating_add(requests);
        self.last_work = now;
    }

    fn record(&mut self, now: Nanos, gap_ns: u64, tradeoff: CpuLatencyTradeoff) {
        // Work that ended a sleep came earlier than this sweep, by the latency of a wake.
        let has_slept = std::mem::take(&mut self.has_slept);
        let late_ns = if has_slept {
            self.park.wake_ns as u64
        } else {
            0
        };
        let park = Park {
            cpu_ns: self.park.cpu_ns + self.arm_cost_ns as f64,
            ..self.park
        };
        self.idle_periods.was_followed_by(self.burst);
        self.idle_periods
            .record(gap_ns.saturating_sub(late_ns), park, tradeoff);
        self.allowance.settle(now);
    }

    /// Returns the time, in nanoseconds, for which the priced policy spins after the last work.
    fn priced_limit_ns(&self) -> u64 {
        let limit_ns = self.idle_periods.limit_ns();
        if self.allowance.is_left() {
            limit_ns.max(self.idle_periods.allowed_limit_ns())
        } else {
            limit_ns
        }
    }

    #[cold]
    fn learn(&mut self, gap_ns: u64, times: Adaptive) {
        let counted = gap_ns.min(self.long_gap_ns(&times).saturating_mul(4));
        self.predicted_gap_ns = self.predicted_gap_ns - self.predicted_gap_ns / 8 + counted / 8;
    }

    /// Returns how to wait after a sweep that ended at `now` and found no work. `hints` is called
    /// only when sleeping is possible.
    pub fn next(&mut self, now: Nanos, hints: impl FnOnce() -> Hints) -> Wait {
        self.is_idle = true;
        let idle_ns = now.since(self.last_work);
        match self.policy {
            IdlePolicy::Poll => Wait::Spin,
            IdlePolicy::Sleep => self.sleep_unless(now, hints().deadline, 0),
            IdlePolicy::Spin(limit_ns) if idle_ns < limit_ns => Wait::Spin,
            IdlePolicy::Spin(_) => self.sleep_unless(now, hints().deadline, WAKE_COST_NS),
            IdlePolicy::Priced(_) if idle_ns < self.priced_limit_ns() => {
                if idle_ns < PRICED_EAGER_NS {
                    Wait::Spin
                } else {
                    Wait::Pause
                }
            }
            IdlePolicy::Priced(_) => {
                let hints = hints();
                self.arm_cost_ns = hints.arm_cost_ns;
                // Before its cost has been measured here: as long as one arming takes.
                if idle_ns < hints.arm_cost_ns {
                    return Wait::Pause;
                }
                let wake_ns = self.park.wake_ns as u64;
                self.sleep_unless(now, hints.deadline, wake_ns + hints.arm_cost_ns)
            }
            IdlePolicy::Adaptive(times) => {
                if idle_ns < self.spin_limit_ns(&times) {
                    return if idle_ns < times.eager_ns {
                        Wait::Spin
                    } else {
                        Wait::Pause
                    };
                }
                let hints = hints();
                self.arm_cost_ns = hints.arm_cost_ns;
                if idle_ns < self.spin_limit_ns(&times) {
                    return Wait::Pause;
                }
                self.sleep_unless(now, hints.deadline, WAKE_COST_NS + hints.arm_cost_ns)
            }
        }
    }

    fn sleep_unless(&self, now: Nanos, deadline: Option<Nanos>, too_short_ns: u64) -> Wait {
        let is_too_short = deadline.is_some_and(|at| at <= now.after(too_short_ns));
        if now < self.awake_until || is_too_short {
            Wait::Pause
        } else {
            Wait::Sleep
        }
    }

    /// Records that arming failed: it keeps polling, and retries at growing intervals.
    pub fn arm_failed(&mut self, now: Nanos) {
        self.awake_until = now.after(self.retry_ns);
        self.retry_ns = (self.retry_ns * 2).min(ARM_RETRY_LAST_NS);
    }

    /// Records that arming succeeded.
    pub fn armed(&mut self) {
        self.retry_ns = ARM_RETRY_FIRST_NS;
    }

    /// Returns whether the cost of the coming park is to be measured, see [`slept`](Self::slept).
    /// Reading the thread's clock twice takes a microsecond, the second time before the work that
    /// ended the sleep, so only some parks are measured.
    pub fn wants_cost(&mut self) -> bool {
        let is_wanted = matches!(self.policy, IdlePolicy::Priced(_)) && self.until_measured == 0;
        self.until_measured = if is_wanted {
            PARKS_PER_MEASUREMENT - 1
        } else {
            self.until_measured.saturating_sub(1)
        };
        is_wanted
    }

    /// Records a sleep of `asleep_ns`. `cpu_ns` is the CPU time of the park, with the pollers'
    /// arming, if it was measured. `late_ns` is how late a wake by a deadline was, which is the
    /// latency of any wake.
    pub fn slept(&mut self, asleep_ns: u64, cpu_ns: Option<u64>, late_ns: Option<u64>) {
        self.has_slept = true;
        // The CPU time of a park is spent inside the sleep.
        self.allowance
            .slept(asleep_ns.saturating_sub(self.park.cpu_ns as u64));
        if let Some(cpu_ns) = cpu_ns {
            let own_ns = cpu_ns.saturating_sub(self.arm_cost_ns) as f64;
            self.park.cpu_ns += (own_ns.min(*WAKE_NS.end()) - self.park.cpu_ns) / 8.0;
        }
        if let Some(late_ns) = late_ns {
            let late_ns = (late_ns as f64).clamp(*WAKE_NS.start(), *WAKE_NS.end());
            self.park.wake_ns += (late_ns - self.park.wake_ns) / 8.0;
        }
    }

    /// Returns whether the core's total CPU time is to be measured, see [`used`](Self::used).
    pub fn wants_use(&self, now: Nanos) -> bool {
        matches!(self.policy, IdlePolicy::Priced(_)) && self.allowance.wants_measurement(now)
    }

    /// Records the core's total CPU time, in nanoseconds.
    pub fn used(&mut self, now: Nanos, cpu_ns: u64) {
        self.allowance.measured(now, cpu_ns);
    }

    /// Sets the latency that a wake adds and the CPU time of a park, in nanoseconds: measured
    /// before there was work, in place of the assumptions.
    pub fn calibrated(&mut self, wake_ns: u64, cpu_ns: u64) {
        self.park = Park {
            cpu_ns: (cpu_ns as f64).min(*WAKE_NS.end()),
            wake_ns: (wake_ns as f64).clamp(*WAKE_NS.start(), *WAKE_NS.end()),
        };
        if let IdlePolicy::Priced(tradeoff) = self.policy {
            self.idle_periods = IdlePeriods::new(self.park, tradeoff);
        }
    }

    fn long_gap_ns(&self, times: &Adaptive) -> u64 {
        let arming = times
            .arm_factor
            .saturating_mul(10)
            .saturating_mul(self.arm_cost_ns);
        times.max_spin_ns.max(arming)
    }

    fn spin_limit_ns(&self, times: &Adaptive) -> u64 {
        let gap = self.predicted_gap_ns;
        if gap > self.long_gap_ns(times) {
            return self.arm_cost_ns;
        }
        // Four mean idle periods catch 98 % of arrivals when they come at random.
        let spin = gap
            .saturating_mul(4)
            .min(times.max_spin_ns)
            .max(times.min_spin_ns);
        spin.max(times.arm_factor.saturating_mul(self.arm_cost_ns))
    }
}

#[cfg(all(test, not(loom)))]
#[path = "idle/tests/price.rs"]
mod price;
#[cfg(all(test, not(loom)))]
mod tests;
