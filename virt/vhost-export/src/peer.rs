//! One connection of a front end, from accept to its end.

use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};

use guest_mem::{FileError, MapError, SharedFile, Ticket};
use sidecore::{Activity, Nanos, PollContext, Wakes, WritePermit};
use vhost_user::backend::{Answer, Config, Fatal, Refusal, Region, RingConfig, Session, Step};
use vhost_user::chain;
use vhost_user::channel::{DEFAULT_BACKLOG, DEFAULT_MAX_PAYLOAD, ReceiveError, Receiver, Sender};
use vhost_user::wire::{Message, ProtocolFeatures, RequestId};
use vio::net::net_feature;
use vio::ring::Watch;
use vio::{CancelReason, Device, DeviceClass, PollBudget, QueueDevice, feature};

use crate::config::{ExportConfig, ExportStats};
use crate::deferred_drop::{DeferredDrop, is_taken};
use crate::iotlb::{Channel, StartingRing};
use crate::journal::InflightRegion;
use crate::log::{Log, say};
use crate::memory::{Memory, RegionMemory, with_view};
use crate::queue::{Calls, LOAD, Queue};

/// Token of the connection's descriptor; a ring's kick has the ring's number, below 256.
pub(crate) const TOKEN_SOCKET: u32 = 1 << 16;
/// Token of the back-end channel, on which this process sends requests.
pub(crate) const TOKEN_CHANNEL: u32 = TOKEN_SOCKET + 3;

/// Largest number of messages handled in one poll of the socket. A front end that sends without end
/// is continued in its next turn.
const MESSAGES: u32 = 16;
/// Least cost charged for a message, in nanoseconds. One that takes longer (mapping memory) is
/// charged its time.
const MESSAGE_COST: u64 = 3_000;
/// Interval between attempts to send to a front end that does not read, in nanoseconds.
const FLUSH_EVERY_NS: u64 = 1_000_000;
/// Cost of a call (the interrupt of a driver), in nanoseconds.
const CALL_COST: u64 = 500;
/// Memory regions of one guest: the number that QEMU requests, which has a region for each
/// hot-plugged memory.
const MAX_REGIONS: usize = 64;

/// Protocol features that are offered to every front end. BACKEND_REQ serves translations.
/// User-mode Linux 6.1 needs it, too: it requests the interrupt of its rings only together with
/// that channel, and fails without it.
pub(crate) const PROTOCOL: ProtocolFeatures = ProtocolFeatures(
    ProtocolFeatures::MQ.0
        | ProtocolFeatures::REPLY_ACK.0
        | ProtocolFeatures::BACKEND_REQ.0
        | ProtocolFeatures::CONFIG.0
        | ProtocolFeatures::INFLIGHT_SHMFD.0
        | ProtocolFeatures::RESET_DEVICE.0
        | ProtocolFeatures::CONFIGURE_MEM_SLOTS.0,
);

/// Whether this host permits memory files. In these, front ends keep the requests in flight, from
/// which the successor of a killed back end resumes. If not, inflight regions are not offered.
pub fn has_inflight_regions() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| match SharedFile::create(1) {
        // A lack of permission or support is permanent; a lack of descriptors or memory is not.
        Err(FileError::Create(MapError::Create(error))) => !matches!(
            error.kind(),
            ErrorKind::PermissionDenied | ErrorKind::Unsupported
        ),
        _ => true,
    })
}

/// Returns the protocol features that are offered to the front ends of a device of this type. A
/// network device's front end has the configuration itself, and QEMU warns of an offer of CONFIG.
fn protocol(device_type: u16) -> ProtocolFeatures {
    let mut protocol = PROTOCOL;
    if !has_inflight_regions() {
        protocol = protocol.without(ProtocolFeatures::INFLIGHT_SHMFD);
    }
    if device_type == NETWORK {
        protocol = protocol.without(ProtocolFeatures::CONFIG)
            | ProtocolFeatures::RARP
            | ProtocolFeatures::MTU;
    }
    protocol
}

