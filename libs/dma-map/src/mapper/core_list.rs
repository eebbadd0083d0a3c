//! Lists of segments, and mapping without translation.

use alloc::vec::Vec;
use core::num::NonZeroU64;

use address::{Iova, PAGE_SIZE, PhysAddr};
use iova::{CoreAllocator, IovaAllocator, IovaRange, Request};

use super::MapperCore;
use super::core_map::{no_segment, too_long, unaddressable, wraps};
use super::error::DmaMapError;
use super::limits::{DeviceLimits, Reach};
use super::request::{DeviceSegment, Direction, Mapping, Segment};
use crate::clock::Clock;
use crate::invalidate::Invalidator;
use crate::table::IoMap;

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Maps a list whose segments may begin and end anywhere, in one stretch of pages, and adds what the device is to
    /// be told to `out`: one element for segments that meet at a page boundary, cut where the device takes no more.
    ///
    /// # Errors
    /// [`DmaMapError`]; nothing is mapped then, and `out` is as it was.
    pub fn map_list(
        &mut self,
        segments: &[Segment],
        direction: Direction,
        out: &mut Vec<DeviceSegment>,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        self.list_within(self.shared.reach, segments, direction, out)
    }

    /// The same for a device of the domain that takes less than the mapper's own limits, as
    /// [`map_for`](Self::map_for) does.
    ///
    /// # Errors
    /// As [`map_list`](Self::map_list).
    pub fn map_list_for(
        &mut self,
        device: &DeviceLimits,
        segments: &[Segment],
        direction: Direction,
        out: &mut Vec<DeviceSegment>,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        self.list_within(self.reach(Some(device)), segments, direction, out)
    }

    fn list_within(
        &mut self,
        reach: Reach,
        segments: &[Segment],
        direction: Direction,
        out: &mut Vec<DeviceSegment>,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        let pages = check_list(segments)?;
        // Before anything is mapped, which the device would see.
        let elements = segments
            .iter()
            .map(|segment| reach.most_pieces(segment.len));
        let elements = elements.fold(0, usize::saturating_add);
        out.try_reserve(elements)
            .map_err(|_| DmaMapError::OutOfMemory { elements })?;
        if self.shared.policy.is_off {
            return self.list_off(reach, segments, out);
        }
        let request = Request::pages(pages).at_most(reach.last_page);
        let (iova, len, allocated) = self.map_pages(request, segments, pages, direction)?;
        let mut page = iova.align_down(PAGE_SIZE).raw();
        let mut element: Option<DeviceSegment> = None;
        let mut before: Option<Segment> = None;
        for &segment in segments {
            let joins = before.is_some_and(|before| before.joins(segment));
            match &mut element {
                Some(element) if joins => element.len += segment.len,
                _ => {
                    out.extend(
                        element
                            .take()
                            .into_iter()
                            .flat_map(|element| reach.cut(element)),
                    );
                    let iova = Iova::new(page | segment.phys.offset_in(PAGE_SIZE));
                    let len = segment.len;
                    element = Some(DeviceSegment { iova, len });
                }
            }
            before = Some(segment);
            page += segment.pages().expect("checked") * PAGE_SIZE;
        }
        out.extend(element.into_iter().flat_map(|element| reach.cut(element)));
        Ok(self.unkeyed(iova, len, allocated))
    }

    #[cold]
    #[inline(never)]
    pub(super) fn map_joined(
        &mut self,
        device: Option<&DeviceLimits>,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<(Iova, NonZeroU64, u64), DmaMapError<T::Error>> {
        let pages = check_list(segments)?;
        for (index, pair) in segments.windows(2).enumerate() {
            if !pair[0].joins(pair[1]) {
                return Err(DmaMapError::Gap { index });
            }
        }
        let reach = self.reach(device);
        let len = segments.iter().map(|segment| segment.len).sum();
        if len > reach.max_len {
            return Err(too_long(len, reach.max_len));
        }
        if !self.shared.policy.is_off {
            let request = reach.request(pages)?;
            return self.map_pages(request, segments, pages, direction);
        }
        // Without translation it is contiguous only where the memory is.
        let mut end = segments[0].phys.raw();
        for (index, segment) in segments.iter().enumerate() {
            if segment.phys.raw() != end {
                return Err(DmaMapError::Gap { index: index - 1 });
            }
            end = end.wrapping_add(segment.len);
        }
        let iova = self.map_off(device, Segment::new(segments[0].phys, len), direction)?;
        Ok((iova, NonZeroU64::new(len).expect("checked"), 0))
    }

    /// One stretch for all segments, each from a page of its own on: where it begins, its length, and the pages allocated.
    fn map_pages(
        &mut self,
        request: Request,
        segments: &[Segment],
        pages: u64,
        direction: Direction,
    ) -> Result<(Iova, NonZeroU64, u64), DmaMapError<T::Error>> {
        // A list that fails halfway has been seen by the device, and needs a place in the queue.
        if self.queue.is_full() {
            self.make_room().map_err(DmaMapError::Invalidation)?;
        }
        let allocated = match self.alloc.alloc(request) {
            Ok(allocated) => allocated,
            Err(error) => self.alloc_again(request, error)?,
        };
        let mut done = 0;
        for segment in segments {
            let more = segment.pages().expect("checked");
            let first = iova::IovaPfn::new(allocated.first().raw() + done);
            let range = IovaRange::new(first, more).expect("inside what was allocated");
            let phys = segment.phys.align_down(PAGE_SIZE);
            if let Err(error) = self.shared.table.map(range, phys, direction.access()) {
                self.undo(allocated, done);
                return Err(DmaMapError::Table(error));
            }
            done += more;
        }
        let last = segments[segments.len() - 1];
        let offset = segments[0].phys.offset_in(PAGE_SIZE);
        let unused = PAGE_SIZE - 1 - (last.phys.raw() + (last.len - 1)) % PAGE_SIZE;
        let len = NonZeroU64::new(pages * PAGE_SIZE - offset - unused);
        Ok((
            Iova::new(allocated.start().raw() | offset),
            len.expect("every segment has a byte"),
            allocated.pages(),
        ))
    }

    /// Without translation the device's address is the memory's, or that of memory which stands for it.
    #[cold]
    #[inline(never)]
    pub(super) fn map_off(
        &mut self,
        device: Option<&DeviceLimits>,
        segment: Segment,
        direction: Direction,
    ) -> Result<Iova, DmaMapError<T::Error>> {
        let reach = self.reach(device);
        let last = reach.last.raw();
        let within = |phys: PhysAddr| {
            let iova = Iova::new(phys.raw());
            match reach.room_at(iova) {
                room if room < segment.len => Err(too_long(segment.len, room)),
                _ => Ok(iova),
            }
        };
        if segment.phys.raw() + (segment.len - 1) <= last {
            return within(segment.phys);
        }
        let bounce = self.shared.bounce.as_ref();
        let low = bounce.and_then(|bounce| bounce.bounce(segment, last, direction));
        within(low.ok_or(unaddressable(segment, last))?)
    }

    fn list_off(
        &mut self,
        reach: Reach,
        segments: &[Segment],
        out: &mut Vec<DeviceSegment>,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        let last = reach.last.raw();
        for &segment in segments {
            if segment.phys.raw() + (segment.len - 1) > last {
                return Err(unaddressable(segment, last));
            }
        }
        out.extend(segments.iter().flat_map(|&Segment { phys, len }| {
            let iova = Iova::new(phys.raw());
            reach.cut(DeviceSegment { iova, len })
        }));
        let Segment { phys, len } = segments[0];
        let len = NonZeroU64::new(len).expect("checked");
        Ok(self.unkeyed(Iova::new(phys.raw()), len, 0))
    }

    fn unkeyed(&self, iova: Iova, len: NonZeroU64, allocated: u64) -> Mapping {
        Mapping {
            iova,
            len,
            allocated,
            domain: self.domain(),
            key: None,
        }
    }
}

/// Pages of all segments.
fn check_list<E>(segments: &[Segment]) -> Result<u64, DmaMapError<E>> {
    let mut pages = 0_u64;
    for (index, &segment) in segments.iter().enumerate() {
        let more = segment.pages().ok_or(no_segment(index, segment))?;
        pages = pages
            .checked_add(more)
            .filter(|pages| *pages <= iova::IovaPfn::MAX.raw())
            .ok_or(wraps(index, segment))?;
    }
    match pages {
        0 => Err(DmaMapError::NoSegments),
        pages => Ok(pages),
    }
}
