//! The priced policy against the fixed ones, in a simulator without a clock.
//!
//! A core serves requests that arrive at given moments, or a while after the answer to the last.
//! Serving one takes [`SERVICE`]; a wake takes [`WAKE`], in which more may arrive; a park takes
//! [`PARK`] of CPU time besides; spinning takes all of it. A policy's cost is the mean latency
//! times the price, plus the CPU time per request; it is compared with the best fixed policy for
//! that load and price.

use seeded::Random;

use super::*;

const SERVICE: u64 = 1_000;
const WAKE: u64 = 30_000;
const PARK: u64 = 10_000;
const SECOND: u64 = 1_000_000_000;

/// Costs of a run, in ns.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    /// Per request.
    latency: f64,
    median: f64,
    /// Per request.
    cpu: f64,
    /// CPU time as a share of all time.
    share: f64,
}

impl Outcome {
    fn cost(&self, price: f64) -> f64 {
        self.latency * price + self.cpu
    }
}

/// A core under a policy, and its costs so far.
struct Core {
    state: IdleState,
    wake: u64,
    now: u64,
    cpu: u64,
    latencies: Vec<u64>,
}

impl Core {
    /// Creates a core on which a wake takes `wake` ns, while the policy assumes `believed` ns.
    fn new(policy: IdlePolicy, wake: u64, believed: u64) -> Self {
        let mut state = IdleState::new(policy, Nanos(0));
        state.calibrated(believed, PARK);
        Core {
            state,
            wake,
            now: 0,
            cpu: 0,
            latencies: Vec::new(),
        }
    }

    /// Serves the request that arrives at `arrival`; returns the time of the answer.
    fn serve(&mut self, arrival: u64) -> u64 {
        if arrival > self.now {
            match falls_asleep(&mut self.state, self.now, arrival) {
                Some(asleep) => {
                    self.cpu += asleep - self.now + PARK;
                    self.now = arrival + self.wake;
                    self.state.armed();
                    self.state.slept(self.now - asleep, Some(PARK), None);
                    if self.state.wants_use(Nanos(self.now)) {
                        self.state.used(Nanos(self.now), self.cpu);
                    }
                }
                None => {
                    self.state.next(Nanos(arrival), Hints::default);
                    self.cpu += arrival - self.now;
                    self.now = arrival;
                }
            }
        }
        self.now += SERVICE;
        self.cpu += SERVICE;
        self.latencies.push(self.now - arrival);
        self.state.busy(Nanos(self.now), 1);
        self.now
    }

    fn outcome(&self) -> Outcome {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        let requests = sorted.len() as f64;
        Outcome {
            latency: sorted.iter().sum::<u64>() as f64 / requests,
            median: sorted[sorted.len() / 2] as f64,
            cpu: self.cpu as f64 / requests,
            share: self.cpu as f64 / self.now as f64,
        }
    }
}

/// Returns the time of the sleep, if it comes before `next`. The state is polled at growing
/// intervals, since limits are far apart.
fn falls_asleep(state: &mut IdleState, idle_since: u64, next: u64) -> Option<u64> {
    let mut now = idle_since;
    while now < next {
        match state.next(Nanos(now), Hints::default) {
            Wait::Sleep => return Some(now),
            _ if state.policy == IdlePolicy::Poll => return None,
            _ => now += 200 + (now - idle_since) / 64,
        }
    }
    None
}

fn simulate(policy: IdlePolicy, arrivals: &[u64]) -> Outcome {
    let mut core = Core::new(policy, WAKE, WAKE);
    for &arrival in arrivals {
        core.serve(arrival);
    }
    core.outcome()
}

/// Returns requests at `rate` per second in `from..to`, at random or evenly spaced.
fn at_rate(rate: f64, from: u64, to: u64, is_random: bool, random: &mut Random) -> Vec<u64> {
    let mut arrivals = Vec::new();
    let mut now = from as f64;
    loop {
        let gap = if is_random { random.exponential() } else { 1.0 };
        now += gap * SECOND as f64 / rate;
        if now >= to as f64 {
            return arrivals;
        }
        arrivals.push(now as u64);
    }
}

