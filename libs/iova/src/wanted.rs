//! Check of a request: the first step of every allocator.

use crate::{AllocError, Aperture, IovaPfn, IovaRange, Request};

/// Binary logarithm of the number of pages in the 64-bit space.
const MAX_ORDER: u8 = 52;

/// A checked request: some address space could satisfy it. `2^order >= pages > 0`.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Number of pages.
    pub pages: u64,
    /// The range starts at a multiple of `2^order` pages.
    pub order: u8,
    /// Highest page that the range may contain.
    pub last: IovaPfn,
}

/// Returns the smallest order whose block holds `pages` pages (at least 1).
#[inline]
pub const fn order_of(pages: u64) -> u8 {
    (u64::BITS - (pages - 1).leading_zeros()) as u8
}

impl Wanted {
    /// Checks a request, and rounds its alignment up to its size.
    ///
    /// # Errors
    /// [`AllocError::Impossible`]: no space has such a range.
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

    /// Returns the error of a request for which no range was found: [`AllocError::Exhausted`] with
    /// `asked` if `aperture` could hold such a range, [`AllocError::Impossible`] if not.
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

/// Returns the highest multiple of `2^order` from which `pages` pages lie inside `first..=last`.
#[inline]
pub fn place(first: u64, last: u64, pages: u64, order: u8) -> Option<u64> {
    let start = (last + 1).checked_sub(pages)? >> order << order;
    (start >= first).then_some(start)
}

/// Returns the range of `pages` pages from `first` on, which the caller knows to lie in the space.
///
/// # Panics
/// The range does not lie in the space: a bug of the caller.
#[inline]
pub fn range_at(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).expect("a range inside a range")
}

#[cfg(test)]
mod tests;
