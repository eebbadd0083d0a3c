//! The other side: a listener, and a thread that plays the daemon to one session after the other.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vhost_user::backend::{
    Answer, Config, Event, Kick, Refusal, Region, RingBase, RingConfig, SUPPORTED, Session,
    SharedFd, Step,
};
use vhost_user::channel::{Receiver, Sender};
use vhost_user::wire::{
    BackendRequest, Inflight, IotlbAccess, IotlbMessage, IotlbRange, Message, ProtocolFeatures,
};

/// Behaviour of the back end.
#[derive(Clone, Debug)]
pub struct Plan {
    pub features: u64,
    pub protocol: ProtocolFeatures,
    pub queues: u16,
    pub max_ring_size: u16,
    /// Sectors of the disk.
    pub sectors: u64,
    /// Position of a ring that is stopped.
    pub base: u16,
    /// It never answers a request to stop a ring.
    pub ignores_stop: bool,
    /// It refuses rings.
    pub refuses_rings: bool,
    /// It takes connections and says nothing.
    pub is_mute: bool,
    /// With each reply comes a descriptor that takes three seconds to close.
    pub lingers: bool,
    /// It answers an invalidation when [`ReceivedMessages::forgotten`] says so.
    pub forgets_slowly: bool,
    /// It refuses invalidations.
    pub refuses_to_forget: bool,
    /// It misses this IOVA when it is to stop a ring, and stops it once there is an entry.
    pub misses_at_stop: Option<u64>,
    /// It refuses every MTU.
    pub refuses_mtu: bool,
}

/// Message about its IOTLB that the back end has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceivedIotlbMessage {
    Update(IotlbRange, u64, IotlbAccess),
    Invalidate(IotlbRange),
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            features: 0,
            protocol: ProtocolFeatures::MQ
                | ProtocolFeatures::REPLY_ACK
                | ProtocolFeatures::CONFIG
                | ProtocolFeatures::INFLIGHT_SHMFD
                | ProtocolFeatures::CONFIGURE_MEM_SLOTS,
            queues: 4,
            max_ring_size: 256,
            sectors: 2048,
            base: 7,
            ignores_stop: false,
            refuses_rings: false,
            is_mute: false,
            lingers: false,
            forgets_slowly: false,
            refuses_to_forget: false,
            misses_at_stop: None,
            refuses_mtu: false,
        }
    }
}

/// Record of the messages received so far.
#[derive(Debug, Default)]
pub struct ReceivedMessages {
    pub connections: u32,
    pub memory: Option<Arc<[Region]>>,
    pub features: Vec<u64>,
    /// Rings as they were started, in the order of starting.
    pub started: Vec<RingConfig>,
    pub enabled: Vec<(u8, bool)>,
    pub stopped: Vec<u8>,
    /// Regions made, and regions given.
    pub inflight_made: u32,
    pub inflight_given: Vec<Inflight>,
    /// Channel for its own requests.
    pub channel: Option<SharedFd>,
    /// Messages about its IOTLB, in order.
    pub told: Vec<ReceivedIotlbMessage>,
    pub mtu: Vec<u64>,
    /// Stations that it was to announce.
    pub announced: Vec<[u8; 6]>,
    /// Invalidations that it may answer, where it waits for that.
    pub forgotten: usize,
}

impl ReceivedMessages {
    /// Rings that are to be served: started (enabled or later so).
    pub fn is_serving(&self, ring: u8) -> bool {
        self.enabled.iter().rev().find(|(at, _)| *at == ring) == Some(&(ring, true))
            || self
                .started
                .iter()
                .rev()
                .find(|config| config.index == ring)
                .is_some_and(|config| config.is_enabled)
    }
}

/// See the module's head. Dropping it is its death: socket gone, connections closed.
pub struct BackEnd {
    path: PathBuf,
    _dir: Option<tempfile::TempDir>,
    seen: Arc<Mutex<ReceivedMessages>>,
    is_over: Arc<AtomicBool>,
    wake: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl BackEnd {
    pub fn new(plan: Plan) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut this = Self::at(&dir.path().join("s"), plan);
        this._dir = Some(dir);
        this
    }

