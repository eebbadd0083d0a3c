//! virtio-net (virtio 1.2 §5.1), as a polled device.
//!
//! *Advertised*: MAC, STATUS (link up), MRG_RXBUF, INDIRECT_DESC, EVENT_IDX, VERSION_1, ACCESS_PLATFORM.
//! *Not implemented*: checksum and segmentation offloads, the control queue, more than one queue pair,
//! an MTU other than 1500.
//!
//! Frames are copied inline, so nothing is ever in flight and no lease is held. A visit sends and
//! receives while it lasts, and publishes each ring once.
//!
//! Transmit: copy the frame, consume its chain, send, stage, publish. A wait before the chain is consumed repeats the copy, one
//! behind it the staging: nothing that the network has seen. Receive: take a frame, look for buffers for all of it, write it,
//! consume their chains, stage, publish. A frame that finds too few buffers is held (one), and those behind it stay in the back end's bounded queue; one that
//! cannot fit at all is dropped. A buffer that faults is given back with length 0, which drivers count
//! as a short frame.

mod checksum;
mod responder;
#[expect(unsafe_code, reason = "system calls on the interface; see the module")]
mod tap;

use std::collections::VecDeque;
use std::os::fd::RawFd;

use guest_mem::{Dma, Intent, KeepAlive, Stop, Ticket, Wanted};

pub use checksum::Checksum;
pub use responder::{MAX_REPLIES, Responder};
pub use tap::{Tap, TapError};

use crate::device::{
    Activity, CancelReason, DeviceStats, Interrupt, QueueDevice, Service, StoppedQueue,
    check_features,
};
use crate::queue_config::{ActivateError, feature};
use crate::ring::following::{Following, wait_for_all};
use crate::ring::{Ahead, Chain, Ring, RingStats, RingStop, Segment, Token, Violation};
use crate::saved::{SAVED_VERSION, SavedDevice};
use crate::visit::{Visit, cost};

/// Largest frame: 14 bytes of Ethernet header, a VLAN tag, 1500 bytes.
pub const MAX_FRAME: usize = 1518;
/// Smallest frame worth sending: its Ethernet header.
const MIN_FRAME: u32 = 14;
/// `struct virtio_net_hdr` (§5.1.6), with `num_buffers`, as VERSION_1 has it always.
pub const HEADER_LEN: usize = 12;
/// Offset of `num_buffers` in it.
const NUM_BUFFERS: usize = 10;
/// Receive queue of the one pair.
pub const RX: u16 = 0;
/// Transmit queue of the one pair.
pub const TX: u16 = 1;
/// VIRTIO_NET_S_LINK_UP.
const LINK_UP: u16 = 1;

/// Feature bits (§5.1.3).
pub mod net_feature {
    /// VIRTIO_NET_F_MAC (5): the device says its address.
    pub const MAC: u64 = 1 << 5;
    /// VIRTIO_NET_F_MRG_RXBUF (15): a frame may take several receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// VIRTIO_NET_F_STATUS (16): the device says whether the link is up.
    pub const STATUS: u64 = 1 << 16;
}

/// Where frames go to and come from. Never blocks. All calls come from the device's thread.
pub trait NetIo: Send {
    /// The next frame for the guest; `None` if there is none now. Frames longer than `buf` are dropped.
    fn receive(&mut self, buf: &mut [u8]) -> Option<usize>;

    /// A frame of the guest, at most [`MAX_FRAME`] bytes; false if it had to be dropped.
    fn send(&mut self, frame: &[u8]) -> bool;

    /// Whether `receive` would answer a frame.
    fn is_readable(&mut self) -> bool;

    /// Appends descriptors that are readable while there are frames.
    fn wake_fds(&self, fds: &mut Vec<RawFd>);

    /// The driver is gone: frames for it are stale.
    fn reset(&mut self);
}

