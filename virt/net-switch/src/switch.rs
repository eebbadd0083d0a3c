//! The decision about one frame.

use std::collections::HashMap;

use crate::limit::Bucket;
use crate::table::Table;
use crate::{MAX_PORTS, Mac, PortConfig, PortId, PortSet, SwitchConfig, Vid, VlanMode};

/// Most bytes of a frame that are read: two addresses, a tag, a type.
pub const HEAD_LEN: usize = 18;
const ADDRESSES: usize = 12;
const TAGGED: [u8; 2] = [0x81, 0x00];
/// Stations that one frame has forgotten at most because they are old.
const EXPIRED_PER_FRAME: usize = 2;

/// Reason why a frame goes nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// Shorter than an Ethernet header, or than the tag it begins.
    Short,
    /// Its source is no address of one interface, or its destination that of a link's other end.
    Address,
    /// Of a VLAN that the port it came from is not in.
    Vlan,
    /// Its source is not one that its port is bound to, or one that another port is bound to.
    Spoofed,
    /// More to groups than the port may flood.
    GroupLimit,
    /// More to unknown addresses than the port may flood.
    UnknownLimit,
    /// No port may have it: its destination is where it came from, is isolated from it, or the VLAN
    /// has no other port.
    NoPort,
}

/// Number of [`DropReason`]s.
const REASONS: usize = 7;

/// Reason why a port is not added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchError {
    /// [`MAX_PORTS`] are there.
    Full,
    /// Another port is bound to this address, or it is not one of a single interface.
    Bound(Mac),
}

impl std::fmt::Display for SwitchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Full => write!(f, "a switch has {MAX_PORTS} ports at most"),
            Self::Bound(mac) => write!(
                f,
                "{:02x?} is no address of a single interface, or another port's",
                mac.0
            ),
        }
    }
}

impl std::error::Error for SwitchError {}

/// Frames of one port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Taken from it and sent on.
    pub forwarded: u64,
    /// Forwarded frames that were flooded.
    pub flooded: u64,
    dropped: [u64; REASONS],
}

impl PortCounters {
    /// Dropped for this reason.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.dropped[reason as usize]
    }
}

/// Change of a frame's tag for a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retag {
    /// The four bytes behind the addresses are taken out.
    pub removes: bool,
    /// These four bytes are put in behind the addresses.
    pub inserts: Option<[u8; 4]>,
}

/// Forwarding decision about a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// Ports that get it.
    pub ports: PortSet,
    /// Its VLAN.
    pub vid: Vid,
    /// It has a tag, of this content.
    tci: Option<u16>,
    /// The port that gets it, if that is one.
    only: Option<PortId>,
    /// Its address is a group's, or not known: it counts against a limit.
    is_flooded: bool,
}

impl Forward {
    /// The port that gets the frame, if it is one.
    #[inline]
    pub fn only(&self) -> Option<PortId> {
        self.only
    }
}

/// Decisions about frames between two stations that a port remembers.
const RECENT: usize = 8;

/// A decision that holds for all frames with the same head as long as the table's generation is the
/// same.
#[derive(Clone, Copy, Debug)]
struct Recent {
    /// Addresses, type, and tag if that is one.
    key: u128,
    generation: u64,
    /// Nodes of source and destination; a bound address has none.
    nodes: [Option<u32>; 2],
    forward: Forward,
}

#[derive(Debug)]
struct Port {
    config: PortConfig,
    group: Bucket,
    unknown: Bucket,
    counters: PortCounters,
    recent: [Option<Recent>; RECENT],
}

/// A switch.
#[derive(Debug)]
pub struct Switch {
    ports: Vec<Option<Port>>,
    /// Ports that there are.
    present: PortSet,
    isolated: PortSet,
    bound: HashMap<Mac, PortId>,
    table: Table,
}

impl Switch {
    /// A switch without ports.
    pub fn new(config: SwitchConfig) -> Self {
        Self {
            ports: Vec::new(),
            present: PortSet::default(),
            isolated: PortSet::default(),
            bound: HashMap::new(),
            table: Table::new(config),
        }
    }

    /// Adds a port.
    ///
    /// # Errors
    /// There is no room, or another port is bound to the same address.
    pub fn add(&mut self, config: PortConfig, now_ns: u64) -> Result<PortId, SwitchError> {
        let is_taken = |mac: &Mac| !mac.is_station() || self.bound.contains_key(mac);
        if let Some(mac) = config.bound.iter().find(|mac| is_taken(mac)) {
            return Err(SwitchError::Bound(*mac));
        }
        let index = match self.ports.iter().position(Option::is_none) {
            Some(index) => index,
            None if self.ports.len() == MAX_PORTS => return Err(SwitchError::Full),
            None => {
                self.ports.push(None);
                self.ports.len() - 1
            }
        };
        let id = PortId(index as u8);
        for mac in &config.bound {
            // It may have been seen elsewhere while it was no port's.
            self.table.forget_mac(*mac);
            self.bound.insert(*mac, id);
        }
        self.present.insert(id);
        if config.is_isolated {
            self.isolated.insert(id);
        }
        self.ports[index] = Some(Port {
            group: Bucket::new(config.flood.group, now_ns),
            unknown: Bucket::new(config.flood.unknown, now_ns),
            config,
            counters: PortCounters::default(),
            recent: [None; RECENT],
        });
        self.table.change();
        Ok(id)
    }

