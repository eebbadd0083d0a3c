//! Allocators of I/O virtual addresses (IOVAs) that scale with cores.
//!
//! A device behind an IOMMU is given addresses of a space of its own. Software that maps memory for
//! it needs a free range of that space for every mapping, often millions of times a second on every
//! core. This crate has one interface for it ([`IovaAllocator`], shared, and [`CoreAllocator`], the
//! handle of one core) and several implementations:
//!
//! | allocator | what it is | take it for |
//! |---|---|---|
//! | [`ChunkAllocator`] | 2 MiB chunks, one leaf table each, owned by one core | page tables that many cores map in; the default |
//! | [`TreeAllocator`] | one locked tree, logarithmic, packed to the top | the reference; few, long-lived or huge ranges |
//!
//! All of them check their arguments: a range that is freed twice, in part, or with another size is
//! refused with an error that names it, and nothing changes. So is one of another space, unless
//! exactly such a range is allocated in this one: ranges are plain numbers. A pinned range or a
//! retired chunk knows its space; passing it to another one panics. All take reserved regions,
//! alignment, a highest address per request, and sizes from one page to the whole space. All drain
//! their caches, and ask the other cores to, before they report that a space is exhausted.
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
//! // An unmap in two halves: no other core can free or map over it while a device may use it.
//! let pinned = core.pin(packet)?;
//! assert!(core.free(packet).is_err());
//! core.free_pinned(pinned);
//! core.free(ring)?;
//! assert_eq!(space.stats().live_ranges, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Ranges are in pages of 4 KiB; ends are inclusive. The feature `testing` runs any allocator in
//! phases beside a naive model; `parts` has the building blocks of allocators elsewhere.
//! Concurrency: a handle is one thread's (`&mut`, not `Sync`); what cores share comes through the
//! crate `lines`, the meetings of cores are modelled with loom (`chunk/tests/model.rs`), and those
//! of more cores with shuttle (`tests/schedules.rs`).
//!
//! **Left out**: guard pages between ranges, boundaries that a range must not cross, NUMA.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(feature = "testing")]
extern crate std;

/// Units of addresses, here and in every signature.
pub use address;

mod allocator;
mod aperture;
pub mod chunk;
mod claims;
mod error;
mod range;
#[cfg(any(test, feature = "testing"))]
#[path = "../tests/testing/mod.rs"]
pub mod testing;
mod tree;
mod wanted;

pub use allocator::{CHUNK_PAGES, CoreAllocator, IovaAllocator, Pinned, RetiredChunk, Stats};
pub use aperture::{Aperture, MSI_WINDOW};
pub use chunk::{ChunkAllocator, ChunkConfig, ChunkCore};
pub use error::{AllocError, ApertureError, ClaimError, FreeError, FreeManyError, ResetError};
pub use range::{Access, CoreId, IovaPfn, IovaRange, MAX_CORES, Request};
pub use tree::{TreeAllocator, TreeCore};

/// Building blocks of allocators outside this crate, so that these check and refuse as those here
/// do (feature `parts`). Without a promise of stability.
#[cfg(feature = "parts")]
pub mod parts {
    pub use crate::claims::Claims;
    pub use crate::tree::Tree;
    pub use crate::wanted::{Wanted, order_of, place, range_at};
    use crate::{IovaRange, Pinned, allocator::SpaceId};

    /// A range that the calling allocator has just pinned.
    pub fn pinned(range: IovaRange) -> Pinned {
        Pinned::new(range, SpaceId::NONE, false)
    }
}
