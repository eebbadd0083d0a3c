//! Transfers past the page cache that are no whole number of the storage's blocks, in a copy of the
//! blocks around them.
//!
//! The protocol's unit is the sector of 512 bytes whatever the disk's block, so they are legal, if
//! rare: firmware, and drivers that do not look at the block size. Their data are in the private
//! buffer. A read loads the blocks, a write loads them, puts its data in and stores them
//! ([`start`](super::start) keeps other writes away meanwhile), and so do pieces of zeroes.

use super::aligned_copy::AlignedCopy;
use super::slot::Stage;
use super::{Op, Outcome, RawDisk};

impl RawDisk {
    /// Loads the blocks around a misaligned range.
    pub(super) fn load(&mut self, number: u32, offset: u64, len: u32) {
        let copy = AlignedCopy::new(offset, len, self.alignment.block);
        self.slots[number as usize].copy = Some(copy);
        self.move_copy(number, Stage::Load);
    }

    fn move_copy(&mut self, number: u32, stage: Stage) {
        let slot = &mut self.slots[number as usize];
        let copy = slot.copy.as_mut();
        let vector = copy.expect("made before it is loaded").vector();
        slot.move_through(stage, [vector].into_iter());
        self.push(number);
    }

    /// The blocks around a misaligned range are in the copy.
    pub(super) fn loaded(&mut self, number: u32) -> Option<Outcome> {
        let slot = &mut self.slots[number as usize];
        if matches!(slot.op, Op::Read { .. }) {
            self.between_copy_and_buffer(number, |copy, buffer| buffer.copy_from_slice(copy));
            return Some(Outcome::Done);
        }
        if slot.cancelled {
            return self.copy_failed(number, libc::ECANCELED);
        }
        match slot.op {
            Op::Write { .. } => {
                self.between_copy_and_buffer(number, |copy, buffer| copy.copy_from_slice(buffer));
            }
            _ => {
                let copy = slot.copy.as_mut();
                copy.expect("it has been loaded").zero();
            }
        }
        self.move_copy(number, Stage::Store);
        None
    }

    /// They are in the file, with the new data.
    pub(super) fn stored(&mut self, number: u32) -> Option<Outcome> {
        let slot = &mut self.slots[number as usize];
        let copy = slot.copy.take().expect("it has been stored");
        match slot.op {
            Op::WriteZeroes { .. } => self.zeroes_ended(number, copy.data as i32),
            _ => Some(Outcome::Done),
        }
    }

    /// Loading or storing has failed.
    pub(super) fn copy_failed(&mut self, number: u32, errno: i32) -> Option<Outcome> {
        match self.slots[number as usize].op {
            Op::WriteZeroes { .. } => self.zeroes_ended(number, -errno),
            _ => Some(Outcome::Failed(errno)),
        }
    }

    /// Gives `each` the pieces of the copy's range and of the private buffer that correspond.
    fn between_copy_and_buffer(&mut self, number: u32, each: impl Fn(&mut [u8], &mut [u8])) {
        let copy = self.slots[number as usize].copy.take();
        let mut copy = copy.expect("it has been loaded");
        let mut at = 0;
        while at < copy.data {
            let own = copy.data(at);
            let buffer = self.private_buffer(number, at);
            let len = own.len().min(buffer.len());
            each(&mut own[..len], &mut buffer[..len]);
            at += len as u32;
        }
        self.slots[number as usize].copy = Some(copy);
    }
}
