//! Messages from any thread to the pollers of one sidecore: many senders, one receiver, in order.
//!
//! The channel is the standard library's lock-free list; what it lacks is a receiver that sleeps on
//! several things at once, and a check for mail that costs one load of an unshared line. Both come
//! from the [`gate`](crate::gate) beside it.

use crate::{
    gate::{Gate, Notifier},
    sync::{Arc, mpsc},
};

/// A message and the number of the poller it is for.
#[derive(Debug)]
pub(crate) struct Envelope<M> {
    pub(crate) poller: u64,
    pub(crate) message: M,
}

/// The sending end.
#[derive(Debug)]
pub(crate) struct Outbox<M, B> {
    channel: mpsc::Sender<Envelope<M>>,
    gate: Arc<Gate<B>>,
}

impl<M, B> Clone for Outbox<M, B> {
    fn clone(&self) -> Self {
        Outbox {
            channel: self.channel.clone(),
            gate: Arc::clone(&self.gate),
        }
    }
}

/// The receiving end, owned by the sidecore's thread. Dropping it drops all messages in it and
/// makes later sends fail.
#[derive(Debug)]
pub(crate) struct Inbox<M, B> {
    channel: mpsc::Receiver<Envelope<M>>,
    gate: Arc<Gate<B>>,
    /// The count of messages at the last time the channel was found to need emptying.
    seen: u64,
    /// The channel has not been found empty since.
    is_draining: bool,
}

pub(crate) fn mailbox<M, B: Notifier>(notifier: B) -> (Outbox<M, B>, Inbox<M, B>) {
    let (tx, rx) = mpsc::channel();
    let gate = Arc::new(Gate::new(notifier));
    (
        Outbox {
            channel: tx,
            gate: Arc::clone(&gate),
        },
        Inbox {
            channel: rx,
            gate,
            seen: 0,
            is_draining: false,
        },
    )
}

impl<M, B: Notifier> Outbox<M, B> {
    /// Gives the message back when the sidecore has ended.
    pub(crate) fn send(&self, poller: u64, message: M) -> Result<(), M> {
        self.channel
            .send(Envelope { poller, message })
            .map_err(|refused| refused.0.message)?;
        self.gate.published();
        Ok(())
    }

    pub(crate) fn gate(&self) -> &Arc<Gate<B>> {
        &self.gate
    }
}

impl<M, B: Notifier> Inbox<M, B> {
    /// The next message, if one has arrived. One load when none has.
    pub(crate) fn take(&mut self) -> Option<Envelope<M>> {
        if !self.is_draining {
            let sent = self.gate.sent();
            if sent == self.seen {
                return None;
            }
            // Read before the channel is emptied: what is counted later makes the counts differ
            // again. A message taken before its sender has counted it costs one look at an empty
            // channel.
            self.seen = sent;
            self.is_draining = true;
        }
        match self.channel.try_recv() {
            Ok(envelope) => Some(envelope),
            Err(_) => {
                self.is_draining = false;
                None
            }
        }
    }

    /// Whether `take` would find anything, for all that one load can tell.
    pub(crate) fn has_mail(&self) -> bool {
        self.is_draining || self.gate.sent() != self.seen
    }

    /// The count of messages up to which the channel is known to be empty (while `take` has
    /// answered `None`).
    pub(crate) fn seen(&self) -> u64 {
        self.seen
    }

    pub(crate) fn gate(&self) -> &Arc<Gate<B>> {
        &self.gate
    }
}