/// Why there is no such network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetError {
    /// A group address, or none.
    #[error("{0:02x?} is no address of a single interface")]
    Mac([u8; 6]),
    /// Queue size.
    #[error("a queue has 2 to 1024 entries, a power of two, not {0}")]
    QueueSize(u16),
}

/// What came of one step of a direction.
enum Step {
    /// A frame of so many bytes was moved, or dropped.
    Done { bytes: u64 },
    /// Nothing to do, or no buffers to do it with.
    Nothing,
}

/// One direction.
struct Queue {
    ring: Ring,
    /// Chains of the last frame that are not staged yet, with the bytes written: the driver sees a frame whole or not at all.
    ended: VecDeque<(Token, u32)>,
    /// What comes behind a chain that waits.
    following: Following,
    /// Chains are taken from it.
    takes: bool,
}

impl Queue {
    fn new(ring: Ring) -> Self {
        // A driver fills the receive ring long before there are frames.
        let most = if ring.index() == RX { 16 } else { 256 };
        Self {
            ring,
            ended: VecDeque::new(),
            following: Following::new(most),
            takes: true,
        }
    }

    /// Consumes `chain`, with `bytes` written into it.
    fn consume(&mut self, chain: &Chain, bytes: u32) {
        let token = self.ring.advance(chain);
        self.following.advance();
        self.ended.push_back((token, bytes));
    }

    /// Stages what was consumed.
    fn stage<D: Dma>(&mut self, dma: &mut D) -> Result<(), RingStop> {
        while let Some(&(token, bytes)) = self.ended.front() {
            self.ring.stage(dma, token, bytes)?;
            self.ended.pop_front();
        }
        Ok(())
    }
}

/// A virtio network device.
pub struct Net {
    features: u64,
    queue_sizes: [u16; 2],
    space: [u8; 8],
    io: Box<dyn NetIo>,
    accepted: u64,
    rx: Option<Queue>,
    tx: Option<Queue>,
    /// Reused: those of the frame under way.
    chains: Vec<Chain>,
    /// A header, which stays zero but for `num_buffers`, and a frame.
    rx_frame: Box<[u8; HEADER_LEN + MAX_FRAME]>,
    /// Length of the frame held there, if one is.
    held: Option<usize>,
    /// How far buffers were looked at that were too few for the held frame; the default if there was none when last looked.
    wanting: Ahead,
    /// The driver had no receive buffer when last looked.
    rx_empty: bool,
    tx_frame: Box<[u8; MAX_FRAME]>,
    /// Buffers of the frame being received, and the bytes of each chain.
    segments: Vec<Segment>,
    takes: Vec<u32>,
    /// The next visit serves the transmit queue first: the one that comes second may find nothing left of the visit.
    tx_first: bool,
    service: Service,
    violation: Option<Violation>,
    announce: bool,
    stats: DeviceStats,
    rings: RingStats,
}

impl Net {
    /// A device with this address over `io`; queues of at most `queue_size` entries.
    pub fn new(mac: [u8; 6], queue_size: u16, io: Box<dyn NetIo>) -> Result<Self, NetError> {
        if mac[0] & 1 != 0 || mac == [0; 6] {
            return Err(NetError::Mac(mac));
        }
        if !queue_size.is_power_of_two() || !(2..=1024).contains(&queue_size) {
            return Err(NetError::QueueSize(queue_size));
        }
        let mut space = [0; 8];
        space[..6].copy_from_slice(&mac);
        space[6..].copy_from_slice(&LINK_UP.to_le_bytes());
        Ok(Self {
            features: feature::COMMON
                | net_feature::MAC
                | net_feature::MRG_RXBUF
                | net_feature::STATUS,
            queue_sizes: [queue_size; 2],
            space,
            io,
            accepted: 0,
            rx: None,
            tx: None,
            chains: vec![Chain::default()],
            rx_frame: Box::new([0; HEADER_LEN + MAX_FRAME]),
            held: None,
            wanting: Ahead::default(),
            rx_empty: false,
            tx_frame: Box::new([0; MAX_FRAME]),
            segments: Vec::new(),
            takes: Vec::new(),
            tx_first: true,
            service: Service::Full,
            violation: None,
            announce: false,
            stats: DeviceStats::default(),
            rings: RingStats::default(),
        })
    }

