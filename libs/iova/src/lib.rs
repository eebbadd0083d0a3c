//! Allocators of I/O virtual addresses (IOVAs) that scale with cores.
//!
//! A device behind an IOMMU is given addresses of a space of its own. Whoever maps memory for it needs a free range of that
//! space for every mapping, often millions of times a second on every core. This crate has one interface for it
//! ([`IovaAllocator`], shared, and [`CoreAllocator`], the handle of one core) and several ways:
//!
//! | allocator | what it is | take it for |
//! |---|---|---|
//! | [`ChunkAllocator`] | 2 MiB chunks, one leaf table each, owned by one core | page tables that many cores map in; the default |
//! | [`MagazineAllocator`] | per-core magazines and bounded depots over the tree (*Utilizing the IOMMU Scalably*, ATC 2015, §4) | the published design |
//! | [`SlabAllocator`] | offsets of objects in one arena ("IOVA-kmalloc", same paper) | memory that is bounded beforehand |
//! | [`IdentityAllocator`] | the physical address, once for each permission (same paper) | no bookkeeping, where the aperture is wide |
//! | [`TreeAllocator`] | one locked tree, logarithmic, packed to the top | the reference; few, long-lived or huge ranges |
//! | [`LinearAllocator`], [`EiovaRAllocator`] | the scan of 2015's Linux, and a cache before it (FAST 2015) | baselines and oracles |
//!
//! All of them check what they are told: a range that is freed twice, in part, with another size, or that another space gave
//! is refused with an error that names it, and nothing changes. All take reserved regions, alignment, a highest address per
//! request, and sizes from one page to the whole space; all drain their caches before they say that a space is
//! exhausted, and ask the other cores.
//!
//! ```
//! use iova::{Aperture, ChunkAllocator, CoreAllocator, CoreId, IovaAllocator, IovaPfn, Request};
//!
//! // 48 bits, without page 0 and the interrupt window; two cores.
//! let space = ChunkAllocator::new(Aperture::of_bits(48)?, 2)?;
//! let mut core = space.claim(CoreId(0))?;
//! let ring = core.alloc(Request::pages(4).at_most(IovaPfn::new(0xf_ffff)))?; // below 4 GiB
//! let packet = core.alloc(Request::pages(1))?;
//!
//! // An unmap in two halves: nobody else can free or map over it, until no device can use it any more.
//! let pinned = core.pin(packet)?;
//! assert!(core.free(packet).is_err());
//! core.free_pinned(pinned);
//! core.free(ring)?;
//! assert_eq!(space.stats().live_ranges, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Ranges are in pages of 4 KiB; ends are inclusive. Modules: `range`, `aperture`, `error`, `allocator` (the traits), then one
//! per allocator; `testing` (a feature of that name) plays with any of them, in phases, beside a naive model. Concurrency: a handle is one thread's (`&mut`, not `Sync`); what cores share comes through the crate `lines`, and
//! the meetings of cores are modelled with loom (`chunk/model.rs`, `magazine/model.rs`), and those of more cores
//! with shuttle (`tests/schedules.rs`).
//!
//! **Left out**: guard pages between ranges, boundaries that a range must not cross, NUMA.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(shuttle)]
extern crate std;

mod allocator;
mod aperture;
mod backing;
pub mod chunk;
mod claims;
mod core_id;
mod crew;
mod error;
mod identity;
mod linear;
mod locked;
mod magazine;
#[cfg(any(test, shuttle))]
pub mod planted;
mod range;
mod slab;
mod states;
mod stats;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tree;
mod wanted;

pub use allocator::{CHUNK_PAGES, CoreAllocator, IovaAllocator, Pinned, RetiredChunk};
pub use aperture::{Aperture, MSI_WINDOW};
pub use chunk::{ChunkAllocator, ChunkConfig, ChunkCore};
pub use core_id::{CoreId, MAX_CORES};
pub use error::{AllocError, ApertureError, ClaimError, FreeError, ResetError};
pub use identity::{IdentityAllocator, IdentityCore};
pub use linear::{EiovaRAllocator, EiovaRCore, LinearAllocator, LinearCore, MAX_LISTED};
pub use magazine::{MagazineAllocator, MagazineConfig, MagazineCore};
pub use range::{Access, IovaPfn, IovaRange, Request};
pub use slab::{SlabAllocator, SlabConfig, SlabCore};
pub use stats::Stats;
pub use tree::{TreeAllocator, TreeCore};
