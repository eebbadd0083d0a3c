//! virtio-net (virtio 1.2 §5.1), as a polled device.
//!
//! *Advertised*: MAC, STATUS (link up), MRG_RXBUF, INDIRECT_DESC, EVENT_IDX, VERSION_1, ACCESS_PLATFORM.
//! *Not implemented*: checksum and segmentation offloads, the control queue, more than one queue pair,
//! an MTU other than 1500.
//!
//! Frames are copied inline, so nothing is ever in flight and no lease is held. A visit sends and
//! receives while it lasts, and publishes each ring at its end.
//!
//! Transmit: copy the frame, consume its chain, send, stage, publish. A wait before the chain is consumed repeats the copy, one
//! behind it the staging: nothing that the network has seen. Receive: take a frame, look for buffers for all of it, write it,
//! consume their chains, stage, publish. A frame that finds too few buffers is held (one), and those behind it stay in the back end's bounded queue; one that
//! cannot fit at all is dropped. A buffer that faults is given back with length 0, which drivers count
//! as a short frame.

mod checksum;
mod header;
mod port;
mod responder;
#[expect(unsafe_code, reason = "system calls on the interface; see the module")]
mod tap;

use std::os::fd::RawFd;

use guest_mem::{Access, Dma, Intent, KeepAlive, Stop, Wanted};
use serde::{Deserialize, Serialize};

pub use checksum::Checksum;
pub use header::{F_DATA_VALID, F_NEEDS_CSUM, HEADER_LEN, HeaderError, NetHeader, Offloads, gso};
pub use port::{
    BURST, Collected, FrameData, FrameReceiver, NetPort, PortCapabilities, RxFrame, TxFrame, Waits,
};
pub use responder::{MAX_REPLIES, Responder};
pub use tap::{Tap, TapError};

use crate::body::{Context, Device, DeviceClass, Environment, ServedQueue, Step};
use crate::device::{Activity, read_space};
use crate::queue_config::{feature, is_queue_size};
use crate::ring::{Ahead, Chain, RingStop, Segment, Violation, write_row};
use crate::saved::SavedState;
use crate::visit::cost;

/// Largest frame: 14 bytes of Ethernet header, a VLAN tag, 1500 bytes.
pub const MAX_FRAME: usize = 1518;
/// Smallest frame worth sending: its Ethernet header.
const MIN_FRAME: u32 = 14;
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
    /// VIRTIO_NET_F_CSUM (0): the driver may leave checksums to the device.
    pub const CSUM: u64 = 1 << 0;
    /// VIRTIO_NET_F_GUEST_CSUM (1): the driver takes frames whose checksum is left over.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// VIRTIO_NET_F_CTRL_GUEST_OFFLOADS (2): the driver may change at any time what it takes.
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    /// VIRTIO_NET_F_MTU (3): the device says what the network's MTU is.
    pub const MTU: u64 = 1 << 3;
    /// VIRTIO_NET_F_GUEST_TSO4 (7): the driver takes unsegmented TCP over IPv4.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// VIRTIO_NET_F_GUEST_TSO6 (8): the driver takes unsegmented TCP over IPv6.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// VIRTIO_NET_F_GUEST_ECN (9): the driver takes unsegmented TCP with CWR.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// VIRTIO_NET_F_HOST_TSO4 (11): the driver may send unsegmented TCP over IPv4.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// VIRTIO_NET_F_HOST_TSO6 (12): the driver may send unsegmented TCP over IPv6.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// VIRTIO_NET_F_HOST_ECN (13): the driver may send unsegmented TCP with CWR.
    pub const HOST_ECN: u64 = 1 << 13;
    /// VIRTIO_NET_F_CTRL_VQ (17): there is a control queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// VIRTIO_NET_F_CTRL_RX (18): the control queue takes receive modes and MAC tables.
    pub const CTRL_RX: u64 = 1 << 18;
    /// VIRTIO_NET_F_CTRL_VLAN (19): the control queue takes VLAN filters.
    pub const CTRL_VLAN: u64 = 1 << 19;
    /// VIRTIO_NET_F_CTRL_RX_EXTRA (20): the control queue takes more receive modes.
    pub const CTRL_RX_EXTRA: u64 = 1 << 20;
    /// VIRTIO_NET_F_GUEST_ANNOUNCE (21): the driver announces itself when asked to.
    pub const GUEST_ANNOUNCE: u64 = 1 << 21;
    /// VIRTIO_NET_F_MQ (22): there may be several queue pairs.
    pub const MQ: u64 = 1 << 22;
    /// VIRTIO_NET_F_CTRL_MAC_ADDR (23): the control queue takes a MAC address.
    pub const CTRL_MAC_ADDR: u64 = 1 << 23;
    /// VIRTIO_NET_F_GUEST_USO4 (54, virtio 1.3): the driver takes unsegmented UDP over IPv4.
    pub const GUEST_USO4: u64 = 1 << 54;
    /// VIRTIO_NET_F_GUEST_USO6 (55, virtio 1.3): the driver takes unsegmented UDP over IPv6.
    pub const GUEST_USO6: u64 = 1 << 55;
    /// VIRTIO_NET_F_HOST_USO (56, virtio 1.3): the driver may send unsegmented UDP.
    pub const HOST_USO: u64 = 1 << 56;
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

