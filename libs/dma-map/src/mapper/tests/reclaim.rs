//! Table pages come back, and never while the device may walk them.

use alloc::sync::Arc;
use alloc::vec::Vec;

use iova::{Access, CoreId};

use super::*;
use crate::table::LeafSizes;
use crate::testing::{DeviceFault, ModelMemory};

/// Maps `count` pages, lets the device walk there, and unmaps them: tables are left with nothing in
/// them.
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

/// The device keeps table pointers; a page that was released too early would be walked after it was
/// freed.
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
    // SAFETY: no core walks there, and the model's memory is never really freed: the mistake is the
    // test.
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

/// A page in each of many chunks, over and over: all of them are emptied at the same time.
fn round_robin(live: &mut [Mapping]) {
    live.sort_by_key(|mapping| mapping.range().first().raw() % iova::CHUNK_PAGES);
}

fn shuffled(live: &mut [Mapping]) {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for end in (1..live.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        live.swap(end, (random % (end as u64 + 1)) as usize);
    }
}

/// So many pages are mapped and unmapped in an order: one `park`, with its one invalidation for
/// tables, leaves none.
fn park_leaves_no_table(pages: u64, order: fn(&mut [Mapping])) {
    for policy in [Policy::STRICT, Policy::DEFERRED, Policy::optimistic(256)] {
        let memory = Arc::new(ModelMemory::new(pages as usize / 512 + 16));
        let allocator = chunks(2 * pages, 1);
        let world = ModelDomain::in_memory(allocator, policy, DeviceLimits::default(), &memory);
        let mut core = world.core(0);
        let mut live: Vec<_> = (0..pages)
            .map(|i| core.map(&[page(i)], Direction::ToDevice).unwrap())
            .collect();
        order(&mut live);
        live.into_iter()
            .for_each(|mapping| core.unmap(mapping).unwrap());
        let before = world.iotlb.commands();
        core.park().unwrap();
        let left = world.mapper.table_stats();
        assert_eq!((left.tables[0], left.retired), (0, 0), "{policy:?}");
        assert!(left.peak >= pages as usize / 512, "{policy:?}: {left:?}");
        assert!(left.pages() <= 10, "{policy:?}: {left:?}");
        let flushes = world.iotlb.commands() - before;
        assert!(flushes <= 8, "{policy:?}: {flushes} to park");
    }
}

#[test]
fn park_gives_back_all_tables_of_chunks_emptied_in_turn() {
    park_leaves_no_table(64 * 512, round_robin);
}

#[test]
fn park_gives_back_all_tables_of_512000_pages_freed_in_random_order() {
    park_leaves_no_table(512_000, shuffled);
}

/// 2 MiB, of which device and memory agree on the alignment.
const LARGE: Segment = Segment::new(PhysAddr::new(0x4000_0000), 2 << 20);

/// There is no table behind it: nothing to wait for, so no invalidation but its own, and the same
/// chunk again and again.
#[test]
fn a_large_leaf_costs_no_quarantine() {
    for (policy, most) in [(Policy::STRICT, 1000), (Policy::DEFERRED, 4)] {
        let memory = Arc::new(ModelMemory::new(8));
        let leaves = LeafSizes::TWO_M;
        let allocator = chunks(1 << 20, 1);
        let limits = DeviceLimits::default();
        let world = ModelDomain::with_leaves(allocator, policy, limits, &memory, leaves);
        let mut core = world.core(0);
        for _ in 0..1000 {
            let mapping = core.map(&[LARGE], Direction::ToDevice).unwrap();
            assert_eq!(world.mapper.table_stats().tables[0], 0, "{policy:?}");
            core.unmap(mapping).unwrap();
        }
        assert!(world.iotlb.commands() <= most, "{policy:?}");
        let kept = world.mapper.allocator_stats().bytes;
        for _ in 0..1000 {
            let mapping = core.map(&[LARGE], Direction::ToDevice).unwrap();
            core.unmap(mapping).unwrap();
        }
        let now = world.mapper.allocator_stats().bytes;
        assert_eq!(now, kept, "{policy:?}: chunks pile up");
    }
}

