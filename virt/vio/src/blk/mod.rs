//! virtio-blk (virtio 1.2 §5.2), as a polled device.
//!
//! *Advertised*: SIZE_MAX, SEG_MAX, BLK_SIZE, FLUSH, DISCARD and WRITE_ZEROES (unless read-only), RO, MQ,
//! INDIRECT_DESC, EVENT_IDX, VERSION_1, ACCESS_PLATFORM. Read, write, flush, discard, write-zeroes, GET_ID.
//! *Not implemented*: CONFIG_WCE, TOPOLOGY, LIFETIME, SECURE_ERASE, ZONED; more than one range per
//! discard or write-zeroes request (the configuration says so).
//!
//! One poll: *take* chains from every queue (bounded), start them all with one system call at most, *harvest*
//! what has ended, *finish*: move bounced data, write status bytes, stage used elements, publish once per
//! queue. A request lives in a slot of a slab from take to finish; its vectors are reused, so a warm
//! device allocates nothing.
//!
//! Leases: taken for every piece of a direct transfer before it is submitted, released at harvest, as
//! soon as the back end no longer touches memory and in any case before the used index is published.
//! Data of `--dma bounce` and everything else (headers, status bytes, rings) is copied inline.
//!
//! Pending anywhere leaves the request where it is (in the ring, or ended and unfinished) and parks its
//! queue; the step is repeated from its beginning when the ticket completes.
//!
//! A status byte that faults leaves nothing to answer with: the device needs a reset. A ring that faults
//! parks its queue. A chain without header or status byte is a protocol violation.
//!
//! Bounds: slots = the back end's depth. Per slot at most 2,047 segments (a ring of 1024 that ends in an
//! indirect table; 32 KiB) and [`MAX_PIECES`] pieces and leases (16 KiB and 4 KiB): with 256 slots a hostile
//! driver makes a device hold 13 MiB, and an ordinary one well below 1 MiB.

mod backend;
mod latency;
mod mem;
mod misbehave;
mod poll;
pub mod request;
#[expect(unsafe_code, reason = "the kernel is given addresses; see the module")]
mod uring;

use std::collections::VecDeque;
use std::os::fd::RawFd;

use guest_mem::{Dma, Iova, KeepAlive, LeaseId, Ticket};

pub use backend::{BlockIo, Completion, Op, Outcome, Piece, Transfer};
pub use latency::LatencyDisk;
pub use mem::MemDisk;
#[cfg(any(test, feature = "test-utils"))]
pub use mem::{SlowControl, SlowDisk};
pub use misbehave::{Misbehave, ROGUE_BYTES};
pub use uring::{UringError, UringFile, UringOptions};

use crate::device::{
    ActivateError, Activity, DeviceStats, Interrupt, QueueConfig, Quiesce, VirtioDevice, feature,
};
use crate::ring::{Chain, Segment, SplitQueue};
use crate::saved::{SAVED_VERSION, SavedDevice};
use request::ID_LEN;

/// Unit of the protocol's sector numbers, in bytes, whatever the block size.
pub const SECTOR: u64 = 512;
/// Largest read or write, in bytes.
pub const MAX_TRANSFER: u32 = 4 << 20;
/// Most leases of one request, and the most segments one system call takes (UIO_MAXIOV):
/// 4 MiB in 4 KiB pages.
pub const MAX_PIECES: usize = 1024;
/// Most queues.
pub const MAX_QUEUES: u16 = 16;
/// Chains taken from, and requests finished on, one queue per poll.
const BATCH: u16 = 32;

/// How a block device shows itself.
#[derive(Clone, Copy, Debug)]
pub struct BlkConfig {
    /// Logical block, 512 or 4096 bytes.
    pub logical_block: u32,
    /// Queues, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Entries of each queue at most, a power of two from 2 to 1024.
    pub queue_size: u16,
    /// Serial number, zero-padded (GET_ID).
    pub serial: [u8; ID_LEN],
    /// The misbehaving test mode.
    pub misbehave: Misbehave,
}

impl Default for BlkConfig {
    fn default() -> Self {
        Self {
            logical_block: 512,
            queues: 1,
            queue_size: 256,
            serial: *b"exitless\0\0\0\0\0\0\0\0\0\0\0\0",
            misbehave: Misbehave::None,
        }
    }
}

/// Why there is no such block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlkError {
    /// Neither 512 nor 4096.
    #[error("a logical block is 512 or 4096 bytes, not {0}")]
    LogicalBlock(u32),
    /// Size of the back end.
    #[error("a disk of {bytes} bytes is empty or no multiple of its {block}-byte block")]
    Capacity {
        /// Its size.
        bytes: u64,
        /// The logical block.
        block: u32,
    },
    /// Number of queues.
    #[error("1 to {MAX_QUEUES} queues, not {0}")]
    Queues(u16),
    /// Queue size.
    #[error("a queue has 2 to 1024 entries, a power of two, not {0}")]
    QueueSize(u16),
}

