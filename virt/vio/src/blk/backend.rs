//! Interface of a block device to the back end that stores its blocks.
//!
//! The device names each request by a *slot*, below [`BlockIo::depth`], which it uses for one
//! request at a time. A back end never blocks: [`submit`](BlockIo::submit) queues,
//! [`flush`](BlockIo::flush) starts what is queued, [`poll`](BlockIo::poll) collects what has
//! ended.
//!
//! Data move in one of four ways ([`Transfer`]): straight between the file and leased guest memory;
//! through a private buffer of the back end, which the device fills before `submit` or empties
//! after the completion, by copies that need no lease; by one copy between the guest and contents
//! that lie in this process's memory; or not at all.
//!
//! An operation that need not wait is not submitted: the device first offers it to
//! [`run_now`](BlockIo::run_now), and only one that this declines takes a slot.

use std::any::Any;
use std::os::fd::RawFd;
use std::path::PathBuf;

use guest_mem::{Hva, KeepAlive};

/// Method of data transfer between the back end and the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Into and out of leased guest memory.
    Direct,
    /// Through private buffers: no lease outlives a call.
    Bounce,
    /// One copy between the guest and [`BlockIo::contents`], before the call returns. Such a back
    /// end can also do with private buffers, for what stands between it and the device
    /// ([`Transfer::queued`]).
    Memory,
    /// No data move: reads leave the guest's buffers as they are, writes are forgotten.
    Nothing,
}

impl Transfer {
    /// Returns the method to use if operations are to be queued, not done at once.
    #[must_use]
    pub fn queued(self) -> Self {
        match self {
            Self::Direct | Self::Nothing => self,
            Self::Bounce | Self::Memory => Self::Bounce,
        }
    }
}

/// One contiguous piece of host memory under a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub hva: Hva,
    /// Bytes.
    pub len: u32,
}

/// An operation; offsets and lengths in bytes, inside the device's capacity. The default, a flush,
/// has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Op {
    /// From the back end into memory.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes, at least 1.
        len: u32,
    },
    /// From memory into the back end.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes, at least 1.
        len: u32,
        /// Complete only when the data are stable (a driver that did not accept FLUSH).
        durable: bool,
    },
    /// Makes all completed writes stable.
    #[default]
    Flush,
    /// The contents are no longer needed.
    Discard {
        /// First byte.
        offset: u64,
        /// Bytes, at least 1.
        len: u64,
    },
    /// The contents become zero.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes, at least 1.
        len: u64,
        /// Blocks may be given back; otherwise they stay reserved.
        unmap: bool,
    },
}

/// Outcome of the operation of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All of it was done; the slot no longer touches memory.
    Done,
    /// It failed with this errno (a cancelled one with ECANCELED); the slot no longer touches
    /// memory.
    Failed(i32),
    /// It was not begun: the host has refused, with this errno, something that it may grant at any
    /// time, as a descriptor. The slot does not touch memory, and the same may be submitted again.
    NotBegun(i32),
    /// [`BlockIo::cancel`] cannot stop it: the slot **stays in flight** and another outcome
    /// follows, perhaps never.
    NotCancellable,
}

/// One report of [`BlockIo::poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Which request.
    pub slot: u32,
    /// Outcome of its operation.
    pub outcome: Outcome,
}

/// A store of blocks with asynchronous operations. All calls come from the device's thread.
/// [`Any`], so that its maker can get the concrete type from [`Blk::backend`](super::Blk::backend).
pub trait BlockIo: Any + Send {
    /// The file that holds the blocks, if one does, for messages. Asks the kernel, so not for every
    /// request.
    fn path(&self) -> Option<PathBuf> {
        None
    }

    /// Size in bytes, a multiple of 512, constant.
    fn capacity(&self) -> u64;

    /// Whether writing is refused.
    fn is_read_only(&self) -> bool;

    /// Alignment of offsets and lengths of reads and writes, in bytes: 512, unless the disk takes
    /// larger blocks only.
    fn alignment(&self) -> u32 {
        super::SECTOR as u32
    }

    /// Whether a direct transfer may have these pieces. Data of others move through a private
    /// buffer, which such a back end has too ([`reserve`](BlockIo::reserve)).
    fn takes(&self, op: Op, pieces: &[Piece]) -> bool {
        let _ = (op, pieces);
        true
    }

    /// Whether [`Op::Discard`] is worth asking for. One that is asked for all the same, or gives
    /// nothing back, succeeds: it promises nothing.
    fn discards(&self) -> bool {
        true
    }

    /// Bytes of which discards are best multiples, a power of two: of others the whole blocks
    /// inside are given back.
    fn discard_block(&self) -> u32 {
        super::SECTOR as u32
    }

