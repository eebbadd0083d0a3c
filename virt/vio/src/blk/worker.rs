//! The device model of a disk in a process of its own: requests as bytes in an area that its owner
//! shares ([`worker_area`]), and a back end. It has no guest memory, no address and no ring.
//!
//! A request is checked by the code that checks one in a chain ([`request::check`]), and carried
//! out by the same back ends. Data go straight between the file and the area where the back end
//! takes that, as they do between the file and guest memory elsewhere.
//!
//! One request may pass through several windows; the parsed request and how much of it is done are
//! kept here, by slot. *Left out*: cancelling (the owner ends the whole process), and waiting for
//! what a host may grant again: such a request fails.

use std::os::fd::RawFd;

use guest_mem::{DmaFault, SharedFile};
use worker_area::{OwnerError, Shape, ShapeError, Submission, Verdict, Worker};

use super::backend::{BlockIo, Completion, Op, Piece, Transfer};
use super::finish::status_of;
use super::request::{self, Action, Data, HEADER_LEN, ID_LEN, Limits, STATUS_IOERR, STATUS_OK};
use super::{BlkConfig, BlkError, BlkFacts, BlkProfile};

/// Bytes of a slot's data: the largest request of Linux's read-ahead. 128 slots have 16.5 MiB.
const DATA: u32 = 128 << 10;

/// The shape of a disk's area, for so many requests at a time.
///
/// # Errors
/// No power of two up to 1024.
pub fn worker_shape(slots: u32) -> Result<Shape, ShapeError> {
    Shape::new(slots, DATA, HEADER_LEN, 1)
}

/// State of the request in a slot.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    action: Option<Action>,
    /// Bytes of its data that are done.
    done: u32,
    /// The window that the back end is at.
    window: Option<Submission>,
    /// Its data pass through a buffer of the back end's.
    is_buffered: bool,
}

/// A disk's device model over an area.
pub struct BlkWorker {
    io: Box<dyn BlockIo>,
    facts: BlkFacts,
    limits: Limits,
    serial: [u8; ID_LEN],
    slots: Vec<Progress>,
    completions: Vec<Completion>,
    in_flight: u32,
}

impl BlkWorker {
    /// Serves the slots of `area` from `io`.
    ///
    /// # Errors
    /// No device can have that configuration over it.
    ///
    /// # Panics
    /// If the back end is less deep than the area.
    pub fn new(
        config: &BlkConfig,
        mut io: Box<dyn BlockIo>,
        area: &Worker<SharedFile>,
    ) -> Result<Self, BlkError> {
        let slots = area.shape().slots();
        assert!(io.depth() >= slots, "a back end for each slot of the area");
        let facts = BlkFacts::of(&*io);
        let profile = BlkProfile::new(config, &facts)?;
        io.attach(area.keep_alive());
        Ok(Self {
            io,
            facts,
            limits: profile.limits,
            serial: config.serial,
            slots: vec![Progress::default(); slots as usize],
            completions: Vec::new(),
            in_flight: 0,
        })
    }

    /// Returns the facts of the disk that its owner has to know.
    pub fn facts(&self) -> &BlkFacts {
        &self.facts
    }

    /// Takes what was submitted, and answers what has ended; whether there was anything. The
    /// caller publishes the answers.
    ///
    /// # Errors
    /// The owner has made a mistake.
    pub fn step(&mut self, area: &mut Worker<SharedFile>) -> Result<bool, OwnerError> {
        let mut is_busy = false;
        while let Some(submission) = area.next_submission()? {
            is_busy = true;
            self.begin(area, submission);
        }
        self.io.flush();
        if self.in_flight == 0 {
            return Ok(is_busy);
        }
        let mut completions = std::mem::take(&mut self.completions);
        self.io.poll(&mut completions);
        is_busy |= !completions.is_empty();
        for Completion { slot, outcome } in completions.drain(..) {
            self.in_flight -= 1;
            self.end(area, slot, status_of(outcome));
        }
        self.completions = completions;
        Ok(is_busy)
    }

