//! `struct virtio_net_hdr_v1` (virtio 1.2 §5.1.6).

/// Header in front of each frame. As it comes from a driver nothing in it is checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHeader {
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
    /// Offset 10: receive buffers that the frame takes.
    pub num_buffers: u16,
}

/// `gso_type`: an open set of codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GsoType(pub u8);

impl GsoType {
    /// VIRTIO_NET_HDR_GSO_NONE.
    pub const NONE: Self = Self(0);
    /// VIRTIO_NET_HDR_GSO_TCPV4.
    pub const TCPV4: Self = Self(1);
    /// VIRTIO_NET_HDR_GSO_UDP (UFO), which no device here offers.
    pub const UDP: Self = Self(3);
    /// VIRTIO_NET_HDR_GSO_TCPV6.
    pub const TCPV6: Self = Self(4);
    /// VIRTIO_NET_HDR_GSO_UDP_L4 (USO).
    pub const UDP_L4: Self = Self(5);
    /// VIRTIO_NET_HDR_GSO_ECN: a bit beside a TCP type, for a segment that says CWR.
    pub const ECN: u8 = 0x80;

    /// Whether the ECN bit is set.
    pub fn has_ecn(self) -> bool {
        self.0 & Self::ECN != 0
    }

    /// The type without the ECN bit.
    #[must_use]
    pub fn kind(self) -> Self {
        Self(self.0 & !Self::ECN)
    }

    /// The type with the ECN bit, if `ecn`.
    #[must_use]
    pub fn with_ecn(self, ecn: bool) -> Self {
        Self(self.0 | if ecn { Self::ECN } else { 0 })
    }
}

impl VnetHeader {
    /// Length of the header, as VERSION_1 has it always.
    pub const LEN: usize = 12;
    /// VIRTIO_NET_HDR_F_NEEDS_CSUM: the checksum at `csum_start + csum_offset` is partial.
    pub const NEEDS_CSUM: u8 = 1;
    /// VIRTIO_NET_HDR_F_DATA_VALID: the device has verified the checksum.
    pub const DATA_VALID: u8 = 2;

    /// Decodes the header; no bytes are wrong.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: GsoType(bytes[1]),
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
            num_buffers: word(10),
        }
    }

    /// Encodes the header.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = self.flags;
        bytes[1] = self.gso_type.0;
        let words = [
            self.hdr_len,
            self.gso_size,
            self.csum_start,
            self.csum_offset,
            self.num_buffers,
        ];
        for (at, word) in bytes[2..].chunks_exact_mut(2).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        bytes
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
        let header = VnetHeader {
            flags: VnetHeader::NEEDS_CSUM,
            gso_type: GsoType::TCPV6.with_ecn(true),
            hdr_len: 0x0203,
            gso_size: 0x0405,
            csum_start: 0x0607,
            csum_offset: 0x0809,
            num_buffers: 0x0a0b,
        };
        assert_eq!(VnetHeader::from_bytes(bytes), header);
        assert_eq!(header.to_bytes(), bytes);
    }
}
