//! The queue between the device's thread and the threads that carry operations out: a [`WorkQueue`]
//! of operations with their data.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use vio::blk::{Completion, Op, Outcome, WorkQueue};

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

impl Done {
    fn of(job: Job, outcome: Outcome) -> Self {
        let slot = job.slot;
        Self {
            completion: Completion { slot, outcome },
            data: Some(job.data),
        }
    }
}

/// Both directions, and whether the image still serves.
pub(crate) struct Queue {
    both: WorkQueue<Job, Done>,
    /// Every job fails.
    dead: AtomicBool,
}

impl Queue {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            both: WorkQueue::new()?,
            dead: AtomicBool::new(false),
        })
    }

    // The device's thread.

    /// Hands jobs to the workers.
    pub(crate) fn submit(&self, jobs: &mut Vec<Job>) {
        self.both.submit(jobs);
    }

    /// Whether [`take_done`](Queue::take_done) would find something.
    pub(crate) fn has_done(&self) -> bool {
        self.both.has_done()
    }

    /// Exchanges the list of completions for an empty one.
    pub(crate) fn take_done(&self, into: &mut Vec<Done>) {
        self.both.take_done(into);
    }

    /// Stops a job that no worker has begun, and reports it; reports `NotCancellable` for one that
    /// runs; and nothing for one that has ended.
    pub(crate) fn cancel(&self, slot: u32) {
        let has_ended = |done: &Done| done.completion.slot == slot && done.data.is_some();
        self.both.cancel(
            |job| job.slot == slot,
            |job, done| match job {
                Some(job) => Some(Done::of(job, Outcome::Failed(libc::ECANCELED))),
                None if done.iter().any(has_ended) => None,
                None => Some(Done {
                    completion: Completion {
                        slot,
                        outcome: Outcome::NotCancellable,
                    },
                    data: None,
                }),
            },
        );
    }

    pub(crate) fn arm(&self) {
        self.both.arm();
    }

    pub(crate) fn disarm(&self) {
        self.both.disarm();
    }

    pub(crate) fn wake_fd(&self) -> RawFd {
        self.both.wake_fd()
    }

    /// Drops what no worker has begun, and ends the workers.
    pub(crate) fn stop(&self) {
        self.both.stop();
    }

    // The workers.

    /// The next job; `None`: stop.
    pub(crate) fn next(&self) -> Option<Job> {
        self.both.next()
    }

    /// The next job if it is a write.
    pub(crate) fn next_write(&self) -> Option<Job> {
        self.both.next_if(|job| matches!(job.op, Op::Write { .. }))
    }

    /// All flushes that wait, with the outcome they have if nothing comes of them.
    pub(crate) fn take_flushes(&self, into: &mut Vec<(Job, Outcome)>) {
        let flush = |job: &Job| job.op == Op::Flush;
        self.both
            .take_all(flush, |job| into.push((job, Outcome::Failed(libc::EIO))));
    }

    /// Reports jobs.
    pub(crate) fn finish(&self, jobs: impl Iterator<Item = (Job, Outcome)>) {
        self.both
            .finish(jobs.map(|(job, outcome)| Done::of(job, outcome)));
    }

    pub(crate) fn kill(&self) {
        self.dead.store(true, Ordering::Release);
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }
}