/// Returns the device features that are offered to the front ends. Front ends of a network device
/// have its address and the state of its link themselves (CONFIG is not offered), and do not send
/// them to the device. So neither these two nor filters by address are offered. Otherwise user-mode
/// Linux would take an unreadable configuration space for the address, and for a link that is down.
fn features(device: &Device<impl DeviceClass>) -> u64 {
    const BY_ADDRESS: u64 = net_feature::MAC
        | net_feature::STATUS
        | net_feature::CTRL_RX
        | net_feature::CTRL_RX_EXTRA
        | net_feature::CTRL_MAC_ADDR;
    match device.device_type() {
        NETWORK => device.features() & !BY_ADDRESS,
        _ => device.features(),
    }
}

/// Device type of network devices (virtio 1.2 §5).
const NETWORK: u16 = 1;

/// Something the session waits for, or the end of the connection.
pub(crate) enum Task {
    /// A ring is to start. Some of its memory is absent until the ticket is done; `None`: it is
    /// done.
    StartRing(Box<RingConfig>, Option<Ticket>),
    /// Ring `index` is to stop.
    StopRing(u8),
    /// Guest memory is to change.
    Memory(Arc<[Region]>),
    /// Leases that an invalidation covers are to end.
    Invalidate,
    /// The device is to be reset.
    Reset,
    /// The connection is over, but its memory is still in use.
    Close,
}

impl Task {
    /// Returns the name of the waiting operation, for the log.
    fn waiter(&self) -> &'static str {
        match self {
            Self::StartRing(..) => "starting a ring",
            Self::StopRing(_) => "stopping a ring",
            Self::Memory(_) => "a change of guest memory",
            Self::Invalidate => "an invalidation",
            Self::Reset => "a reset",
            Self::Close => "the end of the connection",
        }
    }
}

/// A task that waits for requests in flight.
#[derive(Clone, Copy)]
struct Wait {
    since: Nanos,
    /// The drain limit has passed, and this was handled once.
    is_overdue: bool,
}

/// Outcome of an attempt to advance a task.
enum Advance {
    /// There is no task.
    Nothing,
    /// The task waits for requests in flight.
    Waits,
    /// The task has ended.
    Done,
    /// The task was the end of the connection, which has ended.
    Gone,
}

/// A connected front end.
pub(crate) struct Peer<M> {
    pub(crate) log: Arc<Log>,
    pub(crate) deferred: Arc<DeferredDrop>,
    /// The export's permit to write to the descriptors by which drivers are called.
    pub(crate) permit: WritePermit,
    socket: UnixStream,
    receiver: Receiver,
    sender: Sender,
    pub(crate) session: Session,
    pub(crate) memory: Memory<M>,
    pub(crate) queues: Vec<Queue>,
    pub(crate) inflight: Option<InflightRegion>,
    /// Channel for requests to the front end, which are those for translations.
    pub(crate) channel: Option<Channel>,
    /// Rings that wait for translations.
    pub(crate) starting: Vec<StartingRing>,
    /// Counts of translations not yet added to the export's.
    pub(crate) counts: ExportStats,
    pub(crate) task: Option<Task>,
    /// A message that was received while a ring was being stopped, and is handled after that.
    pub(crate) put_off: Option<Message>,
    /// Replies to messages handled while a ring was being stopped; they follow the reply to the
    /// stop.
    pub(crate) late: Vec<Message>,
    /// Time since which the task waits for requests in flight.
    wait: Option<Wait>,
    /// Time of the next attempt to send replies, when the socket accepts no more.
    flush_at: Nanos,
    /// Features that the driver has accepted; the device was activated with them.
    pub(crate) features: u64,
    pub(crate) has_begun: bool,
    /// A part of guest memory was lost, which was logged.
    lost: bool,
    /// Number of protocol violations not yet added to the export's.
    violations: u64,
    /// Watches of the rings' words that change when there are new requests, as of the last idle
    /// visit.
    pub(crate) watches: Vec<Option<Watch>>,
    /// Every ring has a watch, so checking these covers all rings.
    pub(crate) is_watched: bool,
}

