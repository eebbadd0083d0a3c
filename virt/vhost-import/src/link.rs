//! The link thread: talks to the back end, and connects again when it is gone.
//!
//! One thread a device. It sleeps until an order comes, the socket hangs up, a ring's error
//! descriptor is signalled, or it is time to try to connect. Orders are done in turn, one at a
//! time; each ends within the limits of its requests.
//!
//! Positions of rings, `Positions`: *fresh* (0) at the driver's start; *known* after a stop that
//! was answered; in every other case (the connection broke while they were served) the index of the
//! used ring.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost_user::chain;
use vhost_user::frontend::{BackEndChannel, Connection};

use crate::active::{Active, Positions, StartError};
use crate::class::Class;
use crate::config::ImportConfig;
use crate::error::ImportError;
use crate::exchange::{Command, Question};
use crate::handshake::{self, Offer, RingFds};
use crate::iotlb::{IotlbSession, SessionError};
use crate::memory::{Indices, Memory};
use crate::reconnect::Reconnect;
use crate::shared::{LinkCommand, Shared};

mod stop;

/// A connection that lasted so long was a good one: after it, trying begins anew, at once. One that
/// ends sooner is no better than none.
const STEADY: Duration = Duration::from_millis(100);

/// See the module's head.
pub(crate) struct Link {
    config: ImportConfig,
    shared: Arc<Shared>,
    memory: Memory,
    fds: RingFds,
    /// Offer of the first connection, which the guest has seen.
    offer: Offer,
    connection: Option<Connection>,
    connected_at: Instant,
    reconnect: Reconnect,
    /// Of a device behind an IOMMU, for as long as there is a connection.
    iotlb: Option<IotlbSession>,
    /// Number of the last session.
    session: u64,
    /// Number of the last question about the rings.
    question: u64,
    active: Option<Active>,
    /// The rings are started on this connection.
    is_serving: bool,
    /// The network may look for the guest where it was before this connection.
    must_announce: bool,
}

impl Link {
    /// Makes the link of the first connection, and the offer received over it.
    pub fn new(
        config: ImportConfig,
        shared: Arc<Shared>,
        memory: Memory,
        fds: RingFds,
        (connection, offer, channel): (Connection, Offer, Option<BackEndChannel>),
    ) -> Self {
        let mut link = Self {
            config,
            shared,
            memory,
            fds,
            offer,
            connection: Some(connection),
            connected_at: Instant::now(),
            reconnect: Reconnect::new(),
            iotlb: None,
            session: 0,
            question: 0,
            active: None,
            is_serving: false,
            must_announce: false,
        };
        link.begin_session(channel);
        link
    }

    /// The back end's IOTLB is empty.
    fn begin_session(&mut self, channel: Option<BackEndChannel>) {
        self.iotlb = channel.map(IotlbSession::new);
        if self.iotlb.is_some() {
            self.session += 1;
            self.shared.exchange.begin(self.session);
        }
    }

    /// Carries orders out and keeps the connection until [`Shared::end`].
    pub fn run(mut self) {
        while !self.shared.is_over() {
            self.look_for_cut_off();
            while let Some((number, order)) = self.shared.take_order() {
                self.shared.uncancel();
                self.look_for_cut_off();
                self.obey(number, order);
                self.shared.set_done(number);
                if self.shared.is_over() {
                    return;
                }
            }
            if self.connection.is_none() && Instant::now() >= self.reconnect.at {
                self.shared.uncancel();
                self.connect_again();
            }
            self.obey_commands();
            self.wait();
        }
    }

    /// Closes the connection if the owner has waited for the back end for long enough.
    fn look_for_cut_off(&mut self) {
        if self.shared.take_cut_off() {
            let why = "it has not forgotten revoked mappings in time";
            self.lose(why);
            self.fail(why);
        }
    }