    /// Removes a port, and all that was learned at it; a no-op if there is none.
    pub fn remove(&mut self, port: PortId) {
        let Some(Some(former)) = self.ports.get_mut(port.index()).map(Option::take) else {
            return;
        };
        for mac in &former.config.bound {
            self.bound.remove(mac);
        }
        self.present.remove(port);
        self.isolated.remove(port);
        self.table.change();
        self.table.forget_port(port);
    }

    /// Forgets the addresses learned at a port, whose link went down.
    pub fn link_down(&mut self, port: PortId) {
        self.table.forget_port(port);
    }

    /// Returns the counters of frames from a port; zero if there is no such port.
    pub fn counters(&self, port: PortId) -> PortCounters {
        let port = self.ports.get(port.index()).and_then(Option::as_ref);
        port.map_or_else(PortCounters::default, |port| port.counters)
    }

    /// Addresses learned, at one port and in all.
    pub fn learned(&self, port: PortId) -> (usize, usize) {
        (self.table.len_of(port), self.table.len())
    }

    /// Decides about a frame from `from`, of which `head` is the first [`HEAD_LEN`] bytes or all.
    ///
    /// # Errors
    /// It is dropped.
    pub fn forward(
        &mut self,
        from: PortId,
        head: &[u8],
        now_ns: u64,
    ) -> Result<Forward, DropReason> {
        let key = key(head);
        if let Some(key) = key
            && let Some(forward) = self.recall(from, key, now_ns)
        {
            return Ok(forward);
        }
        let decided = self.decide(from, head, now_ns);
        if let Some(key) = key
            && let Ok(forward) = decided
            && !forward.is_flooded
        {
            self.remember(from, key, head, forward);
        }
        if let Some(Some(port)) = self.ports.get_mut(from.index()) {
            match decided {
                Ok(forward) => {
                    port.counters.forwarded += 1;
                    port.counters.flooded += u64::from(forward.is_flooded);
                }
                Err(reason) => port.counters.dropped[reason as usize] += 1,
            }
        }
        decided
    }

    /// Returns whether a frame with the same head as the one before it, from the same port at the
    /// same time, is forwarded likewise; it is counted then. Otherwise it needs a decision as any
    /// other.
    #[inline]
    pub fn forward_again(&mut self, from: PortId, last: &Forward) -> bool {
        let port = self.ports.get_mut(from.index()).and_then(Option::as_mut);
        let port = port.filter(|_| !last.is_flooded);
        if let Some(port) = port {
            port.counters.forwarded += 1;
            return true;
        }
        false
    }

    /// Returns the decision about the last frame with this head, if it would be decided again, and
    /// marks the source as seen now.
    #[inline]
    fn recall(&mut self, from: PortId, key: u128, now_ns: u64) -> Option<Forward> {
        let port = self.ports.get_mut(from.index())?.as_mut()?;
        let recent = port.recent[place(key)].filter(|recent| recent.key == key)?;
        let [source, to] = recent.nodes;
        if recent.generation != self.table.generation()
            || self.table.has_expired(from, now_ns)
            || to.is_some_and(|to| !self.table.is_fresh(to, now_ns))
        {
            return None;
        }
        if let Some(source) = source {
            self.table.touch(source, now_ns);
        }
        port.counters.forwarded += 1;
        Some(recent.forward)
    }

    /// Keeps a decision about a frame whose destination is known.
    fn remember(&mut self, from: PortId, key: u128, head: &[u8], forward: Forward) {
        let Some(Head { to, source, .. }) = Head::parse(head) else {
            return;
        };
        let node = |mac: Mac| match self.bound.contains_key(&mac) {
            true => Some(None),
            false => self.table.node((forward.vid, mac)).map(Some),
        };
        // A source for which its port has no room, or that another port still has, is learned again
        // each time.
        let at_own_port = |at: &Option<u32>| at.is_none_or(|at| self.table.port(at) == from);
        let Some(source) = node(source).filter(at_own_port) else {
            return;
        };
        let (Some(to), generation) = (node(to), self.table.generation()) else {
            return;
        };
        if let Some(Some(port)) = self.ports.get_mut(from.index()) {
            port.recent[place(key)] = Some(Recent {
                key,
                generation,
                nodes: [source, to],
                forward,
            });
        }
    }

