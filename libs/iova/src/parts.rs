//! What allocators outside this crate are built from, so that they check and refuse as those here do (feature `parts`).
//! No promise of stability goes with it.

use crate::allocator::SpaceId;
pub use crate::claims::Claims;
pub use crate::tree::Tree;
pub use crate::wanted::{Wanted, order_of, place, range_at};
use crate::{IovaRange, Pinned};

/// A range that the allocator which asks has just pinned.
pub fn pinned(range: IovaRange) -> Pinned {
    Pinned::new(range, SpaceId::NONE, false)
}
