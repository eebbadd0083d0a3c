//! Monotonic time: nanoseconds of `CLOCK_MONOTONIC`.

use crate::sys;

/// A moment, in nanoseconds of `CLOCK_MONOTONIC` (since boot, not counting suspend).
///
/// The runtime reads the clock once per sweep and gives all pollers of that sweep the same value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Reads the clock (a vDSO call, about 20 ns).
    pub fn now() -> Self {
        Nanos(sys::monotonic_ns())
    }

    /// Nanoseconds from `earlier` to `self`; 0 when `earlier` is later.
    pub const fn since(self, earlier: Nanos) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns the time `ns` nanoseconds later; saturates instead of wrapping.
    #[must_use]
    pub const fn after(self, ns: u64) -> Self {
        Nanos(self.0.saturating_add(ns))
    }
}
