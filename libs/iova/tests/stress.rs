//! Threads on every allocator of this crate.
#![cfg(not(any(loom, shuttle)))]

use iova::{ChunkAllocator, TreeAllocator};

iova::testing::any::threads::allocators! {
    tree: TreeAllocator::new,
    chunk: ChunkAllocator::new,
    chunk_retiring: ChunkAllocator::retiring,
}
