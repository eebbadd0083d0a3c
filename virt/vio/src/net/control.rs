//! Control queue (virtio 1.2 §5.1.6.5): commands of a driver, one chain each.
//!
//! A chain holds class, command and data, then room for one byte of answer; one that lacks either
//! end breaks the protocol. Everything else that is wrong, data that is too short or too long
//! included, is answered with ERR and changes nothing.
//!
//! Bounds: a command reads at most [`MAX_DATA`] bytes, whatever its tables' lengths say, and costs
//! its device's budget [`cost::CONTROL`]; a visit takes as many as that allows.

use guest_mem::Stop;
use net_offload::Offloads;

use super::filter::{Filter, MAC_ENTRIES, Mac, MacList};
use super::{NetClass, Queue, is_station, net_feature};
use crate::body::{Context, Environment, ServedQueue, Step};
use crate::device::Activity;
use crate::poll_budget::cost;
use crate::ring::{Buffers, Chain, Violation};
use guest_mem::{Access, Dma};

const OK: u8 = 0;
const ERR: u8 = 1;

/// Bytes of data that are read of any command but a MAC table, which is read piece by piece.
pub const MAX_DATA: usize = 8;

/// Classes, and their commands.
pub mod class {
    /// VIRTIO_NET_CTRL_RX: receive modes, 0 to 5.
    pub const RX: u8 = 0;
    /// VIRTIO_NET_CTRL_MAC: 0 a table, 1 the device's own address.
    pub const MAC: u8 = 1;
    /// VIRTIO_NET_CTRL_VLAN: 0 add, 1 delete.
    pub const VLAN: u8 = 2;
    /// VIRTIO_NET_CTRL_ANNOUNCE: 0 acknowledge.
    pub const ANNOUNCE: u8 = 3;
    /// VIRTIO_NET_CTRL_MQ: 0 number of pairs.
    pub const MQ: u8 = 4;
    /// VIRTIO_NET_CTRL_GUEST_OFFLOADS: command 0 sets the offloads that the driver takes on.
    pub const GUEST_OFFLOADS: u8 = 5;
}

/// A command, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Mode(u8, bool),
    MacTable {
        unicast: MacList,
        multicast: MacList,
    },
    MacAddress(Mac),
    Vlan(u16, bool),
    AnnounceAck,
    Pairs(u16),
    Offloads(u64),
}

impl Command {
    /// Reads the command in `data`; `None` for one that is malformed or that `features` do not
    /// have.
    pub(super) fn read<D: Dma>(
        dma: &mut D,
        data: Buffers<'_>,
        features: u64,
    ) -> Access<Option<Self>> {
        let mut head = [0; 2];
        data.read(dma, 0, &mut head)?;
        let [class, command] = head;
        let has = |feature| features & feature != 0;
        if class == class::MAC && command == 0 {
            return match has(net_feature::CTRL_RX) {
                true => Self::read_table(dma, data),
                false => Ok(None),
            };
        }
        let len = data.len() as usize - 2;
        let mut bytes = [0; MAX_DATA];
        let Some(bytes) = bytes.get_mut(..len) else {
            return Ok(None);
        };
        data.read(dma, 2, bytes)?;
        Ok(match (class, command, &*bytes) {
            (class::RX, 0 | 1, &[on]) if has(net_feature::CTRL_RX) => {
                Some(Self::Mode(command, on != 0))
            }
            (class::RX, 2..=5, &[on]) if has(net_feature::CTRL_RX_EXTRA) => {
                Some(Self::Mode(command, on != 0))
            }
            (class::MAC, 1, &[a, b, c, d, e, f]) if has(net_feature::CTRL_MAC_ADDR) => {
                let mac = [a, b, c, d, e, f];
                is_station(&mac).then_some(Self::MacAddress(mac))
            }
            (class::VLAN, 0 | 1, &[low, high]) if has(net_feature::CTRL_VLAN) => {
                Some(Self::Vlan(u16::from_le_bytes([low, high]), command == 0))
            }
            (class::ANNOUNCE, 0, &[]) if has(net_feature::GUEST_ANNOUNCE) => {
                Some(Self::AnnounceAck)
            }
            (class::MQ, 0, &[low, high]) if has(net_feature::MQ) => {
                Some(Self::Pairs(u16::from_le_bytes([low, high])))
            }
            (class::GUEST_OFFLOADS, 0, bytes) if has(net_feature::CTRL_GUEST_OFFLOADS) => {
                let bytes = <[u8; 8]>::try_from(bytes).ok();
                bytes.map(|bytes| Self::Offloads(u64::from_le_bytes(bytes)))
            }
            _ => None,
        })
    }

    /// Two lists, each a count (32 bits) and as many addresses; nothing behind them.
    fn read_table<D: Dma>(dma: &mut D, data: Buffers<'_>) -> Access<Option<Self>> {
        let mut at = 2;
        let Some(unicast) = read_list(dma, data, &mut at, false)? else {
            return Ok(None);
        };
        let Some(multicast) = read_list(dma, data, &mut at, true)? else {
            return Ok(None);
        };
        let is_whole = at == u64::from(data.len());
        Ok(is_whole.then_some(Self::MacTable { unicast, multicast }))
    }
}

