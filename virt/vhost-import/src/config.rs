//! How a back end is used.

use std::path::PathBuf;
use std::time::Duration;

use crate::class::{Class, NetIdentity};

/// How a back end is used.
#[derive(Clone, Debug)]
pub struct ImportConfig {
    /// The device's name in the log.
    pub name: String,
    /// The back end's socket.
    pub path: PathBuf,
    /// What it serves.
    pub class: Class,
    /// Queues of the back end: 1 to 16 of a block device, two for each pair of a network device, of
    /// which there are 1 to 16. With several pairs the guest gets a control queue besides
    /// ([`Class::device_queues`]).
    pub queues: u16,
    /// Entries of each at most, a power of two.
    pub queue_size: u16,
    /// The device is behind an IOMMU: the back end translates by what it is told over the
    /// connection.
    pub has_iommu: bool,
    /// How long somebody has to listen before the start fails.
    pub patience: Duration,
    /// How long any reply may take, but that to a stop, which waits for the back end's requests.
    pub reply_limit: Duration,
}

impl ImportConfig {
    /// A block device of one queue of 256 entries; 1 s for the listener, 5 s for a reply.
    pub fn new(name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            path: path.into(),
            class: Class::Block,
            queues: 1,
            queue_size: 256,
            has_iommu: false,
            patience: Duration::from_secs(1),
            reply_limit: Duration::from_secs(5),
        }
    }
}

/// How a network device of the host's kernel is used: one pair of queues.
#[derive(Clone, Debug)]
pub struct KernelConfig {
    /// The device's name in the log.
    pub name: String,
    /// What the guest reads of it.
    pub identity: NetIdentity,
    /// Entries of each queue at most, a power of two.
    pub queue_size: u16,
    /// The device is behind an IOMMU: the kernel translates by what it is told.
    pub has_iommu: bool,
}
