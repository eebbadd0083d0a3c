//! Policies as values: the steps between a driver's unmap and the device's last access.

use core::time::Duration;

use crate::invalidate::GATHER_LOOKS;

/// Time at which an unmapped mapping is invalidated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Teardown {
    /// Before unmap returns; the invalidator orders the cores.
    Strict,
    /// Before unmap returns, together with unmaps of other cores at the moment.
    Combining {
        /// Number of polls, 2 ns each, for other cores when the hardware is idle; 0 for no wait.
        /// (While the hardware is busy, waiting costs nothing.)
        looks: u32,
    },
    /// Submitted before unmap returns, and not waited for; the IOVA returns when it is complete.
    Async(Window),
    /// Some time later, one for all: per-core queues, flushed when one is full or its oldest entry
    /// too old.
    Deferred(Window),
}

impl Teardown {
    /// A wait of about half a microsecond, by cores that have met others lately or were kept
    /// waiting by them.
    pub const COMBINING: Self = Self::Combining {
        looks: GATHER_LOOKS,
    };
}

/// The bound of a policy that lets mappings go stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Most stale mappings of one core, 1 to 65,536.
    pub entries: usize,
    /// Longest time until the invalidation is begun. For a core that does nothing,
    /// [`tick`](super::DmaMapper::tick) enforces it; the period of the ticks adds to it.
    pub age: Duration,
}

impl Window {
    /// As Linux had it when the papers measured it: 250 entries, 10 ms.
    pub const DEFAULT: Self = Self {
        entries: 250,
        age: Duration::from_millis(10),
    };
}

/// Mappings that are found again instead of made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// None.
    Never,
    /// Live ones of any core (approximate sharing).
    Shared,
    /// Idle ones of the same core: an unmap leaves the entries for a while (optimistic teardown).
    Optimistic(Optimistic),
}

/// Bound of optimistic teardown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Optimistic {
    /// Most idle mappings of one core.
    pub quota: usize,
    /// Longest time that a mapping is idle.
    pub residency: Duration,
}

impl Optimistic {
    /// `quota` mappings for 10 ms.
    pub const fn of(quota: usize) -> Self {
        Self {
            quota,
            residency: Duration::from_millis(10),
        }
    }

    pub(super) fn residency_ns(&self) -> u64 {
        u64::try_from(self.residency.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Treatment of an unmap by a mapper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// No translation at all: the IOVA is the physical address. The other fields mean nothing then.
    pub is_off: bool,
    /// Mappings that are found again.
    pub reuse: Reuse,
    /// Teardown of all other mappings.
    pub teardown: Teardown,
}

impl Policy {
    const fn of(reuse: Reuse, teardown: Teardown) -> Self {
        Self {
            is_off: false,
            reuse,
            teardown,
        }
    }

    /// No protection.
    pub const OFF: Self = Self {
        is_off: true,
        reuse: Reuse::Never,
        teardown: Teardown::Strict,
    };
    /// Strict.
    pub const STRICT: Self = Self::of(Reuse::Never, Teardown::Strict);
    /// Strict, many cores in one invalidation.
    pub const STRICT_COMBINING: Self = Self::of(Reuse::Never, Teardown::COMBINING);
    /// Live mappings are shared, the last user's unmap is strict.
    pub const SHARED: Self = Self::of(Reuse::Shared, Teardown::Strict);
    /// Invalidations are submitted and not waited for.
    pub const ASYNC: Self = Self::of(Reuse::Never, Teardown::Async(Window::DEFAULT));
    /// 250 entries, 10 ms.
    pub const DEFERRED: Self = Self::of(Reuse::Never, Teardown::Deferred(Window::DEFAULT));

    /// Optimistic teardown with `quota` idle mappings per core for 10 ms.
    pub const fn optimistic(quota: usize) -> Self {
        Self::of(Reuse::Optimistic(Optimistic::of(quota)), Teardown::Strict)
    }

    /// The same policy with another reuse.
    pub const fn with_reuse(self, reuse: Reuse) -> Self {
        Self { reuse, ..self }
    }

    /// The same policy with another teardown.
    pub const fn with_teardown(self, teardown: Teardown) -> Self {
        Self { teardown, ..self }
    }

    /// The window of its teardown, where it has one.
    pub(super) const fn window(&self) -> Option<Window> {
        match self.teardown {
            Teardown::Async(window) | Teardown::Deferred(window) => Some(window),
            Teardown::Strict | Teardown::Combining { .. } => None,
        }
    }
}
