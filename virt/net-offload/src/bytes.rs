//! Bytes of a frame, wherever they are.

use std::ops::Range;

/// Frame whose bytes may be scattered. Reading may find other bytes each time, as in memory that a
/// guest writes to; the length stays.
pub trait FrameBytes {
    /// Length of the frame.
    fn frame_len(&self) -> usize;

    /// Calls `each` with the bytes of `range` in order, in pieces of any length. `range` is within
    /// the frame.
    fn pieces(&self, range: Range<usize>, each: &mut dyn FnMut(&[u8]));

    /// Copies the bytes from `start` on to `out`, all of it. They are within the frame.
    fn copy_to(&self, start: usize, out: &mut [u8]) {
        let mut at = 0;
        let len = out.len();
        self.pieces(start..start + len, &mut |piece| {
            out[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        });
    }
}

impl FrameBytes for [u8] {
    fn frame_len(&self) -> usize {
        self.len()
    }

    fn pieces(&self, range: Range<usize>, each: &mut dyn FnMut(&[u8])) {
        each(&self[range]);
    }
}

impl FrameBytes for [&[u8]] {
    fn frame_len(&self) -> usize {
        self.iter().map(|piece| piece.len()).sum()
    }

    fn pieces(&self, range: Range<usize>, each: &mut dyn FnMut(&[u8])) {
        let mut start = 0;
        for piece in self {
            let from = range.start.max(start) - start;
            let to = (range.end.max(start) - start).min(piece.len());
            if from < to {
                each(&piece[from..to]);
            }
            start += piece.len();
        }
    }
}