/// Outcome of serving a peer.
pub(crate) enum Served {
    /// The connection continues.
    On(Activity),
    /// The connection is over, and nothing of it is in use any more.
    Gone,
}

impl<M: RegionMemory> Peer<M> {
    pub(crate) fn new(
        socket: UnixStream,
        memory: M,
        device: &Device<impl DeviceClass>,
        log: Arc<Log>,
        deferred: Arc<DeferredDrop>,
        permit: WritePermit,
    ) -> Result<Self, String> {
        socket
            .set_nonblocking(true)
            .map_err(|error| format!("the connection cannot be made non-blocking: {error}"))?;
        let max_ring_size = device.queue_sizes().iter().copied().max().unwrap_or(0);
        let session = Session::new(Config {
            features: features(device),
            protocol: protocol(device.device_type()),
            queues: device.queue_sizes().len() as u16,
            rings_per_queue: if device.device_type() == NETWORK {
                2
            } else {
                1
            },
            max_ring_size,
            max_regions: MAX_REGIONS,
        })
        .map_err(|error| chain(&error))?;
        Ok(Self {
            log,
            deferred,
            permit,
            socket,
            receiver: Receiver::new(DEFAULT_MAX_PAYLOAD).accepting(is_taken),
            sender: Sender::new(DEFAULT_BACKLOG),
            session,
            memory: Memory::new(memory),
            queues: Vec::new(),
            inflight: None,
            channel: None,
            starting: Vec::new(),
            counts: ExportStats::default(),
            task: None,
            put_off: None,
            late: Vec::new(),
            wait: None,
            flush_at: Nanos(0),
            features: feature::VERSION_1,
            has_begun: false,
            lost: false,
            violations: 0,
            watches: Vec::new(),
            is_watched: false,
        })
    }

    /// Registers all descriptors, except the socket of a connection that is over: it would not be
    /// removed again.
    pub(crate) fn register(&self, wakes: &mut Wakes) -> std::io::Result<()> {
        if !self.is_closing() {
            wakes.add(self.socket.as_raw_fd(), TOKEN_SOCKET)?;
        }
        for queue in &self.queues {
            if let Some(fd) = queue.kick_fd() {
                wakes.add(fd, u32::from(queue.index))?;
            }
        }
        self.register_channel(wakes)
    }

    /// Handles messages that the front end has sent, a bounded number.
    pub(crate) fn read_socket(
        &mut self,
        device: &mut Device<impl DeviceClass>,
        turn: &mut PollContext<'_>,
    ) {
        // While a task waits, messages wait in the socket. But the end of the connection is noticed
        // now, since a task may wait for as long as a disk does not answer.
        if self.task.is_some() {
            self.notice_end(turn);
            return self.take_updates(turn);
        }
        for _ in 0..MESSAGES {
            // No message is taken from a front end that does not read its replies.
            if self.task.is_some() || self.sender.backlog() != 0 {
                return;
            }
            let start = Nanos::now();
            let Some(message) = self.next_message(turn) else {
                return;
            };
            let request = message.head.request;
            let channels = match self.keep_channels(&message) {
                Ok(channels) => channels,
                Err(reason) => {
                    self.deferred.close(message);
                    return self.reject(reason, turn);
                }
            };
            match self.session.handle(message) {
                Ok(Step::Done(reply)) => self.reply(reply, turn),
                Ok(Step::Refused(error, reply)) => {
                    self.violations += 1;
                    say!(self.log, warn, ?request, reason = %chain(&error), "a request was \
                         refused");
                    self.reply(Some(reply), turn);
                }
                Ok(Step::Event(event)) => {
                    tracing::debug!(export = %self.log.name(), ?request, "{event:?}");
                    if let Some(outcome) = self.begin_event(event, device, turn) {
                        self.finish(outcome, turn);
                    }
                }
                Err(fatal) => self.fail(&fatal, turn),
            }
            self.let_go_of_channels(channels);
            turn.charge(Nanos::now().since(start).max(MESSAGE_COST));
        }
    }

