//! Cores.

use core::fmt;

/// Most cores one allocator serves.
pub const MAX_CORES: usize = 4096;

/// A core, or whatever else works for itself: a thread of a pool, an I/O queue, a simulated core.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CoreId(pub usize);

impl fmt::Display for CoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "core {}", self.0)
    }
}
