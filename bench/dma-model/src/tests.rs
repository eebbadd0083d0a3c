//! The model compared with arithmetic, and with values measured on one and two cores.

use super::*;

const LOCK: System = System::StrictLock { own_ns: 28.3 };

const COMBINING: System = System::StrictCombining {
    own_ns: 28.3,
    gather_ns: GATHER_NS,
};

fn near(value: f64, expected: f64, share: f64) -> bool {
    (value / expected - 1.0).abs() <= share
}

/// Measured with Linux's allocator and flush queue in user space, under the conditions of the
/// results page: two processors of a Sapphire Rapids guest, round trip of a line 115 to 128 ns.
#[test]
fn the_measured_baseline_is_met_within_a_fifth() {
    let flush = |flush_ns| Constants {
        flush_ns,
        ..Constants::default()
    };
    let pairs = |ns_1: f64, ns_2: f64| [(1, 1000.0 / ns_1), (2, 2000.0 / ns_2)];
    let deferred = System::Deferred {
        own_ns: 38.8,
        entries: 255,
    };
    let cases = [
        (LOCK, flush(500.0), pairs(568.0, 1353.0)),
        (LOCK, flush(1000.0), pairs(1067.0, 2375.0)),
        (deferred, flush(0.0), pairs(47.4, 49.9)),
    ];
    for (system, constants, measured) in cases {
        for check in validate(system, constants, &measured) {
            assert!(check.holds(), "{system:?}: {check}");
        }
    }
}

#[test]
fn a_lock_is_as_fast_as_its_handover_whatever_the_cores() {
    let constants = Constants::default();
    // 500 ns of flush and three lines of 58 ns.
    for cores in [2, 4, 128] {
        assert!(near(run(LOCK, constants, cores).mps, 1000.0 / 674.0, 0.01));
    }
    assert!(near(run(LOCK, constants, 1).ns, 528.3, 0.01));
    assert!(near(run(LOCK, constants, 128).ops_per_flush, 1.0, 1e-9));
}

#[test]
fn combining_is_strict_for_one_core_and_for_those_that_ask_rarely() {
    let constants = Constants::default();
    assert!(near(run(COMBINING, constants, 1).ns, 528.3, 1e-4));
    let rarely = System::StrictCombining {
        own_ns: 50_000.0,
        gather_ns: GATHER_NS,
    };
    let two = run(rarely, constants, 2);
    assert!(near(two.ns, 50_500.0, 0.02), "{two}");
    assert_eq!(two.ops_per_flush, 1.0);
}

/// `d_strict_combining_f500` on two CPUs of a Xeon of 2.5 GHz, round trip of a line 207 ns, from
/// the results page.
#[test]
fn two_combining_cores_are_as_quick_as_measured() {
    let system = System::StrictCombining {
        own_ns: 133.0,
        gather_ns: GATHER_NS,
    };
    let constants = Constants {
        line_ns: 103.3,
        lock_ns: 9.3,
        ..Constants::default()
    };
    for check in validate(system, constants, &[(1, 1.592), (2, 2.325)]) {
        assert!(check.deviation().abs() < 0.1, "{check}");
    }
    assert!(run(system, constants, 2).ops_per_flush > 1.9);
}

#[test]
fn combining_grows_with_cores_up_to_the_cost_of_posting() {
    let outcomes = sweep(COMBINING, Constants::default());
    assert!(outcomes.windows(2).all(|two| two[1].mps > two[0].mps));
    for (combined, locked) in outcomes.iter().zip(sweep(LOCK, Constants::default())) {
        assert!(combined.mps >= locked.mps * 0.999, "{combined} {locked}");
    }
    // Batches are serial: each takes a flush and a doorbell of 150 ns, and for each core a line and
    // 10 ns.
    let constants = Constants {
        lock_ns: 10.0,
        flush_ns: 650.0,
        ..Constants::default()
    };
    for cores in [16, 64, 128] {
        let played = run(COMBINING, constants, cores);
        let expected = cores as f64 * 1000.0 / (650.0 + 68.0 * cores as f64);
        assert!(near(played.mps, expected, 0.1), "{played}, {expected}");
    }
}

#[test]
fn one_flush_of_a_deferred_queue_serves_others() {
    let system = System::Deferred {
        own_ns: 10.0,
        entries: 250,
    };
    let one = run(system, Constants::default(), 1);
    // 1,009 ns of flush and lock for 250 operations.
    assert!(near(one.ns, 10.0 + 1009.0 / 250.0, 0.02), "{one}");
    assert!(near(one.ops_per_flush, 250.0, 0.02));
    let two = run(system, Constants::default(), 2);
    assert!(two.ops_per_flush > 300.0, "{two:?}");
    let many = run(system, Constants::default(), 128);
    assert!(many.mps > 40.0 * one.mps, "{many}");
}

#[test]
fn a_tree_under_a_lock_falls_and_private_lines_scale() {
    let tree = System::TreeLock {
        own_ns: 0.0,
        critical_ns: 40.0,
        lines: TREE_LINES,
    };
    let c = Constants::default();
    let (one, two) = (run(tree, c, 1), run(tree, c, 2));
    assert!(near(one.ns, 40.0, 0.01), "{one}");
    // Two hand-overs of three lines, six lines, 40 ns of work: 736 ns for a pair of operations of
    // either core.
    assert!(near(two.mps, 1000.0 / 736.0, 0.01), "{two}");
    let chunk = System::Private {
        own_ns: 5.0,
        lines: 0.0,
    };
    assert!(near(run(chunk, c, 128).mps, 128.0 * 200.0, 1e-9));
    let shared = System::Private {
        own_ns: 5.0,
        lines: 0.5,
    };
    assert!(near(run(shared, c, 2).ns, 34.0, 1e-9));
}

#[test]
fn a_run_repeats_and_its_text_says_model() {
    let run = || run(COMBINING, Constants::default(), 37);
    assert_eq!(run(), run());
    assert!(run().to_string().starts_with("model: 37 cores "));
    let check = Check {
        cores: 2,
        measured_mps: 1.0,
        model_mps: 1.3,
    };
    assert!(!check.holds());
    let text = check.to_string();
    assert!(text.contains("+30 %") && text.ends_with("does not hold here"));
}
