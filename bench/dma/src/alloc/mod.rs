//! IOVA allocation: the loops a, b, c and x over every allocator of `iova` and its peers.

pub mod loops;
pub mod peers;
pub mod subject;

/// First page that allocators hand out: page 0 is left out, drivers take it for "none".
pub const FIRST_PAGE: u64 = 1;
/// Last page, inclusive.
pub const LAST_PAGE: u64 = (1 << 36) - 1;