    pub fn at(path: &Path, plan: Plan) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let seen = Arc::<Mutex<ReceivedMessages>>::default();
        let is_over = Arc::<AtomicBool>::default();
        let wake = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let player = Player {
            plan,
            seen: seen.clone(),
            is_over: is_over.clone(),
            wake: wake.try_clone().unwrap(),
        };
        let thread = std::thread::spawn(move || player.play(&listener));
        Self {
            path: path.to_owned(),
            _dir: None,
            seen,
            is_over,
            wake,
            thread: Some(thread),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn seen(&self) -> MutexGuard<'_, ReceivedMessages> {
        self.seen.lock().unwrap()
    }

    /// Dies, and comes back with another plan. The directory stays.
    pub fn restart(mut self, plan: Plan) -> Self {
        let dir = self._dir.take();
        let path = self.path.clone();
        drop(self);
        let mut this = Self::at(&path, plan);
        this._dir = dir;
        this
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        crate::handshake::ring(&self.wake);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        std::fs::remove_file(&self.path).unwrap();
    }
}

/// A TCP socket whose last close waits: its peer reads nothing, and it is to linger.
fn lingering() -> OwnedFd {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    let linger = Some(Duration::from_secs(3));
    rustix::net::sockopt::set_socket_linger(&socket, linger).unwrap();
    // Its end would reset the connection.
    std::mem::forget(listener);
    socket.into()
}

struct Player {
    plan: Plan,
    seen: Arc<Mutex<ReceivedMessages>>,
    is_over: Arc<AtomicBool>,
    wake: OwnedFd,
}

impl Player {
    fn play(&self, listener: &UnixListener) {
        while self.wait_for(listener) {
            let (socket, _) = listener.accept().unwrap();
            self.seen.lock().unwrap().connections += 1;
            self.serve(&socket);
        }
    }

    /// False: it is over.
    fn wait_for(&self, fd: &impl std::os::fd::AsFd) -> bool {
        let mut fds = [
            PollFd::new(fd, PollFlags::IN),
            PollFd::new(&self.wake, PollFlags::IN),
        ];
        poll(&mut fds, None).unwrap();
        !self.is_over.load(Ordering::SeqCst)
    }

