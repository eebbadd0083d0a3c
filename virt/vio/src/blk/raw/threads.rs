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
use std::os::fd::RawFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::call::{CANCEL, Call};
use crate::blk::work_queue::WorkQueue;

/// Threads of a disk.
pub(super) const THREADS: usize = 4;

/// A call on its way.
struct Job {
    call: Call,
    user_data: u64,
}

// SAFETY: not `Send` by itself because of the pointers in a call. What they point to stays valid
// until the call is answered, on whichever thread, as the contract of `push` demands.
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
    /// Starts them for `file`; when this returns they wait for calls, and have made those of a
    /// thread's own start.
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
        let (tell, begun) = std::sync::mpsc::channel();
        for number in 0..THREADS {
            let tell = tell.clone();
            let (queue, file) = (Arc::clone(&own.queue), Arc::clone(file));
            let thread = std::thread::Builder::new()
                .name(format!("disk-{number}"))
                .spawn(move || {
                    // The receiver is gone if another thread could not be started.
                    let _ = tell.send(());
                    serve(&queue, &file);
                })?;
            own.threads.push(thread);
        }
        for _ in 0..THREADS {
            // They say so before anything else.
            let _ = begun.recv();
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

    /// Threads look for calls by themselves.
    pub(super) fn enter(&mut self) {
        self.flush();
    }

    /// Replaces `answers` by the answers since the last call.
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

    pub(super) fn wake_fd(&self) -> Option<RawFd> {
        Some(self.queue.wake_fd())
    }

    /// Abandons the threads: those that are in a call end with it. The memory that it points to
    /// must stay valid for ever.
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
        // SAFETY: what the call points to is valid, and used by no other code, until it is
        // answered, which is after this, as the contract of `push` demands.
        let result = unsafe { job.call.run(file) };
        queue.finish(std::iter::once((job.user_data, result)));
    }
}