fn read_list<D: Dma>(
    dma: &mut D,
    data: Buffers<'_>,
    at: &mut u64,
    is_group: bool,
) -> Access<Option<MacList>> {
    let len = u64::from(data.len());
    if *at + 4 > len {
        return Ok(None);
    }
    let mut count = [0; 4];
    // Below `len`, which has 32 bits.
    data.read(dma, *at as u32, &mut count)?;
    let count = u64::from(u32::from_le_bytes(count));
    let start = *at + 4;
    *at = start + 6 * count;
    if *at > len {
        return Ok(None);
    }
    if count > MAC_ENTRIES as u64 {
        return Ok(Some(MacList {
            entries: Vec::new(),
            is_overflowed: true,
        }));
    }
    let mut bytes = [0; 6 * MAC_ENTRIES];
    let bytes = &mut bytes[..6 * count as usize];
    data.read(dma, start as u32, bytes)?;
    let (entries, _) = bytes.as_chunks::<6>();
    let is_right = |mac: &Mac| (mac[0] & 1 != 0) == is_group;
    Ok(Some(MacList {
        // One of the other kind is never looked for in this list.
        entries: entries.iter().copied().filter(is_right).collect(),
        is_overflowed: false,
    }))
}

/// Party that carries out the commands of a control queue.
pub(super) trait Commanded {
    /// Features that the driver has accepted.
    fn accepted(&self) -> u64;

    /// Whether the command makes sense now.
    fn accepts(&self, command: &Command) -> bool;

    /// Carries out a command that makes sense.
    fn obey(&mut self, command: Command);
}

/// Has `device` carry out one command; `chain` is reused.
pub(super) fn serve_command<Q, E: Environment>(
    device: &mut impl Commanded,
    chain: &mut Chain,
    queue: &mut ServedQueue<Q>,
    cx: &mut Context<'_, E>,
) -> Step {
    if !queue.peek(cx.dma, chain)? {
        return Ok(Activity::Idle);
    }
    let (readable, writable) = (chain.readable(), chain.writable());
    if readable.len() < 2 || writable.is_empty() {
        return Err(queue.park(Violation::Truncated));
    }
    let command = match Command::read(cx.dma, readable, device.accepted()) {
        Ok(command) => command,
        // What cannot be read is no command.
        Err(Stop::Fault(_)) => None,
        Err(pending) => return Err(queue.wait_for(cx.dma, pending, super::wanted(chain))),
    };
    // Before the command takes effect: it is carried out again after a wait, and not after a fault.
    let mut answer = match &command {
        Some(command) if device.accepts(command) => OK,
        _ => ERR,
    };
    match chain.writable().write(cx.dma, 0, &[answer]) {
        Ok(()) => {}
        // §5.1.6.5: a driver that cannot be answered is not obeyed.
        Err(Stop::Fault(_)) => answer = ERR,
        Err(pending) => return Err(queue.wait_for(cx.dma, pending, super::wanted(chain))),
    }
    queue.answer(chain, 1)?;
    cx.stats.requests += 1;
    match command {
        Some(command) if answer == OK => device.obey(command),
        _ => cx.stats.errors += 1,
    }
    cx.visit.take_request(cost::CONTROL);
    queue.stage_answers(cx.dma)?;
    Ok(Activity::Busy)
}

impl NetClass {
    /// Carries out one command.
    pub(super) fn control<E: Environment>(
        &mut self,
        queue: &mut Queue,
        cx: &mut Context<'_, E>,
    ) -> Step {
        let mut chain = std::mem::take(&mut self.core.chains[0]);
        let step = serve_command(self, &mut chain, queue, cx);
        self.core.chains[0] = chain;
        step
    }
}

impl Commanded for NetClass {
    fn accepted(&self) -> u64 {
        self.core.accepted
    }

    fn accepts(&self, command: &Command) -> bool {
        match command {
            Command::Vlan(id, _) => *id < 4096,
            Command::AnnounceAck => self.core.must_announce,
            Command::Pairs(pairs) => (1..=self.core.pairs.len()).contains(&usize::from(*pairs)),
            Command::Offloads(bits) => bits & !self.core.guest_offload_bits() == 0,
            Command::Mode(..) | Command::MacTable { .. } | Command::MacAddress(_) => true,
        }
    }

    fn obey(&mut self, command: Command) {
        let core = &mut self.core;
        let filter: &mut Filter = &mut core.filter;
        match command {
            Command::Mode(mode, on) => {
                let flag = match mode {
                    0 => &mut filter.promiscuous,
                    1 => &mut filter.all_multicast,
                    2 => &mut filter.all_unicast,
                    3 => &mut filter.no_multicast,
                    4 => &mut filter.no_unicast,
                    _ => &mut filter.no_broadcast,
                };
                *flag = on;
            }
            Command::MacTable { unicast, multicast } => {
                filter.unicast = unicast;
                filter.multicast = multicast;
            }
            Command::MacAddress(mac) => core.mac = mac,
            Command::Vlan(id, passes) => {
                filter.set_vlan(id, passes);
            }
            Command::AnnounceAck => core.must_announce = false,
            Command::Pairs(pairs) => {
                core.chosen_pairs = pairs;
                self.pairs_changed();
            }
            Command::Offloads(bits) => {
                core.receiver = Offloads::of_guest_features(bits);
                self.port.set_receiver(core.receiver);
            }
        }
    }
}
