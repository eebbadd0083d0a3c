//! The link thread: talks to the back end, and connects again when it is gone.
//!
//! One thread a device. It sleeps until an order comes, the socket hangs up, a ring's error descriptor is signalled, or it is
//! time to try to connect. Orders are done in turn, one at a time; each ends within the limits of its requests.
//!
//! Where rings stand, `Positions`: *fresh* (0) at the driver's start; *known* after a stop that was answered; in every other
//! case (the connection broke while they were served) what the used ring says.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost_user::chain;
use vhost_user::frontend::{CallError, Connection, InflightRegion};
use vhost_user::wire::{ProtocolFeatures, RequestId, feature as vhost};
use vio::feature;

use crate::config::ImportConfig;
use crate::error::ImportError;
use crate::handshake::{self, Offer, RingFds, ring};
use crate::memory::{Memory, RingPlace};
use crate::shared::{Activation, Order, Shared};

/// Between two tries to connect: at first, and at last.
const RETRY_FIRST: Duration = Duration::from_millis(5);
const RETRY_LAST: Duration = Duration::from_millis(200);
/// A connection that lasted so long was a good one: after it, trying begins anew, at once. One that ends sooner is no better than none.
const STEADY: Duration = Duration::from_millis(100);

/// Lines of log about the connection at once, and the time for which each more has to wait.
const LINES: u32 = 20;
const LINE_EVERY: Duration = Duration::from_secs(1);

/// What went wrong while rings were started.
enum StartError {
    /// Another connection may do better.
    Connection(CallError),
    /// The device cannot go on.
    Broken(ImportError),
}

impl From<CallError> for StartError {
    fn from(error: CallError) -> Self {
        match error.is_of_the_connection() {
            true => Self::Connection(error),
            false => Self::Broken(error.into()),
        }
    }
}

/// Where the rings go on.
#[derive(Debug)]
enum Positions {
    Fresh,
    Known(Vec<u16>),
    ByUsedIndex,
}

/// The driver's rings.
struct Active {
    activation: Activation,
    positions: Positions,
    /// They are to be served; else they are stopped.
    is_wanted: bool,
    is_broken: bool,
    inflight: Option<InflightRegion>,
}

/// See the module's head.
pub(crate) struct Link {
    config: ImportConfig,
    shared: Arc<Shared>,
    memory: Memory,
    fds: RingFds,
    /// What the guest was told at the start.
    offer: Offer,
    connection: Option<Connection>,
    connected_at: Instant,
    reconnect: Reconnect,
    active: Option<Active>,
}

/// When to connect again.
#[derive(Debug)]
struct Reconnect {
    at: Instant,
    delay: Duration,
    /// The last reason that was looked at for the log.
    reason: String,
    /// When all of [`LINES`] may be logged at once again: a back end that fails for ever, each time otherwise, fills no log.
    whole_at: Instant,
}

impl Reconnect {
    fn new() -> Self {
        Self {
            at: Instant::now(),
            delay: RETRY_FIRST,
            reason: String::new(),
            whole_at: Instant::now(),
        }
    }

    /// After a connection that was a good one.
    fn at_once(&mut self) {
        self.at = Instant::now();
        self.delay = RETRY_FIRST;
        self.reason.clear();
    }

    fn later(&mut self) {
        self.at = Instant::now() + self.delay;
        self.delay = (self.delay * 2).min(RETRY_LAST);
    }

    /// Whether this is to be logged.
    fn is_news(&mut self, reason: &str, now: Instant) -> bool {
        if self.reason == reason {
            return false;
        }
        reason.clone_into(&mut self.reason);
        self.admits(now)
    }

    /// Whether a line may be logged: some at once, then one each [`LINE_EVERY`].
    fn admits(&mut self, now: Instant) -> bool {
        let whole_at = self.whole_at.max(now);
        let admits = whole_at - now <= (LINES - 1) * LINE_EVERY;
        if admits {
            self.whole_at = whole_at + LINE_EVERY;
        }
        admits
    }
}

