//! The session: dispatch, replies, and all requests that are not about rings.

use super::config::Config;
use super::memory;
use super::reply::{Respond, base_reply, config_reply, inflight_reply, refusal};
use super::ring::Ring;
use super::{Answer, ConfigError, Event, Fatal, Refusal, Region, RequestError, RingBase, Step};
use crate::wire::{
    DecodeError, Head, Inflight, IotlbMessage, Message, ProtocolFeatures, Request, RequestId,
    feature,
};

/// Change of the session's state that takes effect once the daemon has finished an event.
#[derive(Debug)]
pub(super) enum Change {
    None,
    Features(u64),
    Protocol(ProtocolFeatures),
    Memory(Vec<Region>),
    Ring(u8, Ring),
    AllDisabled,
    Reset,
}

/// Outcome of a valid request.
pub(super) enum RequestOutcome {
    Reply(Message),
    /// Nothing for the daemon.
    Change(Change),
    Event(Event, Change, Respond),
}

/// An event the daemon has not finished.
#[derive(Debug)]
struct Pending {
    head: Head,
    wants_ack: bool,
    change: Change,
    respond: Respond,
}

/// The session of one front end with one device.
///
/// Owned by one thread. Lives as long as the connection: a front end that connects again starts
/// anew.
#[derive(Debug)]
pub struct Session {
    pub(super) config: Config,
    pub(super) features: u64,
    protocol: ProtocolFeatures,
    /// Sorted by guest address.
    pub(super) regions: Vec<Region>,
    pub(super) rings: Vec<Ring>,
    pending: Option<Pending>,
}

