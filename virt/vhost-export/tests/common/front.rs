//! A front end driven message by message.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::event::{EventfdFlags, eventfd};
use vhost_blk::client::ring;
use vhost_blk::layout::Layout;
use vhost_blk::memory::Memory;
use vhost_blk::queue::{Extent, Op, Queue, SECTOR};
use vhost_blk::ring::feature;
use vhost_user::frontend::{CallError, Connection, InflightRegion};
use vhost_user::wire::{MemRegion, ProtocolFeatures, Request, VringFd, feature as vhost};

use vio_faults::SlowControl;

use super::{BLOCK, Io, PATIENCE};

/// See the head of this module.
pub struct Front {
    pub connection: Connection,
    pub memory: Memory,
    pub layout: Layout,
    pub queues: Vec<Queue>,
    pub features: u64,
    pub offered: u64,
}

/// An eventfd.
pub fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}

pub fn copy(fd: impl AsFd) -> OwnedFd {
    fd.as_fd().try_clone_to_owned().expect("a descriptor")
}

impl Front {
    /// Connects and negotiates protocol features; memory for `queues` rings of either layout.
    #[track_caller]
    pub fn connect(path: &Path, queues: u16, depth: u16) -> Self {
        Self::try_connect(path, queues, depth).expect("the server accepts")
    }

    pub fn try_connect(path: &Path, queues: u16, depth: u16) -> Result<Self, CallError> {
        let opened = Connection::open_within(PATIENCE, path, None, PATIENCE);
        let mut connection = opened.map_err(CallError::Host)?;
        let everything = ProtocolFeatures(u64::MAX);
        let offered = connection.negotiate(Some(everything))?.features;
        let layout = Layout::new(queues, 256, depth, BLOCK, false, true);
        let memory = Memory::create(layout.len()).expect("memory");
        Ok(Self {
            connection,
            memory,
            layout,
            queues: Vec::new(),
            features: 0,
            offered,
        })
    }

    /// All of it at once: features, memory, rings.
    #[track_caller]
    pub fn running(path: &Path, ring_features: u64, queues: u16, depth: u16) -> Self {
        let mut front = Self::sharing(path, ring_features, queues, depth);
        for queue in 0..queues {
            front.serve(queue);
        }
        front
    }

    /// Features and memory, but no ring yet.
    #[track_caller]
    pub fn sharing(path: &Path, ring_features: u64, queues: u16, depth: u16) -> Self {
        let mut front = Self::connect(path, queues, depth);
        front.set_features(ring_features);
        front.share();
        front
    }

