//! Reasons why a header is wrong.

use crate::GsoType;

/// Contradiction between a frame and its header. The frame is dropped and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Fewer than [`MIN_FRAME`](crate::MIN_FRAME) bytes or more than
    /// [`MAX_FRAME`](crate::MAX_FRAME).
    #[error("a frame of {0} bytes")]
    FrameLength(usize),
    /// The checksum, or the range that it covers, is outside the frame, or begins in the network's
    /// headers.
    #[error("the checksum is outside the frame")]
    ChecksumOutside,
    /// A partial checksum of a sender that has not negotiated that, or for a receiver that has not
    /// taken it on.
    #[error("a partial checksum, which was not negotiated")]
    ChecksumNotNegotiated,
    /// An offload that the sender has not negotiated, or a type that does not exist.
    #[error("segmentation of type {:#x}, which was not negotiated", .0.0)]
    NotNegotiated(GsoType),
    /// A frame to be segmented, with `gso_size` 0.
    #[error("segments of 0 bytes")]
    SegmentSize,
    /// A frame to be segmented, with a checksum that is not partial, or not that of the transport
    /// header.
    #[error("the checksum of a frame to be segmented is not its transport's")]
    SegmentChecksum,
    /// The frame is of another protocol than the type of segmentation.
    #[error("the frame's protocol is not the one to be segmented")]
    Protocol,
    /// An IP fragment to be segmented.
    #[error("a fragment cannot be segmented")]
    Fragment,
    /// A length in the IP or UDP header is not the frame's.
    #[error("a length in the headers is not the frame's")]
    Length,
    /// Headers end early or contradict themselves.
    #[error("malformed headers")]
    Malformed,
    /// Headers of more than [`MAX_HEADERS`](crate::MAX_HEADERS) bytes.
    #[error("headers that are too long")]
    HeadersTooLong,
    /// More than [`MAX_SEGMENTS`](crate::MAX_SEGMENTS) or
    /// [`MAX_UDP_SEGMENTS`](crate::MAX_UDP_SEGMENTS).
    #[error("{0} segments")]
    TooManySegments(usize),
}
