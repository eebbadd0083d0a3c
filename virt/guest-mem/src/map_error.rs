//! Error of the allocation of shared memory.

use std::io;

/// Reason why the host refused shared memory.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// No memory file could be made (descriptors or kernel memory exhausted).
    #[error("cannot create a memory file")]
    Create(#[source] io::Error),
    /// The memory file could not be given its size.
    #[error("cannot size a memory file to {bytes} bytes")]
    Resize {
        /// Size asked for, in bytes.
        bytes: usize,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The memory file's size could not be sealed.
    #[error("cannot seal the size of a memory file")]
    Seal(#[source] io::Error),
    /// The address space or the host's commitment limit is exhausted.
    #[error("cannot map {bytes} bytes of shared memory")]
    Map {
        /// Size asked for, in bytes.
        bytes: usize,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}