    /// Offers packed rings too.
    #[must_use]
    pub fn with_packed(mut self) -> Self {
        self.features |= feature::RING_PACKED;
        self
    }

    fn may_run(&self) -> bool {
        self.service != Service::Stopped && self.violation.is_none()
    }

    fn may_take(&self) -> bool {
        self.may_run() && self.service == Service::Full
    }

    fn note(&mut self, stop: RingStop) {
        if let RingStop::Violation(violation) = stop
            && self.violation.is_none()
        {
            self.violation = Some(violation);
            self.announce = true;
        }
    }

    /// Serves one direction; whether anything was done, or is left.
    fn serve<D: Dma>(
        &mut self,
        index: u16,
        dma: &mut D,
        irq: &mut impl Interrupt,
        visit: &mut Visit,
    ) -> bool {
        if !self.may_run() {
            return false;
        }
        let Some(mut queue) = self.slot(index).take() else {
            return false;
        };
        let served = if index == RX {
            self.batch(dma, irq, &mut queue, visit, Self::receive)
        } else {
            self.batch(dma, irq, &mut queue, visit, Self::transmit)
        };
        *self.slot(index) = Some(queue);
        served.unwrap_or_else(|stop| {
            self.note(stop);
            false
        })
    }

    /// Publishes what was left, takes steps while the visit lasts, publishes.
    fn batch<D: Dma>(
        &mut self,
        dma: &mut D,
        irq: &mut impl Interrupt,
        queue: &mut Queue,
        visit: &mut Visit,
        step: impl Fn(&mut Self, &mut D, &mut Queue) -> Result<Step, RingStop>,
    ) -> Result<bool, RingStop> {
        if queue.ring.parked().is_some() {
            self.look_ahead(dma, queue, visit);
            return Ok(false);
        }
        let mut busy = self.publish(dma, irq, queue)?;
        if !queue.takes || !self.may_take() {
            return Ok(busy);
        }
        queue.ring.disarm(dma)?;
        let mut stopped = Ok(());
        loop {
            if visit.is_over() {
                // There may be more.
                busy = true;
                break;
            }
            match step(self, dma, queue) {
                Ok(Step::Done { bytes }) => {
                    visit.take_request(cost::REQUEST + bytes / cost::BYTES_PER_NS);
                    busy = true;
                }
                Ok(Step::Nothing) => break,
                Err(stop) => {
                    if let RingStop::Access(Stop::Pending(_)) = stop {
                        queue.following.begin();
                        self.look_ahead(dma, queue, visit);
                    }
                    stopped = Err(stop);
                    break;
                }
            }
        }
        // Not while parked by a fault of the ring itself, which would only be recorded again.
        if !queue.ring.is_faulted() {
            busy |= self.publish(dma, irq, queue)?;
        }
        stopped.map(|()| busy)
    }

    /// While `queue` waits: asks for what the frames behind the one that waits will want.
    fn look_ahead<D: Dma>(&mut self, dma: &mut D, queue: &mut Queue, visit: &mut Visit) {
        let Queue {
            following, ring, ..
        } = queue;
        if queue.takes && following.has_work() && self.may_take() {
            let chain = &mut self.chains[0];
            following.look(ring, dma, chain, visit, |dma, chain| {
                dma.gather(wanted(chain))
            });
        }
    }

    /// Shows the driver what has ended, whole frames only.
    fn publish<D: Dma>(
        &mut self,
        dma: &mut D,
        irq: &mut impl Interrupt,
        queue: &mut Queue,
    ) -> Result<bool, RingStop> {
        queue.stage(dma)?;
        let any = queue.ring.staged() != 0;
        if queue.ring.publish(dma)? {
            self.stats.interrupts += 1;
            irq.queue(queue.ring.index());
        }
        Ok(any)
    }

