//! Frames received: looked up in their sender's account, checked, counted.

use crate::account::{Account, Arrival};
use crate::frame::{self, CHECK_EVERY, MIN_FRAME};
use crate::memory::Memory;
use crate::outcome::Wrong;
use crate::queue::{Arrived, Malformed, Pieces};

/// Sums of one port, since the window began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub(crate) received: u64,
    pub(crate) bytes: u64,
    pub(crate) taken: u64,
    pub(crate) made: u64,
    pub(crate) checked: u64,
    pub(crate) foreign: u64,
    pub(crate) wrong: Wrong,
}

/// An account, and the length of its frames.
#[derive(Debug)]
pub(crate) struct Sender {
    pub(crate) account: Account,
    pub(crate) frame_len: u32,
    /// Number of frames that have arrived, and when that number changed last.
    pub(crate) progress: (u64, u64),
}

impl Sums {
    /// A frame that one of the driver's own queues sent. When it was sent, if it is good.
    #[inline]
    pub(crate) fn take_stamped(
        &mut self,
        arrived: Result<Arrived, Malformed>,
        pieces: &Pieces<'_>,
        memory: &Memory,
        senders: &mut [Sender],
        scratch: &mut Vec<u8>,
    ) -> Option<u64> {
        let Ok(frame) = arrived else {
            self.wrong.malformed += 1;
            return None;
        };
        if frame.first_len < MIN_FRAME {
            // No server need split a frame there, and none of ours are so short.
            self.wrong.length += u64::from(frame.len != frame.first_len);
            self.foreign += u64::from(frame.len == frame.first_len);
            return None;
        }
        let Some(stamp) = frame::read_stamp(memory, frame.at) else {
            self.foreign += 1;
            return None;
        };
        let Some(sender) = senders.get_mut(usize::from(stamp.queue)) else {
            self.wrong.forged += 1;
            return None;
        };
        match sender.account.arrive(stamp.number) {
            Arrival::New => {}
            Arrival::Duplicate => {
                self.wrong.duplicate += 1;
                return None;
            }
            Arrival::Forged => {
                self.wrong.forged += 1;
                return None;
            }
        }
        if frame.len != sender.frame_len {
            self.wrong.length += 1;
            return None;
        }
        if stamp.is_checked() {
            pieces.copy(scratch);
            self.checked += 1;
            if !frame::is_intact(scratch) {
                self.wrong.corrupt += 1;
                return None;
            }
        }
        self.received += 1;
        self.bytes += u64::from(frame.len);
        Some(stamp.time)
    }

    /// A frame that the server made, always the same, of which the first checked one is in `made`.
    #[inline]
    pub(crate) fn take_made(
        &mut self,
        arrived: Result<Arrived, Malformed>,
        pieces: &Pieces<'_>,
        len: u32,
        made: &mut Vec<u8>,
        scratch: &mut Vec<u8>,
    ) {
        let Ok(frame) = arrived else {
            self.wrong.malformed += 1;
            return;
        };
        if frame.len != len {
            self.wrong.length += 1;
            return;
        }
        self.made += 1;
        if self.made.is_multiple_of(CHECK_EVERY) {
            pieces.copy(scratch);
            self.checked += 1;
            let constant = frame::constant_part(scratch);
            if made.is_empty() {
                made.extend(constant);
            }
            if !frame::is_plausible(scratch) || constant != made.as_slice() {
                self.wrong.corrupt += 1;
                return;
            }
        }
        self.received += 1;
        self.bytes += u64::from(frame.len);
    }
}
