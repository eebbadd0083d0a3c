//! Poller that a sidecore runs for one device and its socket.

use std::cell::Cell;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::{fmt, io};

use guest_mem::{ForeignRam, Ticket};
use sidecore::{
    Activity, ArmError, DetachReason, Nanos, PollContext, Poller, Reply, Wakes, WritePermit,
};
use vhost_user::backend::Kick;
use vio::{Device, DeviceClass, PollBudget, QueueDevice, Service};

use crate::config::{ExportConfig, ExportStats};
use crate::core_move::CoreMove;
use crate::deferred_drop::DeferredDrop;
use crate::log::{Log, say};
use crate::memory::{RegionMemory, with_view};
use crate::peer::{Peer, Served, TOKEN_CHANNEL, TOKEN_SOCKET};
use crate::probe::RingProbe;
use crate::queue::Calls;
use crate::spare;

/// Tokens of the other descriptors.
const TOKEN_LISTENER: u32 = TOKEN_SOCKET + 1;
const TOKEN_DEVICE: u32 = TOKEN_SOCKET + 2;

/// Cost of a connection, in nanoseconds.
const ACCEPT_COST: u64 = 10_000;

/// Message of another thread to an export.
pub enum ExportMessage {
    /// Request for the counters.
    Stats(Reply<ExportStats>),
    /// The memory that an access to guest memory waited for is there.
    TicketDone(Ticket),
}

/// One device, its listening socket, and the front end that is connected, if one is.
pub struct Export<C: DeviceClass, M = ForeignRam> {
    config: ExportConfig,
    log: Arc<Log>,
    deferred: Arc<DeferredDrop>,
    /// Shared by all front ends that connect: if the permit ended with the connection, a front end
    /// would regain it by connecting again.
    permit: WritePermit,
    /// The withdrawal of the permit has been logged.
    is_withdrawal_said: bool,
    /// A connection that has ended, until the sidecore has released its probe, which holds guest
    /// memory too.
    closing: Option<Peer<M>>,
    has_let_go: Cell<bool>,
    device: Device<C>,
    /// Memory without a region: the initial memory of a connection.
    memory: M,
    listener: UnixListener,
    peer: Option<Peer<M>>,
    device_fds: Vec<std::os::fd::RawFd>,
    stats: ExportStats,
    /// Whether it is to go to another core, or away.
    core_move: CoreMove,
    /// The device needs a reset, as the front end was last notified.
    is_broken: bool,
}

impl<C: DeviceClass, M> fmt::Debug for Export<C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("config", &self.config)
            .field("is_connected", &self.peer.is_some())
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

impl<C: DeviceClass> Export<C> {
    /// Serves `device` to the front ends that connect to `listener`.
    ///
    /// # Errors
    /// The listener cannot be made non-blocking.
    pub fn new(
        config: ExportConfig,
        device: Device<C>,
        listener: UnixListener,
    ) -> io::Result<Self> {
        Self::with_memory(config, device, listener, ForeignRam::empty())
    }
}

impl<C: DeviceClass, M: RegionMemory> Export<C, M> {
    /// As [`new`](Export::new), with guest memory of another kind: `memory` has no region yet.
    ///
    /// # Errors
    /// The listener cannot be made non-blocking.
    pub fn with_memory(
        config: ExportConfig,
        device: Device<C>,
        listener: UnixListener,
        memory: M,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        spare::take();
        let device_fds = device.wake_fds();
        Ok(Self {
            log: Arc::new(Log::new(&config.name)),
            deferred: Arc::default(),
            permit: WritePermit::default(),
            is_withdrawal_said: false,
            closing: None,
            has_let_go: Cell::new(false),
            config,
            device,
            memory,
            listener,
            peer: None,
            device_fds,
            stats: ExportStats::default(),
            core_move: CoreMove::No,
            is_broken: false,
        })
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.config.name
    }

