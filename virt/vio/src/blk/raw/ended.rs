//! End of operations: the results of their system calls, and the completions that come of them.

use super::call::CANCEL;
use super::slot::{Stage, State};
use super::{Completion, Op, Outcome, RawDisk};
use crate::blk::range::RangeProgress;

impl RawDisk {
    /// The sync of a file in the page cache has ended, and those of others with it.
    fn sync_ended(&mut self, result: i32) -> Outcome {
        let outcome = match result {
            0.. => Outcome::Done,
            _ => Outcome::Failed(-result),
        };
        let mut ended = Vec::new();
        if let Some(next) = self.syncs.ended(result.min(0), &self.file, &mut ended) {
            self.push(next);
        }
        for number in ended {
            self.end_in_flight(number, outcome);
        }
        outcome
    }

    /// Ends an operation that the kernel does not have.
    pub(super) fn end_in_flight(&mut self, number: u32, outcome: Outcome) {
        let completion = self.complete(number, outcome);
        self.early.push(completion);
    }

    fn complete(&mut self, number: u32, outcome: Outcome) -> Completion {
        let slot = &mut self.slots[number as usize];
        slot.state = State::Idle;
        slot.plan = None;
        slot.copy = None;
        if let Some(share) = slot.share.take() {
            self.changes.leave(share);
        }
        self.in_flight -= 1;
        Completion {
            slot: number,
            outcome,
        }
    }

    /// Takes calls that the kernel has completed.
    pub(super) fn collect(&mut self, done: &mut Vec<Completion>) {
        let mut answers = std::mem::take(&mut self.answers);
        self.engine.collect(&mut answers);
        for (user_data, result) in answers.drain(..) {
            if user_data & CANCEL != 0 {
                // 0: stopped, its own completion says ECANCELED. EALREADY: a thread of the kernel
                // is in it. ENOENT: no thread is, which is so of one that has ended, and of one
                // that the device is at (direct, or a read into the page cache).
                if result < 0 {
                    self.refused.push(user_data & !CANCEL);
                }
                continue;
            }
            let number = u32::from(user_data as u16);
            if let Some(outcome) = self.ended(number, result) {
                done.push(self.complete(number, outcome));
            }
        }
        self.answers = answers;
        self.begin_waiting();
    }

    /// Takes the result of a call; `None`: the operation goes on.
    fn ended(&mut self, number: u32, result: i32) -> Option<Outcome> {
        let slot = &mut self.slots[number as usize];
        let again = matches!(-result, libc::EINTR | libc::EAGAIN) && !slot.cancelled;
        match slot.stage {
            Stage::Sync if !again && !self.options.o_direct => Some(self.sync_ended(result)),
            _ if again => {
                self.push(number);
                None
            }
            Stage::Sync if result < 0 => Some(Outcome::Failed(-result)),
            Stage::Sync => Some(Outcome::Done),
            Stage::Fallocate { .. } => self.step_ended(number, result),
            Stage::Transfer | Stage::Zeroes { .. } | Stage::Load | Stage::Store => {
                self.moved(number, result)
            }
        }
    }

    /// A step of a discard or write-zeroes has ended; see
    /// [`RangePlan::ended`](crate::blk::range::RangePlan::ended).
    pub(super) fn step_ended(&mut self, number: u32, result: i32) -> Option<Outcome> {
        let slot = &mut self.slots[number as usize];
        let plan = slot.plan.as_mut().expect("made when it was submitted");
        match plan.ended(result, &mut self.support) {
            RangeProgress::Done => Some(Outcome::Done),
            RangeProgress::Failed(errno) => Some(Outcome::Failed(errno)),
            RangeProgress::Next if slot.cancelled => Some(Outcome::Failed(libc::ECANCELED)),
            RangeProgress::Next => self.begin_step(number),
        }
    }

    /// A stage that moves data has moved `result` bytes, or failed.
    fn moved(&mut self, number: u32, result: i32) -> Option<Outcome> {
        let slot = &mut self.slots[number as usize];
        let (_, len) = slot.extent().expect("a stage that moves data");
        if result >= 0 {
            // The kernel moves no more than it was asked to.
            slot.moved += result as u32;
            if slot.moved >= len {
                return self.moved_all(number);
            }
        }
        let errno = match -result {
            // To a driver this would say that nothing was done, and a part may have been.
            libc::EOPNOTSUPP => libc::EIO,
            errno @ 1.. => errno,
            0 => libc::EIO,
            _ if slot.cancelled => libc::ECANCELED,
            _ => {
                slot.advance(result as usize);
                self.push(number);
                return None;
            }
        };
        match slot.stage {
            Stage::Zeroes { .. } => self.zeroes_ended(number, -errno),
            Stage::Load | Stage::Store => self.copy_failed(number, errno),
            Stage::Transfer | Stage::Sync | Stage::Fallocate { .. } => Some(Outcome::Failed(errno)),
        }
    }

    /// A stage has moved all of its data.
    fn moved_all(&mut self, number: u32) -> Option<Outcome> {
        let slot = &self.slots[number as usize];
        match slot.stage {
            Stage::Zeroes { len, .. } => self.zeroes_ended(number, len as i32),
            Stage::Load => self.loaded(number),
            Stage::Store => self.stored(number),
            Stage::Transfer | Stage::Sync | Stage::Fallocate { .. } => {
                if matches!(slot.op, Op::Write { durable: true, .. }) && !self.options.o_direct {
                    return self.begin_sync(number);
                }
                Some(Outcome::Done)
            }
        }
    }
}
