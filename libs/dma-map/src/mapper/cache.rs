//! The reuse cache of one core, whichever its policy has.

use alloc::sync::Arc;

use crate::reuse::{OptimisticCache, SharingTable};

/// Way in which mappings are found again. An enumeration, so that the calls for each mapping are
/// inlined.
#[derive(Default)]
#[expect(
    clippy::large_enum_variant,
    reason = "one per core, and the large one is the one that matters"
)]
pub(super) enum Cache {
    /// Nothing.
    #[default]
    Never,
    Shared(Arc<SharingTable>),
    /// This core's idle mappings. Each stays pinned, so that the allocator refuses to have it
    /// unmapped again, by any core.
    Idle(OptimisticCache),
}
