//! A place in the ring and the lap it belongs to (virtio 1.2 §2.8.1).

use super::{DESC_F_AVAIL, DESC_F_USED};

/// Index, and the wrap counter in bit 16. One word, for the reason that
/// [`Counter`](crate::ring::counter::Counter) is one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::ring) struct Position(u32);

const WRAP: u32 = 1 << 16;

impl Position {
    /// Position at which both sides begin.
    pub(super) const FIRST: Self = Self(WRAP);

    #[inline(always)]
    pub(super) fn idx(self) -> u16 {
        self.0 as u16
    }

    #[inline(always)]
    pub(super) fn wrap(self) -> bool {
        self.0 & WRAP != 0
    }

    /// `count` descriptors further, at most once around (`count` ≤ `size` ≤ 32768).
    #[inline(always)]
    pub(super) fn advanced(self, count: u16, size: u16) -> Self {
        // The index is below 32768 and so is the count but for a full lap: at most 65,535, which
        // does not reach the bit.
        let at = self.0 + u32::from(count);
        if at & 0xffff >= u32::from(size) {
            Self((at - u32::from(size)) ^ WRAP)
        } else {
            Self(at)
        }
    }

    /// Whether `flags` say that the driver has made this descriptor available in this lap.
    #[inline(always)]
    pub(super) fn is_available(self, flags: u16) -> bool {
        let want = if self.wrap() {
            DESC_F_AVAIL
        } else {
            DESC_F_USED
        };
        flags & (DESC_F_AVAIL | DESC_F_USED) == want
    }

    /// The two bits that say that the device has used this descriptor in this lap.
    #[inline(always)]
    pub(super) fn used_flags(self) -> u16 {
        if self.wrap() {
            DESC_F_AVAIL | DESC_F_USED
        } else {
            0
        }
    }

    /// As event suppression structures and doorbells have it: the wrap counter is bit 15 (§2.8.10).
    pub(super) fn off_wrap(self) -> u16 {
        self.idx() | u16::from(self.wrap()) << 15
    }

    /// Returns the number of descriptors that `to` is ahead, below two laps. Indices are below
    /// `size`.
    pub(super) fn distance(self, to: Self, size: u16) -> u32 {
        let size = u32::from(size);
        let lap = |at: Self| u32::from(at.idx()) + if at.wrap() { 0 } else { size };
        (lap(to) + 2 * size - lap(self)) % (2 * size)
    }
}

impl From<(u16, bool)> for Position {
    fn from((idx, wrap): (u16, bool)) -> Self {
        Self(u32::from(idx) | if wrap { WRAP } else { 0 })
    }
}

impl From<Position> for (u16, bool) {
    fn from(at: Position) -> Self {
        (at.idx(), at.wrap())
    }
}

impl std::fmt::Debug for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.idx(), u8::from(self.wrap()))
    }
}
