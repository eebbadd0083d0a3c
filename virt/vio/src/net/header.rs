//! Header in front of each frame (virtio 1.2 §5.1.6, `struct virtio_net_hdr`): work that its sender has
//! left to others.

use crate::net::net_feature;

/// Length of a header, with `num_buffers`, as VERSION_1 has it always.
pub const HEADER_LEN: usize = 12;

/// VIRTIO_NET_HDR_F_NEEDS_CSUM: the checksum at `csum_start + csum_offset` is to be completed.
pub const F_NEEDS_CSUM: u8 = 1;
/// VIRTIO_NET_HDR_F_DATA_VALID: all checksums of the frame have been found right.
pub const F_DATA_VALID: u8 = 2;

/// Values of `gso_type`.
pub mod gso {
    /// VIRTIO_NET_HDR_GSO_NONE: one frame of the network.
    pub const NONE: u8 = 0;
    /// VIRTIO_NET_HDR_GSO_TCPV4: TCP over IPv4, longer than a segment.
    pub const TCPV4: u8 = 1;
    /// VIRTIO_NET_HDR_GSO_TCPV6: TCP over IPv6, longer than a segment.
    pub const TCPV6: u8 = 4;
    /// VIRTIO_NET_HDR_GSO_UDP_L4 (virtio 1.3): UDP over either, longer than a segment.
    pub const UDP_L4: u8 = 5;
    /// VIRTIO_NET_HDR_GSO_ECN: beside TCPV4 or TCPV6, the segment carries CWR.
    pub const ECN: u8 = 0x80;
}

/// Work on frames that the sender of a frame leaves to its receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads(u8);

impl Offloads {
    /// None.
    pub const NONE: Self = Self(0);
    /// Completing a checksum of TCP or UDP.
    pub const CSUM: Self = Self(1);
    /// Segmenting TCP over IPv4.
    pub const TSO4: Self = Self(1 << 1);
    /// Segmenting TCP over IPv6.
    pub const TSO6: Self = Self(1 << 2);
    /// Segmenting TCP with CWR set.
    pub const ECN: Self = Self(1 << 3);
    /// Segmenting UDP over IPv4.
    pub const USO4: Self = Self(1 << 4);
    /// Segmenting UDP over IPv6.
    pub const USO6: Self = Self(1 << 5);
    /// Those by which one frame becomes several.
    pub const SEGMENTING: Self = Self(Self::TSO4.0 | Self::TSO6.0 | Self::USO4.0 | Self::USO6.0);
    /// All of them.
    pub const ALL: Self = Self(0x3f);

    /// Whether all of `other` are among them.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These and `other`.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Those that are in `other` too.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// These without those that need one that is missing: segmenting needs checksums, ECN segmenting
    /// TCP (§5.1.3.1).
    #[must_use]
    pub const fn consistent(self) -> Self {
        if !self.contains(Self::CSUM) {
            return Self::NONE;
        }
        if self.contains(Self::TSO4) || self.contains(Self::TSO6) {
            return self;
        }
        Self(self.0 & !Self::ECN.0)
    }

    /// Features with which a device offers them for frames that its driver sends. HOST_USO stands for
    /// both kinds of UDP.
    pub fn device_features(self) -> u64 {
        let offered = DEVICE.iter().filter(|(offload, _)| self.contains(*offload));
        offered.fold(0, |features, (_, feature)| features | feature)
    }

    /// Features with which a driver takes them on for frames that it receives.
    pub fn guest_features(self) -> u64 {
        let taken = GUEST.iter().filter(|(offload, _)| self.contains(*offload));
        taken.fold(0, |features, (_, feature)| features | feature)
    }

    /// Those that a driver leaves to its device, by the features it has accepted.
    pub fn of_device_features(features: u64) -> Self {
        Self::of(&DEVICE, features)
    }

    /// Those that a driver does for itself, by the features it has accepted, or by GUEST_OFFLOADS
    /// (§5.1.6.5.6.1), whose bits are the same.
    pub fn of_guest_features(features: u64) -> Self {
        Self::of(&GUEST, features)
    }

    fn of(table: &[(Self, u64)], features: u64) -> Self {
        let accepted = table.iter().filter(|(_, feature)| features & feature != 0);
        let offloads = accepted.fold(Self::NONE, |all, (offload, _)| all.with(*offload));
        offloads.consistent()
    }
}

/// Offloads of frames that a driver sends, by feature.
const DEVICE: [(Offloads, u64); 5] = [
    (Offloads::CSUM, net_feature::CSUM),
    (Offloads::TSO4, net_feature::HOST_TSO4),
    (Offloads::TSO6, net_feature::HOST_TSO6),
    (Offloads::ECN, net_feature::HOST_ECN),
    (Offloads::USO4.with(Offloads::USO6), net_feature::HOST_USO),
];

