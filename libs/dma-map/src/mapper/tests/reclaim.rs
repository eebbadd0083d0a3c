//! Table pages come back, and never while the device may walk them.

use alloc::vec::Vec;

use iova::Access;

use super::*;
use crate::testing::DeviceFault;

/// Maps `count` pages, lets the device walk there, and unmaps them: tables are left with nothing in them.
fn churn(
    world: &World<ChunkAllocator>,
    core: &mut Core<ChunkAllocator>,
    count: u64,
) -> Vec<address::Iova> {
    let all: Vec<_> = (0..count)
        .map(|i| core.map(&[page(i)], Direction::ToDevice).unwrap())
        .collect();
    all.into_iter()
        .map(|mapping| {
            let iova = mapping.iova();
            world.device.access(iova, Access::Read).unwrap();
            core.unmap(mapping).unwrap();
            iova
        })
        .collect()
}

#[test]
fn tables_are_released_after_one_epoch_under_every_policy() {
    for policy in policies() {
        let world = World::of(chunks(1 << 16, 2), policy, DeviceLimits::default());
        let mut core = world.core(0);
        churn(&world, &mut core, 8 * 512);
        core.park().unwrap();
        world.tick();
        core.park().unwrap();
        let left = world.mapper.table_stats();
        assert!(
            left.tables[0] <= 1 && left.retired == 0,
            "{policy:?}: {left:?}"
        );
        // Strict policies give some back on the way; the peak shows that there were many.
        assert!(left.peak >= world.memory.used() + 7, "{policy:?}: {left:?}");
    }
}

/// The device keeps table pointers; a page that was released too early would be walked after it was freed.
#[test]
fn the_device_never_walks_a_freed_table() {
    for policy in policies() {
        let world = World::of(chunks(1 << 13, 2), policy, DeviceLimits::default());
        let mut core = world.core(0);
        let mut fewest = usize::MAX;
        let mut most = 0;
        for round in 0..20 {
            let walked = churn(&world, &mut core, 1500);
            for iova in walked {
                let got = world.device.access(iova, Access::Read);
                assert!(
                    !matches!(got, Err(DeviceFault::FreedTable { .. })),
                    "{policy:?}"
                );
            }
            most = most.max(world.memory.used());
            if round % 3 == 0 {
                core.park().unwrap();
                fewest = fewest.min(world.memory.used());
            }
            world.tick();
        }
        assert!(
            fewest < most,
            "{policy:?}: nothing was reclaimed, {most} pages"
        );
    }
}

/// The model device catches it: without this, the test above would prove nothing.
#[test]
fn a_table_released_without_an_invalidation_is_caught() {
    let world = World::of(chunks(1 << 12, 1), Policy::STRICT, DeviceLimits::default());
    let mut core = world.core(0);
    let mapping = core.map(&[page(1)], Direction::ToDevice).unwrap();
    let (iova, range) = (mapping.iova(), mapping.range());
    world.device.access(iova, Access::Read).unwrap();
    core.unmap(mapping).unwrap();
    let first = IovaPfn::new(range.first().raw() & !(iova::CHUNK_PAGES - 1));
    let chunk = IovaRange::new(first, iova::CHUNK_PAGES).unwrap();
    // SAFETY: nobody walks there, and the model's memory is never really freed: the mistake is the test.
    #[expect(unsafe_code, reason = "releases too early on purpose")]
    unsafe {
        let retired = world.mapper.0.table.retire_leaf(chunk).unwrap();
        world.mapper.0.table.release(retired);
    }
    let got = world.device.access(iova, Access::Read);
    assert!(
        matches!(got, Err(DeviceFault::FreedTable { .. })),
        "{got:?}"
    );
}
