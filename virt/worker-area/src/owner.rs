//! The owner's side, which trusts nothing that the worker writes.

use std::os::fd::BorrowedFd;

use guest_mem::{FileError, SharedFile, VolatileSlice};

use crate::Verdict;
use crate::layout::{
    AT_ANSWERED, AT_DATA, AT_FACTS, AT_FEATURES, AT_FOOT, AT_HEAD, AT_MAGIC, AT_OWNER_ASLEEP,
    AT_SLOTS, AT_STATE, AT_SUBMITTED, AT_TEXT, AT_TEXT_LEN, AT_VERSION, AT_WORKER_ASLEEP,
    FLAG_FIRST, FLAG_LAST, GOES_ON, MAGIC, OVER, STATE_FAILED, STATE_READY, VERSION, halves, word,
};
use crate::shape::{Shape, Totals, Window};
use crate::words::Words;
use crate::worker::{FACTS, TEXT_LEN};

/// An answer of the worker's, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Slot of the request, which was out and is not any more.
    pub slot: u32,
    /// Whether the request goes on. Not behind its last window.
    pub verdict: Verdict,
    /// Bytes that the device wrote of the window, from its first on; no more than it had room for.
    pub written: u32,
}

/// Breach of the protocol by the worker. Nothing that it says is to be taken after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misbehaviour {
    /// It says that it has answered more than is out.
    #[error("{answers} answers, and {out} requests that are out")]
    TooMany {
        /// New answers.
        answers: u32,
        /// Requests without an answer.
        out: u32,
    },
    /// It names a slot that there is not.
    #[error("an answer for slot {0}, which there is not")]
    NoSlot(u32),
    /// It names a slot whose request it does not have: answered already, or never submitted.
    #[error("an answer for slot {0}, which is not out")]
    NotOut(u32),
    /// It answers neither of the two verdicts.
    #[error("an answer for slot {slot} with verdict {verdict}")]
    Verdict {
        /// The slot.
        slot: u32,
        /// Its verdict.
        verdict: u32,
    },
    /// It says that it wrote more than there was room for.
    #[error("an answer for slot {slot} of {written} bytes, for which there were {room}")]
    TooLong {
        /// The slot.
        slot: u32,
        /// Bytes that it says.
        written: u32,
        /// Bytes of the window that it may write.
        room: u32,
    },
    /// It wants a window behind the last.
    #[error("an answer for slot {0} that wants more than there is")]
    BehindEnd(u32),
}

/// How the worker's start stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// It has said nothing yet.
    Waiting,
    /// It serves, and says this of its device and of itself. To be checked.
    Ready([u64; FACTS]),
    /// It cannot, and says why: printable ASCII.
    Failed(String),
}

/// Part of a slot that the worker has.
#[derive(Clone, Copy, Debug)]
struct Out {
    /// Bytes that it may write.
    room: u32,
    is_last: bool,
}

/// The owner's side of an area.
#[derive(Debug)]
pub struct Owner<W> {
    words: W,
    shape: Shape,
    /// Of each slot, its window if that is out.
    out: Vec<Option<Out>>,
    out_count: u32,
    /// Submissions written into the ring, modulo 2^32, and those that were published.
    submitted: u32,
    published: u32,
    /// Answers taken, modulo 2^32.
    taken: u32,
}

impl Owner<SharedFile> {
    /// A new area in a sealed memory file.
    ///
    /// # Errors
    /// No such file is to be had.
    pub fn create(shape: Shape) -> Result<Self, FileError> {
        Ok(Self::new(SharedFile::create(shape.area_len())?, shape))
    }

    /// The file, for the worker.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.words.file()
    }

    /// The head of a slot's request.
    pub fn head(&self, slot: u32) -> VolatileSlice<'_> {
        let Self { words, shape, .. } = self;
        words.slice(shape.at_slot(slot), shape.head())
    }

    /// The foot.
    pub fn foot(&self, slot: u32) -> VolatileSlice<'_> {
        let Self { words, shape, .. } = self;
        words.slice(shape.at_foot(slot), shape.foot())
    }

    /// The data.
    pub fn data(&self, slot: u32) -> VolatileSlice<'_> {
        let Self { words, shape, .. } = self;
        words.slice(shape.at_data(slot), shape.data())
    }
}

impl<W: Words> Owner<W> {
    /// Lays an area out in `words`, which hold zeroes and which no worker has yet.
    ///
    /// # Panics
    /// If they are fewer than the shape's.
    pub fn new(words: W, shape: Shape) -> Self {
        assert!(
            words.byte_len() >= shape.area_len(),
            "an area of another shape"
        );
        for (at, value) in [
            (AT_MAGIC, MAGIC),
            (AT_VERSION, VERSION),
            (AT_SLOTS, shape.slots()),
            (AT_DATA, shape.data()),
            (AT_HEAD, shape.head()),
            (AT_FOOT, shape.foot()),
        ] {
            words.store_u32(at, value);
        }
        Self {
            words,
            shape,
            out: vec![None; shape.slots() as usize],
            out_count: 0,
            submitted: 0,
            published: 0,
            taken: 0,
        }
    }

