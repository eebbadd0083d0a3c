//! Calls carried out by a few threads of the disk's own, where the host has no io_uring for us.
//!
//! Four, as disk images have: a call that waits for the storage delays no more than the calls
//! behind it, and none of another disk. They are made with the disk, so that they inherit neither
//! the pinning nor the name of the core that polls it.
//!
//! A call that no thread has begun can be cancelled, one that has begun cannot. A thread that waits
//! in the kernel for storage keeps the file open, and what its call points to must stay: see
//! [`Threads::abandon`].
//!
//! UNSAFETY: system calls with addresses that another thread has prepared, for which
//! [`Threads::push`] says what it needs.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::Errno;

use super::SECTOR;
use super::engine::{CANCEL, Call};
use crate::blk::work_queue::WorkQueue;

/// Threads of a disk.
pub(super) const THREADS: usize = 4;

/// A call on its way.
struct Job {
    call: Call,
    user_data: u64,
}

// SAFETY: not `Send` by itself because of the pointers in a call. What they point to stays valid
// until the call is answered, on whichever thread, as who pushed it has promised.
unsafe impl Send for Job {}

type Queue = WorkQueue<Job, (u64, i32)>;

/// The threads of one disk, and what goes to and from them.
pub(super) struct Threads {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
    /// Pushed and not yet handed over.
    pending: Vec<Job>,
}

impl Threads {
    /// Starts them for `file`.
    ///
    /// # Errors
    /// No thread, or no descriptor.
    pub(super) fn start(file: &Arc<File>) -> io::Result<Self> {
        // Those that have been started end when this is dropped.
        let mut own = Self {
            queue: Arc::new(Queue::new()?),
            threads: Vec::new(),
            pending: Vec::new(),
        };
        for number in 0..THREADS {
            let (queue, file) = (Arc::clone(&own.queue), Arc::clone(file));
            let thread = std::thread::Builder::new()
                .name(format!("disk-{number}"))
                .spawn(move || serve(&queue, &file))?;
            own.threads.push(thread);
        }
        Ok(own)
    }

    /// Queues a call, answered as `user_data`.
    ///
    /// # Safety
    /// The memory that the call points to stays valid, and is used by no other code, until the call
    /// is answered.
    pub(super) unsafe fn push(&mut self, call: Call, user_data: u64) {
        self.pending.push(Job { call, user_data });
    }

    /// Takes back the call that is answered as `user_data`, or answers that it has begun, as
    /// io_uring does.
    pub(super) fn cancel(&mut self, user_data: u64) {
        self.flush();
        let is_it = |job: &Job| job.user_data == user_data;
        self.queue.cancel(is_it, |job, _| match job {
            Some(_) => Some((user_data, -libc::ECANCELED)),
            None => Some((user_data | CANCEL, -libc::EALREADY)),
        });
    }

    pub(super) fn flush(&mut self) {
        if !self.pending.is_empty() {
            self.queue.submit(&mut self.pending);
        }
    }

    /// Replaces `answers` by what has been answered since the last time.
    pub(super) fn collect(&mut self, answers: &mut Vec<(u64, i32)>) {
        answers.clear();
        if self.queue.has_done() {
            self.queue.take_done(answers);
        }
    }

    pub(super) fn has_events(&self) -> bool {
        !self.pending.is_empty() || self.queue.has_done()
    }

    pub(super) fn arm(&mut self) {
        self.queue.arm();
    }

    pub(super) fn disarm(&mut self) {
        self.queue.disarm();
    }

    pub(super) fn wake_fd(&self) -> RawFd {
        self.queue.wake_fd()
    }

    /// Leaves the threads to themselves: those that are in a call end with it. What it points to
    /// must stay for ever.
    pub(super) fn abandon(&mut self) {
        self.threads.clear();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue.stop();
        for thread in self.threads.drain(..) {
            // It runs nothing that panics.
            let _ = thread.join();
        }
    }
}

/// Runs a thread, until [`WorkQueue::stop`].
fn serve(queue: &Queue, file: &File) {
    while let Some(job) = queue.next() {
        let result = run(job.call, file);
        queue.finish(std::iter::once((job.user_data, result)));
    }
}

/// Carries a call out; what io_uring would answer.
fn run(call: Call, file: &File) -> i32 {
    let fd = file.as_raw_fd();
    match call {
        Call::Read {
            vectors,
            count,
            offset,
        } => {
            // SAFETY: the vectors and what they point to are valid until the call is answered,
            // which is after this, and used by no other code meanwhile, as who pushed it has
            // promised.
            let moved =
                unsafe { libc::preadv(fd, vectors, count as libc::c_int, file_offset(offset)) };
            transferred(moved)
        }
        Call::Write {
            vectors,
            count,
            offset,
            durable,
        } => {
            // SAFETY: as above.
            let moved =
                unsafe { libc::pwritev(fd, vectors, count as libc::c_int, file_offset(offset)) };
            match (transferred(moved), durable) {
                (moved @ 1.., true) => match ended(fdatasync(file)) {
                    0 => moved,
                    failed => failed,
                },
                (moved, _) => moved,
            }
        }
        Call::Sync => ended(fdatasync(file)),
        Call::Fallocate { mode, offset, len } => {
            let mode = FallocateFlags::from_bits_retain(mode as u32);
            match fallocate(file, mode, offset, len) {
                // What the host forbids it has not got, and there is another way.
                Err(Errno::NOSYS | Errno::PERM | Errno::ACCESS) => -libc::EOPNOTSUPP,
                done => ended(done),
            }
        }
    }
}

/// A disk is far smaller than 2^63 bytes: its size was a file offset.
fn file_offset(offset: u64) -> libc::off_t {
    offset as libc::off_t
}

/// The bytes that a call of this thread has moved, fewer than 2^31, or its error number, negative.
fn transferred(moved: isize) -> i32 {
    match moved {
        0.. => moved as i32,
        _ => -io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO),
    }
}

fn ended(done: rustix::io::Result<()>) -> i32 {
    done.map_or_else(|errno| -errno.raw_os_error(), |()| 0)
}

/// Whether the host lets this process free ranges of `file`, which ends at `end`, by the system
/// call that threads make.
pub(super) fn may_fallocate(file: &File, end: u64) -> bool {
    // Nothing lies behind the end.
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let refused = fallocate(file, mode, end, SECTOR).err();
    !matches!(refused, Some(Errno::NOSYS | Errno::PERM | Errno::ACCESS))
}
