//! Errors of a back end.

use std::io;
use std::path::PathBuf;

use vhost_user::frontend::CallError;

/// Reason why a back end cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// No process listens.
    #[error("nobody serves the socket {path}")]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// A request went wrong.
    #[error("the back end cannot be used")]
    Call(#[from] CallError),
    /// A required feature is not offered.
    #[error("the back end does not offer {what}")]
    NotOffered {
        /// The missing feature.
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
    /// A largest packet that it does not take.
    #[error("the back end refuses an MTU of {mtu} bytes")]
    Mtu {
        /// As asked for.
        mtu: u16,
    },
    /// A configuration that is no disk's.
    #[error("the back end's configuration makes no sense: {what}")]
    Config {
        /// Fault of the configuration.
        what: &'static str,
    },
    /// After a restart it is not the device that the guest knows.
    #[error("the back end offers another device than before: {what}")]
    Changed {
        /// The property that differs.
        what: &'static str,
    },
    /// It was killed with requests in flight, and has no record of them.
    #[error(
        "the back end died with requests in flight and offers no INFLIGHT_SHMFD: they are lost"
    )]
    Lost,
    /// It was killed, and the position at which its successor has to go on cannot be read.
    #[error("the rings cannot be read where the driver has put them")]
    Rings,
    /// The kernel refused a call about its back end.
    #[error("the kernel's vhost refuses {what}")]
    Kernel {
        /// The refused call.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// The host refused descriptors or a thread.
    #[error("the host refuses what the connection needs")]
    Host(#[source] io::Error),
}
