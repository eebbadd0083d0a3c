//! How to wait when no poller has work: the idle policy.
//!
//! The cost being balanced: a poller that sleeps costs its waker a system call (about 12 µs when it
//! really wakes somebody) and itself about 20 µs until it runs; one that spins costs a core. So spin
//! about as long as one wake costs, longer when experience says that work is about to come, and not
//! at all when experience says that it is not:
//!
//! ```text
//! since the last work:   0 … eager ns              Spin   (full speed)
//!                        … limit                   Pause  (umwait, tpause, mwaitx, or PAUSEs)
//!                        after that                Sleep  (see park.rs)
//! limit = clamp(4 × predicted gap, min_spin, max_spin);  0 when the predicted gap is long
//!         at least arm_factor × the cost of arming;      1 × that when the gap is long
//! long gap: > max_spin and > 10 × arm_factor × the cost of arming
//! predicted gap = moving average (weight 1/8) of the idle times between busy sweeps, each counted
//!         at most as 4 × the long gap, so that one quiet night is forgotten after a dozen requests
//! ```
//! Pure: no clock, no system call; time is an argument. Owned by the loop in `run.rs`.

use crate::clock::Nanos;

/// When to stop polling and sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdlePolicy {
    /// Never: the core belongs to this sidecore. The lowest latency and repeatable counts.
    Poll,
    /// After a time that follows the load.
    Adaptive(Adaptive),
    /// At the first sweep without work.
    #[default]
    Sleep,
}

impl IdlePolicy {
    /// The adaptive policy with its default times.
    pub const fn adaptive() -> Self {
        IdlePolicy::Adaptive(Adaptive::DEFAULT)
    }
}

/// The times of the adaptive policy, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adaptive {
    /// Spin at full speed for this long after work; pause between sweeps after that.
    pub eager_ns: u64,
    /// Poll at least this long after work, unless a long gap is predicted. Default 50 µs: above the
    /// 20 to 32 µs that a wake-up costs both sides.
    pub min_spin_ns: u64,
    /// Poll at most this long after work (but see `arm_factor`); a predicted gap above it is a long
    /// one: sleep at once. Default 1 ms.
    pub max_spin_ns: u64,
    /// Where arming costs something ([`Poller::arm_cost`](crate::Poller::arm_cost)), poll for at
    /// least this many times that cost before paying it. Default 10, so that arming adds at most a
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

/// How to wait after a sweep without work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Sweep again at once.
    Spin,
    /// Pause about a microsecond, then sweep again.
    Pause,
    /// Arm everything and sleep.
    Sleep,
}

/// What the pollers say at a sweep without work.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hints {
    /// Nanoseconds that arming and disarming them all costs.
    pub arm_cost_ns: u64,
    /// Their earliest deadline.
    pub deadline: Option<Nanos>,
}

/// A sleep this short before a deadline is not worth its wake-up, in nanoseconds.
const WAKE_COST_NS: u64 = 30_000;
/// The first and the longest time without another try after a failure to arm, in nanoseconds.
const ARM_RETRY_FIRST_NS: u64 = 10_000_000;
const ARM_RETRY_LAST_NS: u64 = 1_000_000_000;

/// The state of the idle policy of one sidecore.
#[derive(Clone, Debug)]
pub struct IdleState {
    policy: IdlePolicy,
    last_work: Nanos,
    /// The sweep before this one found nothing.
    is_idle: bool,
    predicted_gap_ns: u64,
    /// As last heard; it scales what counts as a long gap.
    arm_cost_ns: u64,
    /// Arming failed: no sleep before this moment.
    awake_until: Nanos,
    retry_ns: u64,
}

impl IdleState {
    /// Starts awake: `now` counts as the last work, and the prediction as neither short nor long.
    pub fn new(policy: IdlePolicy, now: Nanos) -> Self {
        IdleState {
            policy,
            last_work: now,
            is_idle: false,
            predicted_gap_ns: 0,
            arm_cost_ns: 0,
            awake_until: Nanos(0),
            retry_ns: ARM_RETRY_FIRST_NS,
        }
    }

    /// A sweep that ended at `now` found work.
    pub fn busy(&mut self, now: Nanos) {
        if self.is_idle {
            self.is_idle = false;
            self.learn(now.since(self.last_work));
        }
        self.last_work = now;
    }

    #[cold]
    fn learn(&mut self, gap_ns: u64) {
        let IdlePolicy::Adaptive(times) = self.policy else {
            return;
        };
        let counted = gap_ns.min(self.long_gap_ns(&times).saturating_mul(4));
        self.predicted_gap_ns = self.predicted_gap_ns - self.predicted_gap_ns / 8 + counted / 8;
    }

    /// A sweep that ended at `now` found nothing: how to wait. `hints` is asked only when sleeping
    /// comes into question.
    pub fn next(&mut self, now: Nanos, hints: impl FnOnce() -> Hints) -> Wait {
        self.is_idle = true;
        let idle_ns = now.since(self.last_work);
        match self.policy {
            IdlePolicy::Poll => Wait::Spin,
            IdlePolicy::Sleep => self.sleep_unless(now, hints().deadline, 0),
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

    /// Arming failed: keep polling, and try again later, less and less often.
    pub fn arm_failed(&mut self, now: Nanos) {
        self.awake_until = now.after(self.retry_ns);
        self.retry_ns = (self.retry_ns * 2).min(ARM_RETRY_LAST_NS);
    }

    /// Arming succeeded.
    pub fn armed(&mut self) {
        self.retry_ns = ARM_RETRY_FIRST_NS;
    }

    /// The gap that is expected until the next work, in nanoseconds (0 with no experience).
    pub fn predicted_gap_ns(&self) -> u64 {
        self.predicted_gap_ns
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
        // Four mean gaps catch 98 % of arrivals when they come at random.
        let spin = gap
            .saturating_mul(4)
            .min(times.max_spin_ns)
            .max(times.min_spin_ns);
        spin.max(times.arm_factor.saturating_mul(self.arm_cost_ns))
    }
}

#[cfg(all(test, not(loom)))]
#[path = "idle/tests.rs"]
mod tests;