impl Link {
    /// With the first connection, and what was offered over it.
    pub fn new(
        config: ImportConfig,
        shared: Arc<Shared>,
        memory: Memory,
        fds: RingFds,
        (connection, offer): (Connection, Offer),
    ) -> Self {
        Self {
            config,
            shared,
            memory,
            fds,
            offer,
            connection: Some(connection),
            connected_at: Instant::now(),
            reconnect: Reconnect::new(),
            active: None,
        }
    }

    /// Until it is told to end.
    pub fn run(mut self) {
        while !self.shared.is_over() {
            while let Some((number, order)) = self.shared.take_order() {
                self.shared.uncancel();
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
            self.wait();
        }
    }

    fn obey(&mut self, number: u64, order: Order) {
        match order {
            Order::Start(activation) => {
                self.active = Some(Active {
                    activation,
                    positions: Positions::Fresh,
                    is_wanted: true,
                    is_broken: false,
                    inflight: None,
                });
                self.start();
            }
            Order::Stop => self.stop(number),
            Order::Resume => {
                if let Some(active) = &mut self.active {
                    active.is_wanted = true;
                    self.start();
                }
            }
            Order::Forget => self.active = None,
        }
    }

    /// Starts the rings, if there is a connection to start them on; otherwise the next connection does.
    fn start(&mut self) {
        let (Some(connection), Some(active)) = (&mut self.connection, &mut self.active) else {
            return;
        };
        if !active.is_wanted || active.is_broken {
            return;
        }
        // An error signalled before was about rings that are gone.
        sidecore::drain_eventfd(self.fds.err.as_fd());
        match active.start(connection, &self.memory, &self.fds, self.offer.protocol) {
            Ok(()) => {}
            Err(StartError::Connection(error)) => self.lose(&chain(&error)),
            Err(StartError::Broken(error)) => {
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
        let is_served = active.is_wanted && !matches!(active.positions, Positions::Fresh);
        active.is_wanted = false;
        let Some(connection) = &mut self.connection else {
            return;
        };
        if !is_served {
            return;
        }
        if self.shared.is_abandoned(number) {
            self.lose("it did not stop its rings in time");
            return;
        }
        // It has stopped when its last request has ended, and a disk may take long over that. Until it says so it may write the
        // guest's memory: to go on without its answer, by closing the socket, would let it.
        connection.limit = None;
        match stop_rings(connection, &active.activation.rings) {
            Ok(bases) => {
                connection.limit = Some(self.config.reply_limit);
                active.positions = Positions::Known(bases);
            }
            // It has died, or nobody waits for it any more: closing the socket is the last way to say it.
            Err(error) => self.lose(&chain(&error)),
        }
    }

    /// Drops the connection. What comes next is another one.
    fn lose(&mut self, why: &str) {
        if self.connection.take().is_none() {
            return;
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
                let offer = handshake::negotiate(
                    &mut connection,
                    &self.memory,
                    self.config.queues,
                    self.config.queue_size,
                )?;
                self.check_offer(&offer)?;
                Ok((connection, offer.protocol))
            });
        match made {
            Ok((connection, protocol)) => {
                self.connection = Some(connection);
                self.connected_at = Instant::now();
                self.offer.protocol = protocol;
                self.start();
                if self.connection.is_some() && self.reconnect.admits(self.connected_at) {
                    tracing::info!(device = %self.config.name, "connected to the back end again");
                }
            }
            Err(error) => {
                let reason = chain(&error);
                if self.reconnect.is_news(&reason, Instant::now()) {
                    tracing::warn!(device = %self.config.name, %reason, "the back end cannot be used; trying again");
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
        let timeout = match self.connection {
            Some(_) => None,
            // At most `RETRY_LAST`.
            None => {
                Timespec::try_from(self.reconnect.at.saturating_duration_since(Instant::now())).ok()
            }
        };
        let mut fds = vec![
            PollFd::new(self.shared.orders_fd(), PollFlags::IN),
            PollFd::new(&self.fds.err, PollFlags::IN),
        ];
        if let Some(connection) = &self.connection {
            fds.push(PollFd::new(connection.socket(), PollFlags::IN));
        }
        let woken = poll(&mut fds, timeout.as_ref()).unwrap_or(0);
        if woken == 0 {
            return;
        }
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let (has_error, has_input) = (is_ready(1), is_ready(2));
        drop(fds);
        if has_error && sidecore::drain_eventfd(self.fds.err.as_fd()) {
            self.fail("the back end reports a ring that makes no sense");
        }
        if has_input
            && let Some(connection) = &mut self.connection
            && let Err(why) = connection.check_idle()
        {
            self.lose(&why);
        }
    }
}

impl Active {
    fn start(
        &mut self,
        connection: &mut Connection,
        memory: &Memory,
        fds: &RingFds,
        protocol: ProtocolFeatures,
    ) -> Result<(), StartError> {
        let rings = &self.activation.rings;
        let is_restart = matches!(self.positions, Positions::ByUsedIndex);
        connection.set_features(self.activation.features | vhost::PROTOCOL_FEATURES)?;
        if !protocol.contains(ProtocolFeatures::INFLIGHT_SHMFD) {
            self.inflight = None;
        } else if self.inflight.is_none() && (!is_restart || is_quiet(memory, rings)) {
            let queues = rings.iter().map(|ring| ring.index + 1).max().unwrap_or(1);
            let size = rings.iter().map(|ring| ring.size).max().unwrap_or(1);
            self.inflight = Some(connection.new_inflight(queues, size)?);
        }
        let in_order = self.activation.features & feature::IN_ORDER != 0;
        if is_restart && self.inflight.is_none() && !in_order && !is_quiet(memory, rings) {
            return Err(StartError::Broken(ImportError::Lost));
        }
        let base = |at: usize, ring: &RingPlace| match &self.positions {
            Positions::Fresh => 0,
            Positions::Known(bases) => bases[at],
            Positions::ByUsedIndex => memory.used_idx(ring),
        };
        let rings: Vec<_> = rings
            .iter()
            .enumerate()
            .map(|(at, ring)| fds.ring(ring, base(at, ring)))
            .collect();
        // From the first of its messages on the back end may take buffers.
        self.positions = Positions::ByUsedIndex;
        if let Some(region) = &self.inflight {
            connection.give_inflight(region)?;
        }
        connection.start_rings(&rings)?;
        if is_restart {
            // The dead back end may have taken a kick and not looked, or published and not called. Not every back end makes up
            // for it; one signal too many is harmless.
            for at in rings.iter().map(|ring| usize::from(ring.index)) {
                ring(&fds.kick[at]);
                ring(&fds.call[at]);
            }
        }
        Ok(())
    }
}

/// Stops the rings; where each stands.
fn stop_rings(connection: &mut Connection, rings: &[RingPlace]) -> Result<Vec<u16>, CallError> {
    let mut bases = Vec::with_capacity(rings.len());
    for ring in rings {
        let base = connection.stop_ring(ring.index.into())?;
        let request = RequestId::GET_VRING_BASE;
        bases.push(u16::try_from(base).map_err(|_| CallError::Refused { request })?);
    }
    Ok(bases)
}

/// Whether every buffer made available has come back.
fn is_quiet(memory: &Memory, rings: &[RingPlace]) -> bool {
    rings
        .iter()
        .all(|ring| memory.avail_idx(ring) == memory.used_idx(ring))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_back_end_that_fails_for_ever_fills_no_log() {
        let mut reconnect = Reconnect::new();
        let start = Instant::now();
        let mut said = 0;
        // Alternately, each time after a connection that was a good one.
        for at in 0..1000 {
            let now = start + Duration::from_millis(100) * at;
            reconnect.at_once();
            said += u32::from(reconnect.is_news(["gone", "refused"][at as usize % 2], now));
            said += u32::from(reconnect.admits(now));
        }
        assert!((100..=LINES + 101).contains(&said), "{said}");
        // After a rest each is said again, once.
        let now = start + Duration::from_secs(1000);
        reconnect.at_once();
        assert!(reconnect.is_news("gone", now));
        assert!(!reconnect.is_news("gone", now));
    }
}
