//! The worker's side of an area. The worker trusts the owner, but checks its words; a wrong one is
//! an error that ends the worker.

use std::os::fd::OwnedFd;

use guest_mem::{FileError, Hva, KeepAlive, SharedFile, VolatileSlice};

use crate::Verdict;
use crate::layout::{
    AT_ANSWERED, AT_DATA, AT_FACTS, AT_FEATURES, AT_FOOT, AT_HEAD, AT_MAGIC, AT_OWNER_ASLEEP,
    AT_SLOTS, AT_STATE, AT_SUBMITTED, AT_TEXT, AT_TEXT_LEN, AT_VERSION, AT_WORKER_ASLEEP,
    FLAG_FIRST, FLAG_LAST, GOES_ON, MAGIC, OVER, STATE_FAILED, STATE_READY, VERSION, halves, word,
};
use crate::shape::{Shape, ShapeError, Totals, Window};
use crate::words::Words;

/// Number of facts about the device that a worker reports at its start.
pub const FACTS: usize = 7;
/// Largest length of the reason why a worker cannot start, in bytes.
pub const TEXT_LEN: usize = 1024;

/// Reason why an area cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It cannot be mapped.
    #[error("the area cannot be mapped")]
    Map(#[source] FileError),
    /// It is no area, or of another version of this program.
    #[error("no area of this version: magic {magic:#x}, version {version}")]
    Kind {
        /// Its first word.
        magic: u32,
        /// Its second.
        version: u32,
    },
    /// Its sizes are impossible.
    #[error("the area's shape: {0}")]
    Shape(#[from] ShapeError),
    /// It is shorter than its sizes require.
    #[error("an area of {len} bytes, which should have {wanted}")]
    Short {
        /// Its length.
        len: u64,
        /// Length that its sizes require.
        wanted: u64,
    },
}

/// A malformed submission of the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a submission that does not fit the area: {0:?}")]
pub struct OwnerError(pub Submission);

/// A window that the owner has submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submission {
    /// Its slot, below the number of slots.
    pub slot: u32,
    /// Sizes of the whole request.
    pub totals: Totals,
    /// Part of the request that is in the slot.
    pub window: Window,
}

/// The worker's side of an area.
#[derive(Debug)]
pub struct Worker<W> {
    words: W,
    shape: Shape,
    taken: u32,
    answered: u32,
    published: u32,
}

impl Worker<SharedFile> {
    /// Maps the area in `file`.
    ///
    /// # Errors
    /// It cannot be mapped, or is no area of this version.
    pub fn open(file: OwnedFd, len: u64) -> Result<Self, OpenError> {
        Self::new(SharedFile::open(file, 0, len).map_err(OpenError::Map)?)
    }

    /// Returns the head of the request in a slot.
    pub fn head(&self, slot: u32) -> VolatileSlice<'_> {
        let Self { words, shape, .. } = self;
        words.slice(shape.at_slot(slot), shape.head())
    }

    /// Returns the foot of the request in a slot.
    pub fn foot(&self, slot: u32) -> VolatileSlice<'_> {
        let Self { words, shape, .. } = self;
        words.slice(shape.at_foot(slot), shape.foot())
    }

    /// Returns the data of a slot.
    pub fn data(&self, slot: u32) -> VolatileSlice<'_> {
        let Self { words, shape, .. } = self;
        words.slice(shape.at_data(slot), shape.data())
    }

    /// Returns the host address of byte `at` of a slot's data, for system calls.
    pub fn data_hva(&self, slot: u32, at: u32) -> Hva {
        self.words.hva(self.shape.at_data(slot) + at as usize)
    }

    /// Returns the handle that keeps such addresses mapped.
    pub fn keep_alive(&self) -> KeepAlive {
        self.words.keep_alive()
    }
}

impl<W: Words> Worker<W> {
    /// Opens the area in `words`.
    ///
    /// # Errors
    /// It is no area of this version.
    pub fn new(words: W) -> Result<Self, OpenError> {
        let load = |at| words.load_u32(at);
        let (magic, version) = (load(AT_MAGIC), load(AT_VERSION));
        if (magic, version) != (MAGIC, VERSION) {
            return Err(OpenError::Kind { magic, version });
        }
        let shape = Shape::new(load(AT_SLOTS), load(AT_DATA), load(AT_HEAD), load(AT_FOOT))?;
        let (len, wanted) = (words.byte_len(), shape.area_len());
        if len < wanted {
            return Err(OpenError::Short { len, wanted });
        }
        Ok(Self {
            words,
            shape,
            taken: 0,
            answered: 0,
            published: 0,
        })
    }

