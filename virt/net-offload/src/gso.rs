//! Types of generic segmentation offload (virtio 1.2 §5.1.6, `gso_type`).

use crate::Offloads;

/// Value of `gso_type`. It may be one that is not defined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GsoType(pub u8);

impl GsoType {
    /// VIRTIO_NET_HDR_GSO_NONE: the frame needs no segmentation.
    pub const NONE: Self = Self(0);
    /// VIRTIO_NET_HDR_GSO_TCPV4.
    pub const TCPV4: Self = Self(1);
    /// VIRTIO_NET_HDR_GSO_UDP (UFO), which no device here offers.
    pub const UDP: Self = Self(3);
    /// VIRTIO_NET_HDR_GSO_TCPV6.
    pub const TCPV6: Self = Self(4);
    /// VIRTIO_NET_HDR_GSO_UDP_L4 (USO, virtio 1.3), of either version of IP.
    pub const UDP_L4: Self = Self(5);
    /// VIRTIO_NET_HDR_GSO_ECN: a bit in addition to a TCP type, for TCP with CWR set.
    pub const ECN: u8 = 0x80;

    /// Whether the ECN bit is set.
    pub const fn has_ecn(self) -> bool {
        self.0 & Self::ECN != 0
    }

    /// The type without the ECN bit.
    #[must_use]
    pub const fn kind(self) -> Self {
        Self(self.0 & !Self::ECN)
    }

    /// The type with the ECN bit, if `ecn`.
    #[must_use]
    pub const fn with_ecn(self, ecn: bool) -> Self {
        Self(self.0 | if ecn { Self::ECN } else { 0 })
    }

    /// Returns whether a frame of this type may be left to a receiver with the offloads `allowed`.
    /// For UDP either IP version suffices here, since only the frame tells which it is.
    pub(crate) fn is_allowed(self, allowed: Offloads) -> bool {
        let has = |one| allowed.contains(one);
        let has_kind = match self.kind() {
            Self::NONE => !self.has_ecn(),
            Self::TCPV4 => has(Offloads::TSO4),
            Self::TCPV6 => has(Offloads::TSO6),
            Self::UDP_L4 => !self.has_ecn() && (has(Offloads::USO4) || has(Offloads::USO6)),
            _ => false,
        };
        has_kind && (!self.has_ecn() || has(Offloads::ECN))
    }
}