/// The same memory in small leaves has a table, which goes after few more unmaps.
#[test]
fn tables_of_whole_chunks_are_not_hoarded() {
    let world = World::of(chunks(1 << 20, 1), Policy::STRICT, DeviceLimits::default());
    let mut core = world.core(0);
    for _ in 0..1000 {
        let mapping = core.map(&[LARGE], Direction::ToDevice).unwrap();
        core.unmap(mapping).unwrap();
    }
    let left = world.mapper.table_stats();
    assert!(left.peak < 32, "{left:?}");
}

/// A core translates what another maps, unmaps, and gives the tables of back.
#[test]
fn translations_run_beside_unmaps_and_reclaim() {
    for policy in policies() {
        // Room for what cannot be given back while the machine keeps the other thread from ending a
        // walk.
        let memory = Arc::new(ModelMemory::new(1 << 13));
        let (space, limits) = (chunks(1 << 22, 2), DeviceLimits::default());
        let world = ModelDomain::in_memory(space, policy, limits, &memory);
        std::thread::scope(|scope| {
            let looker = scope.spawn(|| {
                let mut core = world.mapper.core(CoreId(1)).unwrap();
                let mut found = 0_u64;
                while found < 2_000 {
                    for pfn in ((1 << 22) - (1 << 12)..1 << 22).rev() {
                        let iova = IovaPfn::new(pfn).start();
                        if let Some(goes) = core.translate(iova) {
                            let all = 1 << 12..1501 << 12;
                            assert!(all.contains(&goes.phys.raw()), "{policy:?}: {goes:?}");
                            found += 1;
                        }
                    }
                }
            });
            let mut core = world.core(0);
            while !looker.is_finished() {
                let live: Vec<_> = (1..1501)
                    .map(|i| core.map(&[page(i)], Direction::ToDevice).unwrap())
                    .collect();
                live.into_iter()
                    .for_each(|mapping| core.unmap(mapping).unwrap());
                core.park().unwrap();
                world.tick().unwrap();
            }
            looker.join().unwrap();
        });
    }
}

/// Deferred work of a dropped core: its tables wait for walks, its IOVAs do not.
#[test]
fn abandoned_mappings_do_not_wait_for_a_walk() {
    let world = World::of(
        chunks(1 << 13, 3),
        Policy::DEFERRED,
        DeviceLimits::default(),
    );
    let (mut core, mut walker, mut other) = (world.core(0), world.core(1), world.core(2));
    churn(&world, &mut core, 1280);
    world.iotlb.die_for(100);
    drop(core);
    world.iotlb.die_for(0);
    let live = || world.mapper.allocator_stats().live_ranges;
    let retired = || world.mapper.table_stats().retired;
    assert!(live() > 10 && retired() > 0, "or the test shows nothing");
    world.mapper.flush().unwrap();
    walker.walk(|_| {
        other.park().unwrap();
        assert_eq!(live(), 0);
        assert!(retired() > 0, "somebody walks");
    });
    other.park().unwrap();
    assert_eq!(retired(), 0);
}

#[test]
fn an_address_is_translated_by_any_core_with_its_offset() {
    let world = World::of(chunks(1 << 13, 2), Policy::STRICT, DeviceLimits::default());
    let (mut core, mut other) = (world.core(0), world.core(1));
    let buffer = Segment::new(PhysAddr::new(0x12345), 9000);
    let mapping = core.map(&[buffer], Direction::FromDevice).unwrap();
    for offset in [0, 1, 4096, 8999] {
        let iova = mapping.iova().checked_add(offset).unwrap();
        let goes = other.translate(iova).unwrap();
        assert_eq!(goes.phys.raw(), 0x12345 + offset);
        assert_eq!(goes.access, Access::Write);
    }
    let iova = mapping.iova();
    core.unmap(mapping).unwrap();
    assert_eq!(other.translate(iova), None);
}
