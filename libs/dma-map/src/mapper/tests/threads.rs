//! Cores that are threads, with a device that checks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use iova::Access;

use super::*;

#[test]
fn strictly_unmapped_page_is_reached_by_no_thread() {
    let rounds = if cfg!(debug_assertions) { 300 } else { 5_000 };
    for policy in policies() {
        let world = world(policy);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let workers: Vec<_> = (0..2)
                .map(|id| {
                    let mut core = world.core(id);
                    let (world, policy) = (&world, &policy);
                    scope.spawn(move || {
                        for i in 0..rounds {
                            // Half of the pages are the other thread's too.
                            let number = if i % 2 == 0 { i % 5 } else { 100 + id as u64 };
                            let mapping = core.map(&[page(number)], Direction::ToDevice).unwrap();
                            let iova = mapping.iova();
                            let got = world.device.access(iova, Access::Read);
                            assert_eq!(got, Ok(PhysAddr::new(number << 12)));
                            core.unmap(mapping).unwrap();
                            // A page of our own, whose IOVA another thread can have got meanwhile
                            // only by a map.
                            if number >= 100 && is_strict(policy) {
                                let got = world.device.access(iova, Access::Read);
                                assert_ne!(got, Ok(PhysAddr::new(number << 12)), "{policy:?}");
                            }
                        }
                        core.park().unwrap();
                    })
                })
                .collect();
            let (world, stop) = (&world, &stop);
            let ticker = scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    world.tick();
                    thread::yield_now();
                }
            });
            let ends: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
            // Before anything panics: the scope waits for the ticker.
            stop.store(true, Ordering::Relaxed);
            ticker.join().unwrap();
            ends.into_iter()
                .for_each(|end| end.expect("a worker ends well"));
        });
        world.mapper.flush().unwrap();
        for core in 0..2 {
            world.core(core).park().unwrap();
        }
        let risk = world.mapper.risk();
        assert_eq!(risk.stale_now, 0);
        if is_strict(&policy) {
            assert_eq!(risk.stale_max, 0, "{policy:?}");
        }
        assert_eq!(world.mapper.allocator_stats().live_ranges, 0, "{policy:?}");
    }
}

/// Uses of a shared mapping end, by the mapping or by its address, while another core has the pin:
/// only the last of them takes it. Also where the allocator gave more pages than are mapped.
#[test]
fn a_use_of_a_shared_mapping_ends_while_another_has_the_pin() {
    for pages in [1, 5, 8] {
        let world = World::of(chunks(1 << 13, 2), Policy::SHARED, DeviceLimits::default());
        let (mut one, mut two) = (world.core(0), world.core(1));
        let memory = [Segment::new(PhysAddr::new(0x10_0000), pages * 4096)];
        let [first, second, third] =
            [(); 3].map(|()| one.map(&memory, Direction::ToDevice).unwrap());
        let iova = second.iova();
        assert_eq!((iova, iova), (first.iova(), third.iova()));
        let allocated = IovaRange::new(IovaPfn::of(iova), pages.next_power_of_two()).unwrap();
        let pinned = iova::CoreAllocator::pin(&mut one.alloc, allocated).unwrap();
        two.unmap(second).unwrap();
        two.unmap_at(iova, third.len()).unwrap();
        assert!(world.device.access(iova, Access::Read).is_ok());
        iova::CoreAllocator::unpin(&mut one.alloc, pinned);
        one.unmap(first).unwrap();
        assert!(world.device.access(iova, Access::Read).is_err());
    }
}