    /// Counters.
    pub fn stats(&self) -> ExportStats {
        // A peer's own are added at its next turn, which the end may forestall.
        let peers = self.peer.iter().chain(&self.closing);
        ExportStats {
            device: self.device.stats(),
            violations: self.stats.violations + peers.map(Peer::violations).sum::<u64>(),
            ..self.stats
        }
    }

    /// The end: the front end is hung up on, elsewhere, since descriptors that it has left may take
    /// long to close. The device comes back, whose files may too.
    pub fn into_device(mut self) -> Device<C> {
        self.finish_closing();
        if let Some(peer) = self.peer.take() {
            self.deferred.close(peer);
        }
        self.device
    }

    /// Publishes the requests that have ended while the device was stopped.
    fn show_ended(&mut self) {
        let Some(peer) = self.peer.as_mut().filter(|peer| peer.has_begun) else {
            return;
        };
        let mut calls = Calls {
            queues: &mut peer.queues,
            now_ns: Nanos::now().0,
        };
        // Nothing is taken by a visit that may cost nothing.
        let mut visit = PollBudget::new(calls.now_ns, 0);
        let device = &mut self.device;
        let _ = with_view!(peer.memory, view => device.visit(view, &mut calls, &mut visit));
        for queue in &mut peer.queues {
            if queue.call_since.is_some() {
                queue.ring_call();
                self.stats.calls += 1;
            }
        }
    }

    fn accept(&mut self, turn: &mut PollContext<'_>) {
        // A front end that ended and started again may be seen before the end of its last
        // connection.
        if let Some(peer) = &mut self.peer {
            peer.look_for_end(&mut self.device, turn);
            self.serve(turn);
        }
        let is_ending = |peer: &Peer<M>| peer.is_ending(turn.now(), &self.config);
        if self.peer.as_ref().is_some_and(is_ending) || self.deferred.is_full() {
            // It waits in the listener's queue until what is in flight has ended, or what was left
            // behind is closed.
            return;
        }
        spare::take();
        let socket = match self.listener.accept() {
            Ok((socket, _)) => socket,
            Err(error) if is_out_of_descriptors(&error) && spare::give_up() => {
                if let Ok((socket, _)) = self.listener.accept() {
                    self.turn_away(socket, "no descriptor is free (RLIMIT_NOFILE)", turn);
                }
                return;
            }
            // Not charged: a listener that is readable and gives nothing ends in being muted.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                say!(self.log, warn, %error, "a connection cannot be accepted");
                return;
            }
        };
        if self.peer.is_some() {
            self.turn_away(socket, "one is connected", turn);
            return;
        }
        turn.charge(ACCEPT_COST);
        match Peer::new(
            socket,
            self.memory.clone(),
            &self.device,
            Arc::clone(&self.log),
            Arc::clone(&self.deferred),
            self.permit.clone(),
        ) {
            Ok(peer) => match peer.register(turn.wakes()) {
                Ok(()) => {
                    self.stats.connections += 1;
                    say!(self.log, info, "a front end connected");
                    self.peer = Some(peer);
                }
                Err(error) => {
                    say!(self.log, warn, %error, "a front end cannot be served");
                }
            },
            Err(error) => say!(self.log, warn, error, "a front end cannot be served"),
        }
    }

    fn turn_away(&mut self, socket: UnixStream, reason: &str, turn: &mut PollContext<'_>) {
        self.stats.turned_away += 1;
        // And a thread is made.
        turn.charge(2 * ACCEPT_COST);
        self.deferred.close(socket);
        say!(self.log, warn, "a front end was turned away: {reason}");
    }

    fn serve(&mut self, turn: &mut PollContext<'_>) -> Activity {
        let Some(peer) = &mut self.peer else {
            return Activity::Idle;
        };
        let served = peer.serve(&mut self.device, &self.config, &mut self.stats, turn);
        self.stats.violations += peer.take_violations();
        let activity = match served {
            Served::Gone => {
                say!(self.log, info, "the connection has ended");
                // A connection that is there already has been released by the probe, or has no
                // memory worth mentioning.
                self.finish_closing();
                self.closing = self.peer.take();
                self.has_let_go.set(false);
                self.is_broken = false;
                Activity::Busy
            }
            Served::On(Activity::Idle) if self.device.in_flight() != 0 => Activity::Waiting,
            Served::On(activity) => activity,
        };
        if self.device.needs_reset() != self.is_broken {
            self.note_broken();
        }
        if self.permit.is_withdrawn() && !self.is_withdrawal_said {
            self.note_withdrawal();
        }
        activity
    }

    /// Whether the device takes requests, as far as the way to another core goes: a task may keep
    /// it from that too.
    fn set_taking(&mut self, takes: bool) {
        let is_held = self.peer.as_ref().is_some_and(Peer::holds_device);
        self.device.set_service(match takes && !is_held {
            true => Service::Full,
            false => Service::Finishing,
        });
    }

    /// Drops the connection that has ended, elsewhere.
    fn finish_closing(&mut self) {
        if let Some(peer) = self.closing.take() {
            self.deferred.close(peer);
        }
    }

    /// Registers the descriptors that the armed device waits for.
    fn listen(&mut self, wakes: &mut Wakes) -> Result<(), ArmError> {
        let fds = self.device.wake_fds();
        if fds == self.device_fds {
            return Ok(());
        }
        for fd in self.device_fds.drain(..) {
            wakes.remove(fd);
        }
        for fd in fds {
            wakes.add(fd, TOKEN_DEVICE).map_err(ArmError::new)?;
            self.device_fds.push(fd);
        }
        Ok(())
    }

    /// The front end has held the core by an eventfd of its own.
    #[cold]
    fn note_withdrawal(&mut self) {
        self.is_withdrawal_said = true;
        self.stats.violations += 1;
        say!(
            self.log,
            warn,
            "a front end made a call wait (its eventfd full, and a blocking one); its calls take \
             the slower way from now on"
        );
    }

    /// The device has come to need a reset, or has been reset.
    #[cold]
    fn note_broken(&mut self) {
        self.is_broken = self.device.needs_reset();
        if !self.is_broken {
            return;
        }
        let reason = self
            .device
            .violation()
            .map_or_else(String::new, |violation| violation.to_string());
        say!(
            self.log,
            warn,
            reason,
            "the device needs a reset: its driver broke the protocol"
        );
    }
}