    /// Whether [`Op::WriteZeroes`] can always be done, if need be by writing zeroes. One that fails
    /// is answered as an I/O error, since a part of it may have been done.
    fn zeroes(&self) -> bool {
        true
    }

    /// Returns the number of slots: requests that may be in flight.
    fn depth(&self) -> u32;

    /// Returns the method of data transfer; constant.
    fn transfer(&self) -> Transfer;

    /// Whether operations end in the order in which they were submitted, and none later than one
    /// that [`run_now`](BlockIo::run_now) does. The device then offers VIRTIO_F_IN_ORDER.
    fn completes_in_order(&self) -> bool {
        false
    }

    /// Does the operation, if that takes no longer than copying its data would; `None` has done
    /// nothing (or nothing that doing it again would not repeat), and the device submits it.
    /// `pieces` as for [`submit`](BlockIo::submit). Reads and writes under [`Transfer::Memory`] are
    /// the device's to do.
    fn run_now(&mut self, op: Op, pieces: &[Piece]) -> Option<Outcome> {
        let _ = (op, pieces);
        None
    }

    /// All contents, with [`Transfer::Memory`]; otherwise not asked for.
    fn contents(&mut self) -> &mut [u8] {
        &mut []
    }

    /// Guest memory that pieces will point into; hold it until [`detach`](BlockIo::detach).
    fn attach(&mut self, keep: KeepAlive);

    /// The device is reset; nothing is in flight.
    fn detach(&mut self);

    /// Reserves `len` bytes of private buffer for `slot`; false when there is no room now. `len` is
    /// at most [`MAX_TRANSFER`](super::MAX_TRANSFER), for which an idle back end always has room.
    fn reserve(&mut self, slot: u32, len: u32) -> bool;

    /// The slot's private buffer from `offset` on: not empty, but perhaps only a part of the rest.
    /// Panics unless the slot is reserved, not in flight, and `offset` inside.
    fn buffer(&mut self, slot: u32, offset: u32) -> &mut [u8];

    /// Gives the slot's private buffer back, if it has one.
    fn unreserve(&mut self, slot: u32);

    /// Queues an operation. `pieces` add up to a direct transfer's length, and are empty otherwise,
    /// as when the slot is reserved.
    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]);

    /// Starts the queued operations.
    fn flush(&mut self);

    /// Appends the operations that have ended.
    fn poll(&mut self, done: &mut Vec<Completion>);

    /// Whether a poll would report something, or has something to start.
    fn has_completions(&mut self) -> bool;

    /// Asks to stop the operation of `slot`, which is in flight. An outcome follows.
    fn cancel(&mut self, slot: u32);

    /// Another thread will poll from now on; nothing is in flight.
    fn rebind(&mut self) {}

    /// The owner is about to sleep: from now on the descriptors become readable. Earlier
    /// completions are reported by [`has_completions`](BlockIo::has_completions) only.
    fn arm(&mut self);

    /// The owner polls again: the descriptors are not needed.
    fn disarm(&mut self);

    /// Appends descriptors that become readable, once armed, when something has ended.
    fn wake_fds(&self, fds: &mut Vec<RawFd>);
}

/// The methods of a [`BlockIo`](crate::blk::BlockIo) that only changes *when* operations happen:
/// all but `submit`, `flush`, `poll`, `cancel` and what wakes it go to the disk in the field
/// `below`.
#[macro_export]
macro_rules! pass_down {
    () => {
        fn path(&self) -> Option<std::path::PathBuf> {
            self.below.path()
        }

        fn capacity(&self) -> u64 {
            self.below.capacity()
        }

        fn is_read_only(&self) -> bool {
            self.below.is_read_only()
        }

        fn alignment(&self) -> u32 {
            self.below.alignment()
        }

        fn takes(&self, op: $crate::blk::Op, pieces: &[$crate::blk::Piece]) -> bool {
            self.below.takes(op, pieces)
        }

        fn discards(&self) -> bool {
            self.below.discards()
        }

        fn discard_block(&self) -> u32 {
            self.below.discard_block()
        }

        fn zeroes(&self) -> bool {
            self.below.zeroes()
        }

        fn depth(&self) -> u32 {
            self.below.depth()
        }

        fn transfer(&self) -> $crate::blk::Transfer {
            self.below.transfer().queued()
        }

        fn attach(&mut self, keep: guest_mem::KeepAlive) {
            self.below.attach(keep);
        }

        fn detach(&mut self) {
            self.below.detach();
        }

        fn reserve(&mut self, slot: u32, len: u32) -> bool {
            self.below.reserve(slot, len)
        }

        fn buffer(&mut self, slot: u32, offset: u32) -> &mut [u8] {
            self.below.buffer(slot, offset)
        }

        fn unreserve(&mut self, slot: u32) {
            self.below.unreserve(slot);
        }

        fn rebind(&mut self) {
            self.below.rebind();
        }
    };
}
