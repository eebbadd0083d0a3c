//! virtio-net (virtio 1.2 §5.1), as a polled device over a [`NetPort`].
//!
//! *Advertised*: MAC, STATUS, MTU, MRG_RXBUF, MQ (where the port has several pairs), the control
//! queue with CTRL_RX, CTRL_RX_EXTRA, CTRL_VLAN, CTRL_MAC_ADDR, GUEST_ANNOUNCE and
//! CTRL_GUEST_OFFLOADS, the offloads of the port (CSUM, TSO4, TSO6, ECN, USO, in either direction),
//! INDIRECT_DESC, EVENT_IDX, VERSION_1, ACCESS_PLATFORM; RING_PACKED and IN_ORDER if asked for.
//! *Not implemented*: RSS, hash reports, notification coalescing, SPEED_DUPLEX, UFO, guest header
//! lengths.
//!
//! Queues: receive 2n and transmit 2n + 1 of pair n; the control queue is behind all pairs of a
//! driver that has accepted MQ, and behind the first one otherwise (§5.1.2).
//!
//! Frames move in bursts ([`BURST`]), and are copied once, between the driver's buffers and the
//! port, inline: only a port that [keeps](PortCapabilities::keeps_frames) frames has any in flight.
//! A visit sends and receives while it lasts, and publishes each ring at its end. `port` has the
//! interface, `transmit` and `receive` the two directions, `control` the commands, `filter` what
//! they set.
//!
//! Repeating after a wait: a wait before a chain is consumed repeats the walk, one behind it the
//! staging: nothing that the network has seen. A frame that finds too few receive buffers stays the
//! port's; one that cannot fit at all is dropped.
//!
//! The driver is not trusted: a header is checked against the negotiated features and against the
//! frame's length ([`NetHeader::check`]), a frame's length against the MTU, or 64 KiB where it is
//! to be segmented; commands are bounded (`control`). A malformed frame is dropped and counts as an
//! error.

mod announce;
mod control;
mod filter;
mod pieces;
mod port;
mod reach;
mod receive;
mod remote_control;
mod responder;
mod transmit;

use std::collections::VecDeque;
use std::os::fd::RawFd;

use guest_mem::{Access, Dma, Intent, KeepAlive, Wanted};
use serde::{Deserialize, Serialize};

pub use control::class as control_class;
pub use filter::{Filter, MAC_ENTRIES, Mac, MacList};
pub use net_offload::{GsoType, HEADER_LEN, HeaderError, NetHeader, Offloads};
pub use port::{
    BURST, Collected, FrameData, FrameReceiver, MAX_FRAME, NetPort, PLAIN_FRAME, PortCapabilities,
    RxFrame, TxFrame, Waits,
};
pub(crate) use remote_control::{Control, ControlClass};
pub use responder::{MAX_REPLIES, Responder};

use crate::body::{Context, Device, DeviceClass, Environment, ServedQueue, Step};
use crate::device::{Activity, CancelReason, NetworkRequest, read_space};
use crate::poll_budget::cost;
use crate::queue_config::{feature, is_queue_size};
use crate::ring::{Chain, Lookahead, RingStop, Single};
use crate::saved::SavedState;
use crate::throttle::{RateLimits, Throttle};
use transmit::Kept;

/// Frames of a burst beside others: about a microsecond.
const SHORT_BURST: usize = 8;
/// Smallest frame worth sending: its Ethernet header.
const MIN_FRAME: u32 = net_offload::MIN_FRAME as u32;
/// Receive queue of the first pair.
pub const RX: u16 = 0;
/// Transmit queue of the first pair.
pub const TX: u16 = 1;
/// Most queue pairs.
pub const MAX_PAIRS: u16 = 64;
/// VIRTIO_NET_S_LINK_UP.
const LINK_UP: u16 = 1;
/// VIRTIO_NET_S_ANNOUNCE.
const ANNOUNCE: u16 = 2;

/// Feature bits (§5.1.3).
pub mod net_feature {
    pub use net_offload::feature::*;

