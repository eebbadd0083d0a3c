//! The priced policy against the fixed ones, in a simulator without a clock.
//!
//! A core serves requests that arrive at given moments. Serving one takes [`SERVICE`]; a wake takes [`WAKE`], in which
//! more may arrive; a park takes [`PARK`] of CPU time besides; spinning takes all of it. A policy's cost is the mean latency times the
//! price, plus the CPU time per request; it is compared with the best fixed policy for that load and price.

use seeded::Random;

use super::*;

const SERVICE: u64 = 1_000;
const WAKE: u64 = 30_000;
const PARK: u64 = 10_000;
const SECOND: u64 = 1_000_000_000;

/// What a run has cost, per request, in ns.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    latency: f64,
    cpu: f64,
}

impl Outcome {
    fn cost(self, price: f64) -> f64 {
        self.latency * price + self.cpu
    }
}

/// The moment of the sleep, if it comes before `next`. Looks more and more seldom: limits are far apart.
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
    let mut state = IdleState::new(policy, Nanos(0));
    let (mut now, mut cpu, mut latency) = (0, 0, 0.0);
    for &arrival in arrivals {
        if arrival > now {
            match falls_asleep(&mut state, now, arrival) {
                Some(asleep) => {
                    cpu += asleep - now + PARK;
                    now = arrival + WAKE;
                    state.armed();
                    state.slept(Some(PARK), None);
                }
                None => {
                    state.next(Nanos(arrival), Hints::default);
                    cpu += arrival - now;
                    now = arrival;
                }
            }
        }
        now += SERVICE;
        cpu += SERVICE;
        latency += (now - arrival) as f64;
        state.busy(Nanos(now));
    }
    let requests = arrivals.len() as f64;
    Outcome {
        latency: latency / requests,
        cpu: cpu as f64 / requests,
    }
}

/// Requests at `rate` per second in `from..to`, at random or evenly spaced.
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
        // One that still slept would have more than 10 µs; one that spins, 1.05.
        assert!(mean < 4_000.0 || price < 1.0, "price {price}: {mean} ns");
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
            state.busy(Nanos(at));
        }
        assert!(
            if cost == 0 {
                state.gaps.limit_ns() == 0
            } else {
                state.gaps.limit_ns() >= limit
            },
            "{cost}: {}",
            state.gaps.limit_ns()
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
        assert_eq!(Price::new(asked).get(), got);
    }
}
