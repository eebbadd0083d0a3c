//! Back ends that die.

use super::*;
use std::os::fd::AsFd;
use vhost_user::backend::RingBase;
use vhost_user::wire::ProtocolFeatures;

fn without_inflight() -> Plan {
    let plan = plan();
    Plan {
        protocol: plan.protocol.without(ProtocolFeatures::INFLIGHT_SHMFD),
        ..plan
    }
}

/// A guest whose rings are served, and stand at these indices; and its back end, restarted as
/// `next`.
fn killed(plan: Plan, indices: [(u16, u16); 2], next: Plan) -> (Guest, BackEnd) {
    let back_end = BackEnd::new(plan);
    let mut guest = Guest::connect(&back_end, 2);
    guest.start();
    eventually("started", || back_end.seen().is_serving(1));
    for (queue, (avail, used)) in (0..).zip(indices) {
        guest.set_indices(queue, avail, used);
    }
    let back_end = back_end.restart(next);
    (guest, back_end)
}

#[test]
fn rings_go_on_at_the_used_index_with_the_region_of_the_dead() {
    let (guest, back_end) = killed(plan(), [(9, 5), (0x8003, 0xfffe)], plan());
    eventually("served again", || back_end.seen().is_serving(1));
    let seen = back_end.seen();
    let bases: Vec<_> = seen.started.iter().map(|config| config.base).collect();
    assert_eq!(bases, [RingBase::Split(5), RingBase::Split(0xfffe)]);
    assert_eq!(seen.inflight_made, 0, "the region of before is given");
    assert_eq!(seen.inflight_given[0].mmap_size, 4096);
    assert_eq!(seen.memory.as_ref().unwrap().len(), 2);
    assert!(!guest.import.needs_reset());
    // What the dead may have owed: a call, and a look at the ring.
    eventually("called", || {
        guest
            .call
            .iter()
            .all(|call| sidecore::drain_eventfd(call.as_fd()))
    });
    let vhost_user::backend::Kick::Fd(kick) = &seen.started[0].kick else {
        panic!("a descriptor")
    };
    assert!(sidecore::drain_eventfd(kick.as_fd()));
}

#[test]
fn without_a_region_requests_in_flight_are_lost_and_the_device_says_so() {
    let (mut guest, back_end) = killed(without_inflight(), [(9, 5), (0, 0)], without_inflight());
    eventually("news", || guest.import.has_events());
    assert!(guest.import.take_events() && guest.import.needs_reset());
    // A reset gets it going again.
    guest.stop();
    guest.import.reset();
    guest.set_indices(0, 0, 0);
    guest.start();
    eventually("served", || back_end.seen().is_serving(1));
    assert!(!guest.import.needs_reset());
}

#[test]
fn without_a_region_quiet_rings_go_on() {
    let (guest, back_end) = killed(without_inflight(), [(9, 9), (3, 3)], without_inflight());
    eventually("served again", || back_end.seen().is_serving(1));
    assert_eq!(back_end.seen().started[0].base, RingBase::Split(9));
    assert!(!guest.import.needs_reset());
}

#[test]
fn a_device_that_completes_in_order_needs_no_region() {
    let mut plan = without_inflight();
    plan.features |= feature::IN_ORDER;
    let (guest, back_end) = killed(plan.clone(), [(9, 5), (3, 3)], plan);
    eventually("served again", || back_end.seen().is_serving(1));
    assert_eq!(back_end.seen().started[0].base, RingBase::Split(5));
    assert!(!guest.import.needs_reset());
}

#[test]
fn another_device_is_not_taken_for_the_old_one() {
    let larger = Plan {
        sectors: 4096,
        ..plan()
    };
    let (guest, back_end) = killed(plan(), [(9, 5), (3, 3)], larger);
    eventually("looked at", || back_end.seen().connections >= 3);
    assert!(back_end.seen().started.is_empty());
    // The right one is, when it comes.
    let back_end = back_end.restart(plan());
    eventually("served again", || back_end.seen().is_serving(1));
    assert!(!guest.import.needs_reset());
}

#[test]
fn a_driver_may_start_and_stop_while_nobody_is_there() {
    let back_end = BackEnd::new(plan());
    let path = back_end.path().to_owned();
    let mut guest = Guest::connect(&back_end, 1);
    drop(back_end);
    guest.start();
    guest.stop();
    guest.import.reset();
    guest.start();
    assert!(!guest.import.needs_reset());
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let back_end = BackEnd::at(&path, plan());
    eventually("served", || back_end.seen().is_serving(0));
    assert_eq!(back_end.seen().started.len(), 1);
    drop(back_end);
    std::fs::remove_dir(path.parent().unwrap()).unwrap();
}

#[test]
fn many_deaths_are_survived() {
    let mut back_end = BackEnd::new(plan());
    let mut guest = Guest::connect(&back_end, 1);
    guest.start();
    for round in 0..10 {
        eventually("served", || back_end.seen().is_serving(0));
        guest.set_indices(0, round + 1, round);
        back_end = back_end.restart(plan());
        eventually("served again", || back_end.seen().is_serving(0));
        assert_eq!(back_end.seen().started[0].base, RingBase::Split(round));
    }
    assert!(!guest.import.needs_reset());
    guest.stop();
}