    /// VIRTIO_NET_F_CTRL_GUEST_OFFLOADS (2): the driver may change the offloads that it takes on at
    /// any time.
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    /// VIRTIO_NET_F_MTU (3): the device says what the network's MTU is.
    pub const MTU: u64 = 1 << 3;
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
    /// VIRTIO_NET_F_MAC (5): the device says its address.
    pub const MAC: u64 = 1 << 5;
    /// VIRTIO_NET_F_MRG_RXBUF (15): a frame may take several receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// VIRTIO_NET_F_STATUS (16): the device says whether the link is up.
    pub const STATUS: u64 = 1 << 16;
}

/// Reason why a network device cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetError {
    /// A group address, or none.
    #[error("{0:02x?} is no address of a single interface")]
    Mac([u8; 6]),
    /// Queue size.
    #[error("a queue has 2 to 1024 entries, a power of two, not {0}")]
    QueueSize(u16),
    /// Number of queue pairs.
    #[error("a network device has 1 to {MAX_PAIRS} queue pairs, not {0}")]
    Pairs(u16),
}

/// A virtio network device.
pub type Net = Device<NetClass>;

/// One queue, with its own state.
type Queue = ServedQueue<NetQueue>;

/// Role of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Receive(u16),
    Transmit(u16),
    Control,
}

/// State of one queue.
pub struct NetQueue {
    role: Role,
    /// Frames that the port keeps, oldest first.
    kept: VecDeque<Kept>,
}

/// State of one queue pair between visits.
#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    /// Position up to which buffers were read that were too few for the port's next frame; the
    /// default if there was no such frame at the last check.
    wanting: Lookahead,
    /// The driver had no receive buffer when last looked.
    is_empty: bool,
    /// The port took nothing when last asked.
    is_blocked: bool,
    /// Chains are taken from its receive queue.
    receives: bool,
    /// Chains are taken from its transmit queue.
    sends: bool,
}

/// Class of network devices: the part of the device that is particular to them.
pub struct NetClass {
    core: NetCore,
    port: Box<dyn NetPort>,
}

/// All of the class but the port, which is given a part of it for each call.
struct NetCore {
    offered: u64,
    queue_sizes: Vec<u16>,
    /// Of the configuration.
    own_mac: Mac,
    mtu: u16,
    throttle: Throttle,
    keeps_frames: bool,
    /// Frames of so many bytes it does not keep.
    copies_up_to: u32,
    /// Set by the owner.
    is_link_up: bool,
    /// Link state as the driver reads it.
    shown_link: bool,
    generation: u8,
    /// The driver is asked to announce itself, and has not acknowledged that.
    must_announce: bool,

    /// Accepted; 0 while there is no driver.
    accepted: u64,
    keep: Option<KeepAlive>,
    /// Work on frames that the driver leaves to the port.
    sender: Offloads,
    /// Work on frames that the driver does for itself.
    receiver: Offloads,
    /// A frame may take several receive buffers.
    is_mergeable: bool,
    /// Longest frame that is sent as it is, longest of all, and longest that is received.
    plain_frame: u32,
    max_frame: u32,
    max_received: u32,
    mac: Mac,
    filter: Filter,
    pairs: Vec<Pair>,
    /// Number of pairs that the driver has chosen through the control queue.
    chosen_pairs: u16,
    has_control: bool,
    /// Number of pairs that was passed to the port.
    told_pairs: u16,
    /// Number of leases that the next frame lacked when last looked.
    wants_leases: usize,
    /// Reused: chains of the frame under way.
    chains: Vec<Chain>,
    /// Reused: chains of one descriptor of the burst under way.
    singles: [Single; BURST],
}

/// Part of the saved state that only network devices have. Frames that the port has not delivered
/// stay its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedNet {
    /// The device's address, as the driver has set it.
    pub mac: Mac,
    /// Filter of the frames that the driver wants to receive.
    pub filter: Filter,
    /// Number of queue pairs in use.
    pub pairs: u16,
    /// Work that the driver does for itself, as GUEST_OFFLOADS has it.
    pub guest_offloads: u64,
    /// The driver was asked to announce itself, and has not acknowledged that.
    pub must_announce: bool,
    /// The owner has the link up.
    pub is_link_up: bool,
}

impl SavedState for SavedNet {
    const TYPE: u16 = NetClass::TYPE;
    const VERSION: u32 = 2;
}

/// Whether `mac` is the address of a single interface.
fn is_station(mac: &Mac) -> bool {
    mac[0] & 1 == 0 && *mac != [0; 6]
}