    fn serve(&self, socket: &UnixStream) {
        let plan = &self.plan;
        let mut session = Session::new(Config {
            features: plan.features,
            protocol: plan.protocol & SUPPORTED,
            queues: plan.queues,
            rings_per_queue: 1,
            max_ring_size: plan.max_ring_size,
            max_regions: 8,
        })
        .unwrap();
        let (mut receiver, mut sender) = (Receiver::default(), Sender::default());
        while self.wait_for(socket) {
            if plan.is_mute {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let message = match receiver.receive(socket) {
                Ok(Some(message)) => message,
                Ok(None) => continue,
                Err(_) => return,
            };
            let mut late_reply = None;
            let reply = match session.handle(message) {
                Ok(Step::Done(reply)) => reply,
                Ok(Step::Refused(_, reply)) => Some(reply),
                Ok(Step::Event(event)) => {
                    if plan.ignores_stop && matches!(event, Event::RingStopped(_)) {
                        self.seen.lock().unwrap().stopped.push(u8::MAX);
                        // Its front end hangs up in the end.
                        while self.wait_for(socket) {
                            match receiver.receive(socket) {
                                Err(_) => return,
                                Ok(_) => std::thread::sleep(Duration::from_millis(1)),
                            }
                        }
                        return;
                    }
                    if !self.may_answer(&event, socket) {
                        return;
                    }
                    let mut late = None;
                    if let (Event::RingStopped(_), Some(iova)) = (&event, plan.misses_at_stop) {
                        let Some(update) = self.miss_and_wait(iova, socket, &mut receiver) else {
                            return;
                        };
                        late = session
                            .update_beside(update, |event| self.act(event))
                            .unwrap();
                    }
                    late_reply = late;
                    match session.finish(self.act(event)) {
                        Ok(reply) => reply,
                        Err(_) => return,
                    }
                }
                Err(_) => return,
            };
            for mut reply in reply.into_iter().chain(late_reply.take()) {
                // Sending it closes ours: the other side's is the last, unless it is very quick
                // (then this one waits, and the test sees nothing).
                reply.fds.extend(plan.lingers.then(lingering));
                sender.push(reply).unwrap();
                if sender.flush(socket).is_err() {
                    return;
                }
            }
        }
    }

    /// Asks for an entry, and waits for the message that has it. None: the connection has ended.
    fn miss_and_wait(
        &self,
        iova: u64,
        socket: &UnixStream,
        receiver: &mut Receiver,
    ) -> Option<Message> {
        let channel = self.seen.lock().unwrap().channel.clone().unwrap();
        let miss = IotlbMessage::Miss {
            iova,
            access: IotlbAccess::Write,
        };
        let mut asking = Sender::default();
        asking
            .push(BackendRequest::Iotlb(miss).encode(true))
            .unwrap();
        asking.flush(&channel).unwrap();
        while self.wait_for(socket) {
            match receiver.receive(socket) {
                Ok(Some(message)) => {
                    assert!(IotlbMessage::is_update(&message), "{message:?}");
                    return Some(message);
                }
                Ok(None) => {}
                Err(_) => return None,
            }
        }
        None
    }

    /// Waits until an invalidation may be answered. False: the front end has closed the connection.
    fn may_answer(&self, event: &Event, socket: &UnixStream) -> bool {
        let &Event::IotlbInvalidate(range) = event else {
            return true;
        };
        let mut seen = self.seen.lock().unwrap();
        seen.told.push(ReceivedIotlbMessage::Invalidate(range));
        if !self.plan.forgets_slowly {
            return true;
        }
        while seen.forgotten == 0 {
            drop(seen);
            let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
            let is_gone = poll(&mut fds, Some(&Timespec::default())).unwrap() != 0;
            if is_gone || self.is_over.load(Ordering::SeqCst) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
            seen = self.seen.lock().unwrap();
        }
        seen.forgotten -= 1;
        true
    }

    fn act(&self, event: Event) -> Result<Answer, Refusal> {
        let mut seen = self.seen.lock().unwrap();
        match event {
            Event::Memory(regions) => seen.memory = Some(regions),
            Event::Features(features) => seen.features.push(features),
            Event::RingStarted(config) => {
                if self.plan.refuses_rings {
                    return Err(Refusal("as planned".into()));
                }
                assert!(matches!(config.kick, Kick::Fd(_)), "a kick descriptor");
                seen.started.push(config);
            }
            Event::RingEnabled(ring, enable) => seen.enabled.push((ring, enable)),
            Event::RingStopped(ring) => {
                seen.stopped.push(ring);
                return Ok(Answer::RingStopped(RingBase::Split(self.plan.base)));
            }
            Event::ConfigRead(access) => {
                let mut config = vec![0; access.size as usize];
                config[..8].copy_from_slice(&self.plan.sectors.to_le_bytes());
                return Ok(Answer::Config(config));
            }
            Event::InflightWanted(_) => {
                assert!(
                    !seen.features.is_empty(),
                    "it has to know the rings' layout"
                );
                seen.inflight_made += 1;
                return Ok(Answer::Inflight {
                    fd: tempfile::tempfile().unwrap().into(),
                    mmap_size: 4096 * u64::from(seen.inflight_made),
                    mmap_offset: 0,
                });
            }
            Event::InflightGiven(inflight, _) => seen.inflight_given.push(inflight),
            Event::BackendChannel(channel) => seen.channel = Some(channel),
            Event::IotlbUpdate {
                range,
                user_addr,
                access,
            } => seen
                .told
                .push(ReceivedIotlbMessage::Update(range, user_addr, access)),
            Event::Mtu(_) if self.plan.refuses_mtu => {
                return Err(Refusal("as planned".into()));
            }
            Event::Mtu(mtu) => seen.mtu.push(mtu),
            Event::Announce(mac) => seen.announced.push(mac),
            Event::IotlbInvalidate(_) if self.plan.refuses_to_forget => {
                return Err(Refusal("as planned".into()));
            }
            _ => {}
        }
        Ok(Answer::Done)
    }
}
