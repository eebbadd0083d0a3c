//! virtio-blk (virtio 1.2 §5.2), as a polled device.
//!
//! *Advertised*: SIZE_MAX, SEG_MAX, BLK_SIZE, FLUSH, DISCARD and WRITE_ZEROES (unless read-only,
//! where the back end can), RO, MQ, INDIRECT_DESC, EVENT_IDX, VERSION_1, ACCESS_PLATFORM. Read,
//! write, flush, discard, write-zeroes, GET_ID. Every sector of 512 bytes can be read, written and
//! zeroed by itself, whatever the disk's block and the storage's ([`range`], [`RawDisk`]). *Not
//! implemented*: CONFIG_WCE, TOPOLOGY, LIFETIME, SECURE_ERASE, ZONED; more than one range per
//! discard or write-zeroes request (the configuration says so).
//!
//! One visit: *take* chains from every queue (bounded), complete at once those that need not wait,
//! start the others with one system call at most, *reap* completions, *finish*: move bounced data,
//! write status bytes, stage used elements, publish once per queue. A request that is not complete
//! at once lives in a slot of a slab from take to finish; its vectors are reused, so a warm device
//! allocates nothing, and the slab grows on demand, so an idle one has none.
//!
//! The device in a process of its own, which is given the bytes of requests and no guest memory, is
//! [`BlkWorker`]: the same check of a request ([`request::check`]) and the same back ends.
//!
//! Reading order: this file (the parts of a device), `class` (the hooks for the body), `take`,
//! `slot`, `parts`, `stalled`, `finish`, [`BlockIo`], [`range`]; [`RawDisk`], a file or block
//! device behind it; [`WorkQueue`], for back ends that have threads.
//!
//! A read or write of more than [`MAX_TRANSFER`] bytes, or in more pieces than [`MAX_PIECES`], is
//! done in *parts*, one after the other, in one slot. (Drivers keep to SIZE_MAX and SEG_MAX if they
//! accept them; firmware often does not.) After a part the request waits in its queue's
//! `continuing` until a visit starts the next one; as long as one waits there, nothing is taken
//! from the queue, so that newcomers do not eat up the room that it waits for. The first part that
//! fails ends it.
//!
//! Leases: taken for every piece of a direct transfer before it is submitted, released when its
//! completion is reaped, as soon as the back end no longer touches memory and in any case before
//! the used index is published. Data of `--dma bounce` and everything else (headers, status bytes,
//! rings) is copied inline. Where an unmap has waited too long, the requests of which a lease is
//! stale are cancelled, and no others.
//!
//! Pending anywhere leaves the request where it is (in the ring, between two parts, or ended and
//! unfinished) and parks its queue; the step is repeated from its beginning when the ticket
//! completes.
//!
//! A status byte that faults leaves nothing to answer with: the device needs a reset. A ring that
//! faults parks its queue. A chain without header or status byte is a protocol violation.
//!
//! Bounds: slots = the back end's depth. Per slot at most 2,047 segments (a ring of 1024 that ends
//! in an indirect table; 32 KiB) and [`MAX_PIECES`] pieces and leases (16 KiB and 4 KiB): with 256
//! slots a hostile driver makes a device hold 13 MiB, and an ordinary one well below 1 MiB.

mod backend;
mod class;
mod finish;
mod mem;
mod parts;
mod profile;
pub mod range;
#[expect(unsafe_code, reason = "the kernel is given addresses; see the module")]
mod raw;
pub mod request;
mod slot;
mod stalled;
mod take;
mod work_queue;
mod worker;

use std::collections::VecDeque;

pub use backend::{BlockIo, Completion, Op, Outcome, Piece, Transfer};
pub use mem::{MemDisk, NullDisk};
pub use profile::{BlkFacts, BlkProfile, FactsError};
pub use raw::{RawDisk, RawDiskError, RawDiskOptions, UringRefusal, UringShare, try_io_uring};
pub use work_queue::WorkQueue;
pub use worker::{BlkWorker, worker_shape};

use guest_mem::Dma;
use serde::{Deserialize, Serialize};

use crate::body::{Context, Device, DeviceClass, Environment, ServedQueue};
use crate::log_rate_limit::LogRateLimit;
use crate::poll_budget::cost;
use crate::ring::Chain;
use crate::saved::SavedState;
use crate::throttle::{RateLimits, Throttle};
use request::ID_LEN;
use slot::{Request, WaitingFor};
use stalled::Stalled;