impl Net {
    /// A device with this address over `port`; queues of at most `queue_size` entries, one pair.
    pub fn new(mac: Mac, queue_size: u16, port: Box<dyn NetPort>) -> Result<Self, NetError> {
        if !is_station(&mac) {
            return Err(NetError::Mac(mac));
        }
        if !is_queue_size(queue_size, 2) {
            return Err(NetError::QueueSize(queue_size));
        }
        let can = port.capabilities();
        let mut offered = feature::COMMON
            | net_feature::MAC
            | net_feature::MRG_RXBUF
            | net_feature::STATUS
            | net_feature::MTU
            | net_feature::CTRL_VQ
            | net_feature::CTRL_RX
            | net_feature::CTRL_RX_EXTRA
            | net_feature::CTRL_VLAN
            | net_feature::CTRL_MAC_ADDR
            | net_feature::GUEST_ANNOUNCE
            | can.send.consistent().device_features();
        let receive = can.receive.consistent().guest_features();
        if receive != 0 {
            offered |= receive | net_feature::CTRL_GUEST_OFFLOADS;
        }
        let core = NetCore {
            offered,
            queue_sizes: vec![queue_size; 3],
            own_mac: mac,
            mtu: can.mtu,
            throttle: Throttle::default(),
            keeps_frames: can.keeps_frames,
            copies_up_to: can.copies_up_to,
            is_link_up: true,
            shown_link: true,
            generation: 0,
            must_announce: false,
            accepted: 0,
            keep: None,
            sender: Offloads::NONE,
            receiver: Offloads::NONE,
            is_mergeable: false,
            plain_frame: can.max_frame(Offloads::NONE),
            max_frame: 0,
            max_received: 0,
            mac,
            filter: Filter::default(),
            pairs: vec![Pair::default()],
            chosen_pairs: 1,
            has_control: false,
            told_pairs: 1,
            wants_leases: 0,
            chains: vec![Chain::default()],
            singles: [Single::EMPTY; BURST],
        };
        Ok(Self::of(NetClass { core, port }))
    }

    /// Offers packed rings too.
    #[must_use]
    pub fn with_packed(mut self) -> Self {
        self.class_mut().core.offered |= feature::RING_PACKED;
        self
    }

    /// Offers IN_ORDER: frames end in the order in which they were made available.
    #[must_use]
    pub fn with_in_order(mut self) -> Self {
        self.class_mut().core.offered |= feature::IN_ORDER;
        self
    }

    /// Has `pairs` queue pairs.
    ///
    /// # Errors
    /// None, or more than [`MAX_PAIRS`].
    pub fn with_pairs(mut self, pairs: u16) -> Result<Self, NetError> {
        if !(1..=MAX_PAIRS).contains(&pairs) {
            return Err(NetError::Pairs(pairs));
        }
        let core = &mut self.class_mut().core;
        let size = core.queue_sizes[0];
        core.queue_sizes = vec![size; 2 * usize::from(pairs) + 1];
        core.pairs = vec![Pair::default(); pairs.into()];
        core.offered &= !net_feature::MQ;
        if pairs > 1 {
            core.offered |= net_feature::MQ;
        }
        Ok(self)
    }

    /// Limits frames and their bytes, of both directions together.
    #[must_use]
    pub fn with_limits(mut self, limits: RateLimits) -> Self {
        self.class_mut().core.throttle = Throttle::new(limits);
        self
    }

    /// Takes the link up or down; the driver is notified by the next visit. While it is down
    /// nothing is received, and what is sent is dropped.
    pub fn set_link(&mut self, is_up: bool) {
        self.class_mut().core.is_link_up = is_up;
    }

    /// Asks the driver to announce itself to the network (§5.1.6.5.4), if it has accepted that it
    /// may be asked.
    pub fn announce(&mut self) {
        let core = &mut self.class_mut().core;
        if core.accepted & net_feature::GUEST_ANNOUNCE != 0 && !core.must_announce {
            core.must_announce = true;
            core.generation = core.generation.wrapping_add(1);
            self.config_changed();
        }
    }
}

impl NetClass {
    /// Number of queue pairs.
    pub fn pairs(&self) -> u16 {
        self.core.pairs.len() as u16
    }

    /// Lends the port.
    pub fn port_mut(&mut self) -> &mut dyn NetPort {
        &mut *self.port
    }

