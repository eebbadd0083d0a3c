//! One core stops for ever, and what is promised holds.

use alloc::vec::Vec;

use iova::Access;

use super::*;

/// What a core that never runs again has left in the device's reach is gone after the age and one tick.
fn quiet_core(policy: Policy) {
    let world = world(policy);
    let mut quiet = world.core(0);
    let mut busy = world.core(1);
    let mut left = Vec::new();
    for i in 0..5 {
        let mapping = quiet.map(&[page(i)], Direction::ToDevice).unwrap();
        world.device.access(mapping.iova(), Access::Read).unwrap();
        left.push(mapping.iova());
        quiet.unmap(mapping).unwrap();
    }
    let reached = |world: &World| {
        left.iter()
            .filter(|i| world.device.access(**i, Access::Read).is_ok())
            .count()
    };
    let age = world.mapper.contract().max_age_ns.unwrap();
    while world.clock.now() < age - TICK {
        world.tick();
        // The other core's work keeps the clock's owner busy, not the quiet one's window.
        let mapping = busy.map(&[page(77)], Direction::ToDevice).unwrap();
        busy.unmap(mapping).unwrap();
    }
    world.tick();
    world.tick();
    assert_eq!(reached(&world), 0, "{policy:?}");
    let risk = world.mapper.risk();
    risk.check(TICK).unwrap();
    // The quiet core's IOVAs are its own until it runs; then they come back.
    let live = world.mapper.allocator().stats().live_ranges;
    assert!(live >= 5, "{live} ranges");
    quiet.park().unwrap();
    busy.park().unwrap();
    assert_eq!(world.mapper.allocator().stats().live_ranges, 0);
    let risk = world.mapper.risk();
    risk.check(TICK).unwrap();
    assert!(risk.windows.max_ns > 0);
}

#[test]
fn deferred_windows_close_without_their_owner() {
    quiet_core(Policy::DEFERRED);
}

#[test]
fn optimistic_windows_close_without_their_owner() {
    quiet_core(Policy::optimistic(256));
    quiet_core(Policy::DEFERRED.with_reuse(Reuse::Optimistic(Optimistic::of(16))));
}

#[test]
fn without_a_tick_the_window_stays_open_and_is_reported() {
    let world = world(Policy::DEFERRED);
    let mut core = world.core(0);
    let mapping = core.map(&[page(1)], Direction::ToDevice).unwrap();
    let iova = mapping.iova();
    world.device.access(iova, Access::Read).unwrap();
    core.unmap(mapping).unwrap();
    world.clock.pass(1_000_000_000);
    assert!(world.device.access(iova, Access::Read).is_ok());
    assert_eq!(world.mapper.risk().stale_now, 1);
    world.mapper.tick(world.clock.now()).unwrap();
    assert!(world.device.access(iova, Access::Read).is_err());
    core.park().unwrap();
    assert_eq!(world.mapper.risk().windows.max_ns, 1_000_000_000);
    assert!(
        world.mapper.risk().check(TICK).is_err(),
        "the promise was broken, and says so"
    );
}

#[test]
fn an_exhausted_core_gets_what_others_keep_when_they_run() {
    let world = World::of(space(64, 2), Policy::DEFERRED, DeviceLimits::default());
    let mut keeper = world.core(0);
    let mut hungry = world.core(1);
    let all: Vec<_> = (0..64)
        .map(|i| keeper.map(&[page(i)], Direction::ToDevice).unwrap())
        .collect();
    for mapping in all {
        keeper.unmap(mapping).unwrap();
    }
    let refused = hungry.map(&[page(1)], Direction::ToDevice);
    assert!(matches!(refused, Err(DmaMapError::Alloc(_))));
    // The flush that the failure forced covers the keeper's queue; its next operation gives it back.
    assert!(keeper.unmap_at(address::Iova::new(1 << 40), 1).is_err());
    let mapping = hungry.map(&[page(1)], Direction::ToDevice);
    hungry.unmap(mapping.unwrap()).unwrap();
}
