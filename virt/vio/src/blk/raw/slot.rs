//! One operation: its state, and the system call that it is at.

use super::Op;
use super::aligned_copy::AlignedCopy;
use super::call::USE_SHIFT;
use crate::blk::range::{FallocateStep, RangePlan};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    #[default]
    Free,
    /// Prepared or being prepared; the kernel knows nothing of it.
    Idle,
    InFlight,
}

/// The system call that an operation is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// The read or write that it is.
    Transfer,
    /// A flush, or the sync after the data of a durable write.
    #[default]
    Sync,
    /// fallocate, of a discard or write-zeroes.
    Fallocate {
        step: FallocateStep,
        offset: u64,
        len: u64,
    },
    /// Zeroes written as data.
    Zeroes { offset: u64, len: u32 },
    /// The whole blocks around misaligned data are read into the copy.
    Load,
    /// They are written, with the new data in them.
    Store,
}

/// One operation. The vectors live here because the kernel reads `iovecs` when the ring is entered;
/// they are on the heap, so a slot may move.
#[derive(Default)]
pub(super) struct Slot {
    pub(super) state: State,
    pub(super) op: Op,
    pub(super) stage: Stage,
    pub(super) iovecs: Vec<libc::iovec>,
    /// First vector with bytes left to move.
    pub(super) first: usize,
    /// Bytes of the stage moved so far.
    pub(super) moved: u32,
    /// Chunks of the private buffer, in order.
    pub(super) chunks: Vec<u32>,
    pub(super) reserved: u32,
    pub(super) cancelled: bool,
    /// Counts the operations this slot has served, modulo 2^31.
    pub(super) uses: u32,
    /// Progress of a discard or write-zeroes.
    pub(super) plan: Option<RangePlan>,
    /// Blocks around misaligned data.
    pub(super) copy: Option<AlignedCopy>,
    /// Its share of the room for operations that change the file, while it runs.
    pub(super) share: Option<u32>,
}

impl Slot {
    /// Name of its operation, slot `number`'s, for the kernel.
    pub(super) fn user_data(&self, number: u32) -> u64 {
        u64::from(number) | u64::from(self.uses) << USE_SHIFT
    }

    /// The bytes that its stage moves through the vectors, from their first offset on; `None`: it
    /// moves none.
    pub(super) fn extent(&self) -> Option<(u64, u32)> {
        match (self.stage, self.op) {
            (Stage::Transfer, Op::Read { offset, len } | Op::Write { offset, len, .. }) => {
                Some((offset, len))
            }
            (Stage::Zeroes { offset, len }, _) => Some((offset, len)),
            (Stage::Load | Stage::Store, _) => self.copy.as_ref().map(AlignedCopy::extent),
            _ => None,
        }
    }

    /// Whether its stage reads from the file.
    pub(super) fn reads(&self) -> bool {
        match self.stage {
            Stage::Transfer => matches!(self.op, Op::Read { .. }),
            stage => stage == Stage::Load,
        }
    }

    /// Begins to move data through these vectors.
    pub(super) fn move_through(
        &mut self,
        stage: Stage,
        vectors: impl Iterator<Item = libc::iovec>,
    ) {
        self.stage = stage;
        self.iovecs.clear();
        self.iovecs.extend(vectors);
        self.first = 0;
        self.moved = 0;
    }

    /// Takes so many bytes, which have been moved, from the vectors.
    pub(super) fn advance(&mut self, mut bytes: usize) {
        while bytes != 0 {
            let vector = &mut self.iovecs[self.first];
            let step = bytes.min(vector.iov_len);
            vector.iov_base = vector.iov_base.wrapping_byte_add(step);
            vector.iov_len -= step;
            bytes -= step;
            if vector.iov_len == 0 {
                self.first += 1;
            }
        }
    }
}