    /// Returns the sizes of the area.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Reports to the owner that submissions are accepted from now on. The caller then writes the
    /// owner's eventfd.
    pub fn ready(&self, facts: [u64; FACTS]) {
        for (i, fact) in facts.into_iter().enumerate() {
            self.words.store_u64(AT_FACTS + 8 * i, fact);
        }
        self.words.store_u32(AT_STATE, STATE_READY);
    }

    /// Reports to the owner the reason why there is no device, cut to [`TEXT_LEN`] bytes. The
    /// caller then writes the owner's eventfd.
    pub fn failed(&self, why: &str) {
        let bytes = &why.as_bytes()[..why.len().min(TEXT_LEN)];
        for (i, chunk) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.words
                .store_u64(AT_TEXT + 8 * i, u64::from_le_bytes(word));
        }
        self.words.store_u32(AT_TEXT_LEN, bytes.len() as u32);
        self.words.store_u32(AT_STATE, STATE_FAILED);
    }

    /// Returns the features that the driver has accepted, as of the last submission taken.
    pub fn features(&self) -> u64 {
        self.words.load_u64(AT_FEATURES)
    }

    /// Whether [`next_submission`](Self::next_submission) would return a submission or an error.
    pub fn has_submissions(&self) -> bool {
        self.words.load_u32(AT_SUBMITTED) != self.taken
    }

    /// Takes the next submission, if there is one.
    ///
    /// # Errors
    /// It does not fit the area.
    pub fn next_submission(&mut self) -> Result<Option<Submission>, OwnerError> {
        if !self.has_submissions() {
            return Ok(None);
        }
        let at = self.shape.at_submission(self.taken);
        self.taken = self.taken.wrapping_add(1);
        let (slot, flags) = halves(self.words.load_u64(at));
        let (all_read, all_written) = halves(self.words.load_u64(at + 8));
        let (readable, writable) = halves(self.words.load_u64(at + 16));
        let submission = Submission {
            slot,
            totals: Totals {
                readable: all_read,
                writable: all_written,
            },
            window: Window {
                at: self.words.load_u64(at + 24),
                readable,
                writable,
                is_last: flags & FLAG_LAST != 0,
            },
        };
        let is_first = flags & FLAG_FIRST != 0;
        let wanted = self.shape.window(submission.totals, submission.window.at);
        let fits = slot < self.shape.slots() && submission.window == wanted;
        match fits && is_first == submission.window.is_first() {
            true => Ok(Some(submission)),
            false => Err(OwnerError(submission)),
        }
    }

    /// Answers the window in `slot`, of which the first `written` writable bytes are valid. If the
    /// request is over, its foot is valid, too. The answer is visible to the owner after
    /// [`publish`](Self::publish).
    pub fn answer(&mut self, slot: u32, verdict: Verdict, written: u32) {
        let at = self.shape.at_answer(self.answered);
        self.answered = self.answered.wrapping_add(1);
        let verdict = match verdict {
            Verdict::GoesOn => GOES_ON,
            Verdict::Over => OVER,
        };
        self.words.store_u64(at, word(slot, verdict));
        self.words.store_u64(at + 8, word(written, 0));
    }

    /// Publishes the answers to the owner. Returns whether the owner has to be woken.
    pub fn publish(&mut self) -> bool {
        if self.published == self.answered {
            return false;
        }
        self.published = self.answered;
        self.words.store_u32(AT_ANSWERED, self.answered);
        // Pairs with the fence of `Owner::arm`: either this load sees that the owner sleeps, or the
        // owner sees the index.
        self.words.fence();
        self.words.load_u32(AT_OWNER_ASLEEP) != 0
    }

    /// Requests that the owner write the worker's eventfd when it submits. The caller checks
    /// [`has_submissions`](Self::has_submissions) after this, before it sleeps.
    pub fn arm(&self) {
        self.words.store_u32(AT_WORKER_ASLEEP, 1);
        // Pairs with the fence of `Owner::publish`.
        self.words.fence();
    }

    /// Ends that request: the worker polls again.
    pub fn disarm(&self) {
        self.words.store_u32(AT_WORKER_ASLEEP, 0);
    }
}
