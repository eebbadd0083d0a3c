//! The four policies: the time at which a mapping goes that the guest has unmapped, and what holds
//! under each.

use std::time::Duration;

use assign::policy::HostPolicy;
use dma_map::mapper::{Optimistic, Window};
use guest_mem::GuestRam;
use vfio::Errno;
use vtd_guest::iotlb_domain;

use crate::memory::Paged;
use crate::world::{DATA, Options, RW, World, tell};

/// Longer than any test takes on a loaded machine: it is over when a test says so.
const AGE: Duration = Duration::from_secs(3600);
/// Behind it, ms.
const AFTER: u64 = 3_600_001;
/// Slack of the age in these tests, ns: the turns of a loaded machine, and its calls.
const SLACK: u64 = 5_000_000_000;

pub fn optimistic(quota: usize) -> HostPolicy {
    optimistic_for(quota, AGE)
}

pub fn optimistic_for(quota: usize, residency: Duration) -> HostPolicy {
    HostPolicy::Optimistic(Optimistic { quota, residency })
}

fn window(entries: usize) -> Window {
    Window { entries, age: AGE }
}

fn policies(count: usize) -> [HostPolicy; 4] {
    [
        HostPolicy::Strict,
        HostPolicy::Async(window(count)),
        HostPolicy::Deferred(window(count)),
        optimistic(count),
    ]
}

fn world(policy: HostPolicy) -> (World<GuestRam>, u64) {
    let mut world = World::<GuestRam>::with(Options {
        policy,
        ..Options::default()
    });
    let table = world.boot()[0];
    (world, table)
}

fn check_contract(world: &mut World<GuestRam>, policy: HostPolicy) {
    let risk = world.assigned(0).shadow().risk();
    let checked = risk.check(SLACK);
    assert!(
        checked.is_ok(),
        "the contract of {policy:?} does not hold: {checked:?}"
    );
}

/// A map is waited for under each; an unmap only by the strict one.
#[test]
fn a_relaxed_policy_completes_unmaps_early_and_never_maps() {
    for policy in policies(4) {
        let (mut world, table) = world(policy);
        let kernel = world.seats[0].kernel.clone();
        kernel.hold();
        world.set(table, 16, DATA, 1, RW);
        let wait = world.submit(&[tell(1, 16, 1)]);
        world.until("the call", |world| world.seats[0].kernel.held() == 1);
        world.settle();
        assert!(
            !world.is_complete(wait),
            "a map is not waited for: {policy:?}"
        );
        kernel.release();
        world.complete(wait);

        kernel.hold();
        world.set(table, 16, 0, 1, 0);
        let wait = world.submit(&[tell(1, 16, 1)]);
        let is_strict = policy == HostPolicy::Strict;
        if is_strict {
            world.until("the call", |world| world.seats[0].kernel.held() == 1);
            world.settle();
            assert!(!world.is_complete(wait));
        } else {
            world.complete(wait);
            assert_eq!(
                world.pages(0),
                [(16, DATA)],
                "what is stale is reached: {policy:?}"
            );
        }
        assert_eq!(world.in_use(&[DATA]), [DATA], "{policy:?}");
        kernel.release();
        world.complete(wait);
        if let HostPolicy::Async(_) = policy {
            // Time passes for a call that is under way, too: it has none here.
            world.until("it goes", |world| world.pages(0).is_empty());
            world.settle();
        }
        world.later(AFTER);
        world.until("it goes", |world| world.pages(0).is_empty());
        world.settle();
        assert_eq!(world.in_use(&[DATA]), [0_u64; 0]);
        check_contract(&mut world, policy);
    }
}

/// Many more than the bound, one by one and in one flush, with calls that are slow: never more are
/// stale than promised.
#[test]
fn no_more_is_stale_than_a_policy_promises() {
    for policy in policies(4) {
        for is_one_by_one in [true, false] {
            let (mut world, table) = world(policy);
            for at in 0..32 {
                world.set(table, 2 * at, DATA + at, 1, RW);
            }
            world.flush(&[iotlb_domain(1)]);
            let kernel = world.seats[0].kernel.clone();
            kernel.hold();
            let mut wait = 0;
            for at in 0..32 {
                world.set(table, 2 * at, 0, 1, 0);
                if is_one_by_one {
                    wait = world.submit(&[tell(1, 2 * at, 1)]);
                }
            }
            if !is_one_by_one {
                wait = world.submit(&[iotlb_domain(1)]);
            }
            // Calls go on one by one.
            world.until("the WAIT completes", |world| {
                let risk = world.assigned(0).shadow().risk();
                assert!(
                    risk.check(SLACK).is_ok(),
                    "the contract of {policy:?} does not hold: {risk:?}"
                );
                if world.seats[0].kernel.held() > 0 {
                    world.seats[0].kernel.release_one();
                }
                world.is_complete(wait)
            });
            kernel.release();
            world.settle();
            check_contract(&mut world, policy);
            let most = match policy {
                HostPolicy::Strict | HostPolicy::Async(_) => 0,
                HostPolicy::Deferred(_) | HostPolicy::Optimistic(_) => 4,
            };
            assert!(world.pages(0).len() <= most, "{policy:?}");
        }
    }
}

