//! Every allocator against a map of what is out. A new one is one more line of [`allocators!`].
//!
//! Each makes [`OPERATIONS_EACH`] operations, more than four million all together; `bench/dma-soak` goes on from there.
#![cfg(not(any(loom, shuttle)))]

mod driver;
mod random;

use driver::{World, run};
use iova::*;

const SEEDS: u64 = 6;
/// By each allocator: two tiny worlds, a tight and a roomy one for every seed.
const OPERATIONS_EACH: usize = SEEDS as usize * (3 * driver::SMALL_STEPS + driver::ROOMY_STEPS);
const LEAST_OPERATIONS: usize = 1_000_000;

macro_rules! allocators {
    ($($name:ident in $cuts:literal cuts: $make:expr,)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn holds_in_a_tiny_space() {
                for seed in 0..SEEDS {
                    run($make, &World::tiny(1).in_parts($cuts), seed);
                    run($make, &World::tiny(3).in_parts($cuts), seed);
                }
            }

            #[test]
            fn holds_with_large_ranges_in_a_tight_space() {
                (0..SEEDS).for_each(|seed| run($make, &World::tight(3).in_parts($cuts), seed));
            }

            #[test]
            fn holds_in_a_roomy_space() {
                (0..SEEDS).for_each(|seed| run($make, &World::roomy(4).in_parts($cuts), seed));
            }
        }
    )*
        const ALLOCATORS: usize = [$(stringify!($name)),*].len();
        const _: () = assert!(ALLOCATORS * OPERATIONS_EACH >= LEAST_OPERATIONS);
    };
}

allocators! {
    tree in 0 cuts: |aperture, cores| TreeAllocator::new(aperture, cores).expect("cores"),
    linear in 0 cuts: |aperture, cores| LinearAllocator::new(aperture, cores).expect("cores"),
    eiovar in 0 cuts: |aperture, cores| EiovaRAllocator::new(aperture, cores).expect("cores"),
    magazine in 0 cuts: |aperture, cores| MagazineAllocator::new(aperture, cores).expect("cores"),
    chunk in 3 cuts: |aperture, cores| ChunkAllocator::new(aperture, cores).expect("cores"),
    // One chunk below each limit: the tree has nearly everything.
    chunk_small in 26 cuts: |aperture, cores| {
        let config = ChunkConfig { zone_chunks: 1, lowest_first: true, ..ChunkConfig::default() };
        ChunkAllocator::with_config(aperture, cores, config).expect("cores")
    },
    chunk_retiring in 3 cuts: |aperture, cores| ChunkAllocator::retiring(aperture, cores).expect("cores"),
    // Magazines of 3, depots of 1: every exchange happens all the time.
    magazine_small in 0 cuts: |aperture, cores| {
        let config = MagazineConfig { size: 3, depot: 1 };
        MagazineAllocator::with_config(aperture, cores, config).expect("cores")
    },
    // Too narrow for identity: all of it is the fallback's.
    identity in 0 cuts: |aperture, cores| IdentityAllocator::new(aperture, cores, 46).expect("cores"),
    // The arena is the whole aperture, so that all of it can be allocated.
    slab in 0 cuts: |aperture, cores| {
        let config = SlabConfig { arena_pages: u64::MAX, list: 128 };
        SlabAllocator::with_config(aperture, cores, config).expect("cores")
    },
    slab_small in 0 cuts: |aperture, cores| {
        let config = SlabConfig { arena_pages: u64::MAX, list: 2 };
        SlabAllocator::with_config(aperture, cores, config).expect("cores")
    },
}
