//! Every allocator against a map of what is out. A new one is one more line of [`allocators!`].
#![cfg(not(loom))]

mod driver;
mod random;

use driver::{World, run};
use iova::*;

const SEEDS: u64 = 6;

macro_rules! allocators {
    ($($name:ident: $make:expr,)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn holds_in_a_tiny_space() {
                for seed in 0..SEEDS {
                    run($make, &World::tiny(1), seed);
                    run($make, &World::tiny(3), seed);
                }
            }

            #[test]
            fn holds_with_large_ranges_in_a_tight_space() {
                (0..SEEDS).for_each(|seed| run($make, &World::tight(3), seed));
            }

            #[test]
            fn holds_in_a_roomy_space() {
                (0..SEEDS).for_each(|seed| run($make, &World::roomy(4), seed));
            }
        }
    )*};
}

allocators! {
    tree: |aperture, cores| TreeAllocator::new(aperture, cores).expect("cores"),
    linear: |aperture, cores| LinearAllocator::new(aperture, cores).expect("cores"),
    eiovar: |aperture, cores| EiovaRAllocator::new(aperture, cores).expect("cores"),
    magazine: |aperture, cores| MagazineAllocator::new(aperture, cores).expect("cores"),
    // Magazines of 3, depots of 1: every exchange happens all the time.
    magazine_small: |aperture, cores| {
        let config = MagazineConfig { size: 3, depot: 1 };
        MagazineAllocator::with_config(aperture, cores, config).expect("cores")
    },
}