    fn obey(&mut self, number: u64, order: LinkCommand) {
        match order {
            LinkCommand::Start(activation) => {
                let pairs = match self.config.class {
                    Class::Block => None,
                    Class::Net(_) => Active::first_pairs(activation.features),
                };
                self.active = Some(Active {
                    pairs,
                    activation,
                    positions: Positions::Fresh,
                    is_wanted: true,
                    is_broken: false,
                    inflight: None,
                });
                self.start();
            }
            LinkCommand::Stop => self.stop(number),
            LinkCommand::Resume => {
                if let Some(active) = &mut self.active {
                    active.is_wanted = true;
                    self.start();
                }
            }
            LinkCommand::Pairs(pairs) => self.set_pairs(pairs),
            LinkCommand::Forget => self.active = None,
        }
    }

    fn set_pairs(&mut self, pairs: u16) {
        // A connection that is lost meanwhile leaves the number for the next one.
        self.is_serving = self.is_serving && self.settle();
        let Some(active) = &mut self.active else {
            return;
        };
        let is_serving = self.is_serving;
        let connection = self.connection.as_mut().filter(|_| is_serving);
        if let Err(error) = active.set_pairs(pairs, connection) {
            self.lose(&chain(&error));
        }
    }

    /// Starts the rings, if there is a connection to start them on; otherwise the next connection
    /// does. Behind an IOMMU only the owner can say where they stand, so it is asked first.
    fn start(&mut self) {
        if !self.are_rings_wanted() || !self.settle() {
            return;
        }
        let (Some(connection), Some(active)) = (&mut self.connection, &mut self.active) else {
            return;
        };
        if let Err(error) = active.set_features(connection, &self.offer) {
            self.start_failed(error);
            return;
        }
        let rings = &active.activation.rings;
        if self.iotlb.is_some() {
            self.question += 1;
            self.shared.exchange.ask(Question::Rings {
                number: self.question,
                rings: rings.clone(),
            });
            self.shared.tell();
            return;
        }
        let indices = self.memory.indices(rings);
        self.start_at(Some(&indices));
    }

    /// Starts the rings at the positions that the owner has read.
    fn start_at_last(&mut self, indices: Option<&[Indices]>) {
        if self.are_rings_wanted() && self.settle() {
            self.start_at(indices);
        }
    }

    fn are_rings_wanted(&self) -> bool {
        let is_wanted = |active: &Active| active.is_wanted && !active.is_broken;
        self.active.as_ref().is_some_and(is_wanted)
    }

    /// Starts the rings, which are wanted and stand there.
    fn start_at(&mut self, indices: Option<&[Indices]>) {
        let (Some(connection), Some(active)) = (&mut self.connection, &mut self.active) else {
            return;
        };
        // An error signalled before was about rings that are gone.
        sidecore::drain_eventfd(self.fds.err.as_fd());
        let class = &self.config.class;
        match active.start(connection, indices, &self.fds, &self.offer, class) {
            Ok(()) => self.is_serving = true,
            Err(error) => return self.start_failed(error),
        }
        if std::mem::take(&mut self.must_announce)
            && let Err(error) = class.announce(connection, self.offer.protocol)
        {
            self.lose(&chain(&error));
        }
    }

    fn start_failed(&mut self, error: StartError) {
        match error {
            StartError::Connection(error) => self.lose(&chain(&error)),
            StartError::Broken(error) => {
                let why = chain(&error);
                self.lose(&why);
                self.fail(&why);
            }
        }
    }

    fn stop(&mut self, number: u64) {
        let Some(active) = &mut self.active else {
            return;
        };
        active.is_wanted = false;
        // An answer about rings that are not to be started now.
        self.question += 1;
        if !self.is_serving {
            return;
        }
        if self.shared.is_abandoned(number) {
            self.lose("it did not stop its rings in time");
            return;
        }
        if !self.settle() {
            return;
        }
        // It has stopped when its last request has ended, and a disk may take long over that. Until
        // it says so it may write the guest's memory: to go on without its answer, by closing the
        // socket, would let it.
        self.set_limit(None);
        if let Some(bases) = self.stop_rings() {
            self.set_limit(Some(self.config.reply_limit));
            let active = self.active.as_mut().expect("it was looked at");
            active.positions = Positions::Known(bases);
            self.is_serving = false;
        }
    }

