//! Allocators of I/O virtual addresses (IOVAs) that scale with cores.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

mod allocator;
mod aperture;
mod error;
mod range;
mod stats;

pub use allocator::{CHUNK_PAGES, CoreAllocator, CoreId, IovaAllocator, Pinned, RetiredChunk};
pub use aperture::{Aperture, MAX_CORES, MSI_WINDOW};
pub use error::{AllocError, ApertureError, ClaimError, FreeError, ResetError};
pub use range::{Access, IovaPfn, IovaRange, Request};
pub use stats::Stats;