/// Counted from outside: mappings that the device reaches when the WAIT of their unmap has
/// completed.
#[test]
fn mappings_reached_beyond_the_guests_belief_are_within_the_quota() {
    for quota in [1, 2, 5] {
        for policy in [
            HostPolicy::Async(window(quota)),
            HostPolicy::Deferred(window(quota)),
            optimistic(quota),
        ] {
            let (mut world, table) = world(policy);
            for at in 0..16 {
                world.map((table, 1), 2 * at, DATA + at, 1, RW);
            }
            for at in 0..16 {
                world.unmap((table, 1), 2 * at, 1);
                let believed = 15 - at as usize;
                let beyond = world.pages(0).len() - believed;
                assert!(
                    beyond <= quota,
                    "{beyond} mappings are stale, {quota} are allowed: {policy:?}"
                );
            }
            check_contract(&mut world, policy);
        }
    }
}

/// Without an invalidation: time alone ends a stale mapping.
#[test]
fn a_stale_mapping_goes_when_its_age_is_over() {
    for policy in [HostPolicy::Deferred(window(8)), optimistic(8)] {
        let (mut world, table) = world(policy);
        world.map((table, 1), 16, DATA, 1, RW);
        world.unmap((table, 1), 16, 1);
        assert_eq!(world.pages(0), [(16, DATA)]);
        let deadline = world.assigned(0).shadow().deadline();
        assert!(deadline.is_some(), "it asks to be woken");
        world.later(AFTER);
        world.until("what is stale goes when its age is over", |world| {
            world.pages(0).is_empty()
        });
        world.settle();
        assert_eq!(world.in_use(&[DATA]), [0_u64; 0]);
        assert_eq!(world.assigned(0).shadow().deadline(), None);
        check_contract(&mut world, policy);
    }
}

/// The same IOVA for another page, which is common: the stale mapping goes first, and the device
/// reaches the new page.
#[test]
fn a_stale_iova_that_is_used_again_never_reaches_the_old_page() {
    for policy in policies(8) {
        let (mut world, table) = world(policy);
        for turn in 0..10 {
            world.map((table, 1), 16, DATA + turn, 1, RW);
            assert_eq!(
                world.pages(0),
                [(16, DATA + turn)],
                "the stale mapping was not torn down: {policy:?}"
            );
            world.unmap((table, 1), 16, 1);
        }
        // A run over several that are stale.
        world.map((table, 1), 17, DATA + 40, 1, RW);
        world.unmap((table, 1), 17, 1);
        world.map((table, 1), 16, DATA + 50, 4, RW);
        let wanted: Vec<_> = (0..4).map(|at| (16 + at, DATA + 50 + at)).collect();
        assert_eq!(world.pages(0), wanted, "{policy:?}");
        check_contract(&mut world, policy);
    }
}

#[test]
fn a_stale_mapping_that_comes_back_needs_no_call() {
    let (mut world, table) = world(optimistic(8));
    world.map((table, 1), 16, DATA, 1, RW);
    let calls = world.calls(0);
    for _ in 0..10 {
        world.unmap((table, 1), 16, 1);
        world.map((table, 1), 16, DATA, 1, RW);
    }
    assert_eq!((world.calls(0), world.counts(0).hits), (calls, 10));
    assert_eq!(world.pages(0), [(16, DATA)]);
}