    fn set_limit(&mut self, limit: Option<Duration>) {
        if let Some(connection) = &mut self.connection {
            connection.limit = limit;
        }
    }

    /// Carries out the owner's commands about the back end's IOTLB, as far as the back end keeps
    /// up.
    fn obey_commands(&mut self) {
        while let Some(iotlb) = &mut self.iotlb
            && iotlb.has_room()
            && let Some(command) = self.shared.exchange.take_command()
        {
            if let Command::Rings { number, indices } = command {
                // Of several questions the last counts, and a stop is behind all of them.
                if number == self.question {
                    // What was cancelled has ended since.
                    self.shared.uncancel();
                    self.look_for_cut_off();
                    self.start_at_last(indices.as_deref());
                }
                continue;
            }
            let connection = self.connection.as_mut();
            let connection = connection.expect("its session ends with it");
            if let Err(error) = iotlb.obey(connection, command) {
                self.end_session(error);
            }
        }
    }

    /// Takes messages of the back end, of both sockets.
    fn take_input(&mut self) {
        let (Some(connection), Some(iotlb)) = (&mut self.connection, &mut self.iotlb) else {
            return;
        };
        let exchange = &self.shared.exchange;
        let taken = iotlb
            .take_answers(connection, exchange)
            .and_then(|has_released| Ok(iotlb.take_requests(exchange)? | has_released));
        match taken {
            Ok(true) => self.shared.tell(),
            Ok(false) => {}
            Err(error) => self.end_session(error),
        }
    }

    /// Takes requests of the back end.
    fn take_requests(&mut self) {
        let Some(iotlb) = &mut self.iotlb else {
            return;
        };
        match iotlb.take_requests(&self.shared.exchange) {
            Ok(true) => self.shared.tell(),
            Ok(false) => {}
            Err(error) => self.end_session(error),
        }
    }

    fn end_session(&mut self, error: SessionError) {
        match error {
            SessionError::Connection(why) => self.lose(&why),
            SessionError::Unforgotten(why) => {
                self.lose(&why);
                self.fail(&why);
            }
        }
    }

    /// Waits until the back end has answered everything about its IOTLB, so that it can be asked
    /// something else. False: the connection is lost.
    fn settle(&mut self) -> bool {
        while let Some(iotlb) = &self.iotlb
            && !iotlb.is_settled()
        {
            let Some(connection) = &self.connection else {
                break;
            };
            let deadline = iotlb.deadline(self.config.reply_limit);
            let timeout = deadline.and_then(until);
            let mut fds = [
                PollFd::new(connection.socket(), PollFlags::IN),
                PollFd::new(&self.shared.cancel, PollFlags::IN),
            ];
            let woken = poll(&mut fds, timeout.as_ref()).unwrap_or(0);
            if woken != 0 && !fds[1].revents().is_empty() {
                self.lose("it is not waited for any more");
            } else if woken != 0 {
                self.take_input();
            } else {
                self.look_for_deadline();
            }
        }
        self.connection.is_some()
    }

    /// Ends a session whose back end does not answer.
    fn look_for_deadline(&mut self) {
        if let Some(iotlb) = &self.iotlb
            && let Some(deadline) = iotlb.deadline(self.config.reply_limit)
            && Instant::now() >= deadline
        {
            let error = iotlb.overdue();
            self.end_session(error);
        }
    }

    /// Drops the connection. What comes next is another one.
    fn lose(&mut self, why: &str) {
        if self.connection.take().is_none() {
            return;
        }
        self.is_serving = false;
        if let Some(iotlb) = self.iotlb.take() {
            iotlb.end(&self.shared.exchange);
            self.shared.exchange.end();
            self.shared.tell();
        }
        if self.connected_at.elapsed() >= STEADY {
            self.reconnect.at_once();
        } else {
            self.reconnect.later();
        }
        if self.reconnect.is_news(why, Instant::now()) {
            tracing::warn!(device = %self.config.name, socket = %self.config.path.display(), why,
                "the back end is gone; connecting again");
        }
    }

