//! Queues of a TAP interface. Its frames are moved by a [`TapPort`](super::TapPort) or by the
//! kernel's vhost-net.

use std::fs::File;
use std::io;

use net_offload::Offloads;

use super::open::{Interface, TapError, TapOptions, set_offloads};

/// A TAP interface, open, with virtio-net headers of 12 bytes. No frame is read or written here.
#[derive(Debug)]
pub struct TapQueues {
    interface: Interface,
    /// One for each queue, at least one.
    files: Vec<File>,
}

impl TapQueues {
    /// Attaches to an interface.
    ///
    /// # Errors
    /// The interface cannot be opened with these options.
    pub fn open(options: &TapOptions<'_>) -> Result<Self, TapError> {
        let (interface, files) = Interface::open(options)?;
        Ok(Self { interface, files })
    }

    /// Number of queues.
    pub fn queues(&self) -> usize {
        self.files.len()
    }

    /// The first queue.
    pub fn queue(&self) -> &File {
        &self.files[0]
    }

    /// Largest packet, in bytes without the Ethernet header.
    pub fn mtu(&self) -> u16 {
        self.interface.mtu
    }

    /// Whether the kernel segments UDP.
    pub fn has_uso(&self) -> bool {
        self.interface.has_uso
    }

    /// Sets the offloads that the kernel may leave undone in frames that are read.
    ///
    /// # Errors
    /// The kernel's; an interface that was deleted refuses.
    pub fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        set_offloads(self.queue(), offloads.tun_flags())
    }

    pub(super) fn into_parts(self) -> (Interface, Vec<File>) {
        (self.interface, self.files)
    }
}
