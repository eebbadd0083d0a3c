//! Configuration of a back end.

use std::path::PathBuf;
use std::time::Duration;

use crate::class::{Class, NetIdentity};

/// Configuration of a back end.
#[derive(Clone, Debug)]
pub struct ImportConfig {
    /// The device's name in the log.
    pub name: String,
    /// The back end's socket.
    pub path: PathBuf,
    /// Class of the device that it serves.
    pub class: Class,
    /// Queues of the back end: 1 to 16 of a block device, two for each pair of a network device, of
    /// which there are 1 to 16. With several pairs the guest gets a control queue besides
    /// ([`Class::device_queues`]).
    pub queues: u16,
    /// Entries of each at most, a power of two.
    pub queue_size: u16,
    /// The device is behind an IOMMU: the back end translates by entries that it receives over the
    /// connection.
    pub has_iommu: bool,
    /// Time limit for a listener to appear, after which the start fails.
    pub patience: Duration,
    /// Time limit of any reply, except that to a stop, which waits for the back end's requests.
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

/// Configuration of a network device of the host's kernel: one pair of queues.
#[derive(Clone, Debug)]
pub struct KernelConfig {
    /// The device's name in the log.
    pub name: String,
    /// Properties that the guest reads.
    pub identity: NetIdentity,
    /// Entries of each queue at most, a power of two.
    pub queue_size: u16,
    /// The device is behind an IOMMU: the kernel translates by entries that it receives.
    pub has_iommu: bool,
}
