use proptest::prelude::*;
use seeded::Random;

use super::*;

/// Behaviour of a flow in its turns.
#[derive(Clone, Copy, Debug)]
struct Client {
    weight: u32,
    /// Cost of its pieces of work: from, to.
    costs: (u64, u64),
    /// Most pieces that it does in a visit, however much budget is left.
    batch: u32,
}

/// Serves clients that always have work until `total` has been spent; returns the cost of each.
fn serve(clients: &[Client], total: u64, seed: u64) -> Vec<u64> {
    let mut drr = Drr::new(QUANTUM);
    let mut got = vec![0; clients.len()];
    let (mut random, mut spent) = (Random::new(seed), 0);
    for (flow, client) in clients.iter().enumerate() {
        drr.reset(flow);
        drr.set_weight(flow, client.weight);
        drr.activate(flow);
    }
    while spent < total {
        drr.begin_round();
        while let Some(visit) = drr.next() {
            let client = clients[visit.flow];
            let mut used = 0;
            for _ in 0..client.batch {
                if used >= visit.budget {
                    break;
                }
                let (from, to) = client.costs;
                used += from + random.below(to - from + 1);
            }
            drr.charge(visit.flow, used);
            drr.finish(visit.flow, State::Backlogged);
            got[visit.flow] += used;
            spent += used;
        }
    }
    got
}

/// Returns Jain's index over cost per weight.
fn jain(got: &[u64], clients: &[Client]) -> f64 {
    let shares: Vec<f64> = got
        .iter()
        .zip(clients)
        .map(|(&cost, client)| cost as f64 / f64::from(client.weight))
        .collect();
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|x| x * x).sum();
    sum * sum / (shares.len() as f64 * squares)
}

