//! Threads on every allocator of this crate.

use dma_peers::{
    EiovaRAllocator, IdentityAllocator, LinearAllocator, MagazineAllocator, MagazineConfig,
    SlabAllocator,
};

iova::testing::any::threads::allocators! {
    linear: LinearAllocator::new,
    eiovar: EiovaRAllocator::new,
    magazine: MagazineAllocator::new,
    magazine_small: |aperture, cores| {
        MagazineAllocator::with_config(aperture, cores, MagazineConfig { size: 3, depot: 1 })
    },
    identity: |aperture, cores| IdentityAllocator::new(aperture, cores, 46),
    slab: SlabAllocator::new,
}
