//! What a device can take, for each mapping.

use alloc::boxed::Box;

use address::{Iova, PAGE_SHIFT, PAGE_SIZE};
use iova::{IovaPfn, Request};

use super::core_map::too_long;
use super::{Bounce, DeviceSegment, DmaMapError, Segment};

/// What a device can address and takes in one element, and what stands in for memory that it cannot address.
pub struct DeviceLimits {
    /// Last byte that the device addresses: its DMA mask.
    pub last: Iova,
    /// Most bytes in one element of a device's list; 0 counts as 1.
    pub max_segment: u64,
    /// No element crosses a multiple of this many bytes: 64 KiB for old disk controllers, 4 GiB for many others. A power of two
    /// from 4 KiB on (other numbers count as the next smaller one), or 0 for none.
    pub boundary: u64,
    /// For `Policy::OFF`, of the mapper's own limits.
    pub bounce: Option<Box<dyn Bounce>>,
}

impl DeviceLimits {
    /// A device of `bits` address bits, 12 to 64; fewer and more count as these. Elements may have any length and lie anywhere.
    pub fn of_bits(bits: u32) -> Self {
        Self {
            last: Iova::new(u64::MAX >> (64 - bits.clamp(12, 64))),
            max_segment: u64::MAX,
            boundary: 0,
            bounce: None,
        }
    }
}

impl Default for DeviceLimits {
    /// 64 bits, segments of any length.
    fn default() -> Self {
        Self::of_bits(64)
    }
}

/// Limits as numbers that are ready for use.
#[derive(Clone, Copy)]
pub(super) struct Reach {
    pub(super) last: Iova,
    /// Of those that the device addresses as a whole.
    pub(super) last_page: IovaPfn,
    pub(super) max_len: u64,
    /// Bytes between two boundaries, less 1.
    boundary: u64,
}

impl Reach {
    pub(super) fn of(limits: &DeviceLimits) -> Self {
        let last_page = match limits.last.raw().checked_add(1) {
            None => IovaPfn::MAX,
            Some(end) => IovaPfn::new((end >> PAGE_SHIFT).saturating_sub(1)),
        };
        Self {
            last: limits.last,
            last_page,
            max_len: limits.max_segment.max(1),
            boundary: match limits.boundary {
                0 => u64::MAX,
                boundary => (1 << boundary.max(PAGE_SIZE).ilog2()) - 1,
            },
        }
    }

    /// What both allow.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            last: self.last.min(other.last),
            last_page: self.last_page.min(other.last_page),
            max_len: self.max_len.min(other.max_len),
            boundary: self.boundary.min(other.boundary),
        }
    }

    /// For one element of so many pages.
    #[inline(always)]
    pub(super) fn request<E>(self, pages: u64) -> Result<Request, DmaMapError<E>> {
        let request = Request::pages(pages).at_most(self.last_page);
        match self.boundary {
            u64::MAX => Ok(request),
            _ => self.between_boundaries(request, pages),
        }
    }

    /// A range that is aligned to its size, rounded up to a power of two, crosses no larger one.
    #[cold]
    fn between_boundaries<E>(
        self,
        request: Request,
        pages: u64,
    ) -> Result<Request, DmaMapError<E>> {
        let most = (self.boundary >> PAGE_SHIFT) + 1;
        match pages <= most {
            true => Ok(request.aligned(pages.next_power_of_two().ilog2() as u8)),
            false => Err(too_long(pages << PAGE_SHIFT, most << PAGE_SHIFT)),
        }
    }

    /// Whether memory, without translation, is one element. (False as well, with a boundary, where it may be.)
    #[inline(always)]
    pub(super) fn has(self, segment: Segment) -> bool {
        segment.phys.raw() + (segment.len - 1) <= self.last.raw() && self.boundary == u64::MAX
    }

    /// Bytes that an element which begins at `iova` can have.
    pub(super) fn room_at(self, iova: Iova) -> u64 {
        let to_boundary = self.boundary - (iova.raw() & self.boundary);
        self.max_len.min(to_boundary.saturating_add(1))
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
        let (cut, crossed) = (
            len / self.max_len,
            len >> self.boundary.count_ones().min(63),
        );
        let crossings = if self.boundary == u64::MAX {
            0
        } else {
            crossed + 1
        };
        usize::try_from(cut.saturating_add(crossings).saturating_add(1)).unwrap_or(usize::MAX)
    }
}
