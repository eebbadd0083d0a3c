//! A space that is used up: unmapped ranges are available to a core that needs them, even while
//! another core is idle.

use super::*;

/// Pages of the space: chunks, and odd ends.
const PAGES: u64 = 4096;

fn full_world(policy: Policy, retires: bool) -> World<ChunkAllocator> {
    let aperture = Aperture::new(IovaPfn::new(1), IovaPfn::new(PAGES), &[]).unwrap();
    let allocator = match retires {
        true => ChunkAllocator::retiring(aperture, 3),
        false => ChunkAllocator::new(aperture, 3),
    };
    World::of(allocator.unwrap(), policy, DeviceLimits::default())
}

/// Maps pages from number `from` on until there is no room.
fn map_all(core: &mut Core<ChunkAllocator>, from: u64) -> Vec<Mapping> {
    let map = |i| core.map(&[page(from + i)], Direction::ToDevice).ok();
    (0..).map_while(map).collect()
}

fn unmap_all(core: &mut Core<ChunkAllocator>, mappings: Vec<Mapping>) {
    for mapping in mappings {
        core.unmap(mapping).unwrap();
    }
}

/// Number of unmapped ranges that an idle core may keep: its queue, or its idle mappings.
fn kept(world: &World<ChunkAllocator>) -> usize {
    let stale = world.mapper.contract().max_stale.unwrap_or(0);
    usize::try_from(stale).unwrap() / 3
}

#[test]
fn ranges_unmapped_by_others_are_available_without_their_mapping_core() {
    for policy in policies().filter(|policy| !policy.is_off) {
        for retires in [false, true] {
            let world = full_world(policy, retires);
            let (mut producer, mut consumer) = (world.core(0), world.core(1));
            let all = map_all(&mut producer, 1);
            assert_eq!(all.len() as u64, PAGES);
            unmap_all(&mut consumer, all);
            let again = map_all(&mut consumer, 10_000);
            assert_eq!(again.len() as u64, PAGES, "{policy:?}: the producer rests");
            // It runs again, and finds nothing of its own.
            assert!(producer.map(&[page(1)], Direction::ToDevice).is_err());
            unmap_all(&mut consumer, again);
            let mut third = world.core(2);
            let others = map_all(&mut third, 20_000);
            // Beyond the free lists of the second, which has freed its own now. Mappings that its
            // policy keeps besides are live.
            let least = if kept(&world) == 0 {
                PAGES as usize - 512
            } else {
                0
            };
            assert!(others.len() >= least, "{policy:?}: {}", others.len());
            consumer.park().unwrap();
            unmap_all(&mut third, others);
            drop(consumer);
            let others = map_all(&mut third, 30_000);
            assert_eq!(others.len() as u64, PAGES, "{policy:?}");
            unmap_all(&mut third, others);
        }
    }
}

#[test]
fn a_core_that_rests_after_unmapping_keeps_no_more_than_its_policy_says() {
    for policy in policies().filter(|policy| !policy.is_off) {
        let world = full_world(policy, false);
        let (mut producer, mut consumer) = (world.core(0), world.core(1));
        let all = map_all(&mut producer, 1);
        unmap_all(&mut consumer, all);
        let again = map_all(&mut producer, 10_000);
        let least = PAGES as usize - kept(&world);
        assert!(
            again.len() >= least,
            "{policy:?}: {} of at least {least}",
            again.len()
        );
        // It runs again.
        consumer.park().unwrap();
        let rest = map_all(&mut producer, 20_000);
        assert_eq!((again.len() + rest.len()) as u64, PAGES, "{policy:?}");
        unmap_all(&mut producer, again);
        unmap_all(&mut producer, rest);
    }
}

#[test]
fn ranges_of_a_dropped_core_are_available_at_the_first_request() {
    for policy in [Policy::DEFERRED, Policy::optimistic(256)] {
        let world = World::of(space(64, 2), policy, DeviceLimits::default());
        let mut dropped = world.core(0);
        let mut busy = world.core(1);
        let map = |i| dropped.map(&[page(i)], Direction::ToDevice).ok();
        let all: Vec<_> = (1..).map_while(map).collect();
        for mapping in all {
            dropped.unmap(mapping).unwrap();
        }
        world.iotlb.die_for(8);
        drop(dropped);
        world.iotlb.die_for(0);
        assert!(
            world.mapper.risk().stale_now > 0,
            "{policy:?}: nothing was left behind"
        );
        let mapping = busy.map(&[page(1000)], Direction::ToDevice);
        let mapping = mapping.unwrap_or_else(|error| panic!("{policy:?}: {error}"));
        busy.unmap(mapping).unwrap();
    }
}