    /// Its sizes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How the worker's start stands.
    pub fn start(&self) -> Start {
        match self.words.load_u32(AT_STATE) {
            STATE_READY => Start::Ready(std::array::from_fn(|i| {
                self.words.load_u64(AT_FACTS + 8 * i)
            })),
            STATE_FAILED => {
                let len = self.words.load_u32(AT_TEXT_LEN).min(TEXT_LEN as u32);
                let words = (0..len.div_ceil(8)).map(|i| AT_TEXT + 8 * i as usize);
                let bytes = words.flat_map(|at| self.words.load_u64(at).to_le_bytes());
                let shown = bytes.take(len as usize).map(|byte| match byte {
                    b' '..=b'~' => char::from(byte),
                    _ => '?',
                });
                Start::Failed(shown.collect())
            }
            _ => Start::Waiting,
        }
    }

    /// Tells which features the driver has accepted: for requests submitted from now on.
    pub fn set_features(&mut self, features: u64) {
        self.words.store_u64(AT_FEATURES, features);
    }

    /// Puts a window into the submission ring, whose bytes are in the slot.
    ///
    /// # Panics
    /// If the slot is out already, or the window is larger than it.
    pub fn submit(&mut self, slot: u32, totals: Totals, window: Window) {
        let out = &mut self.out[slot as usize];
        assert!(out.is_none(), "a slot holds one window at a time");
        let end = u64::from(window.writable_at()) + u64::from(window.writable);
        assert!(end <= u64::from(self.shape.data()) || window.writable == 0);
        assert!(window.readable <= self.shape.data());
        *out = Some(Out {
            room: window.writable,
            is_last: window.is_last,
        });
        self.out_count += 1;
        let at = self.shape.at_submission(self.submitted);
        self.submitted = self.submitted.wrapping_add(1);
        let first = if window.is_first() { FLAG_FIRST } else { 0 };
        let last = if window.is_last { FLAG_LAST } else { 0 };
        let words = [
            word(slot, first | last),
            word(totals.readable, totals.writable),
            word(window.readable, window.writable),
            window.at,
        ];
        for (i, value) in words.into_iter().enumerate() {
            self.words.store_u64(at + 8 * i, value);
        }
    }

    /// Shows the worker what was submitted; whether it has to be woken.
    pub fn publish(&mut self) -> bool {
        if self.published == self.submitted {
            return false;
        }
        self.published = self.submitted;
        self.words.store_u32(AT_SUBMITTED, self.submitted);
        // With that of `Worker::arm`: either this load sees that it sleeps, or it sees the index.
        self.words.fence();
        self.words.load_u32(AT_WORKER_ASLEEP) != 0
    }

    /// Windows that the worker has.
    pub fn out(&self) -> u32 {
        self.out_count
    }

    /// Whether [`next_answer`](Self::next_answer) has something to say.
    pub fn has_answers(&self) -> bool {
        self.words.load_u32(AT_ANSWERED) != self.taken
    }

    /// Takes an answer.
    ///
    /// # Errors
    /// It is none that the worker may give.
    pub fn next_answer(&mut self) -> Result<Option<Answer>, Misbehaviour> {
        let answers = self.words.load_u32(AT_ANSWERED).wrapping_sub(self.taken);
        if answers == 0 {
            return Ok(None);
        }
        let out = self.out_count;
        if answers > out {
            return Err(Misbehaviour::TooMany { answers, out });
        }
        let at = self.shape.at_answer(self.taken);
        let (slot, verdict) = halves(self.words.load_u64(at));
        let (written, _) = halves(self.words.load_u64(at + 8));
        let own = self.out.get_mut(slot as usize);
        let own = own.ok_or(Misbehaviour::NoSlot(slot))?;
        let Out { room, is_last } = own.ok_or(Misbehaviour::NotOut(slot))?;
        let verdict = match verdict {
            GOES_ON if is_last => return Err(Misbehaviour::BehindEnd(slot)),
            GOES_ON => Verdict::GoesOn,
            OVER => Verdict::Over,
            verdict => return Err(Misbehaviour::Verdict { slot, verdict }),
        };
        if written > room {
            return Err(Misbehaviour::TooLong {
                slot,
                written,
                room,
            });
        }
        *own = None;
        self.out_count -= 1;
        self.taken = self.taken.wrapping_add(1);
        Ok(Some(Answer {
            slot,
            verdict,
            written,
        }))
    }

    /// From now on the worker writes the owner's eventfd when it answers. Ask
    /// [`has_answers`](Self::has_answers) before sleeping: what came before is not announced.
    pub fn arm(&self) {
        self.words.store_u32(AT_OWNER_ASLEEP, 1);
        // With that of `Worker::publish`.
        self.words.fence();
    }

    /// The owner looks by itself again.
    pub fn disarm(&self) {
        self.words.store_u32(AT_OWNER_ASLEEP, 0);
    }
}
