//! Zeroes written as data, in pieces, where no call of the kernel's makes them.
//!
//! A few pieces of a disk are in flight at a time ([`WRITERS`]), whatever its guest has asked for,
//! and after each piece the next request has its turn. The kernel's threads write them, never the
//! thread that enters the ring, so a piece costs a core two entries of its ring, and does not delay
//! other disks of the core.

use super::aligned_copy::Page;
use super::slot::Stage;
use super::{Outcome, RawDisk};
use crate::blk::range::ZERO_PIECE;

/// Pieces in flight at a time.
pub(super) const WRITERS: u32 = 2;

/// Memory that is written; the kernel reads it only. As few vectors as fill a piece.
static ZEROES: [Page; 16] = [Page::ZERO; 16];
const ZEROES_LEN: u32 = size_of_val(&ZEROES) as u32;
const _: () = assert!(ZERO_PIECE.is_multiple_of(ZEROES_LEN));

impl RawDisk {
    /// Writes the piece that the slot's request is at, whose turn it is.
    pub(super) fn write_zeroes(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        let Stage::Zeroes { offset, len } = slot.stage else {
            unreachable!("a slot that waits to write zeroes is at that stage");
        };
        if !self.alignment.fits(offset, len) {
            return self.load(number, offset, len);
        }
        let vectors = (0..len).step_by(ZEROES_LEN as usize).map(|at| libc::iovec {
            iov_base: (&raw const ZEROES).cast_mut().cast(),
            iov_len: (len - at).min(ZEROES_LEN) as usize,
        });
        slot.move_through(slot.stage, vectors);
        self.push(number);
    }

    /// The piece has ended: all of it is written, or it has failed.
    pub(super) fn zeroes_ended(&mut self, number: u32, result: i32) -> Option<Outcome> {
        self.zero_writers.leave(1);
        self.step_ended(number, result)
    }
}
