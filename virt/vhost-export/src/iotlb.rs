//! Translations: requested on the back-end channel, received and invalidated on the socket.
//!
//! ```text
//! a queue meets a miss and parks ─▶ MISS, need_reply ──────────────────────▶ front end
//!        ▲                                                                      │
//!        └── ticket ends ◀─ UPDATE, answered at once ◀──── socket ──────────────┤
//!        └── ticket ends, refused ◀─ answer: not 0, or 0 and no UPDATE ◀─ channel ┘
//! INVALIDATE: forgotten at once; answered when the leases of its range have ended
//! ```
//! **Only a queue waits for the answer to a miss.** QEMU answers on the channel only after its
//! UPDATE was answered on the socket, and from 8.0 on does not read the channel while it waits for
//! an answer on the socket. So:
//!
//! * UPDATE is answered at once.
//! * The start of a ring is answered before the translations of its areas have come
//!   ([`StartingRing`]).
//! * INVALIDATE waits for leases, which end with their I/O, and never for requests: a request may
//!   need an UPDATE before it can be answered.
//!
//! **While a ring is being stopped** updates are handled all the same, ahead of other messages on
//! the socket, since a request may need one to end; their replies follow the stop's. QEMU sends
//! none during a stop: there such a request ends with the limit.
//!
//! **Two channels, without order between them.** An answer of 0 may be read before the UPDATE that
//! was sent before it. So the socket is read until it is empty, and only then is a miss without an
//! UPDATE refused.
//!
//! **Limits.** A miss that is not answered within
//! [`miss_limit_ns`](crate::ExportConfig::miss_limit_ns), and an invalidation whose leases last
//! longer than [`drain_limit_ns`](crate::ExportConfig::drain_limit_ns), leave the device in need of
//! a reset; the invalidation is answered by a number other than 0. From then on each miss is
//! refused at once, until a driver begins anew.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use guest_mem::{Intent, Iommu, Iova, IovaRange, Perm, Ticket, Wanted};
use sidecore::{Nanos, PollContext, Wakes};
use vhost_user::backend::{Answer, Event, Refusal, RingBase, RingConfig, RingLayout, SharedFd};
use vhost_user::chain;
use vhost_user::channel::{DEFAULT_BACKLOG, ReceiveError, Receiver, Sender};
use vhost_user::wire::{
    BackendRequest, BackendRequestId, IotlbAccess, IotlbMessage, IotlbRange, Message,
};
use vio::ring::Violation;
use vio::{CancelReason, Device, DeviceClass, QueueDevice};

use crate::config::{ExportConfig, ExportStats};
use crate::deferred_drop::is_harmless;
use crate::events::Outcome;
use crate::log::say;
use crate::memory::{Memory, RegionMemory, not_negotiated};
use crate::peer::{Peer, TOKEN_CHANNEL, Task};

/// Largest number of answers read from the channel at once: as many as there can be misses.
const ANSWERS: usize = guest_mem::MAX_MISSES;
/// Largest number of updates handled while one ring is being stopped: twice the number that this
/// project's front end sends without an answer.
const UPDATES: usize = 128;
/// Longest accepted payload of an answer, in bytes: a number, and room to detect a malformed one.
const MAX_ANSWER: usize = 64;
/// Cost of sending a miss, or of handling its answer, in nanoseconds.
const MISS_COST: u64 = 2_000;

/// Back-end channel: the socket on which this process sends requests to the front end.
pub(crate) struct Channel {
    fd: SharedFd,
    receiver: Receiver,
    sender: Sender,
}

impl Channel {
    fn new(fd: SharedFd) -> Self {
        Self {
            fd,
            receiver: Receiver::new(MAX_ANSWER).accepting(|_, fd| is_harmless(fd)),
            sender: Sender::new(DEFAULT_BACKLOG),
        }
    }

    /// Its descriptor's number.
    pub(crate) fn number(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Number of bytes that the front end has not read yet.
    pub(crate) fn backlog(&self) -> usize {
        self.sender.backlog()
    }

    /// Sends waiting bytes. Returns false if the front end has closed its end, or it is no socket.
    fn flush(&mut self) -> bool {
        self.sender.flush(self.fd.as_fd()).is_ok()
    }
}

/// A ring whose start was answered, but whose areas have no translations yet.
pub(crate) struct StartingRing {
    pub(crate) config: RingConfig,
    /// Ticket of the translation that it waits for.
    waits: Option<Ticket>,
    /// It cannot start, and the front end has been notified.
    is_failed: bool,
}

impl StartingRing {
    pub(crate) fn new(config: RingConfig) -> Self {
        Self {
            config,
            waits: None,
            is_failed: false,
        }
    }
}

impl<M: RegionMemory> Peer<M> {
    /// Registers the channel if answers can come. That of a front end without translations is not
    /// registered: its descriptor may be of any kind.
    pub(crate) fn register_channel(&self, wakes: &mut Wakes) -> std::io::Result<()> {
        let is_wanted = self.memory.is_translated() && !self.is_closing();
        match self.channel.as_ref().filter(|_| is_wanted) {
            Some(channel) => wakes.add(channel.number(), TOKEN_CHANNEL),
            None => Ok(()),
        }
    }