fn loads() -> Vec<(String, Vec<u64>)> {
    let mut random = Random::new(1);
    let mut loads = Vec::new();
    for is_random in [true, false] {
        let kind = if is_random { "random" } else { "even" };
        for (rate, seconds) in [
            (10.0, 20),
            (100.0, 10),
            (1e3, 4),
            (1e4, 1),
            (2e4, 1),
            (4e4, 1),
            (1e5, 1),
        ] {
            let arrivals = at_rate(rate, 0, seconds * SECOND, is_random, &mut random);
            loads.push((format!("{rate}/s {kind}"), arrivals));
        }
        let bursts = (0..20)
            .flat_map(|n| {
                let from = n * SECOND / 10;
                at_rate(2e5, from, from + SECOND / 100, is_random, &mut random)
            })
            .collect();
        loads.push((format!("bursts {kind}"), bursts));
        let mut step = at_rate(10.0, 0, SECOND, is_random, &mut random);
        step.extend(at_rate(1e5, SECOND, 2 * SECOND, is_random, &mut random));
        loads.push((format!("step {kind}"), step));
    }
    loads
}

const FIXED: [IdlePolicy; 6] = [
    IdlePolicy::Poll,
    IdlePolicy::Sleep,
    IdlePolicy::Spin(20_000),
    IdlePolicy::Spin(50_000),
    IdlePolicy::Spin(200_000),
    IdlePolicy::Spin(1_000_000),
];

#[test]
fn the_priced_policy_is_never_far_from_the_best_fixed_one_and_each_fixed_one_is() {
    let mut worst = (0.0, String::new());
    let mut worst_fixed = [0.0f64; FIXED.len()];
    for (name, arrivals) in loads() {
        let fixed = FIXED.map(|policy| simulate(policy, &arrivals));
        for price in [0.1, 1.0, 10.0] {
            let costs = fixed.map(|outcome| outcome.cost(price));
            let best = costs.iter().copied().fold(f64::INFINITY, f64::min);
            for (worst, cost) in worst_fixed.iter_mut().zip(costs) {
                *worst = worst.max(cost / best);
            }
            let outcome = simulate(IdlePolicy::priced(price), &arrivals);
            let ratio = outcome.cost(price) / best;
            println!("{name:14} price {price:4}: {ratio:.3} of {best:.0} ns, {outcome:?}");
            if ratio > worst.0 {
                worst = (ratio, format!("{name} at {price}"));
            }
        }
    }
    println!("worst: {worst:?}; of the fixed policies: {worst_fixed:.2?}");
    assert!(worst.0 <= 1.25, "{worst:?}");
    assert!(worst_fixed.iter().all(|&fixed| fixed > worst.0));
}

#[test]
fn a_step_from_10_to_100_k_requests_a_second_is_followed_within_milliseconds() {
    for price in [0.1, 1.0, 10.0] {
        let mut random = Random::new(77);
        let mut arrivals = at_rate(10.0, 0, 20 * SECOND, true, &mut random);
        let from = 20 * SECOND;
        arrivals.extend(at_rate(1e5, from, from + 3_000_000, true, &mut random));
        let late: Vec<u64> = at_rate(1e5, from + 3_000_000, from + 100_000_000, true, &mut random);
        let before = simulate(IdlePolicy::priced(price), &arrivals);
        let requests = arrivals.len() as f64;
        arrivals.extend(&late);
        let after = simulate(IdlePolicy::priced(price), &arrivals);
        let total = after.latency * arrivals.len() as f64 - before.latency * requests;
        let mean = total / late.len() as f64;
        println!("price {price}: {mean:.0} ns after 3 ms");
        // With a sleep the mean would be more than 10 µs; with spinning it is 1.05.
        assert!(mean < 4_000.0 || price < 1.0, "price {price}: {mean} ns");
    }
}

#[test]
fn most_of_20_000_requests_a_second_find_the_core_awake_for_60_percent_of_it() {
    for is_random in [true, false] {
        for seed in 1..=5 {
            let mut random = Random::new(seed);
            let arrivals = at_rate(2e4, 0, 2 * SECOND, is_random, &mut random);
            let outcome = simulate(IdlePolicy::tiered(), &arrivals);
            println!("random {is_random}: {outcome:?}");
            assert!(outcome.median <= 5_000.0, "random {is_random}: {outcome:?}");
            assert!(outcome.share <= 0.6, "random {is_random}: {outcome:?}");
        }
    }
}

