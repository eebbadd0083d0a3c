//! What an allocator says about itself.

/// State of a space at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Ranges handed out and not freed.
    pub live_ranges: u64,
    /// Pages of those ranges.
    pub live_pages: u64,
    /// Free pages that cores keep for themselves.
    pub cached_pages: u64,
    /// 2 MiB chunks in which anything is allocated or cached: the leaf tables such a space needs.
    pub chunks: u64,
    /// Bytes of bookkeeping, all cores together.
    pub bytes: usize,
    /// Operations that left their core's own memory, since the start.
    pub slow: u64,
}