    /// Ends the use of the channel, since the connection is over.
    pub(crate) fn stop_asking(&mut self, wakes: &mut Wakes) {
        self.unregister_channel(wakes);
        if let Some(tlb) = self.memory.tlb() {
            tlb.close();
        }
    }

    /// Unregisters the channel: for now nothing is read from it.
    fn unregister_channel(&self, wakes: &mut Wakes) {
        if let Some(channel) = &self.channel {
            wakes.remove(channel.number());
        }
    }

    /// Closes the channel: no translation can be requested any more.
    fn close_channel(&mut self, wakes: &mut Wakes) {
        self.unregister_channel(wakes);
        // Closing may take long: descriptors may be queued in the socket.
        if let Some(channel) = self.channel.take() {
            self.deferred.close(channel);
        }
        if let Some(tlb) = self.memory.tlb() {
            tlb.close();
        }
    }

    /// Accepts a channel from the front end.
    pub(crate) fn set_channel(&mut self, fd: SharedFd, turn: &mut PollContext<'_>) -> Outcome {
        self.unregister_channel(turn.wakes());
        if let Some(old) = self.channel.replace(Channel::new(fd)) {
            self.deferred.close(old);
        }
        if let Some(tlb) = self.memory.tlb() {
            tlb.ask_again();
            tlb.open();
        }
        if let Err(error) = self.register_channel(turn.wakes()) {
            self.close_channel(turn.wakes());
            return Err(Refusal(format!(
                "the channel cannot be waited for: {error}"
            )));
        }
        Ok(Answer::Done)
    }

    /// Sets whether the driver's addresses are translated; no ring runs.
    pub(crate) fn set_translated(&mut self, is_translated: bool, turn: &mut PollContext<'_>) {
        if is_translated == self.memory.is_translated() {
            return;
        }
        self.unregister_channel(turn.wakes());
        self.memory.set_translated(is_translated);
        // A descriptor that epoll refuses, such as that of a memory file, gives no answers.
        if self.register_channel(turn.wakes()).is_err() {
            self.close_channel(turn.wakes());
        }
    }

    /// Stores a translation.
    pub(crate) fn update_iotlb(
        &mut self,
        range: IotlbRange,
        user_addr: u64,
        access: IotlbAccess,
    ) -> Outcome {
        update(&mut self.memory, &mut self.counts, range, user_addr, access)
    }

    /// Removes translations. `None` if leases of theirs are in flight, for which a task now waits.
    pub(crate) fn invalidate_iotlb(&mut self, range: IotlbRange) -> Option<Outcome> {
        self.counts.iotlb_invalidations += 1;
        let Some(tlb) = self.memory.tlb() else {
            return Some(Err(not_negotiated()));
        };
        let range = IovaRange::new(Iova::new(range.first), Iova::new(range.last));
        tlb.invalidate(range.expect("a message's range is in order"));
        // The watches read memory that may be another's now.
        self.watches.clear();
        self.is_watched = false;
        let outcome = self.finish_invalidation();
        if outcome.is_none() {
            self.task = Some(Task::Invalidate);
        }
        outcome
    }

    /// Returns the outcome of an invalidation if no lease that it covers is in flight any more.
    pub(crate) fn finish_invalidation(&mut self) -> Option<Outcome> {
        let is_over = self
            .memory
            .tlb()
            .is_none_or(|tlb| tlb.leases().stale() == 0);
        is_over.then_some(Ok(Answer::Done))
    }

    /// Fails an invalidation that has waited for too long: the device needs a reset.
    #[cold]
    pub(crate) fn give_up_invalidation(
        &mut self,
        device: &mut Device<impl DeviceClass>,
    ) -> Outcome {
        device.fail(Violation::NotReleased);
        device.cancel(CancelReason::Unmap);
        if let Some(tlb) = self.memory.tlb() {
            tlb.close();
        }
        Err(Refusal(
            "requests still use memory whose translations were invalidated".into(),
        ))
    }

