//! What a receiver of frames does itself.

use std::ops::BitOr;

/// Set of offloads: what may be left undone in a frame for its receiver. A set without
/// [`CSUM`](Self::CSUM) is empty, and ECN stands beside a TSO bit only, as the features require (§5.1.3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Offloads(u8);

impl Offloads {
    /// None at all: every frame is finished, and of at most the MTU.
    pub const NONE: Self = Self(0);
    /// Partial checksums.
    pub const CSUM: Self = Self(1);
    /// Unsegmented TCP over IPv4.
    pub const TSO4: Self = Self(2);
    /// Unsegmented TCP over IPv6.
    pub const TSO6: Self = Self(4);
    /// Unsegmented TCP that says CWR.
    pub const ECN: Self = Self(8);
    /// Unsegmented UDP over IPv4.
    pub const USO4: Self = Self(16);
    /// Unsegmented UDP over IPv6.
    pub const USO6: Self = Self(32);
    /// All of them.
    pub const ALL: Self = Self(63);

    /// Bit in a feature word (§5.1.3) for what a driver takes, and for what it may send.
    const FEATURES: [(Self, u32, u32); 6] = [
        (Self::CSUM, 1, 0),
        (Self::TSO4, 7, 11),
        (Self::TSO6, 8, 12),
        (Self::ECN, 9, 13),
        (Self::USO4, 54, 56),
        (Self::USO6, 55, 56),
    ];

    /// What the device may leave to a driver: from the GUEST_ features.
    pub fn taken_by_driver(features: u64) -> Self {
        let has = |bit: u32| features >> bit & 1 != 0;
        Self::of(Self::FEATURES.map(|(one, taken, _)| (one, has(taken))))
    }

    /// What a driver may leave to the device: from CSUM and the HOST_ features.
    pub fn sent_by_driver(features: u64) -> Self {
        let has = |bit: u32| features >> bit & 1 != 0;
        Self::of(Self::FEATURES.map(|(one, _, sent)| (one, has(sent))))
    }

    /// The GUEST_ feature bits of this set; inverse of [`taken_by_driver`](Self::taken_by_driver).
    pub fn guest_features(self) -> u64 {
        let bits = Self::FEATURES.iter().filter(|bit| self.contains(bit.0));
        bits.fold(0, |all, (_, taken, _)| all | 1 << taken)
    }

    /// CSUM and the HOST_ feature bits of this set; USO only with both.
    pub fn host_features(self) -> u64 {
        let both = self.contains(Self::USO4 | Self::USO6);
        let has = |one: Self| match one {
            Self::USO4 | Self::USO6 => both,
            other => self.contains(other),
        };
        let bits = Self::FEATURES.iter().filter(|bit| has(bit.0));
        bits.fold(0, |all, (_, _, sent)| all | 1 << sent)
    }

    /// `TUN_F_*`, the argument of TUNSETOFFLOAD. USO is asked for only for both versions of IP, since the kernel refuses one alone.
    pub fn tun_flags(self) -> u32 {
        let both = self.contains(Self::USO4 | Self::USO6);
        let flags = [
            (Self::CSUM, 1),
            (Self::TSO4, 2),
            (Self::TSO6, 4),
            (Self::ECN, 8),
        ];
        let set = flags.iter().filter(|(one, _)| self.contains(*one));
        set.fold(if both { 0x60 } else { 0 }, |all, (_, flag)| all | flag)
    }

    /// Whether all of `others` are in this set.
    pub fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// What is in both sets.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0).normalized()
    }

    fn of(bits: [(Self, bool); 6]) -> Self {
        let set = bits.iter().filter(|(_, is_set)| *is_set);
        set.fold(Self::NONE, |all, (one, _)| Self(all.0 | one.0))
            .normalized()
    }

    /// Takes out what needs another offload that is not there.
    #[must_use]
    pub fn normalized(self) -> Self {
        if !self.contains(Self::CSUM) {
            return Self::NONE;
        }
        if !self.contains(Self::TSO4) && !self.contains(Self::TSO6) {
            return Self(self.0 & !Self::ECN.0);
        }
        self
    }
}

impl BitOr for Offloads {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_the_bits_of_the_specification() {
        // GUEST_CSUM 1, GUEST_TSO4 7, GUEST_TSO6 8, GUEST_ECN 9, GUEST_USO4 54, GUEST_USO6 55.
        let guest = 1 << 1 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 54 | 1 << 55;
        assert_eq!(Offloads::taken_by_driver(guest), Offloads::ALL);
        assert_eq!(Offloads::ALL.guest_features(), guest);
        // CSUM 0, HOST_TSO4 11, HOST_TSO6 12, HOST_ECN 13, HOST_USO 56.
        let host = 1 << 0 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 56;
        assert_eq!(Offloads::sent_by_driver(host), Offloads::ALL);
        assert_eq!(Offloads::ALL.host_features(), host);
        assert_eq!(Offloads::ALL.tun_flags(), 0x6f);
    }

    #[test]
    fn nothing_is_offloaded_without_checksums_and_ecn_only_beside_tso() {
        assert_eq!(Offloads::taken_by_driver(1 << 7 | 1 << 54), Offloads::NONE);
        assert_eq!(Offloads::taken_by_driver(1 << 1 | 1 << 9), Offloads::CSUM);
        // One version of USO alone is EINVAL for a TAP.
        let uso4 = Offloads::CSUM | Offloads::USO4;
        assert_eq!((uso4.tun_flags(), uso4.host_features()), (1, 1));
    }
}
