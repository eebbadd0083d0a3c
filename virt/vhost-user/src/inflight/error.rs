//! Errors of a region, and of a request.

/// The region cannot be used; the ring is not to be served with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoverError {
    /// Number of entries outside 1 to `MAX_RING_SIZE`, or the ring larger than the region's array.
    #[error("a ring of {ring_size} entries, an inflight region for {desc_num}")]
    Size {
        /// Entries of the ring.
        ring_size: u16,
        /// Entries of the region.
        desc_num: u16,
    },
    /// The region ends too early.
    #[error("inflight region of {size} bytes, {needed} needed")]
    TooSmall {
        /// Bytes there are.
        size: usize,
        /// Bytes its layout has.
        needed: usize,
    },
    /// A field that no back end leaves so, wherever it dies.
    #[error("inflight region: {field} is {value:#x}")]
    Corrupt {
        /// The document's name for it.
        field: &'static str,
        /// Value of the field.
        value: u64,
    },
}

impl RecoverError {
    pub(super) fn corrupt(field: &'static str, value: impl Into<u64>) -> Self {
        Self::Corrupt {
            field,
            value: value.into(),
        }
    }
}

/// A request that cannot be tracked: the driver broke the ring's rules, or the caller the order of
/// calls. Nothing was stored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrackError {
    /// A head outside the ring.
    #[error("head {head} of {desc_num} descriptors")]
    Head {
        /// The head.
        head: u16,
        /// Entries of the region.
        desc_num: u16,
    },
    /// The driver made a head available that it had not got back.
    #[error("head {head} is in flight already")]
    InFlight {
        /// The head.
        head: u16,
    },
    /// A completion of a head that is not in flight, or was completed before.
    #[error("head {head} is not in flight")]
    NotInFlight {
        /// The head, or the slot's number.
        head: u16,
    },
    /// A chain without descriptors, or more descriptors in flight than the ring has.
    #[error("a chain of {len} descriptors with {in_flight} in flight, ring of {ring_size}")]
    Chain {
        /// Descriptors of the chain.
        len: usize,
        /// Descriptors in flight before it.
        in_flight: u16,
        /// Entries of the ring.
        ring_size: u16,
    },
    /// Packed: a batch has to be committed first.
    #[error("a batch is being returned")]
    BatchOpen,
}