/// A virtio network device.
pub type Net = Device<NetClass>;

/// One direction, of which nothing is kept but the ring.
type Queue = ServedQueue<()>;

/// Class of network devices: the part of the device that is particular to them.
pub struct NetClass {
    features: u64,
    queue_sizes: [u16; 2],
    space: [u8; 8],
    io: Box<dyn NetIo>,
    /// A frame may take several receive buffers.
    is_mergeable: bool,
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
}

/// Part of the saved state that only network devices have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedNet {
    /// A frame received and not yet delivered.
    pub held_frame: Vec<u8>,
}

impl SavedState for SavedNet {
    const TYPE: u16 = NetClass::TYPE;
    const VERSION: u32 = 1;
}

impl Net {
    /// A device with this address over `io`; queues of at most `queue_size` entries.
    pub fn new(mac: [u8; 6], queue_size: u16, io: Box<dyn NetIo>) -> Result<Self, NetError> {
        if mac[0] & 1 != 0 || mac == [0; 6] {
            return Err(NetError::Mac(mac));
        }
        if !is_queue_size(queue_size, 2) {
            return Err(NetError::QueueSize(queue_size));
        }
        let mut space = [0; 8];
        space[..6].copy_from_slice(&mac);
        space[6..].copy_from_slice(&LINK_UP.to_le_bytes());
        Ok(Self::of(NetClass {
            features: feature::COMMON
                | net_feature::MAC
                | net_feature::MRG_RXBUF
                | net_feature::STATUS,
            queue_sizes: [queue_size; 2],
            space,
            io,
            is_mergeable: false,
            chains: vec![Chain::default()],
            rx_frame: Box::new([0; HEADER_LEN + MAX_FRAME]),
            held: None,
            wanting: Ahead::default(),
            rx_empty: false,
            tx_frame: Box::new([0; MAX_FRAME]),
            segments: Vec::new(),
            takes: Vec::new(),
        }))
    }

    /// Offers packed rings too.
    #[must_use]
    pub fn with_packed(mut self) -> Self {
        self.class_mut().features |= feature::RING_PACKED;
        self
    }
}

impl NetClass {
    /// Sends one frame.
    fn transmit<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        let chain = &mut self.chains[0];
        if !queue.peek(cx.dma, chain)? {
            return Ok(Activity::Idle);
        }
        let readable = chain.readable();
        let Some(len) = readable.len().checked_sub(HEADER_LEN as u32) else {
            return Err(queue.park(Violation::Truncated));
        };
        // The header asks for offloads, and none is offered: whatever it says is ignored.
        let fits = (MIN_FRAME..=MAX_FRAME as u32).contains(&len);
        let frame = &mut self.tx_frame[..if fits { len as usize } else { 0 }];
        let read = match readable.read(cx.dma, HEADER_LEN as u32, frame) {
            Ok(()) => fits,
            Err(Stop::Fault(_)) => false,
            Err(pending) => return Err(queue.wait_for(cx.dma, pending, wanted(chain))),
        };
        queue.answer(chain, 0)?;
        cx.stats.requests += 1;
        if read && self.io.send(frame) {
            cx.stats.written_bytes += u64::from(len);
        } else {
            cx.stats.errors += 1;
        }
        queue.stage_answers(cx.dma)?;
        moved(cx, len)
    }

    /// Receives one frame.
    fn receive<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        self.rx_empty = !queue.has_available(cx.dma)?;
        if self.rx_empty {
            return Ok(Activity::Idle);
        }
        let len = match self.held {
            Some(len) => len,
            None => match self.io.receive(&mut self.rx_frame[HEADER_LEN..]) {
                Some(len) => len,
                None => return Ok(Activity::Idle),
            },
        };
        self.held = Some(len);
        let all = (HEADER_LEN + len) as u32;
        if !self.gather(cx.dma, queue, all)? {
            // More buffers may come, unless the ring is full of them, or a frame must fit into one.
            let is_full = queue.in_flight() == 0 && queue.is_exhausted(self.wanting);
            if self.is_mergeable && !is_full {
                return Ok(Activity::Idle);
            }
            self.held = None;
            cx.stats.errors += 1;
            return moved(cx, 0);
        }
        let count = self.takes.len() as u16;
        let num_buffers = count.to_le_bytes();
        self.rx_frame[NUM_BUFFERS..HEADER_LEN].copy_from_slice(&num_buffers);
        let segments = self.segments.iter().copied();
        let written = match write_row(cx.dma, segments, &self.rx_frame[..all as usize]) {
            Ok(()) => true,
            Err(Stop::Fault(_)) => false,
            Err(pending) => {
                let all = self.segments.iter();
                let all = all.map(|segment| (segment.iova, segment.len, Intent::Write));
                return Err(queue.wait_for(cx.dma, pending, all));
            }
        };
        for (chain, &bytes) in self.chains.iter().zip(&self.takes) {
            queue.answer(chain, if written { bytes } else { 0 })?;
        }
        self.held = None;
        cx.stats.requests += 1;
        if written {
            cx.stats.read_bytes += len as u64;
        } else {
            cx.stats.errors += 1;
        }
        queue.stage_answers(cx.dma)?;
        moved(cx, all)
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
            if nth != 0 && !self.is_mergeable {
                return Ok(false);
            }
            if nth == self.chains.len() {
                self.chains.push(Chain::default());
            }
            let chain = &mut self.chains[nth];
            if !queue.peek_ahead(dma, &mut self.wanting, chain)? {
                return Ok(false);
            }
            let writable = chain.writable();
            // §5.1.6.3.1: the header fits into the first buffer, and every buffer holds something.
            if writable.is_empty() || (nth == 0 && writable.len() < HEADER_LEN as u32) {
                return Err(queue.park(Violation::Truncated));
            }
            let take = writable.len().min(need);
            self.segments.extend(writable.slice(0, take));
            self.takes.push(take);
            need -= take;
        }
        Ok(true)
    }
}

