//! The mistake of drivers that hands out an address twice: several cores unmap the same mappings at
//! the same moment. One of them succeeds, the others receive an error, and nothing is freed twice.
//!
//! Over allocators whose pin is a compare-and-swap. A chunk's owner pins without one, and so
//! together with a remote core, if neither sees the other in time: both unmaps succeed then, and
//! the range is free once too often.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use address::PhysAddr;
use dma_map::mapper::{Teardown, Window};
use dma_map::testing::ModelDomain;
use dma_map::{DeviceLimits, Direction, Policy, Segment};
use iova::{Aperture, IovaAllocator, IovaPfn, TreeAllocator};
use random_schedules::{any, fail, holds, thread};

/// Mappings of different lengths.
const MAPPINGS: u64 = 3;

fn unmap_together<A: IovaAllocator + 'static>(allocator: A, policy: Policy)
where
    A::Core: 'static,
{
    let cores = allocator.cores();
    let domain = ModelDomain::new(allocator, policy, DeviceLimits::default(), 8);
    let mut owner = domain.core(0);
    let mapped: Vec<_> = (0..MAPPINGS)
        .map(|i| {
            let segment = Segment::new(PhysAddr::new((0x100 + i * 8) << 12), (i + 1) * 4096);
            let mapping = owner.map(&[segment], Direction::ToDevice);
            let mapping = mapping.expect("an empty space");
            (mapping.iova(), mapping.len())
        })
        .collect();
    let succeeded: Arc<Mutex<Vec<usize>>> = Arc::default();
    let remotes = (1..cores).map(|id| domain.core(id));
    let all: Vec<_> = remotes.chain([owner]).collect();
    let threads: Vec<_> = all
        .into_iter()
        .map(|mut core| {
            let (mapped, succeeded) = (mapped.clone(), Arc::clone(&succeeded));
            thread::spawn(move || {
                for (number, (iova, len)) in mapped.into_iter().enumerate() {
                    if core.unmap_at(iova, len).is_ok() {
                        succeeded
                            .lock()
                            .expect("nobody panics with it")
                            .push(number);
                    }
                }
                core
            })
        })
        .collect();
    let mut quiet: Vec<_> = threads
        .into_iter()
        .map(|thread| thread.join().expect("a model ends at a panic"))
        .collect();
    for core in &mut quiet {
        core.park().expect("the hardware answers");
    }
    let mut succeeded = succeeded.lock().expect("nobody panics with it");
    succeeded.sort_unstable();
    if *succeeded != (0..MAPPINGS as usize).collect::<Vec<_>>() {
        fail(format!("unmaps that succeeded: {succeeded:?}"));
    }
    let stats = domain.mapper.allocator_stats();
    if (stats.live_ranges, domain.mapper.table_stats().retired) != (0, 0) {
        fail(format!("left over: {stats:?}"));
    }
}

const WINDOW: Window = Window {
    entries: 2,
    age: Duration::from_millis(1),
};

#[test]
fn one_of_several_who_unmap_the_same_does() {
    const POLICIES: [Policy; 4] = [
        Policy::STRICT,
        Policy::STRICT_COMBINING,
        Policy::DEFERRED.with_teardown(Teardown::Deferred(WINDOW)),
        Policy::ASYNC.with_teardown(Teardown::Async(WINDOW)),
    ];
    holds(1_000, || {
        let policy = POLICIES[any(4) as usize];
        let cores = 4 + any(3) as usize;
        let aperture = Aperture::new(IovaPfn::new(0), IovaPfn::new(63), &[]).expect("pages");
        unmap_together(TreeAllocator::new(aperture, cores).expect("cores"), policy);
    });
}