    /// Sends one frame.
    fn transmit<D: Dma>(&mut self, dma: &mut D, queue: &mut Queue) -> Result<Step, RingStop> {
        let chain = &mut self.chains[0];
        if !queue.ring.peek(dma, chain)? {
            return Ok(Step::Nothing);
        }
        let readable = chain.readable();
        let Some(len) = readable.len().checked_sub(HEADER_LEN as u32) else {
            return Err(queue.ring.park(Violation::Truncated.into()));
        };
        // The header asks for offloads, and none is offered: whatever it says is ignored.
        let fits = (MIN_FRAME..=MAX_FRAME as u32).contains(&len);
        let frame = &mut self.tx_frame[..if fits { len as usize } else { 0 }];
        let read = match readable.read(dma, HEADER_LEN as u32, frame) {
            Ok(()) => fits,
            Err(Stop::Fault(_)) => false,
            Err(pending) => {
                let pending = wait_for_all(dma, pending, wanted(chain));
                return Err(queue.ring.park(pending.into()));
            }
        };
        queue.consume(chain, 0);
        self.stats.requests += 1;
        if read && self.io.send(frame) {
            self.stats.written_bytes += u64::from(len);
        } else {
            self.stats.errors += 1;
        }
        queue.stage(dma)?;
        let bytes = u64::from(len);
        Ok(Step::Done { bytes })
    }

    /// Receives one frame.
    fn receive<D: Dma>(&mut self, dma: &mut D, queue: &mut Queue) -> Result<Step, RingStop> {
        self.rx_empty = !queue.ring.has_available(dma)?;
        if self.rx_empty {
            return Ok(Step::Nothing);
        }
        let len = match self.held {
            Some(len) => len,
            None => match self.io.receive(&mut self.rx_frame[HEADER_LEN..]) {
                Some(len) => len,
                None => return Ok(Step::Nothing),
            },
        };
        self.held = Some(len);
        let all = (HEADER_LEN + len) as u32;
        if !self.gather(dma, queue, all)? {
            // More buffers may come, unless the ring is full of them, or a frame must fit into one.
            let ring = &queue.ring;
            let is_full = ring.in_flight() == 0 && ring.is_exhausted(self.wanting);
            if self.mergeable() && !is_full {
                return Ok(Step::Nothing);
            }
            self.held = None;
            self.stats.errors += 1;
            return Ok(Step::Done { bytes: 0 });
        }
        let count = self.takes.len() as u16;
        let num_buffers = count.to_le_bytes();
        self.rx_frame[NUM_BUFFERS..HEADER_LEN].copy_from_slice(&num_buffers);
        let written = match scatter(dma, &self.segments, &self.rx_frame[..all as usize]) {
            Ok(()) => true,
            Err(Stop::Fault(_)) => false,
            Err(pending) => {
                let all = self.segments.iter();
                let all = all.map(|segment| (segment.iova, segment.len, Intent::Write));
                let pending = wait_for_all(dma, pending, all);
                return Err(queue.ring.park(pending.into()));
            }
        };
        for (chain, &bytes) in self.chains.iter().zip(&self.takes) {
            queue.consume(chain, if written { bytes } else { 0 });
        }
        self.held = None;
        self.stats.requests += 1;
        if written {
            self.stats.read_bytes += len as u64;
        } else {
            self.stats.errors += 1;
        }
        queue.stage(dma)?;
        let bytes = u64::from(all);
        Ok(Step::Done { bytes })
    }

