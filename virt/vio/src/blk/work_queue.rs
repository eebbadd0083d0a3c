//! The queue between a device's thread and the threads that carry its operations out.
//!
//! One lock guards both directions; it is held for a few list operations, never across I/O. The
//! device's thread takes it once per batch of submissions, and to collect only if
//! [`WorkQueue::has_done`] says that there is something.
//!
//! *Waking the device's thread.* It says that it is about to sleep ([`WorkQueue::arm`]) under the
//! lock, and a worker that adds an answer looks under the lock. So an answer is either in the list
//! before the arming, and then [`WorkQueue::has_done`], which the owner asks next, says so; or
//! after, and then the worker writes the eventfd.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use rustix::event::{EventfdFlags, eventfd};

struct Lists<J, D> {
    waiting: VecDeque<J>,
    done: Vec<D>,
    /// The owner sleeps, or is about to.
    armed: bool,
    /// Workers that wait, or were woken and have not looked yet.
    idle: usize,
    stopping: bool,
}

/// Jobs one way, answers the other way, and what wakes either side.
pub struct WorkQueue<J, D> {
    lists: Mutex<Lists<J, D>>,
    /// There are jobs, or it is time to stop.
    work: Condvar,
    /// Length of `done`, written under the lock.
    done_len: AtomicUsize,
    /// Readable when something has ended and the owner is armed.
    wake: OwnedFd,
}

impl<J, D> WorkQueue<J, D> {
    /// An empty queue.
    ///
    /// # Errors
    /// No eventfd is to be had.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            lists: Mutex::new(Lists {
                waiting: VecDeque::new(),
                done: Vec::new(),
                armed: false,
                idle: 0,
                stopping: false,
            }),
            work: Condvar::new(),
            done_len: AtomicUsize::new(0),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    fn lists(&self) -> MutexGuard<'_, Lists<J, D>> {
        // Nothing inside can panic but for want of memory; the lists are whole in any case.
        self.lists
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    // The device's thread.

    /// Hands jobs to the workers.
    pub fn submit(&self, jobs: &mut Vec<J>) {
        let mut lists = self.lists();
        // A notification is a system call even if no worker waits. A worker that has something to
        // do looks for more afterwards.
        let wanted = jobs.len().min(lists.idle);
        lists.waiting.extend(jobs.drain(..));
        drop(lists);
        for _ in 0..wanted {
            self.work.notify_one();
        }
    }

    /// Whether [`take_done`](Self::take_done) would find something.
    pub fn has_done(&self) -> bool {
        // Acquire: orders this load before that of the list in `take_done`. The lock makes the
        // store visible to a thread that has armed.
        self.done_len.load(Ordering::Acquire) != 0
    }

    /// Exchanges the list of completions for an empty one.
    pub fn take_done(&self, into: &mut Vec<D>) {
        debug_assert!(into.is_empty());
        let mut lists = self.lists();
        std::mem::swap(&mut lists.done, into);
        self.done_len.store(0, Ordering::Release);
    }

    /// Takes back the job that `is_it` picks, if no worker has begun it, and adds what `answer`
    /// makes of it. `answer` has `None` for a job that has begun, and what has ended and not been
    /// taken.
    pub fn cancel(
        &self,
        is_it: impl FnMut(&J) -> bool,
        answer: impl FnOnce(Option<J>, &[D]) -> Option<D>,
    ) {
        let mut lists = self.lists();
        let at = lists.waiting.iter().position(is_it);
        let job = at.and_then(|at| lists.waiting.remove(at));
        if let Some(answer) = answer(job, &lists.done) {
            self.add(&mut lists, answer);
        }
    }

    /// From now on an answer makes the descriptor readable.
    pub fn arm(&self) {
        // What is counted in it is over. Would-block: nothing is.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        self.lists().armed = true;
    }

    /// The owner polls again and does not need the descriptor.
    pub fn disarm(&self) {
        self.lists().armed = false;
    }

    /// The descriptor that answers make readable while it is armed.
    pub fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Drops what no worker has begun, and ends the workers.
    pub fn stop(&self) {
        let mut lists = self.lists();
        lists.waiting.clear();
        lists.stopping = true;
        drop(lists);
        self.work.notify_all();
    }

    // The workers.

    /// The next job, waited for; `None`: stop.
    pub fn next(&self) -> Option<J> {
        let mut lists = self.lists();
        loop {
            if lists.stopping {
                return None;
            }
            if let Some(job) = lists.waiting.pop_front() {
                return Some(job);
            }
            lists.idle += 1;
            lists = self
                .work
                .wait(lists)
                .unwrap_or_else(|poison| poison.into_inner());
            lists.idle -= 1;
        }
    }

    /// The next job if there is one that `is_wanted`.
    pub fn next_if(&self, is_wanted: impl FnOnce(&J) -> bool) -> Option<J> {
        let mut lists = self.lists();
        match lists.waiting.front() {
            Some(job) if is_wanted(job) => lists.waiting.pop_front(),
            _ => None,
        }
    }

    /// Takes all jobs out that wait and are `wanted`.
    pub fn take_all(&self, wanted: impl Fn(&J) -> bool, mut into: impl FnMut(J)) {
        let mut lists = self.lists();
        let mut at = 0;
        while at < lists.waiting.len() {
            if !wanted(&lists.waiting[at]) {
                at += 1;
            } else if let Some(job) = lists.waiting.remove(at) {
                into(job);
            }
        }
    }

    /// Adds answers.
    pub fn finish(&self, answers: impl Iterator<Item = D>) {
        let mut lists = self.lists();
        for answer in answers {
            self.add(&mut lists, answer);
        }
    }

    fn add(&self, lists: &mut Lists<J, D>, answer: D) {
        lists.done.push(answer);
        self.done_len.store(lists.done.len(), Ordering::Release);
        if lists.armed {
            // Once is enough until it is armed again. (It cannot fail: the counter is far from
            // full.)
            lists.armed = false;
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}