/// One frame of so many bytes was moved or dropped.
fn moved<E: Environment>(cx: &mut Context<'_, E>, bytes: u32) -> Step {
    cx.visit
        .take_request(cost::REQUEST + u64::from(bytes) / cost::BYTES_PER_NS);
    Ok(Activity::Busy)
}

/// All that a frame in this chain may take of it.
fn wanted(chain: &Chain) -> impl Iterator<Item = Wanted> {
    const MOST: u32 = (HEADER_LEN + MAX_FRAME) as u32;
    let read = chain.readable().wanted(0, MOST, Intent::Read);
    read.chain(chain.writable().wanted(0, MOST, Intent::Write))
}

impl DeviceClass for NetClass {
    const TYPE: u16 = 1;
    /// Frames that were sent before the start come first.
    const FIRST: u16 = TX;
    type Queue = ();
    type Saved = SavedNet;

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        read_space(&self.space, offset, out);
    }

    fn queue(&self, index: u16, _features: u64) -> Option<()> {
        (index <= TX).then_some(())
    }

    /// A driver fills the receive ring long before there are frames.
    fn lookahead(&self, index: u16) -> usize {
        if index == RX { 16 } else { 256 }
    }

    fn begin(&mut self, features: u64, _keep: KeepAlive) -> bool {
        self.is_mergeable = features & net_feature::MRG_RXBUF != 0;
        false
    }

    fn reset(&mut self) {
        self.held = None;
        self.io.reset();
    }

    fn forget(&mut self, index: u16, (): ()) {
        if index == RX {
            self.wanting = Ahead::default();
            self.rx_empty = false;
        }
    }

    fn save(&self) -> SavedNet {
        let held = self.held.map(|len| &self.rx_frame[HEADER_LEN..][..len]);
        SavedNet {
            held_frame: held.unwrap_or_default().to_vec(),
        }
    }

    fn serve<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        match queue.index() {
            RX => self.receive(queue, cx),
            _ => self.transmit(queue, cx),
        }
    }

    fn ask_ahead<D: Dma>(&self, dma: &mut D, chain: &Chain) -> Access<()> {
        dma.gather(wanted(chain))
    }

    /// Where there was no buffer, the owner may have asked for our descriptors already, when they
    /// were left out: the poll that follows puts them back.
    fn has_work<D: Dma>(
        &mut self,
        queue: &mut Queue,
        dma: &mut D,
        _now_ns: u64,
    ) -> Result<bool, RingStop> {
        let at = self.arm_at(queue);
        let has_chain = queue.has_available_ahead(dma, at)?;
        Ok(has_chain && (self.rx_empty || self.is_due(queue)))
    }

    /// Buffers for frames are no work by themselves.
    fn is_due(&mut self, queue: &Queue) -> bool {
        queue.index() != RX || self.held.is_some() || self.io.is_readable()
    }

    fn arm_at(&self, queue: &Queue) -> Ahead {
        match self.held {
            Some(_) if queue.index() == RX => self.wanting,
            _ => Ahead::default(),
        }
    }

    fn wake_fds(&self, is_open: impl Fn(u16) -> bool, fds: &mut Vec<RawFd>) {
        // Otherwise frames have nowhere to go at the moment.
        if self.held.is_none() && !self.rx_empty && is_open(RX) {
            self.io.wake_fds(fds);
        }
    }
}

#[cfg(test)]
mod tests;
