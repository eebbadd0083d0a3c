//! A request that did not go well.

use std::io;
use std::time::Duration;

use crate::wire::{DecodeError, RequestId};

/// A request that did not go well.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// No reply in time.
    #[error("{request}: no reply within {limit:?}")]
    Timeout {
        /// Which request.
        request: RequestId,
        /// Duration of the wait.
        limit: Duration,
    },
    /// The socket failed, or its other end was closed.
    #[error("{request}: the connection failed: {what}")]
    Broken {
        /// Which request.
        request: RequestId,
        /// How.
        what: String,
    },
    /// A reply that cannot be read.
    #[error("{request}: the reply makes no sense")]
    Reply {
        /// Which request.
        request: RequestId,
        /// Fault of the reply.
        source: DecodeError,
    },
    /// The back end has refused the request.
    #[error("{request}: the back end refuses")]
    Refused {
        /// Which request.
        request: RequestId,
    },
    /// The caller has cancelled its wait.
    #[error("{request}: given up")]
    Cancelled {
        /// Which request.
        request: RequestId,
    },
    /// The memory has more regions than the back end takes.
    #[error("the back end takes {slots} regions of memory, the guest has {regions}")]
    Slots {
        /// Regions that the back end takes.
        slots: u64,
        /// Regions of the guest.
        regions: usize,
    },
    /// The host refused a descriptor.
    #[error("the host refuses what the connection needs")]
    Host(#[source] io::Error),
}

impl CallError {
    /// The connection is of no use any more, but another one may be.
    pub const fn is_of_the_connection(&self) -> bool {
        matches!(
            self,
            Self::Timeout { .. } | Self::Broken { .. } | Self::Cancelled { .. }
        )
    }
}
