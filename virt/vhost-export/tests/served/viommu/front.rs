//! A front end with an IOMMU, as QEMU is one: one thread, which answers a miss after its update was
//! answered.
//!
//! The driver's addresses are IOVAs with the numbers of the layout's guest addresses. Memory itself
//! lies elsewhere in guest-physical space, so nothing is reached without a translation.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use rustix::net::{RecvFlags, SendFlags, recv, send};
use vhost_blk::ring::feature;
use vhost_user::channel::Receiver;
use vhost_user::frontend::{InflightRegion, Ring};
use vhost_user::wire::{
    BackendRequest, BackendRequestId, HEADER_LEN, IotlbAccess, IotlbMessage, IotlbRange, MemRegion,
    Message, Request, RequestId, feature as vhost,
};

use crate::common::front::{Front, copy, fd};
use crate::common::{Io, PATIENCE};

/// Offset added to the layout's guest addresses.
const ELSEWHERE: u64 = 0x20_0000_0000;
pub const PAGE: u64 = 4096;
pub const PLATFORM: u64 = vhost::ACCESS_PLATFORM;

/// See the head of this module.
pub struct Viommu {
    pub front: Front,
    channel: Option<UnixStream>,
    receiver: Receiver,
    /// Of a page of IOVA: the page of memory (an offset) that it is mapped to, and what the guest
    /// allows.
    pub table: BTreeMap<u64, (u64, IotlbAccess)>,
    /// Pages that were asked for, in order.
    pub asked: Vec<(u64, IotlbAccess)>,
}

impl Viommu {
    /// Features, memory and channel; everything is mapped, no ring runs.
    #[track_caller]
    pub fn connect(path: &Path, ring_features: u64, queues: u16, depth: u16) -> Self {
        let front = Front::connect(path, queues, depth);
        Self::over(front, ring_features, true)
    }

    /// The same over a connection that is there; `is_fresh`: of a driver that has just begun.
    #[track_caller]
    pub fn over(mut front: Front, ring_features: u64, is_fresh: bool) -> Self {
        assert_eq!(
            front.offered & PLATFORM,
            0,
            "offered before the protocol is"
        );
        front.offered = front
            .connection
            .value(Request::GetFeatures)
            .expect("a number");
        assert_ne!(front.offered & PLATFORM, 0, "not offered");
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        ours.set_nonblocking(true).expect("a flag");
        front.call(Request::SetBackendReqFd(theirs.into()));
        match is_fresh {
            true => front.set_features(ring_features | PLATFORM),
            false => front
                .connection
                .set_features(front.features)
                .expect("taken"),
        }
        let mut own = Self {
            front,
            channel: Some(ours),
            receiver: Receiver::default(),
            table: BTreeMap::new(),
            asked: Vec::new(),
        };
        own.share();
        own.map_all();
        own
    }

    /// All of it, and rings that run.
    #[track_caller]
    pub fn running(path: &Path, ring_features: u64, queues: u16, depth: u16) -> Self {
        let mut own = Self::connect(path, ring_features, queues, depth);
        own.serve_all();
        own
    }

    #[track_caller]
    pub fn serve_all(&mut self) {
        for queue in 0..self.front.layout.queues {
            let base = self.front.own_base(queue);
            self.start(queue, base);
        }
    }

    pub fn regions(&self) -> Vec<MemRegion> {
        let regions = self.front.regions().into_iter();
        let moved = regions.map(|region| MemRegion {
            guest_addr: region.guest_addr + ELSEWHERE,
            ..region
        });
        moved.collect()
    }

    #[track_caller]
    fn share(&mut self) {
        let regions = self.regions().into_iter();
        let table = regions.map(|region| (region, copy(self.front.memory.file())));
        self.front.call(Request::SetMemTable(table.collect()));
    }

    /// Every page of the layout at the IOVA of its number.
    pub fn map_all(&mut self) {
        for region in self.front.regions() {
            for page in 0..region.size / PAGE {
                let iova = region.guest_addr / PAGE + page;
                let offset = region.mmap_offset / PAGE + page;
                self.table.insert(iova, (offset, IotlbAccess::ReadWrite));
            }
        }
    }

