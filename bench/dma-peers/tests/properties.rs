//! Every allocator of this crate against a map of what is out.

use dma_peers::{
    EiovaRAllocator, IdentityAllocator, LinearAllocator, MagazineAllocator, MagazineConfig,
    SlabAllocator, SlabConfig,
};

iova::testing::any::phases::allocators! {
    linear in 0 cuts by PAGE: |aperture, cores| LinearAllocator::new(aperture, cores).expect("cores"),
    eiovar in 0 cuts by PAGE: |aperture, cores| EiovaRAllocator::new(aperture, cores).expect("cores"),
    magazine in 0 cuts by PAGE: |aperture, cores| MagazineAllocator::new(aperture, cores).expect("cores"),
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