    /// Collects buffers for `all` bytes from the next chains, without consuming them; whether they suffice. Every chain has
    /// room for a byte, so there are `all` chains at most.
    fn gather<D: Dma>(
        &mut self,
        dma: &mut D,
        queue: &mut Queue,
        all: u32,
    ) -> Result<bool, RingStop> {
        self.segments.clear();
        self.takes.clear();
        self.wanting = Ahead::default();
        let mut need = all;
        while need != 0 {
            let nth = self.takes.len();
            if nth != 0 && !self.mergeable() {
                return Ok(false);
            }
            if nth == self.chains.len() {
                self.chains.push(Chain::default());
            }
            let chain = &mut self.chains[nth];
            if !queue.ring.peek_ahead(dma, &mut self.wanting, chain)? {
                return Ok(false);
            }
            let writable = chain.writable();
            // §5.1.6.3.1: the header fits into the first buffer, and every buffer holds something.
            if writable.is_empty() || (nth == 0 && writable.len() < HEADER_LEN as u32) {
                return Err(queue.ring.park(Violation::Truncated.into()));
            }
            let take = writable.len().min(need);
            self.segments.extend(writable.slice(0, take));
            self.takes.push(take);
            need -= take;
        }
        Ok(true)
    }

    fn mergeable(&self) -> bool {
        self.accepted & net_feature::MRG_RXBUF != 0
    }

    /// Where queue `index` is, which is one of the two.
    fn slot(&mut self, index: u16) -> &mut Option<Queue> {
        if index == RX {
            &mut self.rx
        } else {
            &mut self.tx
        }
    }

    /// Queue `index`, if it is being served.
    fn queue(&mut self, index: u16) -> Option<&mut Queue> {
        self.queues().find(|own| own.ring.index() == index)
    }

    /// Both queues, as far as the driver has enabled them.
    fn queues(&mut self) -> impl Iterator<Item = &mut Queue> {
        self.rx.iter_mut().chain(&mut self.tx)
    }

    /// Where the receive ring is to tell of new buffers.
    fn rx_ahead(&self) -> Ahead {
        match self.held {
            Some(_) => self.wanting,
            None => Ahead::default(),
        }
    }

    /// Whether frames from the back end have nowhere to go at the moment.
    fn is_rx_blocked(&self) -> bool {
        !self.may_take()
            || self.held.is_some()
            || self.rx_empty
            || self
                .rx
                .as_ref()
                .is_none_or(|rx| !rx.takes || rx.ring.parked().is_some())
    }
}

/// All that a frame in this chain may take of it.
fn wanted(chain: &Chain) -> impl Iterator<Item = Wanted> {
    const MOST: u32 = (HEADER_LEN + MAX_FRAME) as u32;
    let read = chain.readable().wanted(0, MOST, Intent::Read);
    read.chain(chain.writable().wanted(0, MOST, Intent::Write))
}

/// Writes `bytes` over `segments`, which hold exactly as many.
fn scatter<D: Dma>(dma: &mut D, segments: &[Segment], bytes: &[u8]) -> Result<(), Stop> {
    let mut at = 0;
    for segment in segments {
        let end = at + segment.len as usize;
        dma.write(segment.iova, &bytes[at..end])?;
        at = end;
    }
    Ok(())
}