    pub fn unmap(&mut self, iova: u64) {
        self.table.remove(&(iova / PAGE));
    }

    /// Lets the page of `iova` lead to the page of memory at `offset`.
    pub fn map(&mut self, iova: u64, offset: usize, access: IotlbAccess) {
        self.table
            .insert(iova / PAGE, (offset as u64 / PAGE, access));
    }

    /// The IOVA of an offset, as the driver names it.
    pub fn iova(&self, offset: usize) -> u64 {
        self.front.layout.gpa(offset)
    }

    /// Describes a ring and starts it; enabled.
    #[track_caller]
    pub fn start(&mut self, queue: u16, base: u32) {
        let places = self.front.layout.places(queue);
        let (desc, avail, used) = (
            self.iova(places.desc),
            self.iova(places.driver),
            self.iova(places.device),
        );
        let own = &self.front.queues[usize::from(queue)];
        let ring = Ring {
            index: queue as u8,
            size: self.front.layout.ring_size,
            base,
            desc,
            avail,
            used,
            kick: own.kick_fd(),
            call: own.call_fd(),
            err: None,
        };
        self.front.connection.describe(&ring).expect("described");
        self.front.call(self.front.kick_request(queue));
        self.front.enable(queue, true);
    }

    pub fn io(&mut self) -> Io<'_> {
        self.front.io()
    }

    /// A miss, if one has come.
    pub fn miss(&mut self) -> Option<(u64, IotlbAccess)> {
        let channel = self.channel.as_ref().expect("a channel");
        let message = self.receiver.receive(channel).expect("it is open")?;
        assert!(message.head.needs_reply(), "a refusal could not be told");
        let Ok(BackendRequest::Iotlb(IotlbMessage::Miss { iova, access })) =
            BackendRequest::decode(&message)
        else {
            panic!("{message:?}");
        };
        self.asked.push((iova / PAGE, access));
        Some((iova, access))
    }

    #[track_caller]
    pub fn next_miss(&mut self) -> (u64, IotlbAccess) {
        let start = Instant::now();
        loop {
            if let Some(miss) = self.miss() {
                return miss;
            }
            assert!(start.elapsed() < PATIENCE, "nothing is asked for");
            std::thread::yield_now();
        }
    }

    /// Answers the oldest miss.
    pub fn answer(&mut self, value: u64) {
        let message = Message::reply_u64(RequestId(BackendRequestId::IOTLB_MSG.0), value);
        self.answer_with(&message.to_bytes());
    }

    pub fn answer_with(&mut self, bytes: &[u8]) {
        let channel = self.channel.as_ref().expect("a channel");
        let _ = send(channel, bytes, SendFlags::NOSIGNAL);
    }

    pub fn close_channel(&mut self) {
        self.channel = None;
    }

    /// The user address of an offset in memory.
    pub fn user(&self, offset: u64) -> u64 {
        let regions = self.front.regions().into_iter();
        let mut places = regions.filter_map(|region| {
            let inside = offset.checked_sub(region.mmap_offset)?;
            (inside < region.size).then_some(region.user_addr + inside)
        });
        places.next().expect("an offset in memory")
    }

    pub fn update_message(
        &self,
        iova: u64,
        size: u64,
        user_addr: u64,
        access: IotlbAccess,
    ) -> Request {
        let last = iova.checked_add(size - 1).expect("a range of the test's");
        let range = IotlbRange { first: iova, last };
        Request::Iotlb(IotlbMessage::Update {
            range,
            user_addr,
            access,
        })
    }

    #[track_caller]
    pub fn update(&mut self, iova: u64, size: u64, user_addr: u64, access: IotlbAccess) {
        let request = self.update_message(iova, size, user_addr, access);
        self.front.call(request);
    }

    /// Sends a request and does not wait for its answer.
    pub fn send(&self, request: Request) {
        let bytes = request.encode(true).to_bytes();
        self.send_raw(&bytes);
    }

    pub fn send_raw(&self, bytes: &[u8]) {
        let sent = send(self.front.connection.socket(), bytes, SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(bytes.len()));
    }

    /// The number of an answer, if it has come.
    pub fn received(&self) -> Option<u64> {
        let mut bytes = [0; HEADER_LEN + 8];
        let flags = RecvFlags::DONTWAIT;
        match recv(self.front.connection.socket(), &mut bytes, flags) {
            Ok((len, _)) => {
                assert_eq!(len, bytes.len(), "the connection has ended");
                Some(u64::from_ne_bytes(
                    bytes[HEADER_LEN..].try_into().expect("8"),
                ))
            }
            Err(rustix::io::Errno::AGAIN) => None,
            Err(error) => panic!("{error}"),
        }
    }

    #[track_caller]
    pub fn wait_received(&self) -> u64 {
        let start = Instant::now();
        loop {
            if let Some(value) = self.received() {
                return value;
            }
            assert!(start.elapsed() < PATIENCE, "no answer comes");
            std::thread::yield_now();
        }
    }

    pub fn invalidate_message(first: u64, last: u64) -> Request {
        let range = IotlbRange { first, last };
        Request::Iotlb(IotlbMessage::Invalidate { range })
    }

    #[track_caller]
    pub fn invalidate(&mut self, first: u64, last: u64) {
        self.front.call(Self::invalidate_message(first, last));
    }

    /// Does for all misses that have come what QEMU does: an update with both rights, then the
    /// answer; or a refusal alone.
    #[track_caller]
    pub fn pump(&mut self) -> usize {
        let mut count = 0;
        while let Some((iova, access)) = self.miss() {
            count += 1;
            self.serve_miss(iova, access);
        }
        count
    }

    #[track_caller]
    pub fn serve_miss(&mut self, iova: u64, access: IotlbAccess) {
        let allows = |has: IotlbAccess| has == IotlbAccess::ReadWrite || has == access;
        match self.table.get(&(iova / PAGE)) {
            Some(&(page, has)) if allows(has) => {
                let user = self.user(page * PAGE);
                self.update(iova / PAGE * PAGE, PAGE, user, IotlbAccess::ReadWrite);
                self.answer(0);
            }
            _ => self.answer(1),
        }
    }

    /// Pumps until this holds.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut condition: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !condition(self) {
            self.pump();
            assert!(start.elapsed() < PATIENCE, "this did not happen: {what}");
            std::thread::yield_now();
        }
    }

    /// Takes all that comes back, serving misses; how many ended well, and how many did not.
    #[track_caller]
    pub fn drain(&mut self) -> (usize, usize) {
        let (mut good, mut bad) = (0, 0);
        self.until("all requests come back", |own| {
            let (more, worse) = own.io().collect();
            (good, bad) = (good + more, bad + worse);
            own.io().outstanding() == 0
        });
        (good, bad)
    }

    /// GET_VRING_BASE.
    #[track_caller]
    pub fn stop(&mut self, queue: u16) -> u32 {
        self.front.stop(queue)
    }

    /// As when the guest resets the device: fresh rings, at the same place.
    #[track_caller]
    pub fn restart(&mut self) {
        for queue in 0..self.front.layout.queues {
            self.stop(queue);
        }
        self.front.fresh_rings();
        self.serve_all();
    }

    /// An error descriptor for a ring.
    #[track_caller]
    pub fn err(&mut self, queue: u16) -> std::os::fd::OwnedFd {
        let err = crate::common::front::event();
        self.front
            .call(Request::SetVringErr(fd(queue, Some(copy(&err)))));
        err
    }

    pub fn is_signalled(err: &std::os::fd::OwnedFd) -> bool {
        rustix::io::read(err, &mut [0; 8]).is_ok()
    }

    #[track_caller]
    pub fn track(&mut self) -> InflightRegion {
        self.front.track()
    }
}

pub const SPLIT: u64 = feature::EVENT_IDX | feature::INDIRECT;
pub const PACKED: u64 = SPLIT | feature::PACKED;
