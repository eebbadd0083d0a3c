//! IO page tables, invalidation, and the policies between map and unmap.
#![cfg_attr(not(test), no_std)]

extern crate alloc;

pub mod reuse;