/// What a slot's request asks for, as finishing it needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reply {
    /// Nothing but the status.
    Status,
    /// Data that wait in the back end's private buffer.
    Bounced,
    /// Data that the back end has put into guest memory.
    Direct,
    /// The serial number.
    Id,
}

/// One request, from its chain to its used element. Vectors keep their capacity from request to request.
#[derive(Debug)]
struct Request {
    queue: usize,
    head: u16,
    reply: Reply,
    status: u8,
    status_at: Iova,
    /// Data bytes: those the device writes for a reading request.
    len: u32,
    is_write: bool,
    data: Vec<Segment>,
    leases: Vec<LeaseId>,
    pieces: Vec<Piece>,
    /// A rogue access to make before finishing.
    rogue: Option<Iova>,
    in_flight: bool,
    cancelled: bool,
}

impl Request {
    fn new() -> Self {
        Self {
            queue: 0,
            head: 0,
            reply: Reply::Status,
            status: 0,
            status_at: Iova::new(0),
            len: 0,
            is_write: false,
            data: Vec::new(),
            leases: Vec::new(),
            pieces: Vec::new(),
            rogue: None,
            in_flight: false,
            cancelled: false,
        }
    }
}

/// One queue and its requests that have ended and are not in the used ring.
struct BlkQueue {
    ring: SplitQueue,
    ended: VecDeque<u32>,
    /// The last take stopped for want of a slot, buffer or lease.
    starved: bool,
}

/// A virtio block device.
pub struct Blk {
    config: BlkConfig,
    features: u64,
    queue_sizes: Vec<u16>,
    space: [u8; 60],
    limits: request::Limits,
    io: Box<dyn BlockIo>,
    queues: Vec<BlkQueue>,
    /// The queue that the next poll serves first.
    first: usize,
    slab: Vec<Request>,
    free: Vec<u32>,
    chain: Chain,
    completions: Vec<Completion>,
    in_flight: u32,
    stopped: bool,
    broken: bool,
    /// NEEDS_RESET has not been announced yet.
    announce: bool,
    stats: DeviceStats,
    /// What the rings of former activations counted.
    rings: crate::ring::split::RingStats,
}

impl Blk {
    /// A device over `io`.
    pub fn new(config: BlkConfig, io: Box<dyn BlockIo>) -> Result<Self, BlkError> {
        let BlkConfig {
            logical_block,
            queues,
            queue_size,
            ..
        } = config;
        if logical_block != 512 && logical_block != 4096 {
            return Err(BlkError::LogicalBlock(logical_block));
        }
        let bytes = io.capacity();
        if bytes == 0 || !bytes.is_multiple_of(u64::from(logical_block)) {
            return Err(BlkError::Capacity {
                bytes,
                block: logical_block,
            });
        }
        if queues == 0 || queues > MAX_QUEUES {
            return Err(BlkError::Queues(queues));
        }
        if !queue_size.is_power_of_two() || !(2..=1024).contains(&queue_size) {
            return Err(BlkError::QueueSize(queue_size));
        }
        let read_only = io.is_read_only();
        let mut features = feature::COMMON
            | request::feature::SIZE_MAX
            | request::feature::SEG_MAX
            | request::feature::BLK_SIZE
            | request::feature::FLUSH
            | request::feature::MQ;
        features |= if read_only {
            request::feature::RO
        } else {
            request::feature::DISCARD | request::feature::WRITE_ZEROES
        };
        let sectors = bytes / SECTOR;
        let depth = io.depth();
        Ok(Self {
            config,
            features,
            queue_sizes: vec![queue_size; usize::from(queues)],
            space: request::config_space(sectors, logical_block, queues),
            limits: request::Limits {
                sectors,
                read_only,
                features: 0,
            },
            io,
            queues: Vec::new(),
            first: 0,
            slab: (0..depth).map(|_| Request::new()).collect(),
            free: (0..depth).rev().collect(),
            chain: Chain::new(),
            completions: Vec::with_capacity(2 * depth as usize),
            in_flight: 0,
            stopped: false,
            broken: false,
            announce: false,
            stats: DeviceStats::default(),
            rings: Default::default(),
        })
    }

    /// The back end.
    pub fn backend(&self) -> &dyn BlockIo {
        &*self.io
    }

    fn may_run(&self) -> bool {
        !self.stopped && !self.broken
    }

    fn fail(&mut self) {
        if !self.broken {
            self.broken = true;
            self.announce = true;
        }
    }
}

impl VirtioDevice for Blk {
    fn device_type(&self) -> u16 {
        2
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        crate::device::read_space(&self.space, offset, out);
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        if self.in_flight != 0 {
            return Err(ActivateError::NotQuiesced {
                in_flight: self.in_flight,
            });
        }
        self.reset();
        let rings = crate::device::make_queues(self.features, &self.queue_sizes, features, queues)?;
        self.queues = rings
            .into_iter()
            .map(|ring| BlkQueue {
                ring,
                // Every slot may end on one queue.
                ended: VecDeque::with_capacity(self.slab.len()),
                starved: false,
            })
            .collect();
        self.limits.features = features;
        self.io.attach(keep);
        Ok(())
    }

