//! Any allocator against a map of what is out, in phases. A new one is one more line of
//! [`allocators!`]. Each makes three quarters of a million operations; `bench/dma-soak` goes on
//! from there.

use std::println;

use crate::testing::{Player, World};
use crate::{Aperture, IovaAllocator};

/// Seeds of each test.
pub const SEEDS: u64 = 6;
/// Operations in a world that is small.
pub const FEW: u64 = 12_000;
/// Operations in a world where they find more to do.
pub const MANY: u64 = 30_000;

/// Runs phases on what `make` makes, then frees everything and allocates all of the space.
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

/// Makes a module of tests for each `NAME in CUTS cuts by GRAIN: CONSTRUCTOR`
/// ([`World::in_parts`]).
#[doc(hidden)]
#[macro_export]
macro_rules! any_allocator_in_phases {
    ($($name:ident in $cuts:literal cuts by $grain:ident: $make:expr,)*) => {$(
        mod $name {
            use super::*;
            use $crate::testing::{Grain, World};
            use $crate::testing::any::phases::{FEW, MANY, SEEDS, play};

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

pub use any_allocator_in_phases as allocators;
