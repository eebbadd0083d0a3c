//! State byte of one page of a chunk: whether a range starts there, its size, and whether its owner
//! has pinned it.
//!
//! | low six bits | meaning |
//! |---|---|
//! | 0 to 8 | a range of 2^n pages starts here and is allocated |
//! | 32 to 40 | the same, n plus 32: its owner has pinned it |
//! | 63 | no range starts here that is allocated |
//!
//! So one comparison with an order ([`exact_order`]) tells that a range is allocated, unpinned, and
//! of that size.
//!
//! The bit above them, the *turn*, is compared with a bit that the designated remote freer writes
//! (`layout`: `exclusive_freed`). Where they differ, that core has freed the range. The owner
//! collects it by flipping the turn, in the same store that says "not allocated".

use core::num::NonZeroU64;

use crate::IovaRange;

/// The state of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct State(pub(super) u8);

/// Added to the order by an owner's pin.
const PINNED: u8 = 32;
const TURN: u8 = 1 << 6;

/// Largest size class inside a chunk: 256 pages. 512 pages and more are runs of whole chunks.
pub(super) const MAX_ORDER: usize = 8;
/// Largest size inside a chunk.
const MOST_PAGES: usize = 1 << MAX_ORDER;
/// The order of no range inside a chunk; no state has it.
const NO_ORDER: u8 = 62;

/// The order of the range that holds so many pages, or of exactly so many, for each number of them.
/// Tables: a logarithm is several times the work of a load.
const ORDERS: [u8; MOST_PAGES + 1] = orders(false);
const EXACT_ORDERS: [u8; MOST_PAGES + 1] = orders(true);

const fn orders(are_exact: bool) -> [u8; MOST_PAGES + 1] {
    let mut orders = [NO_ORDER; MOST_PAGES + 1];
    let mut pages = 1;
    while pages <= MOST_PAGES {
        if pages.is_power_of_two() || !are_exact {
            orders[pages] = pages.next_power_of_two().trailing_zeros() as u8;
        }
        pages += 1;
    }
    orders
}

#[inline(always)]
fn look_up(orders: &[u8; MOST_PAGES + 1], pages: u64) -> Option<usize> {
    let at = usize::try_from(pages).ok()?;
    orders.get(at).map(|order| usize::from(*order))
}

/// The order of the range inside a chunk that holds so many pages.
#[inline(always)]
pub(super) fn order_of(pages: u64) -> Option<usize> {
    look_up(&ORDERS, pages).filter(|order| *order <= MAX_ORDER)
}

/// The order of ranges of exactly so many pages; past [`MAX_ORDER`] where there are none inside a
/// chunk.
#[inline(always)]
pub(super) fn exact_order(pages: u64) -> Option<usize> {
    look_up(&EXACT_ORDERS, pages)
}

/// Pages of a range of an order.
#[inline(always)]
pub(super) fn pages_of(order: usize) -> NonZeroU64 {
    NonZeroU64::new(1 << (order % 64)).unwrap_or(NonZeroU64::MIN)
}

impl State {
    /// No range starts here.
    pub(super) const NONE: Self = Self(63);

    /// Whether exactly a range of this order is allocated here, and not pinned by the owner.
    #[inline(always)]
    pub(super) fn is_out(self, order: usize) -> bool {
        (self.0 ^ order as u8) & Self::NONE.0 == 0
    }

    /// Whether a range of this order is allocated here and pinned by the owner.
    #[inline(always)]
    pub(super) fn is_pinned_out(self, order: usize) -> bool {
        (self.0 ^ (order as u8 | PINNED)) & Self::NONE.0 == 0
    }

    /// Whether exactly `range` starts here, and is allocated and not pinned by the owner.
    pub(super) fn is_out_of(self, range: IovaRange) -> bool {
        exact_order(range.pages()).is_some_and(|order| self.is_out(order))
    }

    /// Whether exactly `range` starts here, pinned by the owner or not.
    pub(super) fn is_of(self, range: IovaRange) -> bool {
        exact_order(range.pages())
            .is_some_and(|order| self.is_out(order) || self.is_pinned_out(order))
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

    /// Whether its owner has pinned what is allocated here.
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
