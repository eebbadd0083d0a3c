//! Lookahead: reading of chains beyond the next one before any is consumed.

/// Distance ahead of the next chain that a device has read with
/// [`Ring::peek_ahead`](super::Ring::peek_ahead). The default is the next chain itself. Holds until
/// the next [`advance`](super::Ring::advance).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookahead {
    /// Chains looked at, those to replay included.
    pub(super) chains: u16,
    /// Ring descriptors that those of them take up that are not to be replayed; a split ring counts
    /// one for each chain.
    pub(super) descs: u16,
}