    /// Whether something has ended that a step would answer.
    pub fn has_ended(&mut self) -> bool {
        self.io.has_completions()
    }

    /// The caller is about to sleep: what ends from now on makes a descriptor readable.
    pub fn arm(&mut self) {
        self.io.arm();
    }

    /// Steps go on.
    pub fn disarm(&mut self) {
        self.io.disarm();
    }

    /// Appends those descriptors.
    pub fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        self.io.wake_fds(fds);
    }

    fn begin(&mut self, area: &mut Worker<SharedFile>, submission: Submission) {
        let slot = submission.slot;
        if submission.window.is_first() {
            self.limits.features = area.features();
            let action = self.parse(area, submission);
            self.slots[slot as usize] = Progress {
                action: Some(action),
                ..Progress::default()
            };
        }
        let own = &mut self.slots[slot as usize];
        own.window = Some(submission);
        match own.action {
            // No first window came before: the owner's mistake, and nothing that can be done.
            None => self.over(area, slot, STATUS_IOERR, 0),
            Some(Action::Status(status)) => self.over(area, slot, status, 0),
            Some(Action::GetId(len)) => self.tell_id(area, submission, len),
            Some(Action::Run(op)) => self.run(area, submission, op),
        }
    }

    /// Checks the request that a first window begins.
    fn parse(&self, area: &Worker<SharedFile>, submission: Submission) -> Action {
        let Submission {
            slot,
            totals,
            window,
        } = submission;
        let mut header = [0; HEADER_LEN as usize];
        area.head(slot).read(0, &mut header);
        let data = Data {
            readable: totals.readable,
            writable: totals.writable,
        };
        let read = |bytes: &mut [u8]| {
            if bytes.len() > window.readable as usize {
                return Err(DmaFault::BadRange.into());
            }
            area.data(slot).read(0, bytes);
            Ok(())
        };
        // What is in the slot is there.
        let checked = request::check(&header, data, &self.limits, read);
        checked.unwrap_or(Action::Status(STATUS_IOERR))
    }

    /// Answers as much of the serial number as the window has room for.
    fn tell_id(&mut self, area: &mut Worker<SharedFile>, submission: Submission, len: u32) {
        let Submission { slot, window, .. } = submission;
        let own = &mut self.slots[slot as usize];
        let part = (len - own.done).min(window.writable);
        let bytes = &self.serial[own.done as usize..][..part as usize];
        area.data(slot).write(window.writable_at(), bytes);
        own.done += part;
        match own.done == len || window.is_last {
            true => self.over(area, slot, STATUS_OK, part),
            false => area.answer(slot, Verdict::GoesOn, part),
        }
    }

    /// The part of `op` whose bytes the window has: `None` if it has none of them. Where they lie
    /// in the slot's data.
    fn part(op: Op, submission: Submission, done: u32) -> Option<(Op, u32)> {
        let window = submission.window;
        match op {
            Op::Read { .. } if window.writable == 0 => None,
            Op::Write { .. } if window.readable == 0 => None,
            Op::Read { offset, .. } => Some((
                Op::Read {
                    offset: offset + u64::from(done),
                    len: window.writable,
                },
                window.writable_at(),
            )),
            Op::Write {
                offset, durable, ..
            } => Some((
                Op::Write {
                    offset: offset + u64::from(done),
                    len: window.readable,
                    durable,
                },
                0,
            )),
            op => Some((op, 0)),
        }
    }

    /// Carries out what the window has of `op`.
    fn run(&mut self, area: &mut Worker<SharedFile>, submission: Submission, op: Op) {
        let slot = submission.slot;
        let done = self.slots[slot as usize].done;
        let Some((op, at)) = Self::part(op, submission, done) else {
            // Bytes that no operation takes.
            return match submission.window.is_last {
                true => self.over(area, slot, STATUS_IOERR, 0),
                false => area.answer(slot, Verdict::GoesOn, 0),
            };
        };
        let piece = match op {
            Op::Read { len, .. } | Op::Write { len, .. } => Some(Piece {
                hva: area.data_hva(slot, at),
                len,
            }),
            Op::Flush | Op::Discard { .. } | Op::WriteZeroes { .. } => None,
        };
        let transfer = self.io.transfer();
        let mut pieces = piece.as_slice();
        let mut is_buffered = false;
        match (transfer, piece) {
            (Transfer::Nothing, _) => pieces = &[],
            (Transfer::Direct, _) if self.io.takes(op, pieces) => {}
            (_, None) => {}
            (_, Some(Piece { len, .. })) => {
                pieces = &[];
                is_buffered = true;
                // A slot's data are less than a transfer. The pool may be empty all the same:
                // nothing waits for it here, the request fails.
                if !self.io.reserve(slot, len) {
                    return self.over(area, slot, STATUS_IOERR, 0);
                }
                if let Op::Write { .. } = op {
                    self.fill_buffer(area, slot, at, len);
                }
            }
        }
        self.slots[slot as usize].is_buffered = is_buffered;
        let moves_buffer = is_buffered || (transfer == Transfer::Memory && piece.is_some());
        let outcome = match moves_buffer {
            true => None,
            false => self.io.run_now(op, pieces),
        };
        match outcome {
            Some(outcome) => self.end(area, slot, status_of(outcome)),
            None => {
                self.in_flight += 1;
                self.io.submit(slot, op, pieces);
            }
        }
    }

    /// Ends the operation of the back end in `slot`.
    fn end(&mut self, area: &mut Worker<SharedFile>, slot: u32, status: u8) {
        let own = &mut self.slots[slot as usize];
        let submission = own.window.expect("it was begun in a window");
        let window = submission.window;
        let (read, all) = match own.action {
            Some(Action::Run(Op::Read { len, .. })) => (window.writable, len),
            Some(Action::Run(Op::Write { len, .. })) => (0, len),
            _ => (0, 0),
        };
        own.done += if all == 0 {
            0
        } else {
            read.max(window.readable.min(all - own.done))
        };
        let is_over = status != STATUS_OK || own.done >= all;
        let is_buffered = own.is_buffered;
        if is_buffered && read != 0 && status == STATUS_OK {
            self.empty_buffer(area, slot, window.writable_at(), read);
        }
        if is_buffered {
            self.io.unreserve(slot);
        }
        let written = if status == STATUS_OK { read } else { 0 };
        match is_over {
            true => self.over(area, slot, status, written),
            false => area.answer(slot, Verdict::GoesOn, written),
        }
    }

    /// Answers that the request is over.
    fn over(&mut self, area: &mut Worker<SharedFile>, slot: u32, status: u8, written: u32) {
        area.foot(slot).write(0, &[status]);
        area.answer(slot, Verdict::Over, written);
        self.slots[slot as usize] = Progress::default();
    }

    /// Copies from the area into the back end's buffer.
    fn fill_buffer(&mut self, area: &Worker<SharedFile>, slot: u32, at: u32, len: u32) {
        let mut done = 0;
        while done < len {
            let buffer = self.io.buffer(slot, done);
            let part = buffer.len().min((len - done) as usize);
            area.data(slot).read(at + done, &mut buffer[..part]);
            done += part as u32;
        }
    }

    /// And the other way.
    fn empty_buffer(&mut self, area: &Worker<SharedFile>, slot: u32, at: u32, len: u32) {
        let mut done = 0;
        while done < len {
            let buffer = self.io.buffer(slot, done);
            let part = buffer.len().min((len - done) as usize);
            area.data(slot).write(at + done, &buffer[..part]);
            done += part as u32;
        }
    }
}