    /// Whether frames move.
    fn is_up(&self) -> bool {
        self.core.is_link_up && self.port.is_up()
    }

    /// Whether the port has frames for `pair` that would be taken.
    fn is_receiving(&mut self, pair: u16) -> bool {
        self.is_up() && self.port.has_frames(pair)
    }

    /// Sets the port's number of pairs in use: those that the driver has chosen, or, without a
    /// control queue here, those whose receive queues are served.
    fn pairs_changed(&mut self) {
        let core = &mut self.core;
        let served = core.pairs.iter().take_while(|pair| pair.receives).count() as u16;
        let pairs = match core.has_control {
            true => served.min(core.chosen_pairs),
            false => served,
        };
        let pairs = pairs.max(1);
        if core.told_pairs != pairs {
            core.told_pairs = pairs;
            self.port.set_pairs(pairs);
        }
    }
}

impl NetCore {
    /// Bits of GUEST_OFFLOADS that the driver may set.
    fn guest_offload_bits(&self) -> u64 {
        self.accepted & Offloads::ALL.guest_features()
    }

    fn role(&self, index: u16, features: u64) -> Option<Role> {
        let pairs = match features & net_feature::MQ {
            0 => 1,
            _ => self.pairs.len() as u16,
        };
        match index {
            index if index < 2 * pairs && index.is_multiple_of(2) => Some(Role::Receive(index / 2)),
            index if index < 2 * pairs => Some(Role::Transmit(index / 2)),
            index if index == 2 * pairs && features & net_feature::CTRL_VQ != 0 => {
                Some(Role::Control)
            }
            // vhost-user: a front end that serves the control queue itself hands over pairs as it
            // needs them.
            index
                if index < 2 * self.pairs.len() as u16 && features & net_feature::CTRL_VQ == 0 =>
            {
                Some(match index % 2 {
                    0 => Role::Receive(index / 2),
                    _ => Role::Transmit(index / 2),
                })
            }
            _ => None,
        }
    }
}

/// Returns the number of frames of one burst in this visit. A burst that has begun is finished, so
/// it is short on a core where other devices may wait for that.
#[inline]
fn burst<E: Environment>(cx: &Context<'_, E>) -> usize {
    match cx.has_others() {
        true => SHORT_BURST,
        false => BURST,
    }
}

/// One frame of so many bytes was moved or dropped.
#[inline]
fn charge<E: Environment>(cx: &mut Context<'_, E>, bytes: u32) {
    cx.visit.take_request(frame_cost(bytes));
}

/// Nanoseconds that a frame of so many bytes costs.
#[inline(always)]
fn frame_cost(bytes: u32) -> u64 {
    cost::FRAME + u64::from(bytes) / cost::BYTES_PER_NS
}

/// All that a frame in this chain may take of it.
fn wanted(chain: &Chain) -> impl Iterator<Item = Wanted> {
    const MOST: u32 = HEADER_LEN as u32 + MAX_FRAME;
    let read = chain.readable().wanted(0, MOST, Intent::Read);
    read.chain(chain.writable().wanted(0, MOST, Intent::Write))
}

impl DeviceClass for NetClass {
    const TYPE: u16 = 1;
    /// Frames that were sent before the start come first.
    const FIRST: u16 = TX;
    type Queue = NetQueue;
    type Saved = SavedNet;

    fn features(&self) -> u64 {
        self.core.offered
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.core.queue_sizes
    }

    /// §5.1.4: address, status, number of pairs, MTU.
    fn read_config(&self, offset: u64, out: &mut [u8]) {
        let core = &self.core;
        let mut space = [0; 12];
        space[..6].copy_from_slice(&core.mac);
        let link = if core.shown_link { LINK_UP } else { 0 };
        let status = link | if core.must_announce { ANNOUNCE } else { 0 };
        space[6..8].copy_from_slice(&status.to_le_bytes());
        space[8..10].copy_from_slice(&self.pairs().to_le_bytes());
        space[10..].copy_from_slice(&core.mtu.to_le_bytes());
        read_space(&space, offset, out);
    }

    fn config_generation(&self) -> u8 {
        self.core.generation
    }

    fn queue(&self, index: u16, features: u64) -> Option<NetQueue> {
        Some(NetQueue {
            role: self.core.role(index, features)?,
            kept: VecDeque::new(),
        })
    }