    pub fn io(&mut self) -> Io<'_> {
        Io {
            memory: &self.memory,
            layout: &self.layout,
            queues: &mut self.queues,
        }
    }

    #[track_caller]
    pub fn call(&mut self, request: Request) {
        let id = request.id();
        let called = self.connection.call(request);
        called.unwrap_or_else(|error| panic!("{id}: {error}"));
    }

    #[track_caller]
    pub fn refused(&mut self, request: Request) {
        let id = request.id();
        match self.connection.call(request) {
            Err(CallError::Refused { .. }) => {}
            other => panic!("{id} was not refused: {other:?}"),
        }
    }

    /// The connection has ended, or ends soon.
    #[track_caller]
    pub fn ended(&mut self) {
        super::until("the connection ends", || {
            let mut bytes = [0; 64];
            let flags = rustix::net::RecvFlags::DONTWAIT;
            match rustix::net::recv(self.connection.socket(), &mut bytes, flags) {
                Ok((0, _)) => true,
                Ok(_) | Err(rustix::io::Errno::AGAIN) => false,
                Err(_) => true,
            }
        });
    }

    /// SET_FEATURES, and fresh rings for them.
    #[track_caller]
    pub fn set_features(&mut self, ring_features: u64) {
        let rings = feature::EVENT_IDX | feature::INDIRECT | feature::PACKED | feature::IN_ORDER;
        let features = self.offered & !rings | ring_features;
        assert_eq!(features & !self.offered, 0, "it is not offered");
        self.features = features | vhost::PROTOCOL_FEATURES;
        let set = self.connection.set_features(self.features);
        set.expect("SET_FEATURES");
        self.fresh_rings();
    }

    /// Rings as after the guest's reset.
    pub fn fresh_rings(&mut self) {
        let is_packed = self.features & feature::PACKED != 0;
        let (queues, depth) = (self.layout.queues, self.layout.depth);
        self.layout = Layout::new(queues, 256, depth, BLOCK, is_packed, true);
        self.memory.zero(0, self.layout.rings_len());
        self.queues = (0..queues)
            .map(|index| Queue::new(index, &self.layout, self.features).expect("eventfds"))
            .collect();
    }

    pub fn regions(&self) -> Vec<MemRegion> {
        self.layout.regions()
    }

    /// SET_MEM_TABLE.
    #[track_caller]
    pub fn share(&mut self) {
        let file = || copy(self.memory.file());
        let table = self.regions().into_iter().map(|region| (region, file()));
        let table = table.collect();
        self.call(Request::SetMemTable(table));
    }

    /// A region of requests in flight, which the server has from now on.
    #[track_caller]
    pub fn track(&mut self) -> InflightRegion {
        let (queues, size) = (self.layout.queues, self.layout.ring_size);
        let region = self.connection.new_inflight(queues, size);
        let region = region.expect("a region");
        self.track_in(&region);
        region
    }

    #[track_caller]
    pub fn track_in(&mut self, region: &InflightRegion) {
        let given = self.connection.give_inflight(region);
        given.expect("it is taken");
    }

    /// SET_VRING_NUM, BASE and ADDR of a ring whose driver has got where it has.
    #[track_caller]
    pub fn describe(&mut self, queue: u16) {
        let base = self.own_base(queue);
        let size = self.layout.ring_size;
        self.place(queue, size, base);
    }

    #[track_caller]
    pub fn place(&mut self, queue: u16, size: u16, base: u32) {
        let own = &self.queues[usize::from(queue)];
        let mut ring = ring(&self.layout, queue as u8, own, base);
        ring.size = size;
        let described = self.connection.describe(&ring);
        described.expect("the ring is described");
    }

    pub fn kick_request(&self, queue: u16) -> Request {
        let kick = copy(self.queues[usize::from(queue)].kick_fd());
        Request::SetVringKick(fd(queue, Some(kick)))
    }

    /// Starts a ring; it is not enabled by that.
    #[track_caller]
    pub fn start(&mut self, queue: u16) {
        self.describe(queue);
        self.call(self.kick_request(queue));
    }

    #[track_caller]
    pub fn enable(&mut self, queue: u16, enable: bool) {
        let index = queue.into();
        self.call(Request::SetVringEnable { index, enable });
    }

    /// Starts a ring and enables it.
    #[track_caller]
    pub fn serve(&mut self, queue: u16) {
        self.start(queue);
        self.enable(queue, true);
    }

    /// As when the guest resets a device of one ring.
    #[track_caller]
    pub fn restart(&mut self) {
        self.stop(0);
        self.fresh_rings();
        self.serve(0);
    }

    /// Submits these blocks, each to the next of the first `queues` queues, and waits until the
    /// disk holds them all.
    #[track_caller]
    pub fn put_in_flight(
        &mut self,
        control: &SlowControl,
        queues: u64,
        op: Op,
        blocks: std::ops::Range<u64>,
    ) {
        let count = blocks.clone().count();
        for block in blocks {
            assert!(self.io().submit((block % queues) as u16, op, block));
        }
        super::until("they are in flight", || control.held() == count);
    }

    /// Makes a read of one sector available in queue 0, without a kick.
    #[track_caller]
    pub fn read_silently(&mut self, sector: u64) {
        let own = &mut self.queues[0];
        let slot = own.take_slot().expect("a slot");
        let extent = Extent {
            sector,
            bytes: SECTOR,
        };
        assert!(own.submit(&self.memory, &self.layout, slot, Op::Read, extent, 0));
        own.publish_silently(&self.memory);
    }

    /// Takes a request of queue 0 that has come back, if there is one; what it has read is not
    /// looked at.
    #[track_caller]
    pub fn take_done(&mut self) -> bool {
        let own = &mut self.queues[0];
        let done = own.complete(&self.memory, &self.layout);
        let done = done.expect("the device keeps to the protocol");
        done.inspect(|done| own.release(done.slot)).is_some()
    }

    /// GET_VRING_BASE.
    #[track_caller]
    pub fn stop(&mut self, queue: u16) -> u32 {
        let base = self.connection.ring_base(queue.into());
        base.expect("GET_VRING_BASE")
    }

    pub fn own_base(&mut self, queue: u16) -> u32 {
        self.queues[usize::from(queue)].ring().available_base()
    }
}

pub fn fd(queue: u16, fd: Option<OwnedFd>) -> VringFd {
    VringFd {
        index: queue as u8,
        fd,
    }
}

impl Front {
    /// The same guest over a new connection, after its VMM lost the last one: rings stay as they
    /// are.
    #[track_caller]
    pub fn connect_again(old: Self, path: &Path) -> Self {
        let Self {
            connection,
            memory,
            layout,
            queues,
            features,
            ..
        } = old;
        drop(connection);
        let mut front = Self::connect(path, layout.queues, layout.depth);
        (front.memory, front.layout, front.queues) = (memory, layout, queues);
        front.features = features;
        let set = front.connection.set_features(features);
        set.expect("SET_FEATURES");
        front.share();
        front
    }

    /// Starts a ring at the used position, as after a crash of the server.
    #[track_caller]
    pub fn start_at_used(&mut self, queue: u16) {
        let base = self.queues[usize::from(queue)].ring().base(&self.memory);
        let size = self.layout.ring_size;
        self.place(queue, size, base);
        self.call(self.kick_request(queue));
    }
}

/// A MiB of memory more, far from the guest's own.
pub fn spare_memory() -> (MemRegion, Memory) {
    const AT: u64 = 0x10_0000_0000;
    const BYTES: u64 = 1 << 20;
    let region = MemRegion {
        guest_addr: AT,
        size: BYTES,
        user_addr: AT,
        mmap_offset: 0,
    };
    let memory = Memory::create(BYTES as usize).expect("memory");
    (region, memory)
}