#[test]
fn the_allowance_is_not_spent_where_a_request_comes_once_a_millisecond_or_never() {
    let mut random = Random::new(5);
    for is_random in [true, false] {
        let arrivals = at_rate(1e3, 0, 4 * SECOND, is_random, &mut random);
        let outcome = simulate(IdlePolicy::tiered(), &arrivals);
        assert!(outcome.share < 0.03, "random {is_random}: {outcome:?}");
        let mut state = Core::new(IdlePolicy::tiered(), WAKE, WAKE);
        for &arrival in &at_rate(1e5, 0, SECOND, is_random, &mut random) {
            state.serve(arrival);
        }
        let asleep = falls_asleep(&mut state.state, state.now, state.now + SECOND);
        assert!(asleep.is_some_and(|at| at - state.now < 1_000_000));
    }
}

/// Simulates a guest that waits for each answer, and sends its next request 15 µs later.
fn closed_loop(policy: IdlePolicy, wake: u64, believed: u64) -> Outcome {
    let mut core = Core::new(policy, wake, believed);
    let mut arrival = 0;
    for _ in 0..100_000 {
        // The first request comes after a silence, and now and then the machine itself is silent.
        let answer = core.serve(arrival);
        let silence = if core.latencies.len() % 5_000 == 1 {
            5_000_000
        } else {
            0
        };
        arrival = answer + 15_000 + silence;
    }
    core.outcome()
}

#[test]
fn a_guest_that_waits_for_each_answer_is_spun_for_though_a_wake_takes_longer_than_was_believed() {
    for (wake, believed) in [(30_000, 30_000), (60_000, 30_000), (60_000, 20_000)] {
        let outcome = closed_loop(IdlePolicy::tiered(), wake, believed);
        println!("wake {wake}, believed {believed}: {outcome:?}");
        assert!(outcome.latency < 1_500.0, "{wake}, {believed}: {outcome:?}");
    }
    // With one price the wakes that it has caused count as idle periods, and justify the next.
    let outcome = closed_loop(IdlePolicy::priced(1.0), 60_000, 20_000);
    assert!(outcome.latency > 20_000.0, "{outcome:?}");
}

/// Returns the time of batches of 32 requests, each sent `think` ns after the answer to the last
/// batch, relative to the time with a core that polls.
fn loss_of_batches(think: u64) -> f64 {
    let time = |policy| {
        let mut core = Core::new(policy, WAKE, WAKE);
        let mut arrival = 0;
        for _ in 0..10_000 {
            let mut answer = 0;
            for _ in 0..32 {
                answer = core.serve(arrival);
            }
            arrival = answer + think;
        }
        arrival as f64
    };
    time(IdlePolicy::tiered()) / time(IdlePolicy::Poll)
}

#[test]
fn a_sleep_before_many_requests_delays_all_of_them() {
    for think in [2_000, 10_000, 15_000, 20_000, 40_000] {
        let loss = loss_of_batches(think);
        println!("think {think}: {loss:.3}");
        assert!(loss < 1.05, "{think}: {loss}");
    }
}

#[test]
fn costly_arming_is_part_of_the_price() {
    let arming = |arm_cost_ns| {
        move || Hints {
            arm_cost_ns,
            deadline: None,
        }
    };
    for (cost, limit) in [(0, 0), (5_000_000, 700_000)] {
        let mut state = IdleState::new(IdlePolicy::priced(1.0), Nanos(0));
        for n in 1..2000 {
            let at = n * 700_000;
            state.next(Nanos(at - 1), arming(cost));
            state.busy(Nanos(at), 1);
        }
        assert!(
            if cost == 0 {
                state.idle_periods.limit_ns() == 0
            } else {
                state.idle_periods.limit_ns() >= limit
            },
            "{cost}: {}",
            state.idle_periods.limit_ns()
        );
    }
}

#[test]
fn a_price_is_kept_within_its_range() {
    for (asked, got) in [
        (0.0, 0.01),
        (1.0, 1.0),
        (1e9, 100.0),
        (f64::NAN, 0.01),
        (0.1, 0.1),
    ] {
        assert_eq!(CpuPerLatency::new(asked).get(), got);
    }
}
