//! Errors of a message by itself, whatever the session's state.

use super::RequestId;

/// A message that is not a valid request (or not a valid reply, where one is expected).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// No request served here has this number.
    #[error("{request} is not supported")]
    Unknown {
        /// Its number.
        request: RequestId,
    },
    /// The reply flag on a request, or none on a reply.
    #[error("{request}: reply flag is {is_reply}")]
    Direction {
        /// The request.
        request: RequestId,
        /// Value of the reply flag.
        is_reply: bool,
    },
    /// A reply to another request than the one sent.
    #[error("reply to {request} instead of {expected}")]
    WrongReply {
        /// Request that the reply names.
        request: RequestId,
        /// Request that was sent.
        expected: RequestId,
    },
    /// The payload's size does not fit the request or the counts inside the payload.
    #[error("{request}: payload of {size} bytes, {expected} expected")]
    Size {
        /// The request.
        request: RequestId,
        /// Bytes that came.
        size: usize,
        /// Bytes its layout has.
        expected: usize,
    },
    /// Descriptors missing or superfluous.
    #[error("{request}: {fds} descriptors, {expected} expected")]
    Fds {
        /// The request.
        request: RequestId,
        /// Descriptors that came.
        fds: usize,
        /// Descriptors that belong to it.
        expected: usize,
    },
    /// A value the specification does not allow, whatever the session's state.
    #[error("{request}: {field} is {value:#x}")]
    Field {
        /// The request.
        request: RequestId,
        /// The specification's name of the field.
        field: &'static str,
        /// Value of the field.
        value: u64,
    },
}
