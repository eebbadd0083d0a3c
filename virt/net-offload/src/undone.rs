//! Work that a sender left undone in a frame whose header has been checked.

use crate::layout::{Ip, Layout, Transport};
use crate::original::Original;
use crate::{Checksum, FrameBytes, GsoType, NetHeader, Offloads};

/// Work that a sender left undone.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Undone {
    Nothing,
    Checksum(PartialChecksum),
    Segments(Segmentation),
}

/// A frame to be segmented.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segmentation {
    pub layout: Layout,
    /// Payload bytes of a segment.
    pub size: usize,
    pub has_ecn: bool,
    pub checksum: PartialChecksum,
    /// Content of the headers at the check.
    pub original: Original,
}

impl Segmentation {
    pub fn gso_type(&self) -> GsoType {
        match (self.layout.transport, self.layout.ip) {
            (Transport::Tcp, Ip::V4) => GsoType::TCPV4,
            (Transport::Tcp, Ip::V6) => GsoType::TCPV6,
            (Transport::Udp, _) => GsoType::UDP_L4,
        }
    }

    /// Returns the offloads that a receiver needs to get the frame unchanged.
    pub fn needs(&self) -> Offloads {
        let one = match (self.layout.transport, self.layout.ip) {
            (Transport::Tcp, Ip::V4) => Offloads::TSO4,
            (Transport::Tcp, Ip::V6) => Offloads::TSO6,
            (Transport::Udp, Ip::V4) => Offloads::USO4,
            (Transport::Udp, Ip::V6) => Offloads::USO6,
        };
        let ecn = if self.has_ecn {
            Offloads::ECN
        } else {
            Offloads::NONE
        };
        Offloads::CSUM.with(one).with(ecn)
    }
}

/// Checksum of which a part is in its field: the sum of the pseudo header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialChecksum {
    pub(crate) start: usize,
    pub(crate) offset: usize,
}

impl PartialChecksum {
    /// First byte that the checksum covers; it covers all behind it.
    pub fn start(self) -> usize {
        self.start
    }

    /// Returns the position in the frame of the two bytes of the checksum, high byte first.
    pub fn position(self) -> usize {
        self.start + self.offset
    }

    /// Sums up the frame from [`start`](Self::start) on: the completed checksum.
    pub fn complete(self, frame: &(impl FrameBytes + ?Sized)) -> u16 {
        let sum = Checksum::new().frame(frame, self.start..frame.frame_len());
        sum.transport()
    }

    /// The fields of a header that say that this is undone.
    pub(crate) fn header(self) -> NetHeader {
        NetHeader {
            flags: NetHeader::NEEDS_CSUM,
            csum_start: self.start as u16,
            csum_offset: self.offset as u16,
            ..NetHeader::default()
        }
    }
}
