//! What goes between the device's thread and the threads that carry operations out.
//!
//! One lock guards both directions; it is held for a few list operations, never across I/O. The device's
//! thread takes it once per batch of submissions, and to collect only if [`Queue::has_done`] says that there is
//! something.
//!
//! *Waking the device's thread.* It says that it is about to sleep ([`Queue::arm`]) under the lock, and a worker
//! that adds a completion looks under the lock. So a completion is either in the list before the arming, and
//! then [`Queue::has_done`], which the owner asks next, says so; or after, and then the worker rings.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use nix::sys::eventfd::{EfdFlags, EventFd};
use vio::blk::{Completion, Op, Outcome};

/// An operation on its way. It owns its data.
pub(crate) struct Job {
    pub slot: u32,
    pub op: Op,
    pub data: Vec<u8>,
}

/// An operation that has ended, with its data.
pub(crate) struct Done {
    pub completion: Completion,
    /// Absent: the slot is still in flight.
    pub data: Option<Vec<u8>>,
}

struct Lists {
    waiting: VecDeque<Job>,
    done: Vec<Done>,
    /// The owner sleeps, or is about to.
    armed: bool,
    /// Workers that wait, or were woken and have not looked yet.
    idle: usize,
    stopping: bool,
}

/// Both directions, and the bells.
pub(crate) struct Queue {
    lists: Mutex<Lists>,
    /// There are jobs, or it is time to stop.
    work: Condvar,
    /// Length of `done`, written under the lock.
    done_len: AtomicUsize,
    /// Rung when something has ended and the owner is armed.
    wake: EventFd,
    /// Every job fails.
    dead: AtomicBool,
}

impl Queue {
    pub(crate) fn new() -> std::io::Result<Self> {
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
            wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            dead: AtomicBool::new(false),
        })
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        // Nothing inside can panic but for want of memory; the lists are whole in any case.
        self.lists
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    // The device's thread.

    /// Hands jobs to the workers.
    pub(crate) fn submit(&self, jobs: &mut Vec<Job>) {
        let mut lists = self.lists();
        // A notification is a system call even if nobody waits. A worker that has something to do looks for
        // more afterwards.
        let wanted = jobs.len().min(lists.idle);
        lists.waiting.extend(jobs.drain(..));
        drop(lists);
        for _ in 0..wanted {
            self.work.notify_one();
        }
    }

    /// Whether [`take_done`](Queue::take_done) would find something.
    pub(crate) fn has_done(&self) -> bool {
        // Acquire: only so that "something" is not seen before it is there. That it is seen at all by one who
        // has armed is the lock's work.
        self.done_len.load(Ordering::Acquire) != 0
    }

    /// Exchanges what has ended for an empty list.
    pub(crate) fn take_done(&self, into: &mut Vec<Done>) {
        debug_assert!(into.is_empty());
        let mut lists = self.lists();
        std::mem::swap(&mut lists.done, into);
        self.done_len.store(0, Ordering::Release);
    }

    /// Stops a job that no worker has begun, and reports it; reports `NotCancellable` for one that runs; and
    /// nothing for one that has ended.
    pub(crate) fn cancel(&self, slot: u32) {
        let mut lists = self.lists();
        if let Some(at) = lists.waiting.iter().position(|job| job.slot == slot) {
            if let Some(job) = lists.waiting.remove(at) {
                self.report(&mut lists, job, Outcome::Failed(libc::ECANCELED));
            }
        } else if !lists
            .done
            .iter()
            .any(|done| done.completion.slot == slot && done.data.is_some())
        {
            let outcome = Outcome::NotCancellable;
            self.add(
                &mut lists,
                Done {
                    completion: Completion { slot, outcome },
                    data: None,
                },
            );
        }
    }

    pub(crate) fn arm(&self) {
        // What is counted in it is over. Would-block: nothing is.
        let _ = self.wake.read();
        self.lists().armed = true;
    }

    pub(crate) fn disarm(&self) {
        self.lists().armed = false;
    }

    pub(crate) fn wake_fd(&self) -> RawFd {
        self.wake.as_fd().as_raw_fd()
    }

    /// Drops what no worker has begun, and ends the workers.
    pub(crate) fn stop(&self) {
        let mut lists = self.lists();
        lists.waiting.clear();
        lists.stopping = true;
        drop(lists);
        self.work.notify_all();
    }

    // The workers.

    /// The next job; `None`: stop.
    pub(crate) fn next(&self) -> Option<Job> {
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

    /// The next job if it is a write.
    pub(crate) fn next_write(&self) -> Option<Job> {
        let mut lists = self.lists();
        match lists.waiting.front() {
            Some(job) if matches!(job.op, Op::Write { .. }) => lists.waiting.pop_front(),
            _ => None,
        }
    }

    /// All flushes that wait, with the outcome they have if nothing comes of them.
    pub(crate) fn take_flushes(&self, into: &mut Vec<(Job, Outcome)>) {
        let mut lists = self.lists();
        let mut at = 0;
        while at < lists.waiting.len() {
            if lists.waiting[at].op != Op::Flush {
                at += 1;
            } else if let Some(job) = lists.waiting.remove(at) {
                into.push((job, Outcome::Failed(libc::EIO)));
            }
        }
    }

    /// Reports jobs.
    pub(crate) fn finish(&self, jobs: impl Iterator<Item = (Job, Outcome)>) {
        let mut lists = self.lists();
        for (job, outcome) in jobs {
            self.report(&mut lists, job, outcome);
        }
    }

    fn report(&self, lists: &mut Lists, job: Job, outcome: Outcome) {
        let slot = job.slot;
        self.add(
            lists,
            Done {
                completion: Completion { slot, outcome },
                data: Some(job.data),
            },
        );
    }

    fn add(&self, lists: &mut Lists, done: Done) {
        lists.done.push(done);
        self.done_len.store(lists.done.len(), Ordering::Release);
        if lists.armed {
            // One ring is enough until it is armed again. (It cannot fail: the counter is far from full.)
            lists.armed = false;
            let _ = self.wake.write(1);
        }
    }

    pub(crate) fn kill(&self) {
        self.dead.store(true, Ordering::Release);
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }
}
