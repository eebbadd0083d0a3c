//! Limits of a device, for each mapping.

use address::{Iova, PAGE_SHIFT, PAGE_SIZE};
use iova::{IovaPfn, Request};

use super::{DeviceSegment, DmaMapError, Segment};

/// Addresses that a device can use, and sizes that it takes in one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    pub(super) last: Iova,
    /// Of those that the device addresses as a whole.
    pub(super) last_page: IovaPfn,
    pub(super) max_segment: u64,
    /// Bytes between two boundaries, less 1.
    boundary: u64,
}

impl DeviceLimits {
    /// A device of `bits` address bits, 12 to 64; fewer and more count as these. Elements may have
    /// any length and lie anywhere.
    pub const fn of_bits(bits: u32) -> Self {
        let unused = match bits {
            0..12 => 52,
            12..64 => 64 - bits,
            _ => 0,
        };
        Self::up_to(Iova::new(u64::MAX >> unused))
    }

    /// The same for one whose last byte is `last`: its DMA mask.
    pub const fn up_to(last: Iova) -> Self {
        let last_page = match last.raw().checked_add(1) {
            None => IovaPfn::MAX,
            Some(end) => IovaPfn::new((end >> PAGE_SHIFT).saturating_sub(1)),
        };
        Self {
            last,
            last_page,
            max_segment: u64::MAX,
            boundary: u64::MAX,
        }
    }

    /// At most so many bytes in one element of the device's list; 0 counts as 1.
    pub const fn with_max_segment(self, bytes: u64) -> Self {
        let max_segment = if bytes == 0 { 1 } else { bytes };
        Self {
            max_segment,
            ..self
        }
    }

    /// No element crosses a multiple of so many bytes: 64 KiB for old disk controllers, 4 GiB for
    /// many others. A power of two from 4 KiB on (other numbers count as the next smaller one).
    pub const fn with_boundary(self, bytes: u64) -> Self {
        let bytes = if bytes < PAGE_SIZE { PAGE_SIZE } else { bytes };
        Self {
            boundary: (1 << bytes.ilog2()) - 1,
            ..self
        }
    }

    /// Returns the limits that satisfy both.
    pub(super) fn and(self, other: &Self) -> Self {
        Self {
            last: self.last.min(other.last),
            last_page: self.last_page.min(other.last_page),
            max_segment: self.max_segment.min(other.max_segment),
            boundary: self.boundary.min(other.boundary),
        }
    }

    /// Returns the request for one element of so many pages.
    #[inline(always)]
    pub(super) fn request<E>(self, pages: u64) -> Result<Request, DmaMapError<E>> {
        let order = match self.boundary {
            u64::MAX => 0,
            boundary => order_within(boundary, pages)?,
        };
        Ok(Request::pages(pages).at_most(self.last_page).aligned(order))
    }

    /// Whether memory, without translation, is one element. (False as well, with a boundary, where
    /// it may be.)
    #[inline(always)]
    pub(super) fn has(self, segment: Segment) -> bool {
        segment.phys.raw() + (segment.len - 1) <= self.last.raw() && self.boundary == u64::MAX
    }

    /// Bytes that an element which begins at `iova` can have.
    pub(super) fn room_at(self, iova: Iova) -> u64 {
        let to_boundary = self.boundary - (iova.raw() & self.boundary);
        self.max_segment.min(to_boundary.saturating_add(1))
    }

    /// An element in pieces that the device takes.
    pub(super) fn cut(self, mut rest: DeviceSegment) -> impl Iterator<Item = DeviceSegment> {
        core::iter::from_fn(move || {
            let len = rest.len.min(self.room_at(rest.iova));
            let piece = DeviceSegment { len, ..rest };
            rest.len -= len;
            rest.iova = rest.iova.checked_add(len).unwrap_or(rest.iova);
            (len > 0).then_some(piece)
        })
    }

    /// At least as many pieces as an element of `len` bytes is cut into, wherever it lies.
    pub(super) fn most_pieces(self, len: u64) -> usize {
        let crossings = match self.boundary {
            u64::MAX => 0,
            mask => (len >> mask.count_ones()) + 1,
        };
        let pieces = (len / self.max_segment).saturating_add(crossings + 1);
        usize::try_from(pieces).unwrap_or(usize::MAX)
    }
}

/// A range that is aligned to its size, rounded up to a power of two, crosses no larger one.
#[cold]
fn order_within<E>(boundary: u64, pages: u64) -> Result<u8, DmaMapError<E>> {
    let most = (boundary >> PAGE_SHIFT) + 1;
    match pages <= most {
        true => Ok(pages.next_power_of_two().ilog2() as u8),
        false => Err(too_long(pages << PAGE_SHIFT, most << PAGE_SHIFT)),
    }
}

impl Default for DeviceLimits {
    /// 64 bits, segments of any length.
    fn default() -> Self {
        Self::of_bits(64)
    }
}

#[cold]
pub(super) fn too_long<E>(len: u64, max: u64) -> DmaMapError<E> {
    DmaMapError::TooLong { len, max }
}
