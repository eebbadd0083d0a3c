//! Pieces of guest memory that the frames of one burst lie in.

use std::ops::Range;

use arrayvec::ArrayVec;
use guest_mem::{Access, Dma, DmaFault, Intent, KeepAlive, VolatileSlice};

use crate::ring::Segment;

/// Pieces of a burst without an allocation: two for each frame.
const FIXED: usize = 64;

/// Pieces of guest memory, those of a frame one behind the other.
pub(super) struct Pieces<'k> {
    fixed: ArrayVec<VolatileSlice<'k>, FIXED>,
    /// Those of one frame that has more than all may have together: the burst ends with it.
    many: Vec<VolatileSlice<'k>>,
}

/// Pieces of one frame, which [`Pieces::get`] answers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PieceRange {
    start: u16,
    end: u16,
    is_many: bool,
}

/// Outcome of a translation.
pub(super) enum Translated {
    /// Their pieces.
    All(PieceRange),
    /// No room behind those of other frames: the burst is to be ended before this one.
    NoRoom,
}

impl<'k> Pieces<'k> {
    pub(super) fn new() -> Self {
        Self {
            fixed: ArrayVec::new(),
            many: Vec::new(),
        }
    }

    /// Whether a frame that is cut into a few pieces finds room.
    pub(super) fn has_room(&self) -> bool {
        !self.fixed.is_full() && self.many.is_empty()
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        self.fixed.clear();
        self.many.clear();
    }

    #[inline]
    pub(super) fn get(&self, range: PieceRange) -> &[VolatileSlice<'k>] {
        let range_of = Range {
            start: range.start.into(),
            end: usize::from(range.end),
        };
        match range.is_many {
            false => &self.fixed[range_of],
            true => &self.many[range_of],
        }
    }

    /// Translates `segments`, hinting the processor at each piece. After an error nothing was
    /// added.
    #[inline]
    pub(super) fn translate<D: Dma>(
        &mut self,
        dma: &mut D,
        keep: &'k KeepAlive,
        segments: impl Iterator<Item = Segment> + Clone,
        intent: Intent,
    ) -> Access<Translated> {
        let start = self.fixed.len();
        for segment in segments.clone() {
            let (mut iova, mut left) = (segment.iova, segment.len);
            while left != 0 {
                if self.fixed.is_full() {
                    self.fixed.truncate(start);
                    return self.translate_many(dma, keep, segments, intent);
                }
                let slice = match piece(dma, keep, iova, left, intent) {
                    Ok(slice) => slice,
                    Err(stop) => {
                        self.fixed.truncate(start);
                        return Err(stop);
                    }
                };
                slice.prefetch();
                self.fixed.push(slice);
                left -= slice.len();
                // A segment does not wrap: there is a byte behind the piece, or nothing is left.
                iova = iova.checked_add(slice.len().into()).unwrap_or(iova);
            }
        }
        Ok(Translated::All(PieceRange {
            start: start as u16,
            end: self.fixed.len() as u16,
            is_many: false,
        }))
    }

    #[cold]
    fn translate_many<D: Dma>(
        &mut self,
        dma: &mut D,
        keep: &'k KeepAlive,
        segments: impl Iterator<Item = Segment>,
        intent: Intent,
    ) -> Access<Translated> {
        if !self.fixed.is_empty() {
            return Ok(Translated::NoRoom);
        }
        let mut many = Vec::new();
        for segment in segments {
            let (mut iova, mut left) = (segment.iova, segment.len);
            while left != 0 {
                let slice = piece(dma, keep, iova, left, intent)?;
                many.push(slice);
                left -= slice.len();
                iova = iova.checked_add(slice.len().into()).unwrap_or(iova);
            }
        }
        self.many = many;
        // A chain has at most 33,792 descriptors; a frame of 64 KiB lies in as many pieces at most.
        Ok(Translated::All(PieceRange {
            start: 0,
            end: u16::try_from(self.many.len()).map_err(|_| DmaFault::BadRange)?,
            is_many: true,
        }))
    }
}

/// The first piece of a range.
#[inline]
fn piece<'k, D: Dma>(
    dma: &mut D,
    keep: &'k KeepAlive,
    iova: guest_mem::Iova,
    len: u32,
    intent: Intent,
) -> Access<VolatileSlice<'k>> {
    let (hva, len) = dma.host(iova, len, intent)?;
    // Of memory that is not kept nothing is touched: `Dma` is a safe trait.
    VolatileSlice::new(keep, hva, len).ok_or_else(|| DmaFault::BadRange.into())
}

/// Copies `bytes` to byte `offset` of `slices` in a row. Returns the number that there was room
/// for.
pub(super) fn write_slices(slices: &[VolatileSlice<'_>], offset: u32, bytes: &[u8]) -> usize {
    let (mut skip, mut done) = (offset, 0);
    for slice in slices {
        if skip >= slice.len() {
            skip -= slice.len();
            continue;
        }
        let len = ((slice.len() - skip) as usize).min(bytes.len() - done);
        slice.write(skip, &bytes[done..done + len]);
        done += len;
        skip = 0;
    }
    done
}

/// Copies all of `from` to byte `offset` of what `to` are in a row, as far as there is room.
pub(super) fn copy_slices(from: &[VolatileSlice<'_>], to: &[VolatileSlice<'_>], offset: u32) {
    let mut at = offset;
    for slice in from {
        let mut done = 0;
        let mut skip = at;
        for target in to {
            if skip >= target.len() {
                skip -= target.len();
                continue;
            }
            let len = (target.len() - skip).min(slice.len() - done);
            slice.slice(done, len).copy_to(target, skip);
            done += len;
            skip = 0;
            if done == slice.len() {
                break;
            }
        }
        at += slice.len();
    }
}