    fn poll<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt, _now_ns: u64) -> Activity {
        self.poll_once(dma, irq)
    }

    fn kick(&mut self, queue: u16) {
        self.stats.kicks += 1;
        if let Some(own) = self.queues.iter_mut().find(|own| own.ring.index() == queue) {
            own.ring.kick();
        }
    }

    fn ticket_done(&mut self, ticket: Ticket) {
        for queue in &mut self.queues {
            queue.ring.ticket_done(ticket);
        }
    }

    fn arm<D: Dma>(&mut self, dma: &mut D) {
        // Also when no chain is taken: what is in flight must be harvested.
        self.io.arm();
        if self.may_run() {
            for queue in self
                .queues
                .iter_mut()
                .filter(|queue| queue.ring.parked().is_none())
            {
                // A stop has parked the queue; what ends that wakes us.
                let _ = queue.ring.arm(dma);
            }
        }
    }

    fn has_work<D: Dma>(&mut self, dma: &mut D) -> bool {
        if self.announce || self.io.has_completions() {
            return true;
        }
        if !self.may_run() {
            return false;
        }
        // Slots may also wait on a parked queue, whose un-parking wakes us.
        let starving = self.in_flight != 0 || self.free.is_empty();
        let mut violated = false;
        let work = self.queues.iter_mut().any(|queue| {
            if queue.ring.parked().is_some() {
                return false;
            }
            if !queue.ended.is_empty() || queue.ring.staged() != 0 {
                return true;
            }
            // A queue starved of slots runs again when a request in flight ends, and that wakes us.
            if queue.starved && starving {
                return false;
            }
            match queue.ring.available(dma) {
                Ok(count) => count != 0,
                Err(crate::ring::RingStop::Violation(_)) => {
                    violated = true;
                    true
                }
                Err(crate::ring::RingStop::Access(_)) => false,
            }
        });
        if violated {
            self.fail();
        }
        work
    }

    fn disarm<D: Dma>(&mut self, dma: &mut D) {
        self.io.disarm();
        if self.may_run() {
            for queue in self
                .queues
                .iter_mut()
                .filter(|queue| queue.ring.parked().is_none())
            {
                let _ = queue.ring.disarm(dma);
            }
        }
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        let mut fds = Vec::new();
        self.io.wake_fds(&mut fds);
        fds
    }

    fn quiesce<D: Dma>(&mut self, dma: &mut D) -> Quiesce {
        self.stopped = true;
        self.io.flush();
        self.harvest(dma);
        match self.in_flight {
            0 => Quiesce::Done,
            in_flight => Quiesce::Draining { in_flight },
        }
    }

    fn resume(&mut self) {
        self.stopped = false;
    }

    fn reset(&mut self) {
        assert_eq!(
            self.in_flight, 0,
            "reset of a block device that has not been quiesced"
        );
        for queue in self.queues.drain(..) {
            let stats = queue.ring.stats();
            self.rings.add(&stats);
            for slot in queue.ended {
                self.io.unreserve(slot);
            }
        }
        self.free.clear();
        self.free.extend((0..self.slab.len() as u32).rev());
        self.first = 0;
        self.limits.features = 0;
        self.stopped = false;
        self.broken = false;
        self.announce = false;
        self.io.detach();
    }

    fn cancel_overdue(&mut self) {
        for (slot, request) in (0..).zip(&mut self.slab) {
            if request.in_flight && !request.cancelled {
                request.cancelled = true;
                self.stats.cancelled += 1;
                self.io.cancel(slot);
            }
        }
        self.io.flush();
    }

    fn needs_reset(&self) -> bool {
        self.broken
    }

    fn save(&self) -> Option<SavedDevice> {
        let Self {
            config: _,
            features: _,
            queue_sizes: _,
            space: _,
            limits,
            io: _,
            queues,
            first: _,
            slab: _,
            free: _,
            chain: _,
            completions: _,
            in_flight,
            stopped,
            broken,
            announce: _,
            stats: _,
            rings: _,
        } = self;
        let ended = queues.iter().any(|queue| !queue.ended.is_empty());
        if *in_flight != 0 || ended || !(*stopped || queues.is_empty()) {
            return None;
        }
        Some(SavedDevice {
            version: SAVED_VERSION,
            device_type: self.device_type(),
            features: limits.features,
            needs_reset: *broken,
            queues: queues
                .iter()
                .map(|queue| queue.ring.save())
                .collect::<Option<_>>()?,
            held_frame: Vec::new(),
        })
    }

    fn stats(&self) -> DeviceStats {
        let mut rings = self.rings;
        for queue in &self.queues {
            rings.add(&queue.ring.stats());
        }
        DeviceStats {
            publishes: rings.publishes,
            ring_faults: rings.faults,
            violations: rings.violations,
            pends: rings.pends,
            in_flight: u64::from(self.in_flight),
            ..self.stats
        }
    }
}

#[cfg(test)]
mod tests;
