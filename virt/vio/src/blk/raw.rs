//! Raw files and block devices behind a virtio-blk device.
//!
//! An operation is one system call on the file, or a sequence of them. A call that need not wait is
//! made at once ([`now`]). All others go to the disk's [`engine`]: the io_uring of the thread that
//! polls the disk ([`uring`]) or, where the host refuses io_uring or a part of it, threads of the
//! disk's own ([`threads`]). Both take the same calls and give the same answers, so the rest of
//! this module does not know which of them there is.
//!
//! | file | what it has |
//! |---|---|
//! | [`open`] | options, errors, the checks of a file and of the host |
//! | [`block_io`] | the calls of the device: submit, poll, cancel, buffers, waking |
//! | [`slot`], [`start`], [`ended`] | one operation: its state, its next call, the result of a call |
//! | [`call`] | the calls |
//! | [`engine`], [`uring`], [`threads`] | their execution: io_uring, or threads |
//! | [`now`] | calls that need not wait |
//! | [`align`], [`aligned_copy`], [`misaligned`] | O_DIRECT: alignment, partial blocks |
//! | [`turns`] | order of operations that must not all run at a time |
//! | [`sync`] | flushes of a file in the page cache |
//! | [`zeroes`] | write-zeroes where no fallocate does it |
//! | [`pool`] | private buffers |
//!
//! **Data** go straight into leased guest memory (readv, writev), or through a private pool: with
//! [`Transfer::Bounce`], and past the page cache where the guest's buffers lie as the storage
//! cannot take them ([`align`]), or the transfer is no whole number of the storage's blocks
//! ([`misaligned`]). Guest memory is not registered with io_uring, for that would pin all of it,
//! and a request has many pieces where a registered buffer is one. A short transfer is continued;
//! one that makes no progress (the file was truncated under us) is EIO.
//!
//! **Discard and write-zeroes** are fallocate, as [`range`](super::range) says, and zeroes written
//! as data ([`zeroes`]) where no mode of it does.
//!
//! **Durability.** Syncs of a file in the page cache run one at a time, and fail for good once one
//! has ([`sync`]). A durable write there is a write and such a sync after it; with O_DIRECT it is
//! one operation (RWF_DSYNC).
//!
//! Bounds: `depth` operations in flight; a pool of 512 × 16 KiB = 8 MiB, committed by the
//! host as it is touched, once something goes through it.
//!
//! UNSAFETY: the kernel is given addresses that it uses after the call returns. What keeps them
//! valid is stated at [`RawDisk::push`], and ensured in `submit` and `drop`. A safe wrapper would
//! have to own the buffers, and they belong to the guest.

mod align;
mod aligned_copy;
mod block_io;
mod call;
mod ended;
mod engine;
mod misaligned;
mod now;
mod open;
mod pool;
mod slot;
mod start;
mod sync;
mod threads;
mod turns;
mod uring;
mod zeroes;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_mem::KeepAlive;
use rustix::fs::fstatfs;

use super::SECTOR;
use super::backend::{BlockIo, Completion, Op, Outcome, Piece, Transfer};
use super::range::RangeSupport;
use align::Alignment;
use engine::Engine;
use now::Now;
pub use open::{RawDiskError, RawDiskOptions};
use pool::{CHUNK, Pool};
use slot::Slot;
use sync::Syncs;
use turns::Turns;
pub use uring::{UringRefusal, UringShare, try_io_uring};

/// Path of an open file, for messages.
fn path_of(file: &File) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

/// Magic number of the file system of `file` (the kernel's uapi `linux/magic.h`); `None` where the
/// host does not say.
fn file_system(file: &File) -> Option<u32> {
    // The numbers have 32 bits, whatever the field has.
    fstatfs(file).ok().map(|about| about.f_type as u32)
}

/// Duration for which `drop` waits for operations in flight before it leaks the memory they use.
const DROP_LIMIT: Duration = Duration::from_secs(2);

