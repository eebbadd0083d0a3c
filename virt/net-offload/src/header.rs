//! Header in front of each frame (virtio 1.2 §5.1.6, `struct virtio_net_hdr`): work that its sender
//! has left undone.

use crate::{GsoType, HeaderError, Offloads};

/// Length of a header, with `num_buffers`, as VERSION_1 has it always.
pub const HEADER_LEN: usize = 12;
/// Shortest frame: its Ethernet header.
pub const MIN_FRAME: usize = 14;
/// Longest frame: an IP packet of 65,535 bytes, and 14 bytes and a VLAN tag before it.
pub const MAX_FRAME: usize = 65_535 + 18;
/// First byte that a checksum may cover: behind the Ethernet header and the shortest header of IP.
/// Linux takes none before that either (`virtio_net_hdr_to_skb`).
const MIN_CSUM_START: usize = MIN_FRAME + 20;

/// Header as its sender wrote it, untrusted. [`check`](Self::check) checks the fields that do not
/// depend on the frame, and [`Checked::check`](crate::Checked::check) all. `num_buffers` is no part
/// of it: only the device that receives knows that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetHeader {
    /// Offset 0: [`NEEDS_CSUM`](Self::NEEDS_CSUM), [`DATA_VALID`](Self::DATA_VALID).
    pub flags: u8,
    /// Offset 1: kind of segmentation.
    pub gso_type: GsoType,
    /// Offset 2: length of the headers, a hint.
    pub hdr_len: u16,
    /// Offset 4: payload bytes of a segment.
    pub gso_size: u16,
    /// Offset 6: first byte that the checksum covers, from the frame's start.
    pub csum_start: u16,
    /// Offset 8: where the checksum is, from `csum_start`.
    pub csum_offset: u16,
}

impl NetHeader {
    /// VIRTIO_NET_HDR_F_NEEDS_CSUM: the checksum at `csum_start + csum_offset` is partial.
    pub const NEEDS_CSUM: u8 = 1;
    /// VIRTIO_NET_HDR_F_DATA_VALID: the checksums have been found right.
    pub const DATA_VALID: u8 = 2;
    /// Nothing is left undone.
    pub const PLAIN: Self = Self {
        flags: 0,
        gso_type: GsoType::NONE,
        hdr_len: 0,
        gso_size: 0,
        csum_start: 0,
        csum_offset: 0,
    };

    /// Decodes the header; no bytes are wrong.
    #[inline]
    pub fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Self {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: GsoType(bytes[1]),
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }

    /// Encodes the header, with the number of receive buffers that the frame takes at offset 10.
    #[inline]
    pub fn to_bytes(self, num_buffers: u16) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = self.flags;
        bytes[1] = self.gso_type.0;
        for (at, word) in [
            (2, self.hdr_len),
            (4, self.gso_size),
            (6, self.csum_start),
            (8, self.csum_offset),
            (10, num_buffers),
        ] {
            bytes[at..at + 2].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Whether it leaves nothing undone, so that any receiver takes the frame.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.flags & Self::NEEDS_CSUM == 0 && self.gso_type == GsoType::NONE
    }

    /// Checks the header without the content of the frame, of `len` bytes, of which no more than
    /// `allowed` may be left undone. Returns the header to forward. It is not checked that the type
    /// fits the frame's protocol.
    ///
    /// # Errors
    /// The frame cannot be sent on.
    #[inline]
    pub fn check(self, len: u32, allowed: Offloads) -> Result<Self, HeaderError> {
        if self.is_plain() {
            return Ok(Self {
                flags: self.flags & Self::DATA_VALID,
                ..Self::PLAIN
            });
        }
        self.check_offloads(len, allowed)
    }

    fn check_offloads(self, len: u32, allowed: Offloads) -> Result<Self, HeaderError> {
        let has_sum = self.flags & Self::NEEDS_CSUM != 0;
        if has_sum {
            if !allowed.contains(Offloads::CSUM) {
                return Err(HeaderError::ChecksumNotNegotiated);
            }
            let end = u32::from(self.csum_start) + u32::from(self.csum_offset) + 2;
            if usize::from(self.csum_start) < MIN_CSUM_START || end > len {
                return Err(HeaderError::ChecksumOutside);
            }
        }
        if !self.gso_type.is_allowed(allowed) {
            return Err(HeaderError::NotNegotiated(self.gso_type));
        }
        // §5.1.6.2: segments are made of a frame whose checksum is partial, and of no other.
        if self.gso_type != GsoType::NONE {
            if !has_sum {
                return Err(HeaderError::SegmentChecksum);
            }
            if self.gso_size == 0 {
                return Err(HeaderError::SegmentSize);
            }
        }
        Ok(Self {
            flags: self.flags & (Self::NEEDS_CSUM | Self::DATA_VALID),
            ..self
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_field_is_where_the_specification_has_it() {
        let bytes = [
            0x01, 0x84, 0x03, 0x02, 0x05, 0x04, 0x07, 0x06, 0x09, 0x08, 0x0b, 0x0a,
        ];
        let header = NetHeader {
            flags: NetHeader::NEEDS_CSUM,
            gso_type: GsoType::TCPV6.with_ecn(true),
            hdr_len: 0x0203,
            gso_size: 0x0405,
            csum_start: 0x0607,
            csum_offset: 0x0809,
        };
        assert_eq!(NetHeader::from_bytes(&bytes), header);
        assert_eq!(header.to_bytes(0x0a0b), bytes);
    }
}
