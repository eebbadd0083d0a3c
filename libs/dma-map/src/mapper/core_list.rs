//! Lists of segments, and mapping without translation.

use alloc::vec::Vec;
use core::num::NonZeroU64;

use address::{Iova, PAGE_SIZE, PhysAddr};
use iova::{CoreAllocator, IovaAllocator, IovaRange};

use super::MapperCore;
use super::core_map::{no_segment, too_long, unaddressable, wraps};
use super::error::DmaMapError;
use super::request::{DeviceSegment, Direction, Mapping, Segment};
use crate::clock::Clock;
use crate::invalidate::Invalidator;
use crate::io_map::IoMap;

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Maps a list whose segments may begin and end anywhere, in one stretch of pages, and adds what the device is to
    /// be told to `out`: one element for segments that meet at a page boundary, as long as the device takes it.
    ///
    /// # Errors
    /// [`DmaMapError`]; nothing is mapped then, and `out` is as it was.
    pub fn map_list(
        &mut self,
        segments: &[Segment],
        direction: Direction,
        out: &mut Vec<DeviceSegment>,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        let pages = self.check_list(segments)?;
        if self.shared.policy.is_off {
            return self.list_off(segments, out);
        }
        let mapping = self.map_pages(segments, pages, direction)?;
        let mut page = mapping.range().start().raw();
        let mut element: Option<DeviceSegment> = None;
        let mut before: Option<Segment> = None;
        for &segment in segments {
            let joins = before.is_some_and(|before| before.joins(segment));
            match &mut element {
                Some(element) if joins => element.len += segment.len,
                _ => {
                    self.put(element.take(), out);
                    let iova = Iova::new(page | segment.phys.offset_in(PAGE_SIZE));
                    let len = segment.len;
                    element = Some(DeviceSegment { iova, len });
                }
            }
            before = Some(segment);
            page += segment.pages().expect("checked") * PAGE_SIZE;
        }
        self.put(element, out);
        Ok(mapping)
    }

    /// Adds an element in pieces that the device takes.
    fn put(&self, element: Option<DeviceSegment>, out: &mut Vec<DeviceSegment>) {
        let Some(DeviceSegment { mut iova, mut len }) = element else {
            return;
        };
        let max = self.shared.limits.max_segment.max(1);
        while len > max {
            out.push(DeviceSegment { iova, len: max });
            iova = iova.checked_add(max).expect("inside the mapping");
            len -= max;
        }
        out.push(DeviceSegment { iova, len });
    }

    #[cold]
    pub(super) fn map_joined(
        &mut self,
        segments: &[Segment],
        direction: Direction,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        let pages = self.check_list(segments)?;
        for (index, pair) in segments.windows(2).enumerate() {
            if !pair[0].joins(pair[1]) {
                return Err(DmaMapError::Gap { index });
            }
        }
        let len = segments.iter().map(|segment| segment.len).sum();
        if len > self.shared.limits.max_segment {
            return Err(too_long(len, self.shared.limits.max_segment));
        }
        if self.shared.policy.is_off {
            // Without translation it is contiguous only where the memory is.
            let mut end = segments[0].phys.raw();
            for (index, segment) in segments.iter().enumerate() {
                if segment.phys.raw() != end {
                    return Err(DmaMapError::Gap { index: index - 1 });
                }
                end = end.wrapping_add(segment.len);
            }
            return self.map_off(Segment::new(segments[0].phys, len), direction);
        }
        self.map_pages(segments, pages, direction)
    }

    /// Pages of all segments.
    fn check_list(&self, segments: &[Segment]) -> Result<u64, DmaMapError<T::Error>> {
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

    /// One stretch for all segments, each from a page of its own on.
    fn map_pages(
        &mut self,
        segments: &[Segment],
        pages: u64,
        direction: Direction,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        // A list that fails halfway has been seen by the device, and needs a place in the queue.
        self.make_room().map_err(DmaMapError::Invalidation)?;
        let access = direction.access();
        // Not for the memory of the first: the others lie elsewhere.
        let request = self.request(pages);
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
            if let Err(error) = self.shared.table.map(range, phys, access) {
                self.undo(allocated, done);
                return Err(DmaMapError::Table(error));
            }
            done += more;
        }
        let last = segments[segments.len() - 1];
        let offset = segments[0].phys.offset_in(PAGE_SIZE);
        let unused = PAGE_SIZE - 1 - (last.phys.raw() + (last.len - 1)) % PAGE_SIZE;
        Ok(Mapping {
            iova: Iova::new(allocated.start().raw() | offset),
            len: NonZeroU64::new(pages * PAGE_SIZE - offset - unused)
                .expect("every segment has a byte"),
            allocated: allocated.pages(),
            domain: self.domain(),
            key: None,
        })
    }

    #[cold]
    pub(super) fn map_off(
        &mut self,
        segment: Segment,
        direction: Direction,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        let limits = &self.shared.limits;
        let last = limits.last.raw();
        let phys = if segment.phys.raw() + (segment.len - 1) <= last {
            segment.phys
        } else {
            limits
                .bounce
                .as_ref()
                .and_then(|bounce| bounce.bounce(segment, last, direction))
                .ok_or(unaddressable(segment, last))?
        };
        Ok(self.untranslated(phys, segment.len))
    }

    fn list_off(
        &mut self,
        segments: &[Segment],
        out: &mut Vec<DeviceSegment>,
    ) -> Result<Mapping, DmaMapError<T::Error>> {
        let last = self.shared.limits.last.raw();
        for &segment in segments {
            if segment.phys.raw() + (segment.len - 1) > last {
                return Err(unaddressable(segment, last));
            }
        }
        for segment in segments {
            let iova = Iova::new(segment.phys.raw());
            self.put(
                Some(DeviceSegment {
                    iova,
                    len: segment.len,
                }),
                out,
            );
        }
        Ok(self.untranslated(segments[0].phys, segments[0].len))
    }

    /// Without translation the device's address is the memory's.
    fn untranslated(&self, phys: PhysAddr, len: u64) -> Mapping {
        Mapping {
            iova: Iova::new(phys.raw()),
            len: NonZeroU64::new(len).expect("a segment without bytes was refused"),
            allocated: 0,
            domain: self.domain(),
            key: None,
        }
    }
}