/// A raw file or block device.
///
/// Thread: made and attached anywhere, submitted to and polled from one thread only, the first that
/// does: on others nothing is submitted and nothing ends. To be dropped on that thread if anything
/// is in flight; elsewhere what is in flight is leaked after two seconds.
pub struct RawDisk {
    engine: Engine,
    /// Threads that are in a call keep it open.
    file: Arc<File>,
    capacity: u64,
    alignment: Alignment,
    /// Calls for ranges that the file has.
    support: RangeSupport,
    options: RawDiskOptions,
    now: Now,
    /// The file cannot say that an operation would wait: each is begun in a thread of the kernel.
    waits: bool,
    /// Operations by number: as many as were in use at the same time, at most `options.depth`.
    slots: Vec<Slot>,
    /// Made when it is first needed.
    pool: Option<Pool>,
    keep: Option<KeepAlive>,
    /// Operations the kernel has or will be given.
    in_flight: u32,
    /// Submissions that have ended before they reached the kernel.
    early: Vec<Completion>,
    /// Answers of the engine: `user_data` and result. Empty between polls.
    answers: Vec<(u64, i32)>,
    /// The vectors of an operation done at once.
    scratch: Vec<libc::iovec>,
    /// Of a file in the page cache.
    syncs: Syncs,
    /// Operations that change a file past the page cache whose blocks are larger than a sector.
    changes: Turns,
    /// Pieces of zeroes.
    zero_writers: Turns,
    /// Operations whose cancellation the kernel has refused, as it knows them. Empty between polls.
    refused: Vec<u64>,
}

// SAFETY: not `Send` by itself because of the pointers in `iovec`, which point into `pool` or into
// guest memory that `keep` holds; neither is tied to a thread.
unsafe impl Send for RawDisk {}

impl RawDisk {
    /// The host's refusal of io_uring, for which threads serve the disk. `None`: io_uring does.
    pub fn uring_refusal(&self) -> Option<&UringRefusal> {
        self.engine.uring_refusal()
    }

    /// The slot, made if it never was.
    fn slot(&mut self, number: u32) -> &mut Slot {
        assert!(number < self.options.depth, "a slot beyond the depth");
        let number = number as usize;
        if number >= self.slots.len() {
            self.slots.resize_with(number + 1, Slot::default);
        }
        &mut self.slots[number]
    }

    /// Reports a submission that does not reach the kernel.
    fn end_early(&mut self, slot: u32, errno: i32) {
        self.early.push(Completion {
            slot,
            outcome: Outcome::Failed(errno),
        });
    }

    /// The slot's private buffer from `offset` on, at most a chunk of it, while the kernel has no
    /// entry that names it.
    fn private_buffer(&mut self, number: u32, offset: u32) -> &mut [u8] {
        let slot = &self.slots[number as usize];
        assert!(offset < slot.reserved, "offset outside the private buffer");
        let within = offset % CHUNK;
        let len = (CHUNK - within).min(slot.reserved - offset);
        let chunk = slot.chunks[(offset / CHUNK) as usize];
        let pool = self.pool.as_ref().expect("a slot with chunks has a pool");
        // SAFETY: `[within, within + len)` lies in the chunk, which belongs to this slot alone. The
        // callers are `buffer`, of a slot that is not in flight, and the copying of misaligned
        // data, whose entries name the copy and not the chunks; so the kernel does not access it.
        // The borrow of `self` keeps others out.
        unsafe {
            std::slice::from_raw_parts_mut(pool.chunk(chunk).add(within as usize), len as usize)
        }
    }
}

impl Drop for RawDisk {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP_LIMIT;
        for slot in 0..self.slots.len() as u32 {
            self.cancel(slot);
        }
        let mut done = Vec::new();
        while self.in_flight != 0 && Instant::now() < deadline {
            self.poll(&mut done);
            done.clear();
            std::thread::yield_now();
        }
        if self.in_flight != 0 {
            // The kernel may write to these at any time: keep them for ever.
            std::mem::forget(self.keep.take());
            std::mem::forget(self.pool.take());
            std::mem::forget(std::mem::take(&mut self.slots));
            self.engine.abandon();
        }
    }
}

#[cfg(test)]
mod tests;