/// Whether the process, or the host, has as many descriptors open as it may.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    matches!(
        errno,
        Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)
    )
}

impl<C: DeviceClass + Send, M: RegionMemory> Poller for Export<C, M>
where
    C::Queue: Send,
{
    type Message = ExportMessage;
    type Probe = RingProbe;

    fn attached(&mut self, wakes: &mut Wakes) -> io::Result<()> {
        wakes.add(self.listener.as_raw_fd(), TOKEN_LISTENER)?;
        // A device that has moved here may have others than before.
        self.device_fds = self.device.wake_fds();
        for &fd in &self.device_fds {
            wakes.add(fd, TOKEN_DEVICE)?;
        }
        if let Some(peer) = &self.peer {
            peer.register(wakes)?;
        }
        self.stays();
        Ok(())
    }

    fn detaching(&mut self, wakes: &mut Wakes) {
        wakes.clear();
        // Stopped with requests in flight, the device stays on this core until it is dropped; only
        // a move waits for them.
        if self.device.in_flight() == 0 {
            self.show_ended();
            self.device.rebind();
        }
    }

    fn may_detach(&mut self, departure: DetachReason) -> bool {
        let may = self.device.in_flight() == 0;
        let takes = match departure {
            DetachReason::Move if !may => self.core_move.takes(Nanos::now().0),
            DetachReason::Move | DetachReason::End => {
                self.core_move = CoreMove::Goes;
                false
            }
        };
        self.set_taking(takes);
        may
    }

    fn stays(&mut self) {
        if std::mem::take(&mut self.core_move) != CoreMove::No {
            self.set_taking(true);
        }
    }

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        if self.has_let_go.get() {
            self.finish_closing();
        }
        let was_ending = self.peer.as_ref().is_some_and(Peer::is_closing);
        let activity = self.serve(turn);
        if was_ending && self.peer.is_none() {
            // Accept the front end that waited for the end of the former connection.
            self.accept(turn);
        }
        activity
    }

    fn message(&mut self, message: ExportMessage, _turn: &mut PollContext<'_>) {
        match message {
            ExportMessage::Stats(reply) => reply.send(self.stats()),
            ExportMessage::TicketDone(ticket) => {
                self.device.ticket_done(ticket);
                if let Some(peer) = &mut self.peer {
                    peer.ticket_done(ticket);
                }
            }
        }
    }

    fn ready(&mut self, token: u32, turn: &mut PollContext<'_>) {
        match token {
            TOKEN_LISTENER => self.accept(turn),
            TOKEN_SOCKET => {
                if let Some(peer) = &mut self.peer {
                    peer.read_socket(&mut self.device, turn);
                }
            }
            TOKEN_CHANNEL => {
                if let Some(peer) = &mut self.peer {
                    peer.read_channel(&mut self.device, turn);
                }
            }
            // Emptied when the device is disarmed, or visited. It may be shared with other devices
            // of the core, and have become readable for one of those: while requests are in flight
            // it is not muted for that.
            TOKEN_DEVICE => {
                if self.device.in_flight() != 0 {
                    turn.charge(1);
                }
            }
            index => {
                let Some(peer) = &self.peer else { return };
                let index = index as u16;
                let queue = peer.queues.iter().find(|queue| queue.index == index);
                if queue.is_some_and(|queue| queue.drain_kick()) {
                    // Not charged here (the core does that): kicks for nothing, however many, must
                    // end in the descriptor's being muted.
                    self.stats.kicks += 1;
                    self.device.kick(index);
                }
            }
        }
    }

    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError> {
        let Some(peer) = &mut self.peer else {
            return Ok(());
        };
        if peer
            .queues
            .iter()
            .any(|queue| matches!(queue.kick, Kick::Poll))
        {
            return Err(ArmError::new("a front end that never kicks must be polled"));
        }
        if peer.has_begun {
            with_view!(peer.memory, view => self.device.arm(view));
        }
        self.listen(wakes)
    }

    fn has_work(&mut self) -> bool {
        let Some(peer) = &mut self.peer else {
            return false;
        };
        let has_work =
            peer.has_begun && with_view!(peer.memory, view => self.device.has_work(view));
        // Arming, or looking, may have met a miss: a visit sends it.
        has_work || peer.memory.has_unsent_miss()
    }

    fn disarm(&mut self) {
        if let Some(peer) = &mut self.peer
            && peer.has_begun
        {
            with_view!(peer.memory, view => self.device.disarm(view));
        }
    }

    fn probe(&self, slot: &mut Option<RingProbe>) {
        self.has_let_go.set(true);
        let Some(peer) = self.peer.as_ref().filter(|peer| peer.has_begun) else {
            // The socket has a descriptor, and there is nothing else.
            *slot = Some(RingProbe::default());
            return;
        };
        if !peer.is_watched {
            *slot = None;
            return;
        }
        slot.get_or_insert_default().follow(&peer.watches);
    }

    fn deadline(&self) -> Option<Nanos> {
        if self.closing.is_some() {
            return Some(Nanos(0));
        }
        let peer = self.peer.as_ref()?;
        let call = peer.call_deadline(&self.config);
        let device = self.device.opens_at_ns();
        let task = peer.task_deadline(&self.config);
        let miss = peer.miss_deadline(&self.config);
        let pause = self.core_move.pause_end();
        [call, device, task, miss, pause, peer.flush_at()]
            .into_iter()
            .flatten()
            .min()
            .map(Nanos)
    }

    fn name(&self) -> &str {
        &self.config.name
    }

    fn weight(&self) -> u32 {
        self.config.weight
    }
}
