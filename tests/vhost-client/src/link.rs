//! One connection to a back end, as far as negotiation. Messages and their order are
//! [`vhost_user::frontend`]'s.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost_user::frontend::{CallError, Connection, Offer};
use vhost_user::wire::{ProtocolFeatures, feature};

/// Features and limits with which a front end takes a back end's offer.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Virtio features to take where offered.
    pub features: u64,
    /// Protocol features to take where offered.
    pub protocol: ProtocolFeatures,
    /// Those of both without which it is no use to go on.
    pub required: (u64, ProtocolFeatures),
    /// Time to wait for a listener, and for each reply.
    pub timeout: Duration,
}

/// Reason why there is no connection.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum LinkError {
    #[error("cannot connect to {path}")]
    Connect { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(
        "the back end does not offer features {features:#x} and protocol features {protocol:?}"
    )]
    Missing {
        features: u64,
        protocol: ProtocolFeatures,
    },
}

/// A connection, negotiated but for SET_FEATURES.
#[derive(Debug)]
pub struct Link {
    /// The socket.
    pub connection: Connection,
    /// Features offered and wanted.
    pub features: u64,
    /// Protocol features acknowledged.
    pub protocol: ProtocolFeatures,
    /// Number that GET_QUEUE_NUM returned, or 1: queues of a disk, pairs of a network device.
    pub queues: u64,
}

impl Link {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// There is no listener, or the back end breaks off or offers too little.
    pub fn open(path: &Path, wanted: &Wanted) -> Result<Self, LinkError> {
        let opened = Connection::open_within(wanted.timeout, path, None, wanted.timeout);
        let mut connection = opened.map_err(|source| LinkError::Connect {
            path: path.to_owned(),
            source,
        })?;
        let has_protocol = wanted.features & feature::PROTOCOL_FEATURES != 0;
        let Offer {
            features: offered,
            protocol,
            queues,
        } = connection.negotiate(has_protocol.then_some(wanted.protocol))?;
        let features = offered & wanted.features;
        let missing = (
            wanted.required.0 & !features,
            wanted.required.1.without(protocol),
        );
        if missing != (0, ProtocolFeatures::NONE) {
            let (features, protocol) = missing;
            return Err(LinkError::Missing { features, protocol });
        }
        Ok(Self {
            connection,
            features,
            protocol,
            queues,
        })
    }
}

/// Whether the back end closed the connection.
pub fn is_hung_up(connection: &Connection) -> bool {
    let mut fds = [PollFd::new(connection.socket(), PollFlags::RDHUP)];
    let at_once = Timespec::default();
    matches!(poll(&mut fds, Some(&at_once)), Ok(1..))
}
