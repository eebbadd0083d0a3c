//! A checked request: the first step of every allocator.

use crate::{AllocError, Aperture, IovaPfn, IovaRange, Request};

/// Pages in the 64-bit space, as a power of two.
const MAX_ORDER: u8 = 52;

/// A request that some space could satisfy. `2^order >= pages > 0`.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Number of pages.
    pub pages: u64,
    /// The range starts at a multiple of `2^order` pages.
    pub order: u8,
    /// No page lies above it.
    pub last: IovaPfn,
}

/// The smallest order whose block holds `pages` pages (at least 1).
#[inline]
pub const fn order_of(pages: u64) -> u8 {
    (u64::BITS - (pages - 1).leading_zeros()) as u8
}

impl Wanted {
    /// Checks a request.
    ///
    /// # Errors
    /// [`AllocError::Impossible`].
    #[inline]
    pub fn of(request: &Request) -> Result<Self, AllocError> {
        let &Request {
            pages,
            align_order,
            last,
            ..
        } = request;
        if pages.wrapping_sub(1) >= 1 << MAX_ORDER || align_order > MAX_ORDER {
            return Err(AllocError::Impossible { pages, align_order });
        }
        let order = order_of(pages).max(align_order);
        Ok(Self { pages, order, last })
    }

    /// Error of a request for which there was no range: none is free now, or none ever will be.
    #[cold]
    pub fn failure(&self, aperture: &Aperture, asked: usize) -> AllocError {
        let (pages, align_order) = (self.pages, self.order);
        let could_fit = |usable: &IovaRange| {
            let (first, last) = (usable.first().raw(), usable.last().raw());
            place(first, last, pages, align_order).is_some()
        };
        if !aperture.usable().iter().any(could_fit) {
            return AllocError::Impossible { pages, align_order };
        }
        let last = self.last.min(aperture.last());
        AllocError::Exhausted { pages, last, asked }
    }
}

/// Highest multiple of `2^order` in `first..=last` from which `pages` pages stay inside.
#[inline]
pub fn place(first: u64, last: u64, pages: u64, order: u8) -> Option<u64> {
    let start = (last + 1).checked_sub(pages)? >> order << order;
    (start >= first).then_some(start)
}

/// A range that the caller knows to lie in the space.
///
/// # Panics
/// It does not.
#[inline]
pub fn range_at(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).expect("a range inside a range")
}

#[cfg(test)]
mod tests;