    /// Sends the device's new misses, and hands out the translations that have arrived. Returns
    /// whether any wait has ended.
    pub(crate) fn exchange_iotlb(
        &mut self,
        device: &mut Device<impl DeviceClass>,
        config: &ExportConfig,
        stats: &mut ExportStats,
        turn: &mut PollContext<'_>,
    ) -> bool {
        if !self.memory.is_translated() || self.is_closing() {
            return false;
        }
        self.send_misses(turn);
        if self.takes_updates() && self.memory.tlb().is_some_and(|tlb| tlb.must_settle()) {
            self.read_socket(device, turn);
        }
        let now = turn.now();
        if let Some(since) = self.memory.oldest_miss_ns()
            && now.since(Nanos(since)) >= config.miss_limit_ns
        {
            self.give_up_misses(device, config);
        }
        stats.misses += std::mem::take(&mut self.counts.misses);
        stats.iotlb_updates += std::mem::take(&mut self.counts.iotlb_updates);
        stats.iotlb_invalidations += std::mem::take(&mut self.counts.iotlb_invalidations);
        let ended = self.memory.tlb().map_or(Vec::new(), |tlb| tlb.take_ended());
        for &ticket in &ended {
            device.ticket_done(ticket);
            self.ring_ticket_done(ticket);
        }
        let started = self.start_rings(device, turn);
        // Rings may have missed translations of their areas.
        self.send_misses(turn);
        let has_ended = self.memory.tlb().is_some_and(|tlb| tlb.has_ended());
        !ended.is_empty() || started || has_ended
    }

    fn send_misses(&mut self, turn: &mut PollContext<'_>) {
        let now_ns = turn.now().0;
        let Some(tlb) = self.memory.tlb() else { return };
        let Some(channel) = &mut self.channel else {
            // No translation can be requested.
            if tlb.has_unsent_miss() {
                tlb.close();
            }
            return;
        };
        let mut is_there = true;
        while let Some(miss) = tlb.next_miss(now_ns) {
            let access = match miss.perm {
                Perm::Read => IotlbAccess::Read,
                Perm::Write => IotlbAccess::Write,
            };
            let iova = miss.iova.raw();
            let message = BackendRequest::Iotlb(IotlbMessage::Miss { iova, access }).encode(true);
            is_there &= channel.sender.push(message).is_ok();
            self.counts.misses += 1;
            turn.charge(MISS_COST);
        }
        if channel.sender.backlog() != 0 {
            is_there &= channel.flush();
        }
        if !is_there {
            self.lose_channel(turn);
        }
    }

    /// Handles answers to misses.
    pub(crate) fn read_channel(
        &mut self,
        device: &mut Device<impl DeviceClass>,
        turn: &mut PollContext<'_>,
    ) {
        for _ in 0..ANSWERS {
            let (Some(tlb), Some(channel)) = (self.memory.tlb(), &mut self.channel) else {
                return;
            };
            let message = match channel.receiver.receive(channel.fd.as_fd()) {
                Ok(Some(message)) => message,
                Ok(None) => break,
                Err(ReceiveError::Unaccepted { fds }) => {
                    self.deferred.close(fds);
                    return self.reject("a descriptor on the back end's channel", turn);
                }
                Err(ReceiveError::Frame(error)) => return self.reject(&chain(&error), turn),
                Err(_) => return self.lose_channel(turn),
            };
            turn.charge(MISS_COST);
            let Some(is_granted) = answer(&message) else {
                return self.reject("no answer of the back end's channel", turn);
            };
            if !tlb.answered(is_granted) {
                return self.reject("an answer to a miss that was not sent", turn);
            }
        }
        // Updates that were sent before the answers are on the socket.
        if self.takes_updates() && self.memory.tlb().is_some_and(|tlb| tlb.must_settle()) {
            self.read_socket(device, turn);
        }
    }

    /// Whether updates on the socket are handled now.
    fn takes_updates(&self) -> bool {
        matches!(self.task, None | Some(Task::StopRing(_)))
    }

    /// Handles the updates at the front of the socket while a ring is being stopped, a bounded
    /// number.
    pub(crate) fn take_updates(&mut self, turn: &mut PollContext<'_>) {
        while matches!(self.task, Some(Task::StopRing(_)))
            && self.memory.is_translated()
            && self.put_off.is_none()
            && self.late.len() < UPDATES
            && let Some(message) = self.next_message(turn)
        {
            if !IotlbMessage::is_update(&message) {
                self.put_off = Some(message);
                return;
            }
            let Self {
                session,
                memory,
                counts,
                ..
            } = self;
            let done = session.update_beside(message, |event| match event {
                Event::IotlbUpdate {
                    range,
                    user_addr,
                    access,
                } => update(memory, counts, range, user_addr, access),
                other => Err(Refusal(format!("{other:?} is no update"))),
            });
            match done {
                Ok(reply) => self.late.extend(reply),
                Err(fatal) => self.fail(&fatal, turn),
            }
            turn.charge(MISS_COST);
        }
    }

    /// Notes that the socket is empty, so all updates that were sent before the answers read so far
    /// have been handled.
    pub(crate) fn socket_is_empty(&mut self) {
        if let Some(tlb) = self.memory.tlb()
            && tlb.must_settle()
        {
            tlb.settle();
        }
    }

