//! What can go wrong with a back end.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use vhost_user::wire::{DecodeError, RequestId};

/// A request that did not go well.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// No reply in time.
    #[error("{request}: no reply within {limit:?}")]
    Timeout {
        /// Which request.
        request: RequestId,
        /// How long it was waited for.
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
        /// What is wrong with it.
        source: DecodeError,
    },
    /// The back end said no.
    #[error("{request}: the back end refuses")]
    Refused {
        /// Which request.
        request: RequestId,
    },
    /// Whoever waited has given up.
    #[error("{request}: given up")]
    Cancelled {
        /// Which request.
        request: RequestId,
    },
}

impl CallError {
    /// The connection is of no use any more, but another one may be.
    pub(crate) fn is_of_the_connection(&self) -> bool {
        matches!(
            self,
            Self::Timeout { .. } | Self::Broken { .. } | Self::Cancelled { .. }
        )
    }
}

/// Why a back end cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// Nobody listens.
    #[error("nobody serves the socket {path}")]
    Connect {
        /// Where.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A request went wrong.
    #[error("the back end cannot be used")]
    Call(#[from] CallError),
    /// Something without which it does not work.
    #[error("the back end does not offer {what}")]
    NotOffered {
        /// What.
        what: &'static str,
    },
    /// Fewer queues than asked for.
    #[error("the back end has {offered} queues, {wanted} are asked for")]
    Queues {
        /// Queues of the back end.
        offered: u64,
        /// Queues asked for.
        wanted: u16,
    },
    /// Smaller rings than asked for.
    #[error("the back end refuses rings of {size} entries")]
    QueueSize {
        /// Entries asked for.
        size: u16,
    },
    /// Guest RAM has more regions than the back end takes.
    #[error("the back end takes {slots} regions of memory, the guest has {regions}")]
    Slots {
        /// What it takes.
        slots: u64,
        /// What there are.
        regions: usize,
    },
    /// A configuration that is no disk's.
    #[error("the back end's configuration makes no sense: {what}")]
    Config {
        /// What is wrong with it.
        what: &'static str,
    },
    /// After a restart it is not the device that the guest knows.
    #[error("the back end offers another device than before: {what}")]
    Changed {
        /// What is different.
        what: &'static str,
    },
    /// It was killed with requests in flight, and has no record of them.
    #[error(
        "the back end died with requests in flight and offers no INFLIGHT_SHMFD: they are lost"
    )]
    Lost,
    /// The host refused descriptors or a thread.
    #[error("the host refuses what the connection needs")]
    Host(#[source] io::Error),
}