/// Offloads of frames that a driver receives, by feature.
const GUEST: [(Offloads, u64); 6] = [
    (Offloads::CSUM, net_feature::GUEST_CSUM),
    (Offloads::TSO4, net_feature::GUEST_TSO4),
    (Offloads::TSO6, net_feature::GUEST_TSO6),
    (Offloads::ECN, net_feature::GUEST_ECN),
    (Offloads::USO4, net_feature::GUEST_USO4),
    (Offloads::USO6, net_feature::GUEST_USO6),
];

/// A header as its sender wrote it: an allegation until [`check`](Self::check) has passed it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetHeader {
    /// `F_*`.
    pub flags: u8,
    /// One of [`gso`], perhaps with [`gso::ECN`].
    pub gso_type: u8,
    /// Length of all headers of the frame: a hint, which may be wrong.
    pub hdr_len: u16,
    /// Bytes of payload of each segment.
    pub gso_size: u16,
    /// Where summing begins.
    pub csum_start: u16,
    /// Where the sum goes, from there.
    pub csum_offset: u16,
}

/// Reason why a frame is not sent on with a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// A `gso_type` that there is not, or that was not negotiated.
    #[error("gso_type {0:#x} is unknown or was not negotiated")]
    GsoType(u8),
    /// A checksum left over that was not negotiated, or that lies outside the frame.
    #[error(
        "the checksum at {csum_start} + {csum_offset} of a frame of {len} bytes cannot be completed"
    )]
    Checksum {
        /// Where summing begins.
        csum_start: u16,
        /// Where the sum goes.
        csum_offset: u16,
        /// Length of the frame.
        len: u32,
    },
    /// Segments without payload, or whose checksum is not left over.
    #[error("segments of {0} bytes cannot be made")]
    GsoSize(u16),
}

impl NetHeader {
    /// Nothing is left over.
    pub const PLAIN: Self = Self {
        flags: 0,
        gso_type: gso::NONE,
        hdr_len: 0,
        gso_size: 0,
        csum_start: 0,
        csum_offset: 0,
    };

    /// From its bytes; `num_buffers` is not looked at.
    #[inline]
    pub fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Self {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }

    /// Its bytes, with the number of buffers that the frame takes.
    #[inline]
    pub fn to_bytes(self, num_buffers: u16) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = self.flags;
        bytes[1] = self.gso_type;
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

    /// Whether it leaves nothing to be done, so that any receiver takes the frame.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.flags & F_NEEDS_CSUM == 0 && self.gso_type == gso::NONE
    }

    /// Offloads that the frame needs of whoever takes it; `None` for an unknown type.
    #[inline]
    pub fn needs(&self) -> Option<Offloads> {
        let mut needs = match self.flags & F_NEEDS_CSUM {
            0 => Offloads::NONE,
            _ => Offloads::CSUM,
        };
        let (kind, has_ecn) = (self.gso_type & !gso::ECN, self.gso_type & gso::ECN != 0);
        needs = needs.with(match kind {
            gso::NONE => Offloads::NONE,
            gso::TCPV4 => Offloads::TSO4,
            gso::TCPV6 => Offloads::TSO6,
            // Which one of the two, the frame says.
            gso::UDP_L4 => Offloads::NONE,
            _ => return None,
        });
        match (has_ecn, kind) {
            (false, _) => Some(needs),
            (true, gso::TCPV4 | gso::TCPV6) => Some(needs.with(Offloads::ECN)),
            (true, _) => None,
        }
    }

    /// Checks what can be checked without the frame, of `len` bytes, which may leave no more than
    /// `allowed`; answers the header to send on. Whether the type fits the protocol, the frame says.
    ///
    /// # Errors
    /// The frame cannot be sent on.
    #[inline]
    pub fn check(self, len: u32, allowed: Offloads) -> Result<Self, HeaderError> {
        if self.is_plain() {
            return Ok(Self {
                flags: self.flags & F_DATA_VALID,
                ..Self::default()
            });
        }
        self.check_offloads(len, allowed)
    }

    fn check_offloads(self, len: u32, allowed: Offloads) -> Result<Self, HeaderError> {
        let bad_type = HeaderError::GsoType(self.gso_type);
        let needs = self.needs().ok_or(bad_type)?;
        let has_sum = needs.contains(Offloads::CSUM);
        let sum_end = u32::from(self.csum_start) + u32::from(self.csum_offset) + 2;
        if has_sum && (!allowed.contains(Offloads::CSUM) || sum_end > len) {
            return Err(HeaderError::Checksum {
                csum_start: self.csum_start,
                csum_offset: self.csum_offset,
                len,
            });
        }
        let is_udp = self.gso_type == gso::UDP_L4;
        let has_uso = allowed.contains(Offloads::USO4) || allowed.contains(Offloads::USO6);
        if !allowed.contains(needs) || (is_udp && !has_uso) {
            return Err(bad_type);
        }
        // §5.1.6.2: segments are made of a frame whose checksum is left over, and of no other.
        if self.gso_type != gso::NONE && (self.gso_size == 0 || !has_sum) {
            return Err(HeaderError::GsoSize(self.gso_size));
        }
        Ok(Self {
            flags: self.flags & (F_NEEDS_CSUM | F_DATA_VALID),
            ..self
        })
    }
}
