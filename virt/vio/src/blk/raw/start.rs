//! Start of operations, and of each next step: the system call that the engine is given, and what
//! it waits for before.
//!
//! Three queues may hold an operation back: the [turns](super::turns) of those that change the
//! file, and of [zeroes](super::zeroes); and [syncs](super::sync).
//!
//! Past the page cache a write that is no whole number of blocks reads the blocks around it, and
//! writes them with the new data in them. Another write to one of these blocks in between would be
//! undone, so such a write is [`ALONE`]: it begins when all that change the file have ended, and
//! others begin when it has. Reads do not wait: they find the bytes beside the new data unchanged
//! at any time.

use super::call::{Call, Vectors};
use super::slot::Stage;
use super::sync::Begin;
use super::{Op, Outcome, RawDisk, SECTOR};
use crate::blk::range::RangeStep;

/// Share of an operation that changes the file beside others.
const BESIDE_OTHERS: u32 = 1;
/// Share of one that changes it alone: all the room there is.
pub(super) const ALONE: u32 = u32::MAX;

impl RawDisk {
    /// Begins what waits for others, where they have ended.
    pub(super) fn begin_waiting(&mut self) {
        while let Some((number, share)) = self.changes.next() {
            self.slots[number as usize].share = Some(share);
            self.begin_or_end(number);
        }
        while let Some((number, _)) = self.zero_writers.next() {
            self.write_zeroes(number);
        }
    }

    /// Begins the operation of a slot in state `InFlight`, or reports that it has ended already.
    pub(super) fn begin_or_end(&mut self, number: u32) {
        if let Some(outcome) = self.begin(number) {
            self.end_in_flight(number, outcome);
        }
    }

    /// Begins the operation of a slot in state `InFlight`; an outcome if it has ended already.
    fn begin(&mut self, number: u32) -> Option<Outcome> {
        match self.slots[number as usize].op {
            Op::Flush => return self.begin_sync(number),
            Op::Discard { .. } | Op::WriteZeroes { .. } => return self.begin_step(number),
            Op::Read { offset, len } | Op::Write { offset, len, .. } => {
                match self.alignment.fits(offset, len) {
                    true => self.push(number),
                    false => self.load(number, offset, len),
                }
            }
        }
        None
    }

    /// Begins the step that a discard or write-zeroes is at; an outcome if there is none.
    pub(super) fn begin_step(&mut self, number: u32) -> Option<Outcome> {
        let slot = &mut self.slots[number as usize];
        let plan = slot.plan.expect("made when it was submitted");
        match plan.step(&self.support) {
            None => return Some(Outcome::Done),
            Some(RangeStep::Fallocate { step, offset, len }) => {
                slot.stage = Stage::Fallocate { step, offset, len };
                self.push(number);
            }
            Some(RangeStep::WriteZeroes { offset, len }) => {
                slot.stage = Stage::Zeroes { offset, len };
                self.zero_writers.enter(number, 1);
            }
        }
        None
    }

    /// The share that an operation needs to begin, where misaligned writes have to be kept from
    /// others.
    pub(super) fn share(&self, op: Op) -> Option<u32> {
        if self.alignment.block <= SECTOR as u32 {
            return None;
        }
        let fits = match op {
            Op::Read { .. } | Op::Flush => return None,
            Op::Write { offset, len, .. } => self.alignment.fits(offset, len),
            Op::WriteZeroes { offset, len, .. } => self.alignment.fits(offset, len),
            // Cut to whole blocks.
            Op::Discard { .. } => true,
        };
        Some(if fits { BESIDE_OTHERS } else { ALONE })
    }

    /// Starts the sync of a slot in state `InFlight`; an outcome if it has none.
    pub(super) fn begin_sync(&mut self, number: u32) -> Option<Outcome> {
        self.slots[number as usize].stage = Stage::Sync;
        let begin = match self.options.o_direct {
            true => Begin::Now,
            false => self.syncs.begin(number),
        };
        match begin {
            Begin::Now => self.push(number),
            Begin::Later => {}
            Begin::Failed(errno) => return Some(Outcome::Failed(errno)),
        }
        None
    }

    /// Gives the engine the system call that a slot in state `InFlight` is at.
    pub(super) fn push(&mut self, number: u32) {
        let slot = &self.slots[number as usize];
        let call = match slot.stage {
            Stage::Sync => Call::Sync,
            Stage::Fallocate { step, offset, len } => Call::Fallocate {
                mode: step.mode(),
                offset,
                len,
            },
            Stage::Transfer | Stage::Zeroes { .. } | Stage::Load | Stage::Store => {
                let (offset, _) = slot.extent().expect("a stage that moves data");
                let offset = offset + u64::from(slot.moved);
                let data = Vectors::new(&slot.iovecs[slot.first..], offset);
                let is_durable = matches!(slot.op, Op::Write { durable: true, .. });
                match slot.reads() {
                    true => Call::Read(data),
                    // In the page cache a failure of the write must be distinguished from one of
                    // its sync, which comes after it.
                    false => Call::Write {
                        data,
                        durable: is_durable && self.options.o_direct,
                    },
                }
            }
        };
        // Zeroes are never written by the thread that enters the ring: no guest waits
        // for them as for a read.
        let waits = self.waits || matches!(slot.stage, Stage::Zeroes { .. });
        let user_data = slot.user_data(number);
        // SAFETY: the call's addresses are (a) the slot's vectors, which are not touched while the
        // engine has the slot's call and lie on the heap; (b) what the vectors point to: chunks of
        // `self.pool` that belong to this slot until it is unreserved, guest memory that
        // `self.keep` was checked to keep mapped in `submit`, the slot's aligned copy, which lies
        // on the heap and stays until the operation has ended, or zeroes in a static. A slot is in
        // flight until its call is answered; `drop` waits for that, or leaks them all.
        unsafe { self.engine.push(&self.file, call, waits, user_data) };
    }
}
