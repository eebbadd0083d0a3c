//! Requests refused, and sessions ended.

use crate::wire::{DecodeError, ProtocolFeatures, RequestId};

/// A request that makes no sense now, or that the daemon could not follow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The message itself is wrong.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Feature bits that were not offered.
    #[error("{request}: features {bits:#x} were not offered")]
    NotOffered {
        /// The request.
        request: RequestId,
        /// Those bits.
        bits: u64,
    },
    /// A protocol feature the request depends on was not negotiated (or, for GET_QUEUE_NUM and
    /// GET_PROTOCOL_FEATURES, not offered).
    #[error("{request} without protocol features {needed:?}")]
    NotNegotiated {
        /// The request.
        request: RequestId,
        /// Protocol features that it needs.
        needed: ProtocolFeatures,
    },
    /// A virtio feature the request depends on was not negotiated.
    #[error("{request} without features {needed:#x}")]
    FeatureMissing {
        /// The request.
        request: RequestId,
        /// Feature bits that it needs.
        needed: u64,
    },
    /// No such ring.
    #[error("{request}: ring {index} of {queues}")]
    RingIndex {
        /// The request.
        request: RequestId,
        /// Index that the request names.
        index: u32,
        /// Rings there are.
        queues: u16,
    },
    /// A field of a ring's description that the specification does not allow.
    #[error("{request}: ring {index}: {field} is {value:#x}")]
    Ring {
        /// The request.
        request: RequestId,
        /// The ring.
        index: u8,
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A ring was to start before it was described.
    #[error("{request}: ring {index} has no {missing} yet")]
    RingIncomplete {
        /// The request.
        request: RequestId,
        /// The ring.
        index: u8,
        /// Name of the missing part.
        missing: &'static str,
    },
    /// Something that may not change under a running ring.
    #[error("{request} while ring {index} runs")]
    Running {
        /// The request.
        request: RequestId,
        /// A running ring.
        index: u8,
    },
    /// A memory region that is empty or runs over the end of an address space.
    #[error("{request}: region at {guest_addr:#x}, {size:#x} bytes: {field} out of range")]
    RegionRange {
        /// The request.
        request: RequestId,
        /// Its guest address.
        guest_addr: u64,
        /// Its size.
        size: u64,
        /// Which of its fields.
        field: &'static str,
    },
    /// Two regions share addresses.
    #[error("{request}: regions at {guest_addr:#x} and {other:#x} overlap in {space} addresses")]
    RegionOverlap {
        /// The request.
        request: RequestId,
        /// Guest address of one.
        guest_addr: u64,
        /// Guest address of the other.
        other: u64,
        /// "guest" or "user".
        space: &'static str,
    },
    /// More regions than the session accepts.
    #[error("{request}: {regions} regions, at most {max} accepted")]
    TooManyRegions {
        /// The request.
        request: RequestId,
        /// Number of regions that there would be.
        regions: usize,
        /// The bound.
        max: usize,
    },
    /// A region to be removed does not exist.
    #[error("{request}: no region at {guest_addr:#x} with this size and user address")]
    NoSuchRegion {
        /// The request.
        request: RequestId,
        /// The guest address named.
        guest_addr: u64,
    },
    /// A value of the request out of its range.
    #[error("{request}: {field} is {value:#x}")]
    Value {
        /// The request.
        request: RequestId,
        /// Which.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The daemon could not do it.
    #[error("{request} failed")]
    Daemon {
        /// The request.
        request: RequestId,
        /// Reason that the daemon gives.
        #[source]
        source: Refusal,
    },
}

/// The session has ended: close the socket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fatal {
    /// A request was refused, and the protocol has no way to report that to the front end.
    #[error("a request was refused, and the front end cannot be told")]
    Untold(#[from] RequestError),
    /// An error of the daemon: a message before the last event was finished.
    #[error("{request} handed in before the last event was finished")]
    Unfinished {
        /// The message's request.
        request: RequestId,
    },
    /// An error of the daemon: an answer where no event waits, or of the wrong kind.
    #[error("no event waits for this answer")]
    WrongAnswer,
}

/// Failure of an event: a line for the log (the protocol has only a number for it).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);
