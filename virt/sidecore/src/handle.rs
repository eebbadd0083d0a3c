//! How other threads reach a poller.

use thiserror::Error;

use crate::{
    gate::Sound,
    mailbox::Outbox,
    reply::{Reply, reply},
    sys::EventFd,
};

/// A message was refused because its sidecore has ended; the message comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the sidecore has ended")]
pub struct SendError<M>(pub M);

/// A call got no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallError {
    /// The sidecore had ended before the question could be sent.
    #[error("the sidecore has ended")]
    Ended,
    /// The poller dropped the question, or the sidecore ended before it answered.
    #[error("the question was dropped without an answer")]
    Dropped,
}

/// Sends messages to one poller of a sidecore. Cheap to clone; any number of threads may send.
///
/// Sending to a sidecore that polls costs no system call; to one that sleeps, one, paid by the
/// sender that comes first. Messages of one sender arrive in order, and after everything that the
/// sender had written before is visible.
#[derive(Debug)]
pub struct Handle<M> {
    outbox: Outbox<M, EventFd>,
    poller: usize,
}

impl<M> Clone for Handle<M> {
    fn clone(&self) -> Self {
        Handle {
            outbox: self.outbox.clone(),
            poller: self.poller,
        }
    }
}

impl<M: Send> Handle<M> {
    pub(crate) fn new(outbox: Outbox<M, EventFd>, poller: usize) -> Self {
        Handle { outbox, poller }
    }

    /// Sends, and wakes the sidecore if it sleeps. Never blocks.
    ///
    /// # Errors
    /// Gives the message back when the sidecore has ended. A message sent while it ends may also
    /// be dropped with its mailbox.
    pub fn send(&self, message: M) -> Result<(), SendError<M>> {
        self.outbox.send(self.poller, message).map_err(SendError)
    }

    /// Sends a question and waits for its answer: spins for up to 50 µs, then parks the thread.
    /// Not for pollers of the same sidecore, which would wait for themselves.
    ///
    /// # Errors
    /// When no answer will come: see [`CallError`]. It never waits for ever, unless the poller
    /// keeps the [`Reply`] for ever.
    pub fn call<R>(&self, question: impl FnOnce(Reply<R>) -> M) -> Result<R, CallError> {
        let (reply, answer) = reply();
        self.send(question(reply)).map_err(|_| CallError::Ended)?;
        answer.wait().ok_or(CallError::Dropped)
    }

    /// Makes the sidecore look at all its pollers' sources, with no message: for work that the
    /// caller has made visible to [`has_work`](crate::Poller::has_work) in its own way. No system
    /// call unless it sleeps.
    pub fn wake(&self) {
        self.outbox.gate().wake::<Sound>();
    }
}