    /// A driver fills the receive ring long before there are frames.
    fn lookahead(&self, index: u16) -> usize {
        if index.is_multiple_of(2) { 16 } else { 256 }
    }

    fn begin(&mut self, features: u64, keep: KeepAlive) -> bool {
        let can = self.port.capabilities();
        let core = &mut self.core;
        core.accepted = features;
        core.keep = Some(keep);
        core.is_mergeable = features & net_feature::MRG_RXBUF != 0;
        core.sender = Offloads::of_device_features(features);
        core.receiver = Offloads::of_guest_features(features);
        core.max_frame = can.max_frame(core.sender);
        core.max_received = can.max_frame(core.receiver);
        core.filter = Filter::new(features & net_feature::CTRL_VLAN != 0);
        core.filter.promiscuous = true;
        self.port.start(core.receiver);
        false
    }

    fn reset(&mut self) {
        let core = &mut self.core;
        core.accepted = 0;
        core.keep = None;
        core.sender = Offloads::NONE;
        core.receiver = Offloads::NONE;
        core.is_mergeable = false;
        core.mac = core.own_mac;
        core.filter = Filter::default();
        core.must_announce = false;
        core.chosen_pairs = 1;
        core.has_control = false;
        core.told_pairs = 1;
        core.wants_leases = 0;
        core.pairs.fill(Pair::default());
        self.port.reset();
    }

    fn set_enabled(&mut self, index: u16, is_enabled: bool) {
        match self.core.role(index, self.core.accepted) {
            Some(Role::Receive(pair)) => self.core.pairs[usize::from(pair)].receives = is_enabled,
            Some(Role::Transmit(pair)) => self.core.pairs[usize::from(pair)].sends = is_enabled,
            Some(Role::Control) => self.core.has_control = is_enabled,
            None => {}
        }
        self.pairs_changed();
    }

    fn forget(&mut self, index: u16, queue: NetQueue) {
        match queue.role {
            Role::Receive(pair) => {
                let state = &mut self.core.pairs[usize::from(pair)];
                state.wanting = Lookahead::default();
                state.is_empty = false;
            }
            Role::Transmit(pair) => self.core.pairs[usize::from(pair)].is_blocked = false,
            Role::Control => {}
        }
        self.set_enabled(index, false);
    }

    fn save(&self) -> SavedNet {
        let NetCore {
            offered: _,
            queue_sizes: _,
            own_mac: _,
            mtu: _,
            throttle: _,
            keeps_frames: _,
            copies_up_to: _,
            is_link_up,
            shown_link: _,
            generation: _,
            must_announce,
            accepted: _,
            keep: _,
            sender: _,
            receiver,
            is_mergeable: _,
            plain_frame: _,
            max_frame: _,
            max_received: _,
            mac,
            filter,
            pairs: _,
            chosen_pairs,
            has_control: _,
            told_pairs: _,
            wants_leases: _,
            chains: _,
            singles: _,
        } = &self.core;
        SavedNet {
            mac: *mac,
            filter: filter.clone(),
            pairs: *chosen_pairs,
            guest_offloads: receiver.guest_features(),
            must_announce: *must_announce,
            is_link_up: *is_link_up,
        }
    }

    fn may_take<D: Dma>(&self, queue: &Queue, dma: &D) -> bool {
        let wanted = self.core.wants_leases;
        wanted == 0 || !matches!(queue.own.role, Role::Transmit(_)) || dma.has_lease_room(wanted)
    }

