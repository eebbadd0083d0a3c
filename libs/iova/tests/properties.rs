//! Every allocator against a map of what is out, in phases (`iova::testing`). A new one is one more line of
//! [`allocators!`].
//!
//! Each makes [`OPERATIONS_EACH`] operations, more than four million all together; `bench/dma-soak` goes on from there.
#![cfg(not(any(loom, shuttle)))]

use iova::testing::{Grain, Player, World};
use iova::*;

const SEEDS: u64 = 6;
/// In a world that is small, and in one where operations find more to do.
const FEW: u64 = 12_000;
const MANY: u64 = 30_000;
/// In each world of [`allocators!`].
const OPERATIONS_EACH: u64 = SEEDS * (3 * FEW + 3 * MANY);
const LEAST_OPERATIONS: u64 = 4_000_000;

/// Phases on what `make` makes, then everything is freed and all of the space allocated.
fn play<A: IovaAllocator>(
    make: impl Fn(Aperture, usize) -> A,
    world: &World,
    operations: u64,
    seed: u64,
) {
    println!("seed {seed} in {world:?}");
    let space = make(world.aperture.clone(), world.cores);
    let mut player = Player::of_all_cores(&space, world, seed);
    player.play(operations);
    player.finish();
}

macro_rules! allocators {
    ($($name:ident in $cuts:literal cuts by $grain:ident: $make:expr,)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn holds_in_a_tiny_space() {
                for seed in 0..SEEDS {
                    play($make, &World::tiny(1).in_parts($cuts, Grain::$grain), FEW, seed);
                    play($make, &World::tiny(3).in_parts($cuts, Grain::$grain), FEW, seed);
                }
            }

            #[test]
            fn holds_with_large_ranges_in_a_tight_space() {
                for seed in 0..SEEDS {
                    play($make, &World::tight(3).in_parts($cuts, Grain::$grain), FEW, seed);
                }
            }

            #[test]
            fn holds_while_a_small_space_falls_to_pieces_and_is_cleared() {
                for seed in 0..SEEDS {
                    play($make, &World::small(1).in_parts($cuts, Grain::$grain), MANY, seed);
                    play($make, &World::small(2).in_parts($cuts, Grain::$grain), MANY, seed);
                }
            }

            #[test]
            fn holds_in_a_roomy_space() {
                for seed in 0..SEEDS {
                    play($make, &World::roomy(4).in_parts($cuts, Grain::$grain), MANY, seed);
                }
            }
        }
    )*
        const ALLOCATORS: u64 = [$(stringify!($name)),*].len() as u64;
        const _: () = assert!(ALLOCATORS * OPERATIONS_EACH >= LEAST_OPERATIONS);
    };
}

allocators! {
    tree in 0 cuts by PAGE: |aperture, cores| TreeAllocator::new(aperture, cores).expect("cores"),
    linear in 0 cuts by PAGE: |aperture, cores| LinearAllocator::new(aperture, cores).expect("cores"),
    eiovar in 0 cuts by PAGE: |aperture, cores| EiovaRAllocator::new(aperture, cores).expect("cores"),
    magazine in 0 cuts by PAGE: |aperture, cores| MagazineAllocator::new(aperture, cores).expect("cores"),
    chunk in 3 cuts by CHUNK: |aperture, cores| ChunkAllocator::new(aperture, cores).expect("cores"),
    // One chunk below each limit: the tree has nearly everything.
    chunk_small in 26 cuts by CHUNK: |aperture, cores| {
        let config = ChunkConfig { zone_chunks: 1, lowest_first: true, ..ChunkConfig::default() };
        ChunkAllocator::with_config(aperture, cores, config).expect("cores")
    },
    chunk_retiring in 3 cuts by CHUNK: |aperture, cores| ChunkAllocator::retiring(aperture, cores).expect("cores"),
    // Magazines of 3, depots of 1: every exchange happens all the time.
    magazine_small in 0 cuts by PAGE: |aperture, cores| {
        let config = MagazineConfig { size: 3, depot: 1 };
        MagazineAllocator::with_config(aperture, cores, config).expect("cores")
    },
    // Too narrow for identity: all of it is the fallback's.
    identity in 0 cuts by PAGE: |aperture, cores| IdentityAllocator::new(aperture, cores, 46).expect("cores"),
    // The arena is the whole aperture, so that all of it can be allocated.
    slab in 0 cuts by PAGE: |aperture, cores| {
        let config = SlabConfig { arena_pages: u64::MAX, list: 128 };
        SlabAllocator::with_config(aperture, cores, config).expect("cores")
    },
    slab_small in 0 cuts by PAGE: |aperture, cores| {
        let config = SlabConfig { arena_pages: u64::MAX, list: 2 };
        SlabAllocator::with_config(aperture, cores, config).expect("cores")
    },
}
