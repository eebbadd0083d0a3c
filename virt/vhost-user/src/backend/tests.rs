//! The session, driven as a front end drives it.

/// That a request is refused, and with which error.
macro_rules! assert_refused {
    ($peer:expr, $request:expr, $($error:tt)*) => {{
        let error = $peer.refused($request);
        assert!(matches!(error, $($error)*), "{error}");
    }};
}

mod clients;
mod refusals;
mod state;

use std::fs::File;
use std::os::fd::OwnedFd;

use super::*;
use crate::frontend::{Reply, expects_reply};
use crate::wire::{
    Inflight, MemRegion, Message, ProtocolFeatures, Request, RequestId, VringAddr, VringFd,
    VringState, feature,
};

/// VIRTIO_F_VERSION_1 and two block features: bits that mean nothing to the session.
const DEVICE_BITS: u64 = 1 << 32 | 1 << 9 | 1 << 6;

const LOW: MemRegion = MemRegion {
    guest_addr: 0,
    size: 0x10_0000,
    user_addr: 0x7f00_0000_0000,
    mmap_offset: 0,
};
const HIGH: MemRegion = MemRegion {
    guest_addr: 1 << 32,
    size: 0x20_0000,
    user_addr: 0x7f00_0010_0000,
    mmap_offset: 0x10_0000,
};

fn fd() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

fn config() -> Config {
    Config {
        features: DEVICE_BITS | feature::RING_PACKED | feature::ACCESS_PLATFORM,
        protocol: SUPPORTED,
        queues: 2,
        rings_per_queue: 1,
        max_ring_size: 1024,
        max_regions: 3,
    }
}

/// A session with the daemon's part played: events succeed unless a test refuses them.
struct Peer {
    session: Session,
    /// need_reply on every request.
    asks_for_acks: bool,
    /// Position of stopped rings.
    base: RingBase,
}

impl Peer {
    fn new() -> Self {
        let session = Session::new(config()).unwrap();
        Self {
            session,
            asks_for_acks: false,
            base: RingBase::Split(0),
        }
    }

    fn message(&self, request: Request) -> Message {
        request.encode(self.asks_for_acks)
    }

    /// Hands a request in and lets the daemon succeed; the event, and the reply where one came.
    fn send(&mut self, request: Request) -> (Option<Event>, Option<Reply>) {
        let id = request.id();
        let message = self.message(request);
        let (event, reply) = match self.session.handle(message).unwrap() {
            Step::Done(reply) => (None, reply),
            Step::Refused(error, _) => panic!("refused: {error}"),
            Step::Event(event) => {
                let answer = match &event {
                    Event::RingStopped(_) => Answer::RingStopped(self.base),
                    Event::ConfigRead(access) => Answer::Config(vec![7; access.size as usize]),
                    Event::InflightWanted(_) => Answer::Inflight {
                        fd: fd(),
                        mmap_size: 4096,
                        mmap_offset: 0,
                    },
                    _ => Answer::Done,
                };
                let reply = self.session.finish(Ok(answer)).unwrap();
                (Some(event), reply)
            }
        };
        assert_eq!(
            reply.is_some(),
            expects_reply(id, self.asks_for_acks),
            "{id}"
        );
        (event, reply.map(|reply| Reply::decode(id, reply).unwrap()))
    }

    /// As [`Peer::send`], for requests whose acknowledgement is good or not asked for.
    fn ok(&mut self, request: Request) -> Option<Event> {
        let (event, reply) = self.send(request);
        assert!(
            matches!(reply, None | Some(Reply::Ack { is_ok: true })),
            "{reply:?}"
        );
        event
    }

    fn value(&mut self, request: Request) -> u64 {
        match self.send(request) {
            (None, Some(Reply::Value(value))) => value,
            other => panic!("{other:?}"),
        }
    }

    /// The error of a request that is refused by a non-zero acknowledgement; the session goes on.
    fn refused(&mut self, request: Request) -> RequestError {
        let id = request.id();
        match self.session.handle(request.encode(true)) {
            Ok(Step::Refused(error, reply)) => {
                let reply = Reply::decode(id, reply).unwrap();
                assert!(matches!(reply, Reply::Ack { is_ok: false }), "{reply:?}");
                error
            }
            other => panic!("{id} was not refused: {other:?}"),
        }
    }

    fn negotiate(&mut self, features: u64) {
        self.ok(Request::SetProtocolFeatures(SUPPORTED));
        self.ok(Request::SetFeatures(features));
    }

    /// Features with bit 30, memory, and ring 0 up to its kick.
    fn describe(&mut self, features: u64) {
        self.negotiate(features | feature::PROTOCOL_FEATURES);
        self.ok(Request::SetMemTable(vec![(LOW, fd())]));
        self.ok(Request::SetVringNum(state(0, 128)));
        self.ok(Request::SetVringAddr(addr(0)));
        self.ok(Request::SetVringBase(state(0, 0)));
    }

    fn start(&mut self) -> RingConfig {
        started(self.ok(Request::SetVringKick(kick(0))))
    }
}

fn state(index: u32, num: u32) -> VringState {
    VringState { index, num }
}

fn addr(index: u32) -> VringAddr {
    let at = LOW.user_addr + u64::from(index) * 0x1_0000;
    VringAddr {
        index,
        desc: at,
        avail: at + 0x4000,
        used: at + 0x8000,
    }
}

const fn inflight(mmap_size: u64, queues: u16, queue_size: u16) -> Inflight {
    Inflight {
        mmap_size,
        mmap_offset: 0,
        queues,
        queue_size,
    }
}

fn kick(index: u8) -> VringFd {
    VringFd {
        index,
        fd: Some(fd()),
    }
}

fn started(event: Option<Event>) -> RingConfig {
    match event {
        Some(Event::RingStarted(ring)) => ring,
        other => panic!("no ring started: {other:?}"),
    }
}
