//! What one byte says of one page of a chunk: whether a range starts there, how large it is, and whether its owner has pinned
//! it.
//!
//! | low six bits | meaning |
//! |---|---|
//! | 0 to 8 | a range of 2^n pages starts here and is allocated |
//! | 54 to 62 | the same, n plus 54: its owner has pinned it |
//! | 63 | no range starts here that is allocated |
//!
//! So `1 << byte` is the number of pages that may be freed, and for everything else no number of pages that a range has:
//! one comparison tells that a range is allocated, unpinned, and of that size.
//!
//! The bit above them, the *turn*, is compared with a bit that strangers write (`layout`: `given`): where they differ, a
//! stranger has given the range back. The owner takes note by turning it, in the same store that says "not allocated".

use core::num::NonZeroU64;

/// The state of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct State(pub(super) u8);

/// What an owner's pin adds.
const PINNED: u8 = 54;
const TURN: u8 = 1 << 6;

/// Two to the power of each byte's low six bits. A table: a shift by a variable is three times the work of a load.
static POWERS: [NonZeroU64; 256] = {
    let mut powers = [NonZeroU64::MIN; 256];
    let mut byte = 0;
    while byte < powers.len() {
        if let Some(power) = NonZeroU64::new(1 << (byte % 64)) {
            powers[byte] = power;
        }
        byte += 1;
    }
    powers
};

/// Pages of a range of an order; of a large one, some number.
#[inline(always)]
pub(super) fn pages_of(order: usize) -> NonZeroU64 {
    POWERS[order % POWERS.len()]
}

impl State {
    /// No range starts here.
    pub(super) const NONE: Self = Self(63);

    /// Whether exactly a range of so many pages is allocated here, and not pinned by the owner.
    #[inline(always)]
    pub(super) fn is_out(self, pages: u64) -> bool {
        POWERS[usize::from(self.0)].get() == pages
    }

    /// Whether a range of so many pages, at most 256, is allocated here and pinned by the owner.
    #[inline(always)]
    pub(super) fn is_pinned_out(self, pages: u64) -> bool {
        POWERS[usize::from(self.0)].get() == pages << PINNED
    }

    /// Whether nothing is allocated here.
    #[inline(always)]
    pub(super) fn is_none(self) -> bool {
        self.0 & Self::NONE.0 == Self::NONE.0
    }

    /// The order of the range that is allocated here.
    pub(super) fn order(self) -> Option<usize> {
        let order = usize::from(self.0 & Self::NONE.0) % usize::from(PINNED);
        (!self.is_none()).then_some(order)
    }

    pub(super) fn is_pinned(self) -> bool {
        !self.is_none() && self.0 & Self::NONE.0 >= PINNED
    }

    /// The state when a range of the order is allocated where there is none.
    #[inline(always)]
    pub(super) fn handed_out(self, order: usize) -> Self {
        debug_assert!(self.is_none(), "{self:?} is allocated");
        Self(self.0 ^ (Self::NONE.0 ^ order as u8))
    }

    #[inline(always)]
    pub(super) fn pinned(self) -> Self {
        Self(self.0 + PINNED)
    }

    #[inline(always)]
    pub(super) fn unpinned(self) -> Self {
        Self(self.0 - PINNED)
    }

    /// The state when nothing is allocated any more.
    #[inline(always)]
    pub(super) fn none(self) -> Self {
        Self(self.0 | Self::NONE.0)
    }

    /// The turn: 0 or 1.
    #[inline(always)]
    pub(super) fn turn(self) -> u64 {
        u64::from(self.0 >> 6 & 1)
    }

    /// The same with the turn at the lowest bit of `turn`.
    #[inline(always)]
    pub(super) fn at_turn(self, turn: u64) -> Self {
        Self(self.0 & !TURN | (turn as u8 & 1) << 6)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
