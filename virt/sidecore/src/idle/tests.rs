use super::*;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

fn free() -> Hints {
    Hints::default()
}

fn arming(arm_cost_ns: u64) -> impl Fn() -> Hints {
    move || Hints {
        arm_cost_ns,
        deadline: None,
    }
}

/// Passes idle sweeps every 10 µs to the state until it sleeps; returns the time until then, at
/// most `most`.
fn ns_until_sleep(state: &mut IdleState, from: Nanos, hints: impl Fn() -> Hints) -> u64 {
    (0..100_000)
        .map(|step| step * 10 * US)
        .find(|&ns| state.next(from.after(ns), &hints) == Wait::Sleep)
        .expect("never slept")
}

/// Passes `n` arrivals, `gap` apart, with idle sweeps between them; returns the time of the last.
fn arrivals(
    state: &mut IdleState,
    from: Nanos,
    n: u64,
    gap: u64,
    hints: impl Fn() -> Hints,
) -> Nanos {
    for k in 1..=n {
        state.next(from.after(k * gap - 1), &hints);
        state.busy(from.after(k * gap), 1);
    }
    from.after(n * gap)
}

#[test]
fn poll_never_sleeps() {
    let mut state = IdleState::new(IdlePolicy::Poll, Nanos(0));
    assert_eq!(state.next(Nanos(u64::MAX), free), Wait::Spin);
}

#[test]
fn sleep_sleeps_at_the_first_idle_sweep_but_not_past_a_deadline() {
    let mut state = IdleState::new(IdlePolicy::Sleep, Nanos(0));
    assert_eq!(state.next(Nanos(1), free), Wait::Sleep);
    let due = || Hints {
        arm_cost_ns: 0,
        deadline: Some(Nanos(1)),
    };
    assert_eq!(state.next(Nanos(1), due), Wait::Pause);
}

#[test]
fn adaptive_spins_then_pauses_then_sleeps_after_50_us() {
    let mut state = IdleState::new(IdlePolicy::adaptive(), Nanos(0));
    assert_eq!(state.next(Nanos(9 * US), free), Wait::Spin);
    assert_eq!(state.next(Nanos(10 * US), free), Wait::Pause);
    assert_eq!(state.next(Nanos(50 * US - 1), free), Wait::Pause);
    assert_eq!(state.next(Nanos(50 * US), free), Wait::Sleep);
}

#[test]
fn hints_are_not_asked_while_spinning() {
    let mut state = IdleState::new(IdlePolicy::adaptive(), Nanos(0));
    state.next(Nanos(49 * US), || panic!("asked"));
}

#[test]
fn gaps_of_100_us_stretch_the_spin_over_the_next_one() {
    let mut state = IdleState::new(IdlePolicy::adaptive(), Nanos(0));
    let now = arrivals(&mut state, Nanos(0), 50, 100 * US, free);
    assert!(state.predicted_gap_ns.abs_diff(100 * US) < US);
    let spin = ns_until_sleep(&mut state, now, free);
    assert!((300 * US..=400 * US).contains(&spin), "{spin}");
}

#[test]
fn gaps_of_700_us_stretch_the_spin_to_the_maximum_only() {
    let mut state = IdleState::new(IdlePolicy::adaptive(), Nanos(0));
    let now = arrivals(&mut state, Nanos(0), 50, 700 * US, free);
    assert_eq!(ns_until_sleep(&mut state, now, free), MS);
}

#[test]
fn gaps_above_1_ms_shrink_the_spin_to_nothing() {
    let mut state = IdleState::new(IdlePolicy::adaptive(), Nanos(0));
    let now = arrivals(&mut state, Nanos(0), 50, 3 * MS, free);
    assert_eq!(state.next(now, free), Wait::Sleep);
}

#[test]
fn one_quiet_night_is_forgotten_after_a_dozen_requests() {
    let mut state = IdleState::new(IdlePolicy::adaptive(), Nanos(0));
    let now = arrivals(&mut state, Nanos(0), 50, 3 * MS, free);
    let morning = arrivals(&mut state, now, 1, 8 * 3_600_000 * MS, free);
    let now = arrivals(&mut state, morning, 12, 20 * US, free);
    assert!(ns_until_sleep(&mut state, now, free) > 0);
}

#[test]
fn costly_arming_is_waited_for_ten_times_as_long() {
    let mut state = IdleState::new(IdlePolicy::adaptive(), Nanos(0));
    assert_eq!(
        ns_until_sleep(&mut state, Nanos(0), arming(200 * US)),
        2 * MS
    );
    // Idle periods of 3 ms are long ones with free arming; here they are not worth ten armings
    // each.
    let now = arrivals(&mut state, Nanos(0), 50, 3 * MS, arming(200 * US));
    assert_eq!(ns_until_sleep(&mut state, now, arming(200 * US)), 2 * MS);
}

#[test]
fn costly_arming_is_paid_at_once_where_long_gaps_are_the_rule() {
    let mut state = IdleState::new(IdlePolicy::adaptive(), Nanos(0));
    assert_eq!(
        ns_until_sleep(&mut state, Nanos(0), arming(200 * US)),
        2 * MS
    );
    let now = arrivals(&mut state, Nanos(0), 50, 100 * MS, arming(200 * US));
    assert_eq!(ns_until_sleep(&mut state, now, arming(200 * US)), 200 * US);
}

#[test]
fn a_deadline_about_to_come_is_waited_for_awake() {
    let mut state = IdleState::new(IdlePolicy::adaptive(), Nanos(0));
    let soon = |at| {
        move || Hints {
            arm_cost_ns: 0,
            deadline: Some(Nanos(at)),
        }
    };
    assert_eq!(state.next(Nanos(60 * US), soon(80 * US)), Wait::Pause);
    assert_eq!(state.next(Nanos(60 * US), soon(200 * US)), Wait::Sleep);
}

#[test]
fn failed_arming_is_tried_again_later_and_later() {
    let mut state = IdleState::new(IdlePolicy::Sleep, Nanos(0));
    state.arm_failed(Nanos(0));
    assert_eq!(state.next(Nanos(9 * MS), free), Wait::Pause);
    assert_eq!(state.next(Nanos(10 * MS), free), Wait::Sleep);
    state.arm_failed(Nanos(10 * MS));
    assert_eq!(state.next(Nanos(29 * MS), free), Wait::Pause);
    assert_eq!(state.next(Nanos(30 * MS), free), Wait::Sleep);
    for _ in 0..20 {
        state.arm_failed(Nanos(0));
    }
    assert_eq!(state.next(Nanos(1_000 * MS), free), Wait::Sleep);
    state.armed();
    state.arm_failed(Nanos(0));
    assert_eq!(state.next(Nanos(10 * MS), free), Wait::Sleep);
}
