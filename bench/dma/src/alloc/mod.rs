//! IOVA allocation: the loops a, b, c and x over every allocator of `iova` and its peers.

use iova::{Aperture, ApertureError, IovaPfn};

pub mod loops;
pub mod peers;
pub mod quoted;
pub mod section;
pub mod subject;

/// First page that allocators hand out: page 0 is left out, drivers take it for "none".
pub const FIRST_PAGE: u64 = 1;
/// Last page, inclusive.
pub const LAST_PAGE: u64 = (1 << 36) - 1;

/// The allocator that the targets are about, and that mappers here allocate from.
pub type Best = iova::ChunkAllocator;

/// The space of every allocator here: [`FIRST_PAGE`] to [`LAST_PAGE`], nothing reserved.
///
/// # Errors
/// None: the space has pages.
pub fn space() -> Result<Aperture, ApertureError> {
    Aperture::new(IovaPfn::new(FIRST_PAGE), IovaPfn::new(LAST_PAGE), &[])
}
