//! Handles, by which other threads reach a poller on whichever core it is.
//!
//! A handle leads to the poller's [`Route`], which has the core that it is on now. A sender holds
//! the route's lock shared. A core that moves the poller away holds it exclusively: every message
//! sent by the old route is then in its mailbox, and it passes those on before the first message by
//! the new route is sent.

use std::sync::{
    PoisonError, RwLock, TryLockError,
    atomic::{AtomicU64, Ordering},
};

use thiserror::Error;

use crate::{
    mailbox::MailboxSender,
    reply::{Reply, reply},
    sync::Arc,
    sys::EventFd,
};

/// Error of a send: the sidecore has ended or the poller was removed. It has the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the sidecore has ended")]
pub struct SendError<M>(pub M);

/// Error of a call: there was no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallError {
    /// The sidecore had ended before the question could be sent.
    #[error("the sidecore has ended")]
    Ended,
    /// The poller dropped the question, or the sidecore ended before it answered.
    #[error("the question was dropped without an answer")]
    Dropped,
}

/// Location of a poller.
#[derive(Debug)]
pub(crate) struct Route<M> {
    pub(crate) id: u64,
    /// `None` when it has been removed.
    to: RwLock<Option<MailboxSender<M, EventFd>>>,
}

/// The next poller's number.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl<M> Route<M> {
    /// Creates the route of a new poller.
    pub(crate) fn new(to: MailboxSender<M, EventFd>) -> Arc<Self> {
        Arc::new(Route {
            // Relaxed: numbers only have to differ.
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            to: RwLock::new(Some(to)),
        })
    }

    /// Changes the route with `act`, while no thread sends. Returns `None` if a thread is sending:
    /// a core must not wait for it.
    pub(crate) fn redirect<R>(
        &self,
        act: impl FnOnce(&mut Option<MailboxSender<M, EventFd>>) -> R,
    ) -> Option<R> {
        match self.to.try_write() {
            Ok(mut to) => Some(act(&mut to)),
            Err(TryLockError::Poisoned(poisoned)) => Some(act(&mut poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Sends messages to one poller of a sidecore, also after it has moved to another. Cheap to clone;
/// any number of threads may send.
///
/// Sending to a sidecore that polls costs no system call; to one that sleeps, one, paid by the
/// sender that comes first. Messages of one sender arrive in order, and after everything that the
/// sender had written before is visible.
#[derive(Debug)]
pub struct Handle<M>(Arc<Route<M>>);

impl<M> Clone for Handle<M> {
    fn clone(&self) -> Self {
        Handle(Arc::clone(&self.0))
    }
}

impl<M: Send> Handle<M> {
    pub(crate) fn new(route: Arc<Route<M>>) -> Self {
        Handle(route)
    }

    /// Returns the poller's number, unique in this process, as in
    /// [`PollerStats::id`](crate::PollerStats::id).
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Sends a message, and wakes the sidecore if it sleeps. Never blocks for longer than a
    /// poller's move takes.
    ///
    /// # Errors
    /// Gives the message back when the sidecore has ended. A message sent while it ends may also
    /// be dropped with its mailbox.
    pub fn send(&self, message: M) -> Result<(), SendError<M>> {
        match &*self.0.to.read().unwrap_or_else(PoisonError::into_inner) {
            Some(sender) => sender.send(self.0.id, message).map_err(SendError),
            None => Err(SendError(message)),
        }
    }

    /// Sends a question and waits for its answer: spins for up to 50 µs, then parks the thread. Not
    /// for pollers of the same sidecore, which would deadlock.
    ///
    /// # Errors
    /// When no answer will come: see [`CallError`]. It never waits for ever, unless the poller
    /// keeps the [`Reply`] for ever.
    pub fn call<R>(&self, question: impl FnOnce(Reply<R>) -> M) -> Result<R, CallError> {
        let (reply, answer) = reply();
        self.send(question(reply)).map_err(|_| CallError::Ended)?;
        answer.wait().ok_or(CallError::Dropped)
    }

    /// Makes the sidecore poll all its pollers' sources, with no message: for work that the caller
    /// has made visible to [`has_work`](crate::Poller::has_work) in its own way. No system call
    /// unless it sleeps.
    pub fn wake(&self) {
        if let Some(sender) = &*self.0.to.read().unwrap_or_else(PoisonError::into_inner) {
            sender.gate().wake();
        }
    }
}
