//! Magazines and slabs under random schedules. Run with
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle \
//!     cargo test -p dma-peers --release --test schedules
//! ```
#![cfg(shuttle)]

use dma_peers::{MagazineAllocator, MagazineConfig, SlabAllocator, SlabConfig};
use iova::{Aperture, IovaPfn};
use random_schedules::{any, holds};

use iova::testing::any::schedules::{Mix, meet};

/// Mix for allocators whose pins are a compare-and-swap.
const BYTES: Mix = Mix {
    sizes: 2,
    other_pins: 0,
    parks: true,
    watches: false,
    retires: false,
};

fn magazines() {
    let cores = 4 + any(5) as usize;
    let last = IovaPfn::new(if any(2) == 0 { 15 } else { 255 });
    let aperture = Aperture::new(IovaPfn::new(0), last, &[]).expect("pages");
    let config = MagazineConfig {
        size: 1 + any(2) as usize,
        depot: 1,
    };
    let space = MagazineAllocator::with_config(aperture, cores, config).expect("cores");
    meet(&space, BYTES, last.raw() + 1);
}

fn slabs() {
    let cores = 4 + any(5) as usize;
    let aperture = Aperture::new(IovaPfn::new(0), IovaPfn::new(63), &[]).expect("pages");
    let config = SlabConfig {
        arena_pages: 64,
        list: 2,
    };
    let space = SlabAllocator::with_config(aperture, cores, config).expect("cores");
    meet(&space, BYTES, 64);
}

#[test]
fn cores_exchange_magazines() {
    holds(2_000, magazines);
}

#[test]
fn cores_exchange_objects_of_slabs() {
    holds(2_000, slabs);
}
