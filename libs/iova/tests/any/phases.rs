//! Any allocator against a map of what is out, in phases (`iova::testing`). A new one is one more line of [`allocators!`].
//! Each makes three quarters of a million operations; `bench/dma-soak` goes on from there.

use iova::testing::{Player, World};
use iova::{Aperture, IovaAllocator};

pub const SEEDS: u64 = 6;
/// In a world that is small, and in one where operations find more to do.
pub const FEW: u64 = 12_000;
pub const MANY: u64 = 30_000;

/// Phases on what `make` makes, then everything is freed and all of the space allocated.
pub fn play<A: IovaAllocator>(
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
            use iova::testing::{Grain, World};
            use phases::{FEW, MANY, SEEDS, play};

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
    };
}

pub(crate) use allocators;