    /// The device needs a reset.
    fn fail(&mut self, why: &str) {
        if let Some(active) = &mut self.active
            && !active.is_broken
        {
            active.is_broken = true;
            tracing::error!(device = %self.config.name, why, "the device needs a reset");
            self.shared.set_broken(active.activation.generation);
        }
    }

    fn connect_again(&mut self) {
        let opened = Connection::open(
            &self.config.path,
            Some(self.shared.cancel.clone()),
            self.config.reply_limit,
        );
        let made = opened
            .map_err(|source| ImportError::Connect {
                path: self.config.path.clone(),
                source,
            })
            .and_then(|mut connection| {
                let (offer, channel) =
                    handshake::negotiate(&mut connection, &self.memory, &self.config)?;
                self.check_offer(&offer)?;
                Ok((connection, offer, channel))
            });
        match made {
            Ok((connection, offer, channel)) => {
                self.connection = Some(connection);
                self.begin_session(channel);
                self.connected_at = Instant::now();
                self.must_announce = true;
                // What the guest was offered stays.
                (self.offer.protocol, self.offer.known) = (offer.protocol, offer.known);
                self.start();
                if self.connection.is_some() && self.reconnect.admits(self.connected_at) {
                    tracing::info!(device = %self.config.name, "connected to the back end again");
                }
            }
            Err(error) => {
                let reason = chain(&error);
                if self.reconnect.is_news(&reason, Instant::now()) {
                    tracing::warn!(device = %self.config.name, %reason, "the back end cannot be \
                         used; trying again");
                }
                self.reconnect.later();
            }
        }
    }

    /// A back end that was restarted has to be the device the guest knows.
    fn check_offer(&self, offer: &Offer) -> Result<(), ImportError> {
        let changed = |what| Err(ImportError::Changed { what });
        if self.offer.features & !offer.features != 0 {
            return changed("features are missing");
        }
        if offer.config != self.offer.config {
            return changed("its configuration, for instance the disk's size");
        }
        Ok(())
    }

    fn wait(&mut self) {
        let deadline = match (&self.connection, &self.iotlb) {
            (Some(_), Some(iotlb)) => iotlb.deadline(self.config.reply_limit),
            (Some(_), None) => None,
            // At most the last delay of a reconnection.
            (None, _) => Some(self.reconnect.at),
        };
        let timeout = deadline.and_then(until);
        let mut fds = vec![
            PollFd::new(self.shared.orders_fd(), PollFlags::IN),
            PollFd::new(&self.fds.err, PollFlags::IN),
        ];
        if let Some(connection) = &self.connection {
            fds.push(PollFd::new(connection.socket(), PollFlags::IN));
        }
        if let Some(requests) = self.iotlb.as_ref().and_then(IotlbSession::requests) {
            fds.push(PollFd::new(requests, PollFlags::IN));
        }
        let woken = poll(&mut fds, timeout.as_ref()).unwrap_or(0);
        if woken == 0 {
            self.look_for_deadline();
            return;
        }
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let has_error = is_ready(1);
        let (has_reply, has_request) = (is_ready(2), is_ready(3));
        drop(fds);
        if has_error && sidecore::drain_eventfd(self.fds.err.as_fd()) {
            self.fail("the back end reports a ring that makes no sense");
        }
        if has_reply || has_request {
            self.take_input();
        }
        // What is left in the socket of requests is its end.
        if has_reply
            && self.iotlb.as_ref().is_none_or(IotlbSession::is_settled)
            && let Some(connection) = &mut self.connection
            && let Err(why) = connection.check_idle()
        {
            self.lose(&why);
        }
    }
}

/// Returns the time until then, as the system takes it; `None` if it cannot express that.
fn until(deadline: Instant) -> Option<Timespec> {
    Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok()
}