/// Unit of the protocol's sector numbers, in bytes, whatever the block size.
pub const SECTOR: u64 = 512;
/// Most bytes that a back end is asked to read or write at a time, a whole number of blocks. A
/// longer request is done in parts.
pub const MAX_TRANSFER: u32 = 4 << 20;
/// Most leases of one part of a request, and the most segments one system call takes (UIO_MAXIOV):
/// 4 MiB in 4 KiB pages.
pub const MAX_PIECES: usize = 1024;
/// Requests behind one that waits for absent memory that are looked at meanwhile: as many as a
/// queue has, usually.
const MAX_AHEAD: usize = 256;
/// Most queues.
pub const MAX_QUEUES: u16 = 16;

/// Configuration of a block device.
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
    /// Whether packed rings are offered, and in-order completion where the back end keeps it.
    pub packed: bool,
    /// Limits of its rate.
    pub limits: RateLimits,
}

impl Default for BlkConfig {
    fn default() -> Self {
        Self {
            logical_block: 512,
            queues: 1,
            queue_size: 256,
            serial: *b"exitless\0\0\0\0\0\0\0\0\0\0\0\0",
            packed: false,
            limits: RateLimits::default(),
        }
    }
}

/// Reason why a block device cannot be made.
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
    /// The back end takes larger blocks only.
    #[error(
        "past the page cache its storage takes blocks of {needed} bytes, and the disk's are of \
         {block}: \
         {}", remedy(*needed)
    )]
    Alignment {
        /// Block that it takes, in bytes.
        needed: u32,
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

/// Returns the options that make storage in blocks of so many bytes usable.
fn remedy(needed: u32) -> &'static str {
    match needed {
        ..=4096 => "block=4096, or direct=off",
        _ => "direct=off",
    }
}

/// The requests of one queue that are neither in the ring nor in flight.
#[derive(Default)]
pub struct BlkQueue {
    /// Those that have ended and are not in the used ring.
    ended: VecDeque<u32>,
    /// Requests of which a part is done and the next one not begun.
    continuing: VecDeque<u32>,
    /// Resource for want of which the last take, or the last next part, stopped.
    waiting_for: Option<WaitingFor>,
    /// Number of entries of `ended`, from the front on, whose memory has been asked for.
    asked: usize,
}

type Queue = ServedQueue<BlkQueue>;

impl BlkQueue {
    /// Whether the queue waits for leases, and not enough have been released yet.
    fn lacks_leases<D: Dma>(&self, dma: &D) -> bool {
        matches!(self.waiting_for, Some(WaitingFor::Leases(count)) if !dma.has_lease_room(count))
    }

    /// The next request, or the next part, has no room.
    fn wait_for<E: Environment>(&mut self, what: WaitingFor, cx: &mut Context<'_, E>) {
        self.waiting_for = Some(what);
        if let WaitingFor::Leases(count) = what {
            cx.visit.charge(count as u64 * cost::LEASE);
        }
        cx.stats.backpressure += 1;
    }
}

/// A virtio block device.
pub type Blk = Device<BlkClass>;

/// Class of block devices: the part of the device that is particular to them.
pub struct BlkClass {
    config: BlkConfig,
    features: u64,
    queue_sizes: Vec<u16>,
    space: [u8; 60],
    limits: request::Limits,
    io: Box<dyn BlockIo>,
    /// As many as were ever in use at the same time: at most the back end's depth.
    slab: Vec<Request>,
    free: Vec<u32>,
    throttle: Throttle,
    chain: Chain,
    completions: Vec<Completion>,
    in_flight: u32,
    /// Of those in flight, the ones that the back end could not begin yet.
    stalled: Stalled,
    /// An unmap has waited too long: the next visit cancels the requests that hold its pages.
    is_overdue: bool,
    /// For errors of the storage.
    lines: LogRateLimit,
}

/// Part of the saved state that only block devices have: nothing, their contents are the back
/// end's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedBlk {}

impl SavedState for SavedBlk {
    const TYPE: u16 = BlkClass::TYPE;
    const VERSION: u32 = 1;
}

impl Blk {
    /// A device over `io`.
    ///
    /// # Errors
    /// No device can have that configuration over it.
    pub fn new(config: BlkConfig, io: Box<dyn BlockIo>) -> Result<Self, BlkError> {
        let profile = BlkProfile::new(&config, &BlkFacts::of(&*io))?;
        Ok(Self::of(BlkClass {
            config,
            features: profile.features,
            queue_sizes: profile.queue_sizes,
            space: profile.space,
            limits: profile.limits,
            io,
            slab: Vec::new(),
            free: Vec::new(),
            throttle: Throttle::new(config.limits),
            chain: Chain::new(),
            completions: Vec::new(),
            in_flight: 0,
            stalled: Stalled::default(),
            is_overdue: false,
            lines: LogRateLimit::default(),
        }))
    }

    /// The back end.
    pub fn backend(&self) -> &dyn BlockIo {
        &*self.class().io
    }
}

#[cfg(test)]
pub(crate) mod tests;