    /// Takes the next message. `None` also if the connection has ended.
    pub(crate) fn next_message(&mut self, turn: &mut PollContext<'_>) -> Option<Message> {
        if let Some(message) = self.put_off.take() {
            return Some(message);
        }
        match self.receiver.receive(self.socket.as_fd()) {
            Ok(Some(message)) => return Some(message),
            Ok(None) => self.socket_is_empty(),
            Err(error) => self.receive_failed(error, turn),
        }
        None
    }

    /// Duplicates the sockets that a message offers as back-end channel, so that a refused one is
    /// closed by a thread of its own: closing may take long, since descriptors may be queued in it.
    fn keep_channels(&self, message: &Message) -> Result<Vec<(RawFd, OwnedFd)>, &'static str> {
        if message.head.request != RequestId::SET_BACKEND_REQ_FD {
            return Ok(Vec::new());
        }
        // Each deferred close occupies a thread for as long as it takes.
        if self.deferred.is_full() {
            return Err("what it has left takes long to close, and it leaves more");
        }
        let keep = |fd: &OwnedFd| Some((fd.as_raw_fd(), fd.try_clone().ok()?));
        let kept: Option<Vec<_>> = message.fds.iter().map(keep).collect();
        kept.ok_or("no descriptor is free (RLIMIT_NOFILE)")
    }

    fn let_go_of_channels(&self, channels: Vec<(RawFd, OwnedFd)>) {
        let own = self.channel.as_ref().map(Channel::number);
        for (number, fd) in channels {
            // The accepted one stays open by another descriptor.
            if own != Some(number) {
                self.deferred.close(fd);
            }
        }
    }

    /// Checks whether the front end has closed the connection; if not, handles its messages.
    pub(crate) fn look_for_end(
        &mut self,
        device: &mut Device<impl DeviceClass>,
        turn: &mut PollContext<'_>,
    ) {
        self.notice_end(turn);
        self.read_socket(device, turn);
    }

    /// Ends the connection if the front end has closed it, even if messages are left.
    fn notice_end(&mut self, turn: &mut PollContext<'_>) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        if let Ok(1..) = poll(&mut fds, Some(&Timespec::default())) {
            self.close(turn);
        }
    }

    /// Number of protocol violations since the last `take_violations`.
    pub(crate) fn violations(&self) -> u64 {
        self.violations
    }

    /// Returns the number of protocol violations since the last call.
    pub(crate) fn take_violations(&mut self) -> u64 {
        std::mem::take(&mut self.violations)
    }

    /// Whether the connection is over.
    pub(crate) fn is_closing(&self) -> bool {
        matches!(self.task, Some(Task::Close))
    }

    /// Whether the connection is over and expected to end soon: requests in flight have the drain
    /// limit to end, and the same time again once cancelled. If some remain after that, they may
    /// never end.
    pub(crate) fn is_ending(&self, now: Nanos, config: &ExportConfig) -> bool {
        let limit_ns = config.drain_limit_ns.saturating_mul(2);
        let is_overdue = self
            .wait
            .is_some_and(|wait| now.since(wait.since) > limit_ns);
        self.is_closing() && !is_overdue
    }

    /// Records that the memory of `ticket` is present: a ring that waits for it starts at the next
    /// visit.
    pub(crate) fn ticket_done(&mut self, ticket: Ticket) {
        if let Some(Task::StartRing(_, waits)) = &mut self.task {
            *waits = waits.filter(|&own| own != ticket);
        }
    }

    /// Completes the event that the session waits for.
    pub(crate) fn finish(&mut self, outcome: Result<Answer, Refusal>, turn: &mut PollContext<'_>) {
        if let Err(refusal) = &outcome {
            say!(self.log, warn, "{refusal}");
        }
        match self.session.finish(outcome) {
            Ok(reply) => self.reply(reply, turn),
            Err(fatal) => self.fail(&fatal, turn),
        }
        for reply in std::mem::take(&mut self.late) {
            self.reply(Some(reply), turn);
        }
    }

    fn reply(&mut self, reply: Option<Message>, turn: &mut PollContext<'_>) {
        let Some(reply) = reply else { return };
        let sent = self
            .sender
            .push(reply)
            .and_then(|()| self.sender.flush(self.socket.as_fd()).map(drop));
        if let Err(error) = sent {
            say!(self.log, info, reason = %chain(&error), "a reply cannot be sent");
            self.close(turn);
        }
    }

    pub(crate) fn fail(&mut self, fatal: &Fatal, turn: &mut PollContext<'_>) {
        self.reject(&chain(fatal), turn);
    }

    /// Handles the failure to receive: the front end has gone, or has broken the protocol.
    fn receive_failed(&mut self, error: ReceiveError, turn: &mut PollContext<'_>) {
        let reason = chain(&error);
        match error {
            ReceiveError::Closed {
                is_mid_message: false,
            }
            | ReceiveError::Socket(_) => {
                say!(self.log, info, reason, "the front end is gone");
                self.close(turn);
            }
            ReceiveError::Unaccepted { fds } => {
                self.deferred.close(fds);
                self.reject(&reason, turn);
            }
            // This process may have no free descriptors, so the meaning of the message is lost.
            ReceiveError::AncillaryTruncated
            | ReceiveError::Frame(_)
            | ReceiveError::Closed {
                is_mid_message: true,
            } => self.reject(&reason, turn),
        }
    }

    /// Ends the connection of a front end that has broken the protocol.
    pub(crate) fn reject(&mut self, reason: &str, turn: &mut PollContext<'_>) {
        self.violations += 1;
        say!(
            self.log,
            warn,
            reason,
            "a front end broke the protocol, and its connection is closed"
        );
        self.close(turn);
    }

    /// Ends the connection: nothing is read or sent any more. It is gone as soon as nothing is in
    /// flight.
    fn close(&mut self, turn: &mut PollContext<'_>) {
        if self.is_closing() {
            return;
        }
        turn.wakes().remove(self.socket.as_raw_fd());
        self.stop_asking(turn.wakes());
        // So that the front end detects it now, and not when the last request has ended.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        self.task = Some(Task::Close);
        self.wait = None;
    }

    /// Serves the rings once, makes calls, and advances the task.
    pub(crate) fn serve(
        &mut self,
        device: &mut Device<impl DeviceClass>,
        config: &ExportConfig,
        stats: &mut ExportStats,
        turn: &mut PollContext<'_>,
    ) -> Served {
        let now_ns = turn.now().0;
        let mut visit = PollBudget::new(now_ns, turn.budget());
        let mut activity = Activity::Idle;
        if self.has_begun {
            let mut calls = Calls {
                queues: &mut self.queues,
                now_ns,
            };
            let asks = || turn.others_wait();
            let others = turn.has_others().then_some(&asks as &dyn Fn() -> bool);
            let visited = with_view!(self.memory, view =>
                device.visit_beside(view, &mut calls, &mut visit, others));
            activity = match visited {
                vio::Activity::Busy => Activity::Busy,
                vio::Activity::Idle => Activity::Idle,
            };
            // Every request that waited for a refused translation has met the fault now: all ended
            // tickets were handed out before this visit, which was not cut short. Forgetting does
            // not wait for an idle visit: the next request may come before that, and must not meet
            // an old refusal.
            if !visit.is_over()
                && let Some(tlb) = self.memory.tlb()
                && !tlb.has_ended()
            {
                tlb.forget_refusals();
            }
            turn.charge(visit.spent());
            turn.took(visit.requests());
            self.make_calls(device, config, stats, visit.is_over(), turn);
        }
        if self.memory.is_lost() && !self.lost {
            self.lost = true;
            self.violations += 1;
            say!(
                self.log,
                warn,
                "the front end truncated guest memory; giving the connection up"
            );
            self.close(turn);
        }
        if self.flush_at().is_some_and(|at| at <= now_ns) {
            self.flush(turn);
        }
        if self.exchange_iotlb(device, config, stats, turn) {
            activity = Activity::Busy;
        }
        match self.advance_task(device, config, stats, turn) {
            Advance::Gone => return Served::Gone,
            Advance::Done => activity = Activity::Busy,
            // The end of its wait, or its deadline, wakes the core.
            Advance::Waits if activity == Activity::Idle => activity = Activity::Waiting,
            Advance::Waits | Advance::Nothing => {}
        }
        if !self.has_begun {
            return Served::On(activity);
        }
        // A visit that was not cut short has mostly taken everything. Behind a vIOMMU the next
        // visit also handles the results of misses.
        let is_drained = activity == Activity::Busy
            && !visit.is_over()
            && self.task.is_none()
            && device.in_flight() == 0
            && !self.memory.is_translated()
            && !with_view!(self.memory, view => device.has_left(view));
        if is_drained {
            turn.drained();
        }
        if activity == Activity::Idle || is_drained {
            self.watch(device);
        }
        Served::On(activity)
    }

    fn flush(&mut self, turn: &mut PollContext<'_>) {
        self.flush_at = turn.now().after(FLUSH_EVERY_NS);
        if self.sender.flush(self.socket.as_fd()).is_err() {
            self.close(turn);
        }
    }

    /// Returns the time at which waiting replies are to be sent, in nanoseconds.
    pub(crate) fn flush_at(&self) -> Option<u64> {
        let channel = self.channel.as_ref().map_or(0, Channel::backlog);
        (self.sender.backlog() + channel != 0 && !self.is_closing()).then_some(self.flush_at.0)
    }

    /// Calls the drivers that are due, unless more completions are expected for the same call.
    fn make_calls(
        &mut self,
        device: &mut Device<impl DeviceClass>,
        config: &ExportConfig,
        stats: &mut ExportStats,
        has_more: bool,
        turn: &mut PollContext<'_>,
    ) {
        for queue in &mut self.queues {
            let Some(since) = queue.call_since else {
                continue;
            };
            let in_flight = device.ring(queue.index).map_or(0, |ring| ring.in_flight());
            // A visit that one costly request ended early does not tell what is left.
            let is_loaded = in_flight >= LOAD
                || (has_more
                    && with_view!(self.memory, view => device.has_more(queue.index, view)));
            if is_loaded && turn.now().0 < since.saturating_add(config.call_delay_ns) {
                continue;
            }
            queue.ring_call();
            stats.calls += 1;
            turn.charge(CALL_COST);
        }
    }

    /// Returns the latest time at which a pending call must be made.
    pub(crate) fn call_deadline(&self, config: &ExportConfig) -> Option<u64> {
        let since = self.queues.iter().filter_map(|queue| queue.call_since);
        Some(since.min()?.saturating_add(config.call_delay_ns))
    }

    /// Whether the waiting task prevents the device from taking requests.
    pub(crate) fn holds_device(&self) -> bool {
        matches!(self.task, Some(Task::Memory(_) | Task::Reset | Task::Close))
    }

    /// Returns the time at which the waiting task reaches the drain limit, in nanoseconds.
    pub(crate) fn task_deadline(&self, config: &ExportConfig) -> Option<u64> {
        let wait = self.wait?;
        (!wait.is_overdue).then(|| wait.since.0.saturating_add(config.drain_limit_ns))
    }

    /// Completes the task if it can end now.
    fn advance_task(
        &mut self,
        device: &mut Device<impl DeviceClass>,
        config: &ExportConfig,
        stats: &mut ExportStats,
        turn: &mut PollContext<'_>,
    ) -> Advance {
        let Some(task) = self.task.take() else {
            return Advance::Nothing;
        };
        let outcome = match &task {
            Task::StartRing(_, Some(_)) => {
                self.task = Some(task);
                return Advance::Nothing;
            }
            Task::StartRing(config, None) => {
                let outcome = self.start_or_wait((**config).clone(), device, turn);
                if outcome.is_none() {
                    return Advance::Nothing;
                }
                outcome
            }
            Task::StopRing(index) => self.stop_ring((*index).into(), device, turn),
            Task::Memory(regions) => self.change_memory(regions, device),
            Task::Invalidate => {
                let waited = self.wait.map_or(0, |wait| turn.now().since(wait.since));
                match self.finish_invalidation() {
                    None if waited >= config.drain_limit_ns => {
                        Some(self.give_up_invalidation(device))
                    }
                    outcome => outcome,
                }
            }
            Task::Reset | Task::Close => self.reset(device, turn).then_some(Ok(Answer::Done)),
        };
        let Some(outcome) = outcome else {
            self.note_wait(&task, device, config, stats, turn.now());
            self.task = Some(task);
            return Advance::Waits;
        };
        self.note_end_of_wait(&task, turn.now());
        if matches!(task, Task::Close) {
            return Advance::Gone;
        }
        self.finish(outcome, turn);
        // Handle messages that came meanwhile.
        turn.charge(MESSAGE_COST);
        self.read_socket(device, turn);
        Advance::Done
    }

    /// Records that a task waits for requests in flight. Stops, resets and changes of memory wait
    /// for them, however slow the disk is: a request that is cancelled fails in the guest, and one
    /// that cannot be cancelled would make the device unusable. They are cancelled only at the end
    /// of a connection, where no driver waits for them; the next connection executes them again.
    fn note_wait(
        &mut self,
        task: &Task,
        device: &mut Device<impl DeviceClass>,
        config: &ExportConfig,
        stats: &mut ExportStats,
        now: Nanos,
    ) {
        let wait = self.wait.get_or_insert(Wait {
            since: now,
            is_overdue: false,
        });
        if wait.is_overdue || now.since(wait.since) < config.drain_limit_ns {
            return;
        }
        wait.is_overdue = true;
        let seconds = now.since(wait.since) as f64 / 1e9;
        let requests = device.in_flight();
        if matches!(task, Task::Close) {
            stats.cancelled += u64::from(device.cancel(CancelReason::End));
        }
        let path = device.path().unwrap_or_default();
        say!(
            self.log,
            warn,
            requests,
            path = %path.display(),
            "{} has waited {seconds:.1} s for requests that the storage has not finished",
            task.waiter()
        );
    }

    /// Records that the wait of a task has ended, and logs this if the wait was logged.
    fn note_end_of_wait(&mut self, task: &Task, now: Nanos) {
        if let Some(wait) = self.wait.take()
            && wait.is_overdue
        {
            let seconds = now.since(wait.since) as f64 / 1e9;
            say!(
                self.log,
                info,
                "{} goes on: the storage has answered after {seconds:.1} s",
                task.waiter()
            );
        }
    }

    /// Watches each ring's word that changes when there are new requests. A device with events of
    /// its own is visited in each sweep all the same, since frames from a network change no ring.
    fn watch(&mut self, device: &mut Device<impl DeviceClass>) {
        self.is_watched = !device.has_own_events();
        let mut count = 0;
        with_view!(self.memory, view => device.for_each_due_ring(|ring| {
            if count == self.watches.len() {
                self.watches.push(None);
            }
            let watch = &mut self.watches[count];
            ring.watch_in(view, watch);
            // A parked ring is woken by an event, not by a change in memory.
            self.is_watched &= watch.is_some() || ring.parked().is_some();
            count += 1;
        }));
        self.watches.truncate(count);
    }
}
