//! Allocators of I/O virtual addresses (IOVAs) that scale with cores.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

mod allocator;
mod aperture;
mod backing;
pub mod chunk;
mod claims;
mod error;
mod identity;
mod linear;
mod locked;
mod magazine;
mod range;
mod states;
mod stats;
mod tree;
mod wanted;

pub use allocator::{CHUNK_PAGES, CoreAllocator, CoreId, IovaAllocator, Pinned, RetiredChunk};
pub use aperture::{Aperture, MAX_CORES, MSI_WINDOW};
pub use chunk::{ChunkAllocator, ChunkCore};
pub use error::{AllocError, ApertureError, ClaimError, FreeError, ResetError};
pub use identity::{IdentityAllocator, IdentityCore};
pub use linear::{EiovaRAllocator, EiovaRCore, LinearAllocator, LinearCore, MAX_LISTED};
pub use magazine::{MagazineAllocator, MagazineConfig, MagazineCore};
pub use range::{Access, IovaPfn, IovaRange, Request};
pub use stats::Stats;
pub use tree::{TreeAllocator, TreeCore};
