//! Offloads of a virtio network device: work on a frame that its sender leaves to its receiver.

/// Set of offloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Offloads(u8);

/// Feature bits that negotiate offloads (virtio 1.2 §5.1.3).
pub mod feature {
    /// VIRTIO_NET_F_CSUM (0): the driver may leave checksums to the device.
    pub const CSUM: u64 = 1 << 0;
    /// VIRTIO_NET_F_GUEST_CSUM (1): the driver accepts frames whose checksum is partial.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// VIRTIO_NET_F_GUEST_TSO4 (7): the driver accepts unsegmented TCP over IPv4.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// VIRTIO_NET_F_GUEST_TSO6 (8): the driver accepts unsegmented TCP over IPv6.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// VIRTIO_NET_F_GUEST_ECN (9): the driver accepts unsegmented TCP with CWR.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// VIRTIO_NET_F_HOST_TSO4 (11): the driver may send unsegmented TCP over IPv4.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// VIRTIO_NET_F_HOST_TSO6 (12): the driver may send unsegmented TCP over IPv6.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// VIRTIO_NET_F_HOST_ECN (13): the driver may send unsegmented TCP with CWR.
    pub const HOST_ECN: u64 = 1 << 13;
    /// VIRTIO_NET_F_GUEST_USO4 (54, virtio 1.3): the driver accepts unsegmented UDP over IPv4.
    pub const GUEST_USO4: u64 = 1 << 54;
    /// VIRTIO_NET_F_GUEST_USO6 (55, virtio 1.3): the driver accepts unsegmented UDP over IPv6.
    pub const GUEST_USO6: u64 = 1 << 55;
    /// VIRTIO_NET_F_HOST_USO (56, virtio 1.3): the driver may send unsegmented UDP.
    pub const HOST_USO: u64 = 1 << 56;
}

impl Offloads {
    /// No offloads: every frame has its checksums and fits the MTU.
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
    /// Segmenting UDP over both: HOST_USO and a TAP include both or neither.
    const USO: Self = Self::USO4.with(Self::USO6);
    /// Offloads that divide a frame into several.
    pub const SEGMENTING: Self = Self::TSO4.with(Self::TSO6).with(Self::USO);
    /// All of them.
    pub const ALL: Self = Self(0x3f);

    /// Features with which a driver leaves each of these offloads to its device.
    const DEVICE: [(Self, u64); 5] = [
        (Self::CSUM, feature::CSUM),
        (Self::TSO4, feature::HOST_TSO4),
        (Self::TSO6, feature::HOST_TSO6),
        (Self::ECN, feature::HOST_ECN),
        (Self::USO, feature::HOST_USO),
    ];

    /// Features with which a driver accepts frames that need each of these offloads.
    const GUEST: [(Self, u64); 6] = [
        (Self::CSUM, feature::GUEST_CSUM),
        (Self::TSO4, feature::GUEST_TSO4),
        (Self::TSO6, feature::GUEST_TSO6),
        (Self::ECN, feature::GUEST_ECN),
        (Self::USO4, feature::GUEST_USO4),
        (Self::USO6, feature::GUEST_USO6),
    ];

    /// `TUN_F_*` flags of these offloads (Linux `if_tun.h`).
    const TUN: [(Self, u64); 5] = [
        (Self::CSUM, 1),
        (Self::TSO4, 2),
        (Self::TSO6, 4),
        (Self::ECN, 8),
        (Self::USO, 0x60),
    ];

    /// Whether the set includes all of `other`.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the union with `other`.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the intersection with `other`.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the set without offloads that depend on a missing one: segmenting depends on
    /// checksums, ECN on segmenting TCP (§5.1.3.1).
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

    /// Returns the features with which a device offers these offloads for frames that its driver
    /// sends.
    pub fn device_features(self) -> u64 {
        self.bits(&Self::DEVICE)
    }

    /// Returns the features with which a driver accepts frames that need these offloads.
    pub fn guest_features(self) -> u64 {
        self.bits(&Self::GUEST)
    }

    /// Returns the argument of TUNSETOFFLOAD. USO is included only for both versions of IP, since
    /// the kernel refuses one alone.
    pub fn tun_flags(self) -> u32 {
        self.bits(&Self::TUN) as u32
    }

    /// Returns the offloads that a driver leaves to its device, by the features it has accepted.
    pub fn of_device_features(features: u64) -> Self {
        Self::of(&Self::DEVICE, features)
    }

    /// Returns the offloads that a driver does itself in frames that it receives, by the features
    /// it has accepted, or by GUEST_OFFLOADS (§5.1.6.5.6.1), whose bits are the same.
    pub fn of_guest_features(features: u64) -> Self {
        Self::of(&Self::GUEST, features)
    }

    fn bits(self, table: &[(Self, u64)]) -> u64 {
        let set = table.iter().filter(|(offload, _)| self.contains(*offload));
        set.fold(0, |all, (_, bits)| all | bits)
    }

    fn of(table: &[(Self, u64)], features: u64) -> Self {
        let accepted = table.iter().filter(|(_, bits)| features & bits != 0);
        let offloads = accepted.fold(Self::NONE, |all, (offload, _)| all.with(*offload));
        offloads.consistent()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_the_bits_of_the_specification() {
        // GUEST_CSUM 1, GUEST_TSO4 7, GUEST_TSO6 8, GUEST_ECN 9, GUEST_USO4 54, GUEST_USO6 55.
        let guest = 1 << 1 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 54 | 1 << 55;
        assert_eq!(Offloads::of_guest_features(guest), Offloads::ALL);
        assert_eq!(Offloads::ALL.guest_features(), guest);
        // CSUM 0, HOST_TSO4 11, HOST_TSO6 12, HOST_ECN 13, HOST_USO 56.
        let host = 1 << 0 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 56;
        assert_eq!(Offloads::of_device_features(host), Offloads::ALL);
        assert_eq!(Offloads::ALL.device_features(), host);
        assert_eq!(Offloads::ALL.tun_flags(), 0x6f);
    }

    #[test]
    fn nothing_is_offloaded_without_checksums_and_ecn_only_beside_tso() {
        assert_eq!(
            Offloads::of_guest_features(1 << 7 | 1 << 54),
            Offloads::NONE
        );
        assert_eq!(Offloads::of_guest_features(1 << 1 | 1 << 9), Offloads::CSUM);
        // One version of USO alone is EINVAL for a TAP.
        let uso4 = Offloads::CSUM.with(Offloads::USO4);
        assert_eq!((uso4.tun_flags(), uso4.device_features()), (1, 1));
    }
}
