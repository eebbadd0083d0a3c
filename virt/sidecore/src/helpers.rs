//! A few threads for what a sidecore must not do itself: anything that may block.
//!
//! A job is a closure; what it returns comes back to a poller as a message. The queue is bounded,
//! and a full one refuses, so that a guest that causes slow work can delay its own work but not
//! grow the host's memory.

use std::{
    io,
    num::NonZeroUsize,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

use thiserror::Error;

use crate::handle::Handle;

type Job = Box<dyn FnOnce() + Send>;

/// A job was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// As many jobs wait as may; try again after a completion.
    #[error("the queue of the helper threads is full")]
    Full,
}

/// A job panicked; its thread lives on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the job panicked")]
pub struct JobPanicked;

/// A pool of helper threads. Dropping it finishes the jobs in its queue and joins the threads.
#[derive(Debug)]
pub struct Helpers {
    /// Taken to end the threads.
    jobs: Option<mpsc::SyncSender<Job>>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Helpers {
    /// Starts `threads` threads behind a queue of `capacity` jobs.
    ///
    /// # Errors
    /// When a thread cannot be started; those started before end.
    pub fn new(name: &str, threads: NonZeroUsize, capacity: NonZeroUsize) -> io::Result<Helpers> {
        let (tx, rx) = mpsc::sync_channel::<Job>(capacity.get());
        let queue = Arc::new(Mutex::new(rx));
        let mut helpers = Helpers {
            jobs: Some(tx),
            threads: Vec::new(),
        };
        for index in 0..threads.get() {
            let queue = Arc::clone(&queue);
            let thread = thread::Builder::new()
                .name(format!("{name}-{index}"))
                .spawn(move || work(&queue))?;
            helpers.threads.push(thread);
        }
        Ok(helpers)
    }

    /// Gives `job` to a helper thread; `complete` makes the message for `to` of its result, also
    /// when it panicked, so that no request is left waiting. Never blocks. A message to a
    /// sidecore that has ended meanwhile is dropped.
    ///
    /// # Errors
    /// When the queue is full; nothing will run.
    pub fn submit<T, M: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
        to: Handle<M>,
        complete: impl FnOnce(Result<T, JobPanicked>) -> M + Send + 'static,
    ) -> Result<(), SubmitError> {
        let job: Job = Box::new(move || {
            // Unwind safe: what the job captured is gone with it.
            let result = catch_unwind(AssertUnwindSafe(job)).map_err(|_| JobPanicked);
            // An error means that nobody waits any more.
            let _ = to.send(complete(result));
        });
        let jobs = self.jobs.as_ref().expect("taken in drop only");
        // Disconnected cannot be: the threads hold the receiver until `jobs` is gone.
        jobs.try_send(job).map_err(|_| SubmitError::Full)
    }
}

fn work(queue: &Mutex<mpsc::Receiver<Job>>) {
    loop {
        // The lock is held while waiting: the other threads wait for it instead.
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match next {
            // `complete` may panic too; the thread must go on for the others' sake.
            Ok(job) => drop(catch_unwind(AssertUnwindSafe(job))),
            Err(mpsc::RecvError) => return,
        }
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        drop(self.jobs.take());
        for thread in self.threads.drain(..) {
            // Jobs' panics are caught: it ends by itself.
            let _ = thread.join();
        }
    }
}
