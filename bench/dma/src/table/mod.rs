//! IO page tables: p-S over the lock-free table and the two locked ones, and through the real
//! allocator.

pub mod loops;
pub mod section;
