//! Lists of segments.

use alloc::vec::Vec;
use core::num::NonZeroU64;

use address::{Iova, PAGE_SIZE};
use iova::{IovaAllocator, Request};

use super::MapperCore;
use super::core_map::{no_segment, too_long};
use super::error::DmaMapError;
use super::limits::DeviceLimits;
use super::request::{DeviceSegment, Direction, Mapping, Segment};
use crate::clock::Clock;
use crate::invalidate::Invalidator;
use crate::table::IoMap;

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Maps a list whose segments may begin and end anywhere, in one stretch of pages, and adds what the device is to
    /// be told to `out`: one element for segments that meet, cut where `device`, which narrows the mapper's own limits as
    /// in [`map_for`](Self::map_for), takes no more.
    ///
    /// # Errors
    /// [`DmaMapError`]; nothing is mapped then, and `out` is as it was.
    pub fn map_list(
        &mut self,
        device: &DeviceLimits,
        segments: &[Segment],
        direction: Direction,
        out: &mut Vec<DeviceSegment>,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        let pages = check_list(segments)?;
        let limits = self.limits(Some(device));
        // Before anything is mapped, which the device would see.
        let elements = segments.iter().map(|one| limits.most_pieces(one.len));
        let elements = elements.fold(0, usize::saturating_add);
        out.try_reserve(elements)
            .map_err(|_| DmaMapError::OutOfMemory { elements })?;
        let request = Request::pages(pages).at_most(limits.last_page);
        let (first, allocated) = self.place(limits, request, segments, direction)?;
        let mut elements = self.elements(first, segments);
        let mut element = elements.next().expect("the list has a segment");
        // Without translation, where nothing is allocated, only the first.
        let mut len = element.len;
        for next in elements {
            if allocated > 0 {
                len = next.iova.raw() - first.raw() + next.len;
            }
            if element.iova.checked_add(element.len) == Some(next.iova) {
                element.len += next.len;
            } else {
                out.extend(limits.cut(element));
                element = next;
            }
        }
        out.extend(limits.cut(element));
        Ok(Mapping {
            iova: first,
            len: NonZeroU64::new(len).expect("every segment has a byte"),
            allocated,
            domain: self.shared.id,
            key: None,
        })
    }

    /// Memory as one element: several segments, or, without translation, one that the device cannot take just so.
    #[cold]
    #[inline(never)]
    pub(super) fn map_joined(
        &mut self,
        device: Option<&DeviceLimits>,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<(Iova, NonZeroU64, u64), DmaMapError<T::Error>> {
        let pages = check_list(segments)?;
        let limits = self.limits(device);
        // From page 0 on, since it is not known yet where they will be.
        let ends = self.elements(Iova::new(0), segments);
        let ends = ends.map(|one| one.iova.checked_add(one.len));
        let next = self.elements(Iova::new(0), segments).skip(1);
        if let Some(index) = ends
            .zip(next)
            .position(|(end, next)| end != Some(next.iova))
        {
            return Err(DmaMapError::Gap { index });
        }
        let len = segments.iter().map(|segment| segment.len).sum();
        if len > limits.max_segment {
            return Err(too_long(len, limits.max_segment));
        }
        let request = limits.request(pages)?;
        let (iova, allocated) = self.place(limits, request, segments, direction)?;
        let room = limits.room_at(iova);
        if len > room {
            // Without translation: nothing was mapped.
            return Err(too_long(len, room));
        }
        let len = NonZeroU64::new(len).expect("every segment has a byte");
        Ok((iova, len, allocated))
    }

    /// Gives the segments a place, each from a page of its own on, or, without translation, finds that the device addresses all
    /// of the memory. Gives where the first begins, and the pages allocated.
    fn place(
        &mut self,
        limits: DeviceLimits,
        request: Request,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<(Iova, u64), DmaMapError<T::Error>> {
        let first = segments[0].phys;
        if self.shared.policy.is_off {
            let last = limits.last.raw();
            return match segments
                .iter()
                .find(|one| one.phys.raw() + (one.len - 1) > last)
            {
                Some(&Segment { phys, .. }) => Err(DmaMapError::Unaddressable { phys, last }),
                None => Ok((Iova::new(first.raw()), 0)),
            };
        }
        let pieces = segments.iter().map(|one| {
            let pages = one.pages().expect("checked");
            (one.phys.align_down(PAGE_SIZE), pages)
        });
        let allocated = self.make(request, pieces, direction.access())?;
        let iova = allocated.start().raw() | first.offset_in(PAGE_SIZE);
        Ok((Iova::new(iova), allocated.pages()))
    }

    /// Where a device finds the segments if the first is in the page of `first`. Without translation, where they are.
    fn elements(&self, first: Iova, segments: &[Segment]) -> impl Iterator<Item = DeviceSegment> {
        let is_off = self.shared.policy.is_off;
        let mut page = first.align_down(PAGE_SIZE).raw();
        segments.iter().map(move |segment| {
            let translated = page | segment.phys.offset_in(PAGE_SIZE);
            page = page.wrapping_add(segment.pages().expect("checked") * PAGE_SIZE);
            let iova = if is_off {
                segment.phys.raw()
            } else {
                translated
            };
            DeviceSegment {
                iova: Iova::new(iova),
                len: segment.len,
            }
        })
    }
}

/// Pages of all segments.
fn check_list<E>(segments: &[Segment]) -> Result<u64, DmaMapError<E>> {
    let mut pages = 0_u64;
    for (index, &segment) in segments.iter().enumerate() {
        let more = segment.pages().ok_or(no_segment(index, segment))?;
        pages += more;
        if pages > iova::IovaPfn::MAX.raw() {
            let Segment { phys, len } = segment;
            return Err(DmaMapError::Wraps { index, phys, len });
        }
    }
    match pages {
        0 => Err(DmaMapError::NoSegments),
        pages => Ok(pages),
    }
}