    fn serve<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        match queue.own.role {
            Role::Receive(pair) => self.receive(pair, queue, cx),
            Role::Transmit(pair) => self.transmit(pair, queue, cx),
            Role::Control => self.control(queue, cx),
        }
    }

    fn ask_ahead<D: Dma>(&self, dma: &mut D, chain: &Chain) -> Access<()> {
        dma.gather(wanted(chain))
    }

    /// Ends the frames that the port has kept and is done with, and notifies the driver if the link
    /// has changed.
    fn complete<E: Environment>(
        &mut self,
        queues: &mut [Queue],
        cx: &mut Context<'_, E>,
    ) -> Activity {
        let mut activity = Activity::Idle;
        if self.core.keeps_frames {
            for queue in queues.iter_mut().filter(|queue| !queue.own.kept.is_empty()) {
                if let Role::Transmit(pair) = queue.own.role {
                    let done = self.port.collect(pair);
                    cx.stats.errors += done.dropped as u64;
                    if done.frames != 0 {
                        self.core.end_kept(queue, cx.dma, done.frames);
                        activity = Activity::Busy;
                    }
                }
            }
        }
        let is_up = self.is_up();
        if self.core.shown_link != is_up {
            self.core.shown_link = is_up;
            self.core.generation = self.core.generation.wrapping_add(1);
            cx.config_changed();
        }
        activity
    }

    fn has_completions(&mut self) -> bool {
        let has_kept = |pair| self.port.has_kept(pair);
        let keeps = self.core.keeps_frames && (0..self.pairs()).any(has_kept);
        keeps || self.core.shown_link != self.is_up()
    }

    /// Also true for the first buffer where there was none: the port's descriptors may have been
    /// left out of `wake_fds` for want of a buffer, and the poll that follows adds them again.
    fn has_work<D: Dma>(
        &mut self,
        queue: &mut Queue,
        dma: &mut D,
        now_ns: u64,
    ) -> Result<bool, RingStop> {
        if queue.own.role != Role::Control && !self.core.throttle.is_open(now_ns) {
            return Ok(false);
        }
        let at = self.arm_at(queue);
        let has_chain = queue.has_available_ahead(dma, at)?;
        let was_empty = match queue.own.role {
            Role::Receive(pair) => self.core.pairs[usize::from(pair)].is_empty,
            _ => false,
        };
        Ok(has_chain && (was_empty || self.is_due(queue)))
    }

    /// Buffers for frames are no work by themselves, nor are frames that the port does not take.
    fn is_due(&mut self, queue: &Queue) -> bool {
        match queue.own.role {
            Role::Receive(pair) => self.is_receiving(pair),
            Role::Transmit(pair) => !self.is_up() || self.port.send_room(pair) != 0,
            Role::Control => true,
        }
    }

    /// Frames that the port gets from elsewhere.
    fn has_own_events(&self) -> bool {
        self.port.has_own_events()
    }

    fn arm_at(&self, queue: &Queue) -> Lookahead {
        match queue.own.role {
            Role::Receive(pair) => self.core.pairs[usize::from(pair)].wanting,
            Role::Transmit(_) | Role::Control => Lookahead::default(),
        }
    }

    fn arm(&mut self) {
        self.port.arm();
    }

    fn disarm(&mut self) {
        self.port.disarm();
    }

    fn wake_fds(&self, is_open: impl Fn(u16) -> bool, fds: &mut Vec<RawFd>) {
        for (pair, state) in (0..).zip(&self.core.pairs) {
            let waits = Waits {
                // Otherwise frames have nowhere to go at the moment.
                receive: is_open(2 * pair)
                    && !state.is_empty
                    && state.wanting == Lookahead::default(),
                send: is_open(2 * pair + 1) && state.is_blocked,
            };
            if waits.receive || waits.send {
                self.port.wake_fds(pair, waits, fds);
            }
        }
    }

    fn deadline(&self, now_ns: u64) -> Option<u64> {
        let throttle = &self.core.throttle;
        (!throttle.is_open(now_ns)).then(|| throttle.opens_at_ns())
    }

    fn is_in_flight(&self, queue: &Queue) -> bool {
        !queue.own.kept.is_empty()
    }

    fn in_flight(&self, queues: &[Queue]) -> u32 {
        let kept = queues.iter().map(|queue| queue.own.kept.len());
        kept.sum::<usize>() as u32
    }

    fn cancel(&mut self, _reason: CancelReason) -> u32 {
        if self.core.keeps_frames {
            for pair in 0..self.pairs() {
                self.port.cancel(pair);
            }
        }
        0
    }

    fn network_request(&mut self, request: NetworkRequest) -> bool {
        match request {
            NetworkRequest::Mtu(mtu) => (68..=self.core.mtu.into()).contains(&mtu),
            NetworkRequest::Announce(mac) => {
                is_station(&mac) && announce::send(&mut *self.port, &mac)
            }
        }
    }

    fn set_memory(&mut self, keep: KeepAlive) {
        self.core.keep = Some(keep);
    }

    fn rebind(&mut self) {
        self.port.rebind();
    }
}

#[cfg(test)]
mod tests;