impl QueueDevice for Net {
    fn device_type(&self) -> u16 {
        1
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

    fn begin(&mut self, features: u64, _keep: KeepAlive) -> Result<(), ActivateError> {
        check_features(self.features, features)?;
        self.reset();
        self.accepted = features;
        Ok(())
    }

    fn add_queue(&mut self, ring: Ring) -> Result<(), ActivateError> {
        let index = ring.index();
        if index > TX || self.slot(index).is_some() {
            return Err(ActivateError::QueueIndex { index });
        }
        *self.slot(index) = Some(Queue::new(ring));
        Ok(())
    }

    fn pause_queue(&mut self, index: u16, is_paused: bool) {
        if let Some(queue) = self.queue(index) {
            queue.takes = !is_paused;
        }
    }

    fn stop_queue<D: Dma>(
        &mut self,
        index: u16,
        dma: &mut D,
        irq: &mut impl Interrupt,
    ) -> Option<StoppedQueue> {
        let mut queue = self
            .slot(index.min(TX))
            .take_if(|own| own.ring.index() == index)?;
        queue.takes = false;
        // Nothing is taken any more; what has ended is shown, also by a device that needs a reset.
        if self.service != Service::Stopped
            && queue.ring.parked().is_none()
            && let Err(stop) = self.publish(dma, irq, &mut queue)
        {
            self.note(stop);
        }
        let unshown = queue.ring.in_flight();
        if unshown != 0 && !queue.ring.is_faulted() {
            *self.slot(index) = Some(queue);
            return None;
        }
        self.rings.add(&queue.ring.stats());
        if index == RX {
            self.wanting = Ahead::default();
            self.rx_empty = false;
        }
        Some(StoppedQueue {
            position: queue.ring.position(),
            unshown,
        })
    }

    fn set_service(&mut self, service: Service) {
        self.service = service;
    }

    /// No I/O outlives a visit.
    fn set_memory(&mut self, _keep: KeepAlive) {}

    fn rebind(&mut self) {}

    fn cancel(&mut self, _reason: CancelReason) -> u32 {
        0
    }

    fn reset(&mut self) {
        for queue in self.rx.take().into_iter().chain(self.tx.take()) {
            self.rings.add(&queue.ring.stats());
        }
        self.held = None;
        self.wanting = Ahead::default();
        self.rx_empty = false;
        self.accepted = 0;
        self.tx_first = true;
        self.service = Service::Full;
        self.violation = None;
        self.announce = false;
        self.io.reset();
    }

    fn visit<D: Dma>(
        &mut self,
        dma: &mut D,
        irq: &mut impl Interrupt,
        visit: &mut Visit,
    ) -> Activity {
        if self.may_run() {
            self.queues()
                .for_each(|queue| queue.ring.retry(visit.now_ns()));
        }
        let order = if self.tx_first { [TX, RX] } else { [RX, TX] };
        self.tx_first = !self.tx_first;
        let mut busy = false;
        for index in order {
            busy |= self.serve(index, dma, irq, visit);
        }
        if self.announce {
            self.announce = false;
            irq.config();
            busy = true;
        }
        if busy { Activity::Busy } else { Activity::Idle }
    }

    fn kick(&mut self, queue: u16) {
        self.stats.kicks += 1;
        for own in self.queues().filter(|own| own.ring.index() == queue) {
            own.ring.kick();
        }
    }

    fn ticket_done(&mut self, ticket: Ticket) {
        for queue in self.queues() {
            queue.ring.ticket_done(ticket);
            queue.following.ticket_done(ticket);
        }
    }

    fn arm<D: Dma>(&mut self, dma: &mut D) {
        if !self.may_take() {
            return;
        }
        let ahead = self.rx_ahead();
        for queue in self.queues() {
            let ring = &mut queue.ring;
            if queue.takes && ring.parked().is_none() {
                let is_rx = ring.index() == RX;
                // A stop has parked the queue; what ends that wakes us.
                let _ = ring.arm_ahead(dma, if is_rx { ahead } else { Ahead::default() });
            }
        }
    }

    fn has_work<D: Dma>(&mut self, dma: &mut D) -> bool {
        if self.announce {
            return true;
        }
        if !self.may_run() {
            return false;
        }
        let is_taking = self.service == Service::Full;
        let ahead = self.rx_ahead();
        let mut has_rx = false;
        let mut has_tx = false;
        for queue in self.rx.iter_mut().chain(&mut self.tx) {
            let ring = &mut queue.ring;
            if ring.parked().is_some() {
                if is_taking && queue.takes && queue.following.has_work() {
                    return true;
                }
                continue;
            }
            if ring.staged() != 0 || !queue.ended.is_empty() {
                return true;
            }
            if !is_taking || !queue.takes {
                continue;
            }
            let (has, at) = match ring.index() {
                RX => (&mut has_rx, ahead),
                _ => (&mut has_tx, Ahead::default()),
            };
            match ring.has_available_ahead(dma, at) {
                Ok(is_available) => *has = is_available,
                Err(stop @ RingStop::Violation(_)) => {
                    self.note(stop);
                    return true;
                }
                // A visit says when it is tried again.
                Err(RingStop::Access(_)) if ring.is_faulted() => return true,
                Err(RingStop::Access(_)) => {}
            }
        }
        // Where there was no buffer, the owner may have asked for our descriptors already, when they were left out: the poll
        // that follows puts them back.
        has_tx || (has_rx && (self.held.is_some() || self.rx_empty || self.io.is_readable()))
    }

    fn disarm<D: Dma>(&mut self, dma: &mut D) {
        if self.may_take() {
            for queue in self.queues() {
                if queue.ring.parked().is_none() {
                    let _ = queue.ring.disarm(dma);
                }
            }
        }
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        let mut fds = Vec::new();
        if !self.is_rx_blocked() {
            self.io.wake_fds(&mut fds);
        }
        fds
    }

    fn has_more<D: Dma>(&mut self, index: u16, dma: &mut D) -> bool {
        if !self.may_take() {
            return false;
        }
        // Buffers for frames are no work by themselves.
        let has_frame = index != RX || self.held.is_some() || self.io.is_readable();
        let Some(queue) = self.queue(index) else {
            return false;
        };
        if !has_frame || !queue.takes || queue.ring.parked().is_some() {
            return false;
        }
        match queue.ring.has_available(dma) {
            Ok(has_available) => has_available,
            Err(stop) => {
                self.note(stop);
                false
            }
        }
    }

    fn opens_at_ns(&self) -> Option<u64> {
        let queues = self.rx.iter().chain(&self.tx).filter(|_| self.may_run());
        queues.filter_map(|queue| queue.ring.retry_at_ns()).min()
    }

    fn ring(&mut self, index: u16) -> Option<&mut Ring> {
        Some(&mut self.queue(index)?.ring)
    }

    fn for_each_ring(&mut self, mut each: impl FnMut(&mut Ring)) {
        self.queues().for_each(|queue| each(&mut queue.ring));
    }

    /// Nothing outlives a visit.
    fn in_flight(&self) -> u32 {
        0
    }

    fn violation(&self) -> Option<Violation> {
        self.violation
    }

    fn save(&self) -> Option<SavedDevice> {
        let Self {
            features: _,
            queue_sizes: _,
            space: _,
            io: _,
            accepted,
            rx,
            tx,
            chains: _,
            rx_frame,
            held,
            wanting: _,
            rx_empty: _,
            tx_frame: _,
            segments: _,
            takes: _,
            tx_first: _,
            service,
            violation,
            announce: _,
            stats: _,
            rings: _,
        } = self;
        let mut queues = rx.iter().chain(tx);
        if *service != Service::Stopped && queues.clone().next().is_some() {
            return None;
        }
        Some(SavedDevice {
            version: SAVED_VERSION,
            device_type: self.device_type(),
            features: *accepted,
            needs_reset: violation.is_some(),
            queues: queues.try_fold(Vec::new(), |mut all, queue| {
                all.push(queue.ring.save()?);
                Some(all)
            })?,
            held_frame: match held {
                Some(len) => rx_frame[HEADER_LEN..][..*len].to_vec(),
                None => Vec::new(),
            },
            balloon_actual: 0,
        })
    }

    fn stats(&self) -> DeviceStats {
        let mut rings = self.rings;
        for queue in self.rx.iter().chain(&self.tx) {
            rings.add(&queue.ring.stats());
        }
        self.stats.with_rings(&rings)
    }
}

#[cfg(test)]
mod tests;