fn client() -> impl Strategy<Value = Client> {
    // From one small request to 4 MiB; enough of them per visit to use up any budget.
    (1u32..8, 50u64..400_000, 0u64..20_000, 64u32..200).prop_map(|(weight, from, more, batch)| {
        Client {
            weight,
            costs: (from, from + more),
            batch,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn backlogged_flows_get_equal_shares_per_weight_at_any_cost(
        clients in prop::collection::vec(client(), 2..20),
        seed in any::<u64>(),
    ) {
        // Long against the largest piece: 200 of them per flow.
        let total = 200 * 420_000 * clients.len() as u64;
        let got = serve(&clients, total, seed);
        let jain = jain(&got, &clients);
        prop_assert!(jain >= 0.99, "{jain}: {got:?}");
    }

    #[test]
    fn flows_that_come_and_go_keep_the_scheduler_whole(
        steps in prop::collection::vec((0usize..6, 0u8..6, 0u64..1_000_000), 1..200),
    ) {
        let mut drr = Drr::new(QUANTUM);
        let mut alive = [false; 6];
        for (flow, act, cost) in steps {
            match act {
                0 => { drr.reset(flow); alive[flow] = true; }
                1 if alive[flow] => { drr.remove(flow); alive[flow] = false; }
                2 if alive[flow] => drr.activate(flow),
                3 if alive[flow] => drr.charge(flow, cost),
                _ => {
                    let backlogged = drr.flows.iter().filter(|f| f.state == State::Backlogged).count();
                    let could = drr.has_backlogged();
                    drr.begin_round();
                    let mut seen = [0; 6];
                    let mut random = Random::new(cost);
                    while let Some(visit) = drr.next() {
                        prop_assert!(alive[visit.flow]);
                        seen[visit.flow] += 1;
                        prop_assert!(visit.budget > 0);
                        let next = [State::Backlogged, State::Waiting, State::Away][cost as usize % 3];
                        drr.charge(visit.flow, cost.min(1_000));
                        let back = random.below(6) as usize;
                        let returns = alive[back] && back != visit.flow && drr.may_interrupt(back);
                        match returns && random.below(2) == 0 {
                            true => drr.cut(visit.flow),
                            false => drr.finish(visit.flow, next),
                        }
                        if alive[back] && random.below(2) == 0 || returns {
                            drr.wake(back);
                        }
                        // Each flow becomes active again as long as its quantum lasts.
                        prop_assert!(cost < 200 || seen[visit.flow] < 64);
                    }
                    prop_assert_eq!(could, backlogged > 0);
                }
            }
            let backlogged = drr.flows.iter().filter(|f| f.state == State::Backlogged).count();
            let inside = drr.flows.iter().filter(|f| f.state != State::Away).count();
            prop_assert_eq!((drr.backlogged, drr.ring.len() + drr.woken.len() + drr.first.len()), (backlogged, inside));
            prop_assert!(drr.cut.is_empty() && drr.again.is_empty());
            prop_assert!(drr.flows.iter().all(|f| f.deficit >= -MAX_DEBT));
        }
    }
}

/// Serves a flow that always has work, in pieces of 50 to 250 after each of which it asks whether
/// others wait, and others that do a piece of `costs[i]` whenever they are served and have the next
/// one at once; until `total` has been spent. Returns the cost of each, and the number of times
/// that the flow was cut short.
fn serve_beside(costs: &[u64], total: u64, at_once: bool, seed: u64) -> (Vec<u64>, u64) {
    let mut drr = Drr::new(QUANTUM);
    let mut got = vec![0; costs.len() + 1];
    let (mut random, mut cuts) = (Random::new(seed), 0);
    for flow in 0..got.len() {
        drr.reset(flow);
        drr.activate(flow);
    }
    while got.iter().sum::<u64>() < total {
        drr.begin_round();
        while let Some(Grant { flow, budget }) = drr.next() {
            let (mut used, mut is_cut) = (0, false);
            match flow.checked_sub(1) {
                Some(other) => used = costs[other],
                None => {
                    while used < budget && !is_cut {
                        used += 50 + random.below(200);
                        is_cut = (1..got.len()).any(|other| drr.may_interrupt(other));
                    }
                }
            }
            drr.charge(flow, used);
            got[flow] += used;
            match (flow, is_cut) {
                (0, true) => drr.cut(flow),
                (0, false) => drr.finish(flow, State::Backlogged),
                _ => drr.finish(flow, State::Away),
            }
            cuts += u64::from(is_cut);
            let all: u64 = got.iter().sum();
            assert!(all < 2 * total, "a round that has no end: {got:?}");
            if at_once || flow == 0 {
                (1..got.len()).for_each(|other| drr.wake(other));
            }
        }
        (1..got.len()).for_each(|other| drr.wake(other));
    }
    (got, cuts)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn intermittent_flows_get_no_more_than_steady_ones(
        costs in prop::collection::vec(200u64..5_000, 1..8),
        seed in any::<u64>(),
    ) {
        let flows = costs.len() as u64 + 1;
        let (got, _) = serve_beside(&costs, 2_000_000 * flows, true, seed);
        // A flow whose piece does not divide a quantum may have less.
        let share = got.iter().sum::<u64>() / flows;
        prop_assert!(got[0] > share * 98 / 100, "{got:?}");
        prop_assert!(got[1..].iter().all(|&got| got < share * 102 / 100), "{got:?}");
    }
}

#[test]
fn a_flow_that_comes_back_cuts_one_short_as_far_as_its_quantum_goes() {
    // Of its requests of a round one comes at its beginning, and the others in the other's turn.
    let (got, cuts) = serve_beside(&[400], 10_000_000, false, 1);
    assert!(got[1] <= got[0] && got[1] > got[0] * 9 / 10, "{got:?}");
    let all = (QUANTUM / 400 - 1) * (got[0] / QUANTUM);
    assert!((all * 9 / 10..=all).contains(&cuts), "{cuts}");
}

/// Creates a scheduler of `flows` flows, of which the first is in the ring and always has work.
fn beside_a_flood(flows: usize) -> Drr {
    let mut drr = Drr::new(QUANTUM);
    (0..flows).for_each(|flow| drr.reset(flow));
    drr.activate(0);
    one_round(&mut drr);
    drr
}

/// Creates the same, in a round in which flow 1 has become active again and interrupted the first.
fn interrupted_flood(flows: usize) -> Drr {
    let mut drr = beside_a_flood(flows);
    drr.begin_round();
    assert_eq!(next_flow(&mut drr), Some(0));
    drr.cut(0);
    drr.wake(1);
    drr
}

fn next_flow(drr: &mut Drr) -> Option<FlowId> {
    drr.next().map(|visit| visit.flow)
}

/// Returns the cost of flow 0, which always has work, until flow 1 is served again after it has
/// used up its quantum at the beginning of a round and gone `on`; it has work again at once.
fn wait_behind_a_quantum(on: State) -> u64 {
    let mut drr = beside_a_flood(2);
    drr.activate(1);
    drr.begin_round();
    assert_eq!(next_flow(&mut drr), Some(1));
    drr.charge(1, QUANTUM);
    drr.finish(1, on);
    drr.wake(1);
    let mut waited = 0;
    loop {
        while let Some(visit) = drr.next() {
            if visit.flow == 1 {
                return waited;
            }
            waited += visit.budget;
            drr.charge(0, visit.budget);
            drr.finish(0, State::Backlogged);
        }
        drr.begin_round();
    }
}

#[test]
fn a_flow_that_has_used_up_its_quantum_is_the_first_of_the_next_round() {
    for on in [State::Away, State::Backlogged] {
        assert_eq!(wait_behind_a_quantum(on), QUANTUM, "{on:?}");
    }
}

#[test]
fn a_flow_that_has_come_back_and_stays_is_served_before_the_others_as_long_as_it_may() {
    let mut drr = interrupted_flood(2);
    for _ in 0..QUANTUM / 400 {
        assert_eq!(next_flow(&mut drr), Some(1));
        drr.charge(1, 400);
        drr.finish(1, State::Backlogged);
    }
    assert_eq!(rest_of_round(&mut drr, QUANTUM), [(0, QUANTUM)]);
}

#[test]
fn a_newcomer_is_visited_before_woken_flows_that_were_visited_already() {
    let mut drr = beside_a_flood(4);
    (1..3).for_each(|flow| drr.activate(flow));
    drr.begin_round();
    for flow in [1, 2] {
        assert_eq!(next_flow(&mut drr), Some(flow));
        drr.charge(flow, 400);
        drr.finish(flow, State::Backlogged);
    }
    assert_eq!(next_flow(&mut drr), Some(1));
    assert!(!drr.is_interruption());
    drr.cut(1);
    drr.wake(3);
    let rest = [
        (3, QUANTUM),
        (2, QUANTUM - 400),
        (1, QUANTUM - 400),
        (0, QUANTUM),
    ];
    assert_eq!(rest_of_round(&mut drr, QUANTUM), rest);
}

#[test]
fn a_woken_flow_alone_with_work_is_visited_once_a_round() {
    let mut drr = Drr::new(QUANTUM);
    drr.reset(0);
    drr.activate(0);
    drr.begin_round();
    assert_eq!(rest_of_round(&mut drr, 200), [(0, QUANTUM)]);
    assert!(drr.has_backlogged());
}

#[test]
fn a_waiting_flow_that_is_cut_short_has_work() {
    let mut drr = Drr::new(QUANTUM);
    (0..2).for_each(|flow| drr.reset(flow));
    drr.activate(0);
    round_of(&mut drr, State::Waiting);
    drr.begin_round();
    assert_eq!(next_flow(&mut drr), Some(0));
    drr.charge(0, 3 * QUANTUM);
    drr.cut(0);
    drr.wake(1);
    assert_eq!(next_flow(&mut drr), Some(1));
    drr.finish(1, State::Away);
    assert!(drr.next().is_none() && drr.has_backlogged());
}

#[test]
fn a_flow_that_is_charged_nothing_is_visited_once_a_round() {
    let mut drr = Drr::new(QUANTUM);
    (0..2).for_each(|flow| drr.reset(flow));
    (0..2).for_each(|flow| drr.activate(flow));
    for _ in 0..3 {
        assert_eq!(round_of(&mut drr, State::Backlogged).len(), 2);
    }
}

#[test]
fn an_interrupter_is_visited_before_the_woken_flow_that_it_interrupts() {
    let mut drr = interrupted_flood(3);
    assert_eq!(next_flow(&mut drr), Some(1));
    drr.charge(1, 500);
    assert!(drr.may_interrupt(2));
    drr.cut(1);
    drr.wake(2);
    let rest = [(2, QUANTUM), (1, QUANTUM - 500), (0, QUANTUM)];
    assert_eq!(rest_of_round(&mut drr, QUANTUM), rest);
}

/// Returns the visits, with their budgets, of the rest of a round; each spends `cost`, and has more
/// to do.
fn rest_of_round(drr: &mut Drr, cost: u64) -> Vec<(FlowId, u64)> {
    let mut visits = Vec::new();
    while let Some(Grant { flow, budget }) = drr.next() {
        visits.push((flow, budget));
        drr.charge(flow, cost);
        drr.finish(flow, State::Backlogged);
    }
    visits
}

#[test]
fn a_flow_that_has_come_back_is_first_and_one_cut_short_goes_on_behind_it() {
    let mut drr = Drr::new(QUANTUM);
    (0..4).for_each(|flow| drr.reset(flow));
    (0..2).for_each(|flow| drr.activate(flow));
    one_round(&mut drr);
    drr.activate(2);
    drr.begin_round();
    assert_eq!(next_flow(&mut drr), Some(2), "before those that stayed");
    drr.charge(2, 300);
    drr.finish(2, State::Away);
    assert_eq!(next_flow(&mut drr), Some(0));
    drr.charge(0, 500);
    assert!(drr.may_interrupt(2) && drr.may_interrupt(3) && !drr.may_interrupt(1));
    drr.cut(0);
    (2..4).for_each(|flow| drr.wake(flow));
    let rest = [
        (2, QUANTUM - 300),
        (3, QUANTUM),
        (0, QUANTUM - 500),
        (1, QUANTUM),
    ];
    assert_eq!(rest_of_round(&mut drr, QUANTUM), rest);
    // Those that were served before the rest of the round have overdrawn their quanta.
    let next: Vec<_> = one_round(&mut drr)
        .iter()
        .map(|visit| (visit.flow, visit.budget))
        .collect();
    let owed = |flow| match flow {
        0 => 500,
        2 => 300,
        _ => 0,
    };
    assert_eq!(next, [2, 3, 0, 1].map(|flow| (flow, QUANTUM - owed(flow))));
}

#[test]
fn a_flow_in_debt_interrupts_no_other() {
    for owes in [QUANTUM - 1, QUANTUM] {
        let mut drr = Drr::new(QUANTUM);
        (0..2).for_each(|flow| drr.reset(flow));
        drr.charge(1, owes);
        drr.activate(0);
        drr.begin_round();
        assert_eq!(next_flow(&mut drr), Some(0));
        assert_eq!(drr.may_interrupt(1), owes < QUANTUM);
        drr.wake(1);
        assert!(drr.is_contended(0));
        drr.finish(0, State::Backlogged);
        let visits = rest_of_round(&mut drr, 1);
        assert_eq!(visits.len(), usize::from(owes < QUANTUM), "{visits:?}");
    }
}

const SMALL: Client = Client {
    weight: 1,
    costs: (609, 609),
    batch: 32,
};

#[test]
fn weights_1_2_4_are_kept_within_a_tenth() {
    // No turn ends before its budget.
    const BATCH: u64 = 256;
    for costs in [(200, 200), (609, 609), (6_753, 6_753), (200, 30_000)] {
        let clients: Vec<_> = [1, 2, 4, 1, 2, 4]
            .iter()
            .map(|&weight| Client {
                weight,
                costs,
                batch: BATCH as _,
            })
            .collect();
        let got = serve(&clients, 50_000_000, 7);
        let unit = got.iter().sum::<u64>() as f64 / 14.0;
        for (cost, client) in got.iter().zip(&clients) {
            let error = *cost as f64 / (unit * f64::from(client.weight)) - 1.0;
            assert!(error.abs() < 0.1, "{costs:?}: {error}");
        }
    }
}

#[test]
fn a_neighbour_with_large_requests_gets_no_more_time() {
    let large = Client {
        costs: (6_753, 6_753),
        ..SMALL
    };
    let got = serve(&[SMALL, large], 10_000_000, 3);
    assert!(got[0].abs_diff(got[1]) < 20_000, "{got:?}");
}

fn one_round(drr: &mut Drr) -> Vec<Grant> {
    let mut visits = Vec::new();
    drr.begin_round();
    while let Some(visit) = drr.next() {
        visits.push(visit);
        drr.charge(visit.flow, visit.budget);
        drr.finish(visit.flow, State::Backlogged);
    }
    visits
}

#[test]
fn a_debt_outlives_idleness_and_is_repaid_by_rounds() {
    let mut drr = Drr::new(QUANTUM);
    for flow in 0..3 {
        drr.reset(flow);
        drr.activate(flow);
    }
    drr.begin_round();
    while let Some(visit) = drr.next() {
        let owes = visit.flow == 0;
        drr.charge(visit.flow, if owes { 10 * QUANTUM } else { QUANTUM });
        drr.finish(
            visit.flow,
            if owes { State::Away } else { State::Backlogged },
        );
    }
    drr.activate(0);
    assert_eq!(one_round(&mut drr).len(), 2, "it owes nine quanta");
    for _ in 0..7 {
        assert_eq!(one_round(&mut drr).len(), 2);
    }
    one_round(&mut drr);
    assert_eq!(one_round(&mut drr).len(), 3, "repaid");
}

#[test]
fn debts_do_not_idle_the_core() {
    let mut drr = Drr::new(QUANTUM);
    for flow in 0..2 {
        drr.reset(flow);
        drr.charge(flow, 1_000_000 * (flow as u64 + 1));
        drr.activate(flow);
    }
    assert!(one_round(&mut drr).is_empty());
    let visits = one_round(&mut drr);
    assert_eq!(visits.len(), 1, "the rounds nobody could use are skipped");
    assert!(visits[0].flow == 0 && visits[0].budget <= QUANTUM);
}

#[test]
fn a_monstrous_charge_is_forgiven_in_the_end() {
    let mut drr = Drr::new(QUANTUM);
    drr.reset(0);
    drr.charge(0, u64::MAX);
    drr.charge(0, u64::MAX);
    assert_eq!(drr.deficit(0), -MAX_DEBT);
}

/// Returns the budget of each of the flows of a round, and whether others had work. All get `state`
/// at the end of their visits.
fn round_of(drr: &mut Drr, state: State) -> Vec<(FlowId, u64, bool)> {
    let mut visits = Vec::new();
    drr.begin_round();
    while let Some(Grant { flow, budget }) = drr.next() {
        visits.push((flow, budget, drr.is_contended(flow)));
        drr.finish(flow, state);
    }
    visits
}

#[test]
fn a_visit_without_contention_delays_no_other_flow() {
    let mut drr = Drr::new(QUANTUM);
    for flow in 0..3 {
        drr.reset(flow);
    }
    let contended = |visits: Vec<(FlowId, u64, bool)>| -> Vec<_> {
        visits.iter().map(|&(flow, _, is)| (flow, is)).collect()
    };
    drr.activate(0);
    assert_eq!(
        contended(round_of(&mut drr, State::Backlogged)),
        [(0, false)]
    );
    drr.activate(1);
    let both = contended(round_of(&mut drr, State::Waiting));
    assert_eq!(both, [(1, true), (0, true)]);
    let nobody = contended(round_of(&mut drr, State::Waiting));
    assert_eq!(nobody, [(0, false), (1, false)]);
    // Waiting flows contend with one that has work; it does not contend with itself.
    drr.activate(2);
    let one = contended(round_of(&mut drr, State::Waiting));
    assert_eq!(one, [(2, false), (0, true), (1, true)]);
}

#[test]
fn a_waiting_flow_in_debt_is_visited_when_no_flow_has_work() {
    let mut drr = Drr::new(QUANTUM);
    for flow in 0..2 {
        drr.reset(flow);
    }
    drr.activate(0);
    round_of(&mut drr, State::Waiting);
    for cost in [1_000 * QUANTUM, u64::MAX] {
        drr.charge(0, cost);
        assert_eq!(round_of(&mut drr, State::Waiting), [(0, QUANTUM, false)]);
    }
    // While another flow has work it repays.
    drr.charge(0, 3 * QUANTUM);
    drr.activate(1);
    let visited: Vec<_> = (0..4)
        .map(|_| round_of(&mut drr, State::Backlogged))
        .collect();
    let repays = visited.iter().take_while(|visits| visits.len() == 1);
    assert_eq!(repays.count(), 3);
}