impl Session {
    /// A session in which nothing is negotiated.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let config = config.check()?;
        let rings = vec![Ring::default(); config.queues.into()];
        Ok(Self {
            config,
            features: 0,
            protocol: ProtocolFeatures::NONE,
            regions: Vec::new(),
            rings,
            pending: None,
        })
    }

    /// Features the front end acknowledged (SET_FEATURES), bit 30 among them or not.
    pub const fn features(&self) -> u64 {
        self.features
    }

    /// Protocol features the front end acknowledged.
    pub const fn protocol_features(&self) -> ProtocolFeatures {
        self.protocol
    }

    /// Whether an event waits for [`Session::finish`]: leave the socket alone until then.
    pub const fn is_waiting(&self) -> bool {
        self.pending.is_some()
    }

    /// Takes one message from the front end.
    ///
    /// # Errors
    /// [`Fatal`]: close the socket; the session can only be dropped.
    pub fn handle(&mut self, message: Message) -> Result<Step, Fatal> {
        let head = message.head;
        if self.pending.is_some() {
            return Err(Fatal::Unfinished {
                request: head.request,
            });
        }
        let wants_ack = self.wants_ack(&message);
        let act = Request::decode(message).map_err(RequestError::from);
        match act.and_then(|request| self.dispatch(request)) {
            Ok(RequestOutcome::Reply(reply)) => Ok(Step::Done(Some(reply))),
            Ok(RequestOutcome::Change(change)) => {
                self.apply(change);
                Ok(Step::Done(
                    wants_ack.then(|| Message::reply_u64(head.request, 0)),
                ))
            }
            Ok(RequestOutcome::Event(event, change, respond)) => {
                self.pending = Some(Pending {
                    head,
                    wants_ack,
                    change,
                    respond,
                });
                Ok(Step::Event(event))
            }
            Err(error) => match refusal(head.request, wants_ack, None) {
                Some(reply) => Ok(Step::Refused(error, reply)),
                None => Err(error.into()),
            },
        }
    }

    /// Ends the event that waits, well or not; gives the reply to be sent, where there is one. An
    /// event that ended badly leaves the session as it was before.
    ///
    /// # Errors
    /// [`Fatal::WrongAnswer`] is the daemon's own mistake (no event waits, or another answer
    /// belongs to it); [`Fatal::Untold`] a failure that cannot be reported to the front end.
    pub fn finish(&mut self, outcome: Result<Answer, Refusal>) -> Result<Option<Message>, Fatal> {
        let Pending {
            head,
            wants_ack,
            change,
            respond,
        } = self.pending.take().ok_or(Fatal::WrongAnswer)?;
        let request = head.request;
        let reply = match (respond, outcome) {
            (_, Err(source)) => {
                return match refusal(request, wants_ack, Some(respond)) {
                    Some(reply) => Ok(Some(reply)),
                    None => Err(RequestError::Daemon { request, source }.into()),
                };
            }
            (Respond::Ack, Ok(Answer::Done)) => wants_ack.then(|| Message::reply_u64(request, 0)),
            (Respond::Zero, Ok(Answer::Done)) => Some(Message::reply_u64(request, 0)),
            (Respond::RingBase(index), Ok(Answer::RingStopped(base))) => {
                self.ring_stopped(index, base);
                Some(base_reply(index.into(), base.to_wire()))
            }
            (Respond::Config(access), Ok(Answer::Config(contents)))
                if contents.len() == access.size as usize =>
            {
                Some(config_reply(access, &contents))
            }
            (
                Respond::Inflight(wanted),
                Ok(Answer::Inflight {
                    fd,
                    mmap_size,
                    mmap_offset,
                }),
            ) => {
                let inflight = Inflight {
                    mmap_size,
                    mmap_offset,
                    ..wanted
                };
                let mut reply = inflight_reply(inflight);
                reply.fds.push(fd);
                Some(reply)
            }
            _ => return Err(Fatal::WrongAnswer),
        };
        self.apply(change);
        Ok(reply)
    }

    /// Takes an update of the IOTLB while another event waits, which may need it to end: `message`
    /// is one that [`IotlbMessage::is_update`] recognises, and what it says is `daemon`'s to do.
    /// The reply is to be sent behind that of the event: replies come in the order of the requests.
    ///
    /// # Errors
    /// As of [`handle`](Self::handle) and [`finish`](Self::finish).
    pub fn update_beside(
        &mut self,
        message: Message,
        daemon: impl FnOnce(Event) -> Result<Answer, Refusal>,
    ) -> Result<Option<Message>, Fatal> {
        let waiting = self.pending.take();
        let done = match self.handle(message) {
            Ok(Step::Event(event)) => self.finish(daemon(event)),
            Ok(Step::Done(reply)) => Ok(reply),
            Ok(Step::Refused(_, reply)) => Ok(Some(reply)),
            Err(fatal) => Err(fatal),
        };
        self.pending = waiting;
        done
    }

    /// Whether this message asks for an acknowledgement in a way that counts. SET_PROTOCOL_FEATURES
    /// counts by what it sets: Linux' user-mode driver asks for one there.
    fn wants_ack(&self, message: &Message) -> bool {
        let offered = self.config.protocol;
        let sets_it = message.head.request == RequestId::SET_PROTOCOL_FEATURES
            && message.payload.as_slice().try_into().is_ok_and(|value| {
                let value = ProtocolFeatures(u64::from_ne_bytes(value));
                (value & offered).contains(ProtocolFeatures::REPLY_ACK)
            });
        message.head.needs_reply()
            && (sets_it || self.protocol.contains(ProtocolFeatures::REPLY_ACK))
    }

    fn apply(&mut self, change: Change) {
        match change {
            Change::None => {}
            Change::Features(features) => self.features = features,
            Change::Protocol(protocol) => self.protocol = protocol,
            Change::Memory(regions) => self.regions = regions,
            Change::Ring(index, ring) => self.rings[usize::from(index)] = ring,
            Change::AllDisabled => self
                .rings
                .iter_mut()
                .for_each(|ring| ring.is_enabled = false),
            Change::Reset => {
                for ring in &mut self.rings {
                    let (call, err) = (ring.call.take(), ring.err.take());
                    *ring = Ring {
                        call,
                        err,
                        ..Ring::default()
                    };
                }
                self.features = 0;
            }
        }
    }

    fn dispatch(&mut self, request: Request) -> Result<RequestOutcome, RequestError> {
        let id = request.id();
        self.check_negotiated(id)?;
        let value = |value| Ok(RequestOutcome::Reply(Message::reply_u64(id, value)));
        match request {
            Request::GetFeatures => value(self.offered()),
            Request::SetFeatures(features) => self.set_features(features),
            Request::SetOwner => Ok(event(Event::Owner, Change::None)),
            Request::ResetOwner if self.features & feature::PROTOCOL_FEATURES == 0 => {
                Ok(RequestOutcome::Change(Change::None))
            }
            Request::ResetOwner => Ok(event(Event::RingsDisabled, Change::AllDisabled)),
            Request::SetMemTable(table) => {
                let mut regions = Vec::with_capacity(table.len());
                for (place, fd) in table {
                    memory::add(&mut regions, id, place, fd, self.config.max_regions)?;
                }
                Ok(memory_event(regions))
            }
            Request::AddMemReg(place, fd) => {
                let mut regions = self.regions.clone();
                memory::add(&mut regions, id, place, fd, self.config.max_regions)?;
                Ok(memory_event(regions))
            }
            Request::RemMemReg(place) => {
                let mut regions = self.regions.clone();
                memory::remove(&mut regions, id, place)?;
                Ok(memory_event(regions))
            }
            Request::SetVringNum(state) => self.set_vring_num(state),
            Request::SetVringAddr(addr) => self.set_vring_addr(addr),
            Request::SetVringBase(state) => self.set_vring_base(state),
            Request::GetVringBase { index } => self.get_vring_base(index),
            Request::SetVringKick(vring) => self.set_vring_kick(vring),
            Request::SetVringCall(vring) => self.set_vring_call(vring),
            Request::SetVringErr(vring) => self.set_vring_err(vring),
            Request::SetVringEnable { index, enable } => self.set_vring_enable(index, enable),
            Request::GetProtocolFeatures => value(self.config.protocol.0),
            Request::SetProtocolFeatures(protocol) => {
                let bits = protocol.without(self.config.protocol).0;
                if bits != 0 {
                    return Err(RequestError::NotOffered { request: id, bits });
                }
                Ok(event(
                    Event::ProtocolFeatures(protocol),
                    Change::Protocol(protocol),
                ))
            }
            Request::GetQueueNum => {
                value((self.config.queues / self.config.rings_per_queue).into())
            }
            Request::SendRarp(value) => {
                let [mac @ .., _, _] = value.to_le_bytes();
                Ok(event(Event::Announce(mac), Change::None))
            }
            Request::NetSetMtu(mtu) => Ok(event(Event::Mtu(mtu), Change::None)),
            Request::GetMaxMemSlots => value(self.config.max_regions as u64),
            Request::SetBackendReqFd(fd) => {
                Ok(event(Event::BackendChannel(fd.into()), Change::None))
            }
            Request::Iotlb(iotlb) => self.iotlb(iotlb),
            Request::GetConfig(access) => {
                let respond = Respond::Config(access);
                Ok(RequestOutcome::Event(
                    Event::ConfigRead(access),
                    Change::None,
                    respond,
                ))
            }
            Request::SetConfig(access, contents) => {
                Ok(event(Event::ConfigWrite(access, contents), Change::None))
            }
            Request::GetInflightFd(inflight) => {
                self.check_inflight(id, inflight)?;
                let respond = Respond::Inflight(inflight);
                Ok(RequestOutcome::Event(
                    Event::InflightWanted(inflight),
                    Change::None,
                    respond,
                ))
            }
            Request::SetInflightFd(inflight, fd) => {
                self.check_inflight(id, inflight)?;
                check_file_range(id, inflight.mmap_size, inflight.mmap_offset)?;
                self.check_none_runs(id)?;
                Ok(event(
                    Event::InflightGiven(inflight, fd.into()),
                    Change::None,
                ))
            }
            Request::ResetDevice => Ok(event(Event::Reset, Change::Reset)),
        }
    }

    /// Requests that belong to a feature are refused without it.
    fn check_negotiated(&self, request: RequestId) -> Result<(), RequestError> {
        // The specification gates the first three by what is offered, the rest by what is
        // negotiated.
        let (needed, present) = match request {
            RequestId::GET_PROTOCOL_FEATURES | RequestId::SET_PROTOCOL_FEATURES => {
                let is_offered = !self.config.protocol.is_empty();
                return match is_offered {
                    true => Ok(()),
                    false => Err(RequestError::FeatureMissing {
                        request,
                        needed: feature::PROTOCOL_FEATURES,
                    }),
                };
            }
            RequestId::IOTLB_MSG => {
                let needed = feature::ACCESS_PLATFORM;
                return match self.features & needed {
                    0 => Err(RequestError::FeatureMissing { request, needed }),
                    _ => Ok(()),
                };
            }
            RequestId::GET_QUEUE_NUM => (ProtocolFeatures::MQ, self.config.protocol),
            RequestId::SEND_RARP => (ProtocolFeatures::RARP, self.protocol),
            RequestId::NET_SET_MTU => (ProtocolFeatures::MTU, self.protocol),
            RequestId::SET_BACKEND_REQ_FD => (ProtocolFeatures::BACKEND_REQ, self.protocol),
            RequestId::GET_CONFIG | RequestId::SET_CONFIG => {
                (ProtocolFeatures::CONFIG, self.protocol)
            }
            RequestId::GET_INFLIGHT_FD | RequestId::SET_INFLIGHT_FD => {
                (ProtocolFeatures::INFLIGHT_SHMFD, self.protocol)
            }
            RequestId::RESET_DEVICE => (ProtocolFeatures::RESET_DEVICE, self.protocol),
            RequestId::GET_MAX_MEM_SLOTS | RequestId::ADD_MEM_REG | RequestId::REM_MEM_REG => {
                (ProtocolFeatures::CONFIGURE_MEM_SLOTS, self.protocol)
            }
            _ => return Ok(()),
        };
        match present.contains(needed) {
            true => Ok(()),
            false => Err(RequestError::NotNegotiated { request, needed }),
        }
    }

    /// Features offered now. ACCESS_PLATFORM only to a front end that has acknowledged what its
    /// IOTLB needs: that rules out those that acknowledge what their driver would, and know no such
    /// messages (user-mode Linux). A network device's VIRTIO_NET_F_MTU only to one that has
    /// acknowledged NET_SET_MTU: another takes for the MTU what it cannot read.
    fn offered(&self) -> u64 {
        let needed =
            ProtocolFeatures(ProtocolFeatures::REPLY_ACK.0 | ProtocolFeatures::BACKEND_REQ.0);
        let mut features = self.config.features;
        if !self.protocol.contains(needed) {
            features &= !feature::ACCESS_PLATFORM;
        }
        let is_network = self.config.protocol.contains(ProtocolFeatures::MTU);
        if is_network && !self.protocol.contains(ProtocolFeatures::MTU) {
            features &= !feature::NET_MTU;
        }
        features
    }

    fn set_features(&self, features: u64) -> Result<RequestOutcome, RequestError> {
        let request = RequestId::SET_FEATURES;
        let bits = features & !self.offered();
        if bits != 0 {
            return Err(RequestError::NotOffered { request, bits });
        }
        if features != self.features {
            self.check_none_runs(request)?;
        }
        Ok(event(Event::Features(features), Change::Features(features)))
    }

    fn iotlb(&self, iotlb: IotlbMessage) -> Result<RequestOutcome, RequestError> {
        let request = RequestId::IOTLB_MSG;
        let event = match iotlb {
            IotlbMessage::Update {
                range,
                user_addr,
                access,
            } => {
                let last = user_addr + (range.last - range.first);
                if !memory::covers_user(&self.regions, user_addr, last) {
                    let field = "user address";
                    return Err(RequestError::Value {
                        request,
                        field,
                        value: user_addr,
                    });
                }
                Event::IotlbUpdate {
                    range,
                    user_addr,
                    access,
                }
            }
            IotlbMessage::Invalidate { range } => Event::IotlbInvalidate(range),
            IotlbMessage::Miss { .. } | IotlbMessage::AccessFail { .. } => {
                return Err(DecodeError::Field {
                    request,
                    field: "type",
                    value: 1,
                }
                .into());
            }
        };
        Ok(RequestOutcome::Event(event, Change::None, Respond::Zero))
    }

    fn check_inflight(&self, request: RequestId, inflight: Inflight) -> Result<(), RequestError> {
        let Inflight {
            queues, queue_size, ..
        } = inflight;
        let value = |field, value: u16| RequestError::Value {
            request,
            field,
            value: value.into(),
        };
        if queues == 0 || queues > self.config.queues {
            return Err(value("num queues", queues));
        }
        if queue_size == 0 || queue_size > self.config.max_ring_size {
            return Err(value("queue size", queue_size));
        }
        Ok(())
    }
}

pub(super) fn event(event: Event, change: Change) -> RequestOutcome {
    RequestOutcome::Event(event, change, Respond::Ack)
}

fn memory_event(regions: Vec<Region>) -> RequestOutcome {
    event(
        Event::Memory(regions.as_slice().into()),
        Change::Memory(regions),
    )
}

/// An area of a file: not empty, and its end is an offset a file can have.
fn check_file_range(request: RequestId, size: u64, offset: u64) -> Result<(), RequestError> {
    let value = |field, value| {
        Err(RequestError::Value {
            request,
            field,
            value,
        })
    };
    match size.checked_add(offset) {
        _ if size == 0 => value("size", size),
        Some(end) if i64::try_from(end).is_ok() => Ok(()),
        _ => value("offset", offset),
    }
}

impl Session {
    fn ring_stopped(&mut self, index: u8, base: RingBase) {
        let ring = &mut self.rings[usize::from(index)];
        ring.is_running = false;
        ring.base = base.to_wire();
        ring.is_base_literal = ring.base == 0;
    }
}
