//! What has ended, in the kernel or before it came there: which completions a slot's operation needs, and what they mean.

use super::sync::Begin;
use super::{CANCEL, Completion, Op, Outcome, State, UringFile};

impl UringFile {
    /// Starts the sync of a slot in state `InFlight`; an outcome if it has none.
    pub(super) fn begin_sync(&mut self, number: u32) -> Option<Outcome> {
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
        self.slots[number as usize].state = State::Idle;
        self.in_flight -= 1;
        Completion {
            slot: number,
            outcome,
        }
    }

    /// Takes what the kernel has completed.
    pub(super) fn collect(&mut self, done: &mut Vec<Completion>) {
        let mut answers = std::mem::take(&mut self.answers);
        self.engine.collect(&mut answers);
        for (user_data, result) in answers.drain(..) {
            if user_data & CANCEL != 0 {
                // 0: stopped, its own completion says ECANCELED. EALREADY: a thread of the kernel is in it. ENOENT: no thread
                // is, which is so of one that has ended, and of one that the device is at (direct, or a read into
                // the page cache).
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
    }

    /// What a finished entry means; `None`: the operation goes on.
    fn ended(&mut self, number: u32, result: i32) -> Option<Outcome> {
        let slot = &mut self.slots[number as usize];
        let is_sync = slot.op == Op::Flush || slot.syncing;
        let again = matches!(-result, libc::EINTR | libc::EAGAIN) && !slot.cancelled;
        if is_sync && !again && !self.options.o_direct {
            return Some(self.sync_ended(result));
        }
        if again {
            self.push(number);
            return None;
        }
        if let Op::WriteZeroes { unmap, .. } = slot.op
            && let Some(way) = slot.way.next(unmap, result)
        {
            if slot.cancelled {
                return Some(Outcome::Failed(libc::ECANCELED));
            }
            slot.way = way;
            self.push(number);
            return None;
        }
        if result < 0 {
            return Some(Outcome::Failed(-result));
        }
        let (Op::Read { len, .. } | Op::Write { len, .. }) = slot.op else {
            return Some(Outcome::Done);
        };
        // The kernel moves no more than it was asked to.
        slot.moved += result as u32;
        if slot.moved >= len {
            if matches!(slot.op, Op::Write { durable: true, .. }) && !self.options.o_direct {
                slot.syncing = true;
                return self.begin_sync(number);
            }
            return Some(Outcome::Done);
        }
        if result == 0 || slot.cancelled {
            return Some(Outcome::Failed(libc::EIO));
        }
        let mut skip = result as usize;
        while skip != 0 {
            let vector = &mut slot.iovecs[slot.first];
            let step = skip.min(vector.iov_len);
            vector.iov_base = vector.iov_base.wrapping_byte_add(step);
            vector.iov_len -= step;
            skip -= step;
            if vector.iov_len == 0 {
                slot.first += 1;
            }
        }
        self.push(number);
        None
    }
}