/// A detach, a switch of the domain, a pass-through that is refused, translation off: nothing of
/// the old is reached, live or stale, when they complete.
#[test]
fn a_detach_and_a_switch_and_te_off_tear_all_down_first() {
    for policy in policies(8) {
        // Also where nothing was stale before.
        let cases = ["detach", "switch", "TE off"].map(|how| [(how, 3), (how, 0)]);
        for (how, stale) in cases.into_iter().flatten() {
            let (mut world, table) = world(policy);
            for at in 0..6 {
                world.map((table, 1), 16 + 2 * at, DATA + at, 1, RW);
            }
            for at in 0..stale {
                world.unmap((table, 1), 16 + 2 * at, 1);
            }
            match how {
                "detach" => {
                    world.context(0, 0, 0);
                    world.tell_context(0, 1);
                }
                "switch" => {
                    let new = world.table();
                    world.attach(0, new, 2);
                }
                _ => world.translate(false),
            }
            let live: Vec<_> = (stale..6).map(|at| (16 + 2 * at, DATA + at)).collect();
            let reached = world.pages(0);
            assert!(
                live.iter().all(|page| !reached.contains(page)),
                "{how} completes while a mapping is reached: {policy:?}"
            );
            assert_eq!(
                reached,
                [],
                "{how} completes while what is stale is reached: {policy:?}"
            );
            assert_eq!(
                world.reach.pages(),
                0,
                "{how} completes while pages are in use: {policy:?}"
            );
            check_contract(&mut world, policy);
        }
    }
}

/// The same where what is stale is in a call that is under way.
#[test]
fn a_detach_waits_for_unmaps_that_are_under_way() {
    for how in ["detach", "switch", "TE off"] {
        let (mut world, table) = world(HostPolicy::Async(window(8)));
        world.map((table, 1), 16, DATA, 1, RW);
        let kernel = world.seats[0].kernel.clone();
        kernel.hold();
        world.unmap((table, 1), 16, 1);
        world.until("the call", |world| world.seats[0].kernel.held() == 1);
        let new = world.table();
        let source = world.seats[0].source;
        let wait = match how {
            "detach" => {
                world.context(0, 0, 0);
                Some(world.submit(&[vtd_guest::cc_device(1, source, 0)]))
            }
            "switch" => {
                world.context(0, new | 1, 2);
                Some(world.submit(&[vtd_guest::cc_device(2, source, 0)]))
            }
            _ => {
                world.ask_translation(false);
                None
            }
        };
        world.settle();
        let is_over = match wait {
            Some(wait) => world.is_complete(wait),
            None => !world.is_translating(),
        };
        assert!(!is_over, "{how} completes while what is stale is reached");
        kernel.release();
        world.until("it completes", |world| match wait {
            Some(wait) => world.is_complete(wait),
            None => !world.is_translating(),
        });
        assert_eq!(world.pages(0), []);
    }
}

/// Pages that are stale are in use: a pager must not have them.
#[test]
fn pages_that_are_stale_stay() {
    for policy in [HostPolicy::Deferred(window(8)), optimistic(8)] {
        let mut world = World::<Paged>::with(Options {
            policy,
            ..Options::default()
        });
        let table = world.boot()[0];
        world.map((table, 1), 16, DATA, 2, RW);
        world.unmap((table, 1), 16, 2);
        assert_eq!(
            world.evict(&[DATA, DATA + 1, DATA + 2]),
            [DATA + 2],
            "a stale page is evicted under a device"
        );
        world.later(AFTER);
        world.until("it goes", |world| world.pages(0).is_empty());
        world.settle();
        assert_eq!(world.evict(&[DATA, DATA + 1]), [DATA, DATA + 1]);
    }
}

/// A teardown that no WAIT waits for fails: the device is cut off all the same.
#[test]
fn a_failed_teardown_of_what_is_stale_cuts_the_device_off() {
    for policy in &policies(8)[1..] {
        let (mut world, table) = world(*policy);
        world.map((table, 1), 16, DATA, 1, RW);
        world.seats[0].kernel.fail_nth(0, Errno(5));
        world.unmap((table, 1), 16, 1);
        world.later(AFTER);
        world.until("the device is cut off", |world| {
            world.seats[0].hardware.device().is_stopped
        });
        world.until("it is closed", |world| world.reach.pages() == 0);
        assert_eq!(world.pages(0), []);
    }
}

/// The policy changes while mappings are stale: they go, and what follows is the new one's.
#[test]
fn another_policy_tears_down_what_the_last_one_kept() {
    for policy in [HostPolicy::Deferred(window(8)), optimistic(8)] {
        let (mut world, table) = world(policy);
        world.map((table, 1), 16, DATA, 1, RW);
        world.unmap((table, 1), 16, 1);
        world
            .assigned(0)
            .shadow_mut()
            .set_policy(HostPolicy::Strict);
        world.until("it goes", |world| world.pages(0).is_empty());
        world.settle();
        world.map((table, 1), 16, DATA, 1, RW);
        world.unmap((table, 1), 16, 1);
        assert_eq!(world.pages(0), []);
        check_contract(&mut world, HostPolicy::Strict);
    }
}
