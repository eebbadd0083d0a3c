use super::*;

fn core(core: usize, pollers: &[(u64, f64)]) -> CoreSample {
    CoreSample {
        core,
        utilisation: pollers.iter().map(|&(_, share)| share).sum(),
        pollers: pollers
            .iter()
            .map(|&(id, utilisation)| PollerSample { id, utilisation })
            .collect(),
    }
}

fn up_to(max_cores: usize) -> Controller {
    Controller::new(ControlConfig {
        max_cores,
        ..ControlConfig::default()
    })
}

/// Returns the first decision other than `Stay`, and the number of samples until then.
fn first(controller: &mut Controller, cores: &[CoreSample]) -> (u32, Decision) {
    for n in 1..=100 {
        let decision = controller.decide(cores);
        if decision != Decision::Stay {
            return (n, decision);
        }
    }
    (0, Decision::Stay)
}

#[test]
fn a_full_core_gets_help_after_three_samples() {
    let cores = [core(0, &[(1, 0.5), (2, 0.45)])];
    assert_eq!(first(&mut up_to(2), &cores), (3, Decision::AddCore));
    assert_eq!(first(&mut up_to(1), &cores), (0, Decision::Stay));
}

#[test]
fn one_poller_alone_cannot_be_helped() {
    let cores = [core(0, &[(1, 1.0)])];
    assert_eq!(first(&mut up_to(4), &cores), (0, Decision::Stay));
    let two = [core(0, &[(1, 1.0)]), core(1, &[])];
    assert!(matches!(first(&mut up_to(2), &two).1, Decision::Stay));
}

#[test]
fn a_new_core_gets_the_poller_that_balances_best_at_once() {
    let mut controller = up_to(2);
    let full = core(0, &[(1, 0.1), (2, 0.5), (3, 0.4)]);
    assert_eq!(
        first(&mut controller, std::slice::from_ref(&full)).1,
        Decision::AddCore
    );
    let decision = controller.decide(&[full, core(1, &[])]);
    let (poller, from, to) = (2, 0, 1);
    assert_eq!(decision, Decision::Move { poller, from, to });
}

#[test]
fn a_move_that_gains_little_is_not_made() {
    // 0.9 and 0.8: moving 0.05 would make 0.85 of both.
    let cores = [core(0, &[(1, 0.85), (2, 0.05)]), core(1, &[(3, 0.8)])];
    assert_eq!(first(&mut up_to(2), &cores), (0, Decision::Stay));
    assert_eq!(first(&mut up_to(3), &cores).1, Decision::AddCore);
}

#[test]
fn a_peak_of_two_samples_changes_nothing() {
    let mut controller = up_to(2);
    let (full, quiet) = (
        core(0, &[(1, 0.5), (2, 0.5)]),
        core(0, &[(1, 0.3), (2, 0.3)]),
    );
    for sample in [&full, &full, &quiet].repeat(50) {
        assert_eq!(
            controller.decide(std::slice::from_ref(sample)),
            Decision::Stay
        );
    }
}

#[test]
fn the_least_used_core_retires_after_a_longer_time() {
    let cores = [core(0, &[(1, 0.2)]), core(1, &[(2, 0.1)])];
    assert_eq!(
        first(&mut up_to(2), &cores),
        (12, Decision::Retire { core: 1 })
    );
    let busier = [core(0, &[(1, 0.3)]), core(1, &[(2, 0.3)])];
    assert_eq!(first(&mut up_to(2), &busier), (0, Decision::Stay));
    let last = [core(0, &[(1, 0.0)])];
    assert_eq!(first(&mut up_to(2), &last), (0, Decision::Stay));
}

/// Carries decisions out in a model until there is none: for all loads the model becomes stable.
#[test]
fn decisions_come_to_rest() {
    let mut seed = 5u64;
    for _ in 0..200 {
        let mut pollers: Vec<(u64, f64, usize)> = (0..12)
            .map(|id| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (id, (seed >> 40) as f64 / 2e7, 0)
            })
            .collect();
        let mut running = vec![0];
        let mut controller = up_to(4);
        let mut acts = 0;
        for _ in 0..400 {
            let sample: Vec<CoreSample> = running
                .iter()
                .map(|&number| {
                    let here = pollers.iter().filter(|p| p.2 == number);
                    let shares: Vec<_> = here.map(|p| (p.0, p.1)).collect();
                    // A core's utilisation is at most 1; if its pollers want more, they get
                    // proportionally less.
                    let mut sample = core(number, &shares);
                    let over = sample.utilisation.max(1.0);
                    sample.utilisation /= over;
                    sample
                        .pollers
                        .iter_mut()
                        .for_each(|p| p.utilisation /= over);
                    sample
                })
                .collect();
            match controller.decide(&sample) {
                Decision::Stay => continue,
                Decision::AddCore => {
                    let new = (0..).find(|number| !running.contains(number)).unwrap();
                    running.push(new);
                }
                Decision::Retire { core } => {
                    running.retain(|&number| number != core);
                    let left = running[0];
                    pollers
                        .iter_mut()
                        .filter(|p| p.2 == core)
                        .for_each(|p| p.2 = left);
                }
                Decision::Move { poller, from, to } => {
                    let moved = pollers.iter_mut().find(|p| p.0 == poller).unwrap();
                    assert_eq!(moved.2, from);
                    moved.2 = to;
                }
            }
            acts += 1;
        }
        assert!(acts < 40, "{acts} acts in 400 samples: {pollers:?}");
    }
}