    fn decide(&mut self, from: PortId, head: &[u8], now_ns: u64) -> Result<Forward, DropReason> {
        let port = self.ports.get_mut(from.index()).and_then(Option::as_mut);
        let port = port.ok_or(DropReason::NoPort)?;
        let parsed = Head::parse(head).ok_or(DropReason::Short)?;
        let Head { to, source, tci } = parsed;
        if !source.is_station() || to.is_link_local() {
            return Err(DropReason::Address);
        }
        let vid = vlan_of(&port.config.vlan, tci).ok_or(DropReason::Vlan)?;
        let is_own = match self.bound.get(&source) {
            Some(owner) => *owner == from,
            None => port.config.bound.is_empty(),
        };
        if !is_own {
            return Err(DropReason::Spoofed);
        }
        if port.config.bound.is_empty() {
            self.table.expire(from, now_ns, EXPIRED_PER_FRAME);
            self.table.learn((vid, source), from, now_ns);
        }
        let known = match self.bound.get(&to) {
            Some(owner) => Some(*owner),
            None if to.is_group() => None,
            None => self.table.find((vid, to), now_ns),
        };
        let wanted = match known {
            Some(known) => PortSet::of(known),
            None => {
                let (bucket, reason) = if to.is_group() {
                    (&mut port.group, DropReason::GroupLimit)
                } else {
                    (&mut port.unknown, DropReason::UnknownLimit)
                };
                if !bucket.take(now_ns) {
                    return Err(reason);
                }
                self.present
            }
        };
        let ports = self.reachable(wanted, from, vid);
        if ports.is_empty() {
            return Err(DropReason::NoPort);
        }
        let only = ports.iter().next().filter(|_| ports.len() == 1);
        Ok(Forward {
            ports,
            vid,
            tci,
            only,
            is_flooded: known.is_none(),
        })
    }

    /// Those of `wanted` that a frame of this VLAN from `from` may go to.
    fn reachable(&self, wanted: PortSet, from: PortId, vid: Vid) -> PortSet {
        let is_isolated = self.isolated.contains(from);
        let mut ports = PortSet::default();
        for id in wanted.iter() {
            let port = self.ports.get(id.index()).and_then(Option::as_ref);
            let is_member = port.is_some_and(|port| port.config.vlan.is_member(vid));
            if id != from && is_member && !(is_isolated && self.isolated.contains(id)) {
                ports.insert(id);
            }
        }
        ports
    }

    /// Returns the change of the frame's tag for one of its ports.
    pub fn retag(&self, forward: &Forward, to: PortId) -> Retag {
        let port = self.ports.get(to.index()).and_then(Option::as_ref);
        let is_tagged = port.is_some_and(|port| port.config.vlan.is_tagged(forward.vid));
        // The priority is kept.
        let wanted = is_tagged.then(|| forward.tci.unwrap_or(0) & 0xf000 | forward.vid.get());
        if wanted == forward.tci {
            return Retag::default();
        }
        Retag {
            removes: forward.tci.is_some(),
            inserts: wanted.map(|tci| {
                let [high, low] = tci.to_be_bytes();
                [TAGGED[0], TAGGED[1], high, low]
            }),
        }
    }
}

/// Returns the part of a head on which the decision depends, if the head is complete.
fn key(head: &[u8]) -> Option<u128> {
    let whole: &[u8; HEAD_LEN] = head.try_into().ok()?;
    let first: [u8; 16] = whole[..16].try_into().ok()?;
    Some(u128::from_le_bytes(first))
}

/// Returns the index of a key in a port's recent decisions.
fn place(key: u128) -> usize {
    // The last byte of either address.
    ((key >> 40) as usize ^ (key >> 88) as usize) % RECENT
}

/// Fields of a frame that the switch reads.
struct Head {
    to: Mac,
    source: Mac,
    tci: Option<u16>,
}

impl Head {
    fn parse(head: &[u8]) -> Option<Self> {
        let (addresses, rest) = head.split_at_checked(ADDRESSES)?;
        let (to, source) = addresses.split_at(6);
        let kind = rest.get(..2)?;
        let tci = if kind == TAGGED {
            // And the type behind it.
            let tag = rest.get(2..6)?;
            Some(u16::from_be_bytes([tag[0], tag[1]]))
        } else {
            None
        };
        let mac = |bytes: &[u8]| Mac(std::array::from_fn(|i| bytes[i]));
        Some(Self {
            to: mac(to),
            source: mac(source),
            tci,
        })
    }
}

/// VLAN of a frame that comes from such a port; `None` if the port takes none of its kind.
fn vlan_of(mode: &VlanMode, tci: Option<u16>) -> Option<Vid> {
    let tag = tci.map(|tci| tci & 0xfff).filter(|vid| *vid != 0);
    match (mode, tag) {
        (VlanMode::Access(vid), None) => Some(*vid),
        // Not even its own: a sender of tags at an access port tries to reach another VLAN.
        (VlanMode::Access(_), Some(_)) => None,
        (VlanMode::Trunk { native, .. }, None) => *native,
        (VlanMode::Trunk { tagged, .. }, Some(vid)) => {
            Vid::new(vid).filter(|vid| tagged.contains(*vid))
        }
    }
}
