//! Transfer of pollers between cores: the commands to a core about its pollers, and the state that
//! moves with a poller. [`migrate`](crate::migrate) executes the commands on the core.

use std::{
    io,
    sync::mpsc,
    time::{Duration, Instant},
};

use crate::{
    handle::Route,
    mailbox::MailboxSender,
    poller::{DetachReason, Poller},
    stats::SharedPollerStats,
    sync::Arc,
    sys::EventFd,
};

/// Time between two checks whether a caller that waits for a poller to leave should stop waiting.
const LOOK: Duration = Duration::from_millis(10);

/// A poller that is on no core, with its state: new, or in transfer.
pub(crate) struct DetachedPoller<P: Poller> {
    pub(crate) poller: P,
    pub(crate) route: Arc<Route<P::Message>>,
    pub(crate) shared_stats: Arc<SharedPollerStats>,
    /// Messages that the last core had not delivered.
    pub(crate) undelivered: Vec<P::Message>,
    /// Debt of the poller in the deficit round robin, in cost units.
    pub(crate) debt: u64,
}

impl<P: Poller> DetachedPoller<P> {
    /// Creates a new poller, for the core to which its route leads.
    pub(crate) fn new(poller: P, route: Arc<Route<P::Message>>) -> Self {
        let shared_stats = Arc::new(SharedPollerStats::new(route.id, poller.name()));
        DetachedPoller {
            poller,
            route,
            shared_stats,
            undelivered: Vec::new(),
            debt: 0,
        }
    }
}

/// Command to a core about a poller.
pub(crate) enum CoreCommand<P: Poller> {
    /// Attaches a new poller. If that fails, the sender reports the error, and the poller is
    /// dropped.
    Add(DetachedPoller<P>, mpsc::Sender<Result<(), io::Error>>),
    /// Attaches a poller from another core. It stays even if its descriptors cannot be registered.
    Receive(DetachedPoller<P>),
    /// Detaches a poller once it may be detached.
    Leave(Leaving<P>),
    /// Cancels `Leave` for the poller with this number, if it is still here.
    Stay(u64),
}

/// Request to detach a poller, and the poller's destination.
pub(crate) struct Leaving<P: Poller> {
    pub(crate) id: u64,
    pub(crate) to: Destination<P>,
}

/// Destination of a detached poller.
pub(crate) enum Destination<P: Poller> {
    /// Another core. The sender reports whether the poller went there.
    Core(Port<P>, mpsc::Sender<bool>),
    /// Its owner, which receives it. The sender is dropped if there is no such poller.
    Owner(mpsc::Sender<P>),
}

impl<P: Poller> Destination<P> {
    pub(crate) fn detach_reason(&self) -> DetachReason {
        match self {
            Self::Core(..) => DetachReason::Move,
            Self::Owner(_) => DetachReason::End,
        }
    }
}

/// Sending ends of a core: its mailbox and its command channel.
#[derive(Debug)]
pub(crate) struct Port<P: Poller> {
    pub(crate) sender: MailboxSender<P::Message, EventFd>,
    pub(crate) commands: mpsc::Sender<CoreCommand<P>>,
}

impl<P: Poller> Clone for Port<P> {
    fn clone(&self) -> Self {
        Port {
            sender: self.sender.clone(),
            commands: self.commands.clone(),
        }
    }
}

impl<P: Poller> Port<P> {
    /// Sends a command; returns it if the core has ended.
    pub(crate) fn command(&self, command: CoreCommand<P>) -> Result<(), CoreCommand<P>> {
        self.commands.send(command).map_err(|refused| refused.0)?;
        self.sender.gate().published();
        Ok(())
    }
}

/// Pending request to detach a poller.
pub(crate) struct PendingDetach<P: Poller, R> {
    port: Port<P>,
    id: u64,
    answer: mpsc::Receiver<R>,
}

impl<P: Poller, R> PendingDetach<P, R> {
    /// Sends the core at `port` the command to detach the poller `id`. `None` if the core has
    /// ended.
    pub(crate) fn to_leave(
        port: &Port<P>,
        id: u64,
        to: impl FnOnce(mpsc::Sender<R>) -> Destination<P>,
    ) -> Option<Self> {
        let (tx, answer) = mpsc::channel();
        let to = to(tx);
        port.command(CoreCommand::Leave(Leaving { id, to })).ok()?;
        let port = port.clone();
        Some(PendingDetach { port, id, answer })
    }

    /// Waits until the poller is detached, at most `limit`, or until `give_up` cancels the request.
    pub(crate) fn wait(self, limit: Duration, give_up: impl Fn() -> bool) -> Option<R> {
        let since = Instant::now();
        loop {
            let left = limit.saturating_sub(since.elapsed());
            match self.answer.recv_timeout(left.min(LOOK)) {
                Ok(result) => return Some(result),
                Err(mpsc::RecvTimeoutError::Disconnected) => return None,
                Err(mpsc::RecvTimeoutError::Timeout) if left.is_zero() || give_up() => {
                    // It may be detached just now: then there is an answer, or the channel is
                    // closed.
                    self.port.command(CoreCommand::Stay(self.id)).ok()?;
                    return self.answer.recv().ok();
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        }
    }
}
