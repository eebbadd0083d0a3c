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
pub(crate) struct AddressedMessage<M> {
    pub(crate) poller: u64,
    pub(crate) message: M,
}

/// The sending end.
#[derive(Debug)]
pub(crate) struct MailboxSender<M, B> {
    channel: mpsc::Sender<AddressedMessage<M>>,
    gate: Arc<Gate<B>>,
}

impl<M, B> Clone for MailboxSender<M, B> {
    fn clone(&self) -> Self {
        MailboxSender {
            channel: self.channel.clone(),
            gate: Arc::clone(&self.gate),
        }
    }
}

/// The receiving end, owned by the sidecore's thread. Dropping it drops all messages in it and
/// makes later sends fail.
#[derive(Debug)]
pub(crate) struct MailboxReceiver<M, B> {
    channel: mpsc::Receiver<AddressedMessage<M>>,
    gate: Arc<Gate<B>>,
    /// Count of messages when the channel was last found to need emptying.
    seen: u64,
    /// The channel has not been found empty since.
    is_draining: bool,
}

pub(crate) fn mailbox<M, B: Notifier>(notifier: B) -> (MailboxSender<M, B>, MailboxReceiver<M, B>) {
    let (tx, rx) = mpsc::channel();
    let gate = Arc::new(Gate::new(notifier));
    (
        MailboxSender {
            channel: tx,
            gate: Arc::clone(&gate),
        },
        MailboxReceiver {
            channel: rx,
            gate,
            seen: 0,
            is_draining: false,
        },
    )
}

impl<M, B: Notifier> MailboxSender<M, B> {
    /// Sends a message; returns it when the sidecore has ended.
    pub(crate) fn send(&self, poller: u64, message: M) -> Result<(), M> {
        self.channel
            .send(AddressedMessage { poller, message })
            .map_err(|refused| refused.0.message)?;
        self.gate.published();
        Ok(())
    }

    pub(crate) fn gate(&self) -> &Arc<Gate<B>> {
        &self.gate
    }
}

impl<M, B: Notifier> MailboxReceiver<M, B> {
    /// Checks whether anything was announced since the last check, or is left of it: messages,
    /// which [`take`](Self::take) finds, or orders, which have a channel of their own. One load
    /// when nothing was.
    ///
    /// The count is read here only, before either channel is emptied: anything announced later
    /// makes the counts differ again, even if it has been taken by then.
    pub(crate) fn look(&mut self) -> bool {
        if !self.is_draining {
            let sent = self.gate.sent();
            self.is_draining = sent != self.seen;
            self.seen = sent;
        }
        self.is_draining
    }

    /// Takes the next message, if the last [`look`](Self::look) saw that there may be one. A
    /// message that is taken before its sender has counted it costs one read of an empty channel.
    pub(crate) fn take(&mut self) -> Option<AddressedMessage<M>> {
        if !self.is_draining {
            return None;
        }
        let addressed = self.channel.try_recv().ok();
        self.is_draining = addressed.is_some();
        addressed
    }

    /// Takes all messages, announced or not; the announcement stays for the next
    /// [`look`](Self::look).
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = AddressedMessage<M>> {
        std::iter::from_fn(|| self.channel.try_recv().ok())
    }

    /// Returns the count of messages up to which the channel is known to be empty (while `take` has
    /// returned `None`).
    pub(crate) fn seen(&self) -> u64 {
        self.seen
    }

    pub(crate) fn gate(&self) -> &Arc<Gate<B>> {
        &self.gate
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    struct Silent;

    impl Notifier for Silent {
        fn notify(&self) {}
    }

    /// An order that is announced between the look at orders and the look at messages.
    #[test]
    fn an_order_behind_the_look_is_found_by_the_next_one() {
        let (sender, mut receiver) = mailbox(Silent);
        sender.send(1, "message").unwrap();
        assert!(receiver.look());
        sender.gate().published();
        assert_eq!(receiver.take().unwrap().message, "message");
        assert!(receiver.take().is_none());
        assert!(receiver.look(), "the order is lost");
        assert!(receiver.take().is_none());
        assert!(!receiver.look());
    }

    /// A move empties the mailbox; orders that came meanwhile are not among what it finds.
    #[test]
    fn an_order_is_found_after_a_move_has_emptied_the_mailbox() {
        let (sender, mut receiver) = mailbox(Silent);
        assert!(!receiver.look());
        sender.send(1, "message").unwrap();
        sender.gate().published();
        assert_eq!(receiver.drain().count(), 1);
        assert!(receiver.look(), "the order is lost");
    }
}
