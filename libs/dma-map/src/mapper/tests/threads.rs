//! Cores that are threads, with a device that watches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use iova::Access;

use super::*;

#[test]
fn what_a_core_has_unmapped_strictly_no_thread_reaches() {
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
                            // A page of our own, whose IOVA nobody else can have got meanwhile but by a map.
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
        assert_eq!(
            world.mapper.allocator().stats().live_ranges,
            0,
            "{policy:?}"
        );
    }
}
