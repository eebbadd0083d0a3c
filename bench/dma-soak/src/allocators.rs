//! Runs of allocators, in phases (`iova::testing`): by one thread that plays all cores, then by a
//! thread for each.

use std::thread;

use dma_peers::{
    EiovaRAllocator, IdentityAllocator, LinearAllocator, MagazineAllocator, MagazineConfig,
    SlabAllocator,
};
use iova::testing::{Grain, Player, Shared, World};
use iova::*;

use crate::{CORES, Run};

fn soak<A: IovaAllocator>(
    make: &impl Fn(Aperture) -> A,
    world: &World,
    operations: u64,
    seed: u64,
) {
    let space = make(world.aperture.clone());
    let mut player = Player::of_all_cores(&space, world, seed);
    player.play(operations / 2);
    player.finish();
    soak_at_once(&space, world, operations - operations / 2, seed);
    // Everything is free again, and all of it can be had.
    Player::of_all_cores(&space, world, seed).finish();
}

fn soak_at_once<A: IovaAllocator>(space: &A, world: &World, operations: u64, seed: u64) {
    let shared = Shared::new(world);
    let each = operations.div_ceil(CORES as u64);
    let mut players: Vec<_> = (0..CORES)
        .map(|core| Player::of_one_core(space, world, &shared, CoreId(core), seed))
        .collect();
    thread::scope(|scope| {
        for player in &mut players {
            scope.spawn(move || player.play(each));
        }
    });
    // After the last has left something to another.
    players.into_iter().for_each(Player::finish);
    assert!(shared.is_empty(), "a page is still out");
    let stats = space.stats();
    assert_eq!((stats.live_ranges, stats.live_pages), (0, 0));
}

fn run<A: IovaAllocator>(name: &str, world: World, make: impl Fn(Aperture) -> A + 'static) -> Run {
    Run {
        name: format!("iova {name}"),
        soak: Box::new(move |operations, seed| soak(&make, &world, operations, seed)),
    }
}

/// Every allocator, some with small caches, whose exchanges happen all the time then; each in a
/// space that falls to pieces as a whole, and some in a large one.
pub fn runs() -> Vec<Run> {
    const OK: &str = "three cores and such a space are in range";
    let small = || World::small(CORES);
    let roomy = || World::roomy(CORES);
    // These walk past every range that is out.
    let few = || World {
        most: 400,
        ..small()
    };
    let chunks = |cuts| small().in_parts(cuts, Grain::CHUNK);
    vec![
        run("tree", small(), |a| TreeAllocator::new(a, CORES).expect(OK)),
        run("tree, roomy", roomy(), |a| {
            TreeAllocator::new(a, CORES).expect(OK)
        }),
        run("linear", few(), |a| {
            LinearAllocator::new(a, CORES).expect(OK)
        }),
        run("eiovar", few(), |a| {
            EiovaRAllocator::new(a, CORES).expect(OK)
        }),
        run("magazine", small(), |a| {
            MagazineAllocator::new(a, CORES).expect(OK)
        }),
        run("magazine, roomy", roomy(), |a| {
            MagazineAllocator::new(a, CORES).expect(OK)
        }),
        run("magazine, small", small(), |a| {
            let config = MagazineConfig { size: 3, depot: 1 };
            MagazineAllocator::with_config(a, CORES, config).expect(OK)
        }),
        run("chunk", chunks(3), |a| {
            ChunkAllocator::new(a, CORES).expect(OK)
        }),
        run("chunk, roomy", roomy().in_parts(3, Grain::CHUNK), |a| {
            ChunkAllocator::new(a, CORES).expect(OK)
        }),
        // One chunk below each limit: the tree has nearly everything.
        run("chunk, one", chunks(26), |a| {
            let config = ChunkConfig {
                zone_chunks: 1,
                ..ChunkConfig::default()
            };
            ChunkAllocator::with_config(a, CORES, config).expect(OK)
        }),
        run("chunk, retiring", chunks(3), |a| {
            ChunkAllocator::retiring(a, CORES).expect(OK)
        }),
        run("identity, all in the fallback", small(), |a| {
            IdentityAllocator::new(a, CORES, 46).expect(OK)
        }),
        run("slab", small(), |a| SlabAllocator::new(a, CORES).expect(OK)),
    ]
}