    /// Handles that the front end has closed its end of the channel.
    #[cold]
    fn lose_channel(&mut self, turn: &mut PollContext<'_>) {
        say!(
            self.log,
            info,
            "the channel by which translations are asked for has ended"
        );
        self.close_channel(turn.wakes());
    }

    #[cold]
    fn give_up_misses(&mut self, device: &mut Device<impl DeviceClass>, config: &ExportConfig) {
        say!(
            self.log,
            warn,
            "a translation has not come within {} ms",
            config.miss_limit_ns / 1_000_000
        );
        if let Some(tlb) = self.memory.tlb() {
            tlb.close();
        }
        device.fail(Violation::MissUnanswered);
    }

    /// Returns the time at which the oldest miss reaches its limit, in nanoseconds.
    pub(crate) fn miss_deadline(&self, config: &ExportConfig) -> Option<u64> {
        let since = self.memory.oldest_miss_ns()?;
        Some(since.saturating_add(config.miss_limit_ns))
    }

    /// Starts the rings whose areas have translations. Returns whether there were any.
    fn start_rings(
        &mut self,
        device: &mut Device<impl DeviceClass>,
        turn: &mut PollContext<'_>,
    ) -> bool {
        let mut started = false;
        for at in (0..self.starting.len()).rev() {
            let ring = &self.starting[at];
            if ring.waits.is_some() || ring.is_failed {
                continue;
            }
            let wanted = areas(&ring.config);
            self.starting[at].waits = self.memory.absent(&wanted);
            if self.starting[at].waits.is_some() {
                continue;
            }
            let config = self.starting[at].config.clone();
            started = true;
            match self.start_ring(config, device, turn) {
                Ok(()) => drop(self.starting.remove(at)),
                Err(refusal) => self.fail_start(at, &refusal, device),
            }
        }
        started
    }

    /// Fails a ring that cannot start although its start was answered.
    #[cold]
    fn fail_start(&mut self, at: usize, refusal: &Refusal, device: &mut Device<impl DeviceClass>) {
        say!(self.log, warn, "{refusal}");
        let ring = &mut self.starting[at];
        ring.is_failed = true;
        device.fail(Violation::RingAddress(ring.config.index.into()));
        let err = ring.config.err.clone();
        if let Ok(Some(mut err)) = self.notifier("error", err) {
            err.notify();
        }
    }

    fn ring_ticket_done(&mut self, ticket: Ticket) {
        for ring in &mut self.starting {
            ring.waits = ring.waits.filter(|&own| own != ticket);
        }
    }

    /// Returns the configuration of the ring of this number, if it waits for its start.
    pub(crate) fn starting(&mut self, index: u8) -> Option<&mut RingConfig> {
        let mut starting = self.starting.iter_mut();
        let ring = starting.find(|ring| ring.config.index == index)?;
        Some(&mut ring.config)
    }

    /// Cancels the start of a ring that waits for it. Returns its base.
    pub(crate) fn cancel_start(&mut self, index: u8) -> Option<RingBase> {
        let mut starting = self.starting.iter();
        let at = starting.position(|ring| ring.config.index == index)?;
        Some(self.starting.remove(at).config.base)
    }
}

fn update<M: RegionMemory>(
    memory: &mut Memory<M>,
    counts: &mut ExportStats,
    range: IotlbRange,
    user_addr: u64,
    access: IotlbAccess,
) -> Outcome {
    counts.iotlb_updates += 1;
    memory
        .update(range, user_addr, access)
        .map(|()| Answer::Done)
}

/// Parses the answer to a miss. Returns whether it reports success; `None` if the message is no
/// such answer.
fn answer(message: &Message) -> Option<bool> {
    let is_reply = message.head.is_reply()
        && message.head.request.0 == BackendRequestId::IOTLB_MSG.0
        && message.fds.is_empty();
    let value = message.payload.as_slice().try_into().ok();
    let value = value.filter(|_| is_reply).map(u64::from_ne_bytes)?;
    Some(value == 0)
}

/// Returns a ring's areas with the accesses to them: their translations are requested all at once.
fn areas(config: &RingConfig) -> Vec<Wanted> {
    let size = u32::from(config.size);
    let (desc, avail, used) = (
        Iova::new(config.desc),
        Iova::new(config.avail),
        Iova::new(config.used),
    );
    match config.layout {
        RingLayout::Split => vec![
            (desc, 16 * size, Intent::Read),
            (avail, 6 + 2 * size, Intent::Read),
            // A ring continues at the index in it.
            (used, 4, Intent::Read),
            (used, 6 + 8 * size, Intent::Write),
        ],
        RingLayout::Packed => vec![
            (desc, 16 * size, Intent::Read),
            (desc, 16 * size, Intent::Write),
            (avail, 4, Intent::Read),
            (used, 4, Intent::Write),
        ],
    }
}
