//! Every allocator of this crate against a map of what is out.
#![cfg(not(any(loom, shuttle)))]

use iova::{ChunkAllocator, ChunkConfig, TreeAllocator};

iova::testing::any::phases::allocators! {
    tree in 0 cuts by PAGE: |aperture, cores| TreeAllocator::new(aperture, cores).expect("cores"),
    chunk in 3 cuts by CHUNK: |aperture, cores| ChunkAllocator::new(aperture, cores).expect("cores"),
    // One chunk below each limit: the tree has nearly everything.
    chunk_small in 26 cuts by CHUNK: |aperture, cores| {
        let config = ChunkConfig { zone_chunks: 1, ..ChunkConfig::default() };
        ChunkAllocator::with_config(aperture, cores, config).expect("cores")
    },
    chunk_retiring in 3 cuts by CHUNK: |aperture, cores| ChunkAllocator::retiring(aperture, cores).expect("cores"),
}
