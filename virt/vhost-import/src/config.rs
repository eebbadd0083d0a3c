//! How a back end is used.

use std::path::PathBuf;
use std::time::Duration;

/// How a back end is used.
#[derive(Clone, Debug)]
pub struct ImportConfig {
    /// The device's name in the log.
    pub name: String,
    /// The back end's socket.
    pub path: PathBuf,
    /// Queues the guest gets, 1 to 16.
    pub queues: u16,
    /// Entries of each at most, a power of two.
    pub queue_size: u16,
    /// How long somebody has to listen before the start fails.
    pub patience: Duration,
    /// How long any reply may take, but that to a stop, which waits for the back end's requests.
    pub reply_limit: Duration,
}

impl ImportConfig {
    /// One queue of 256 entries; 1 s for the listener, 5 s for a reply.
    pub fn new(name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            path: path.into(),
            queues: 1,
            queue_size: 256,
            patience: Duration::from_secs(1),
            reply_limit: Duration::from_secs(5),
        }
    }
}
