//! Table of learned addresses, a bounded number for each port.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::{Mac, PortId, SwitchConfig, Vid};

/// Station: an address in a VLAN.
pub(crate) type Station = (Vid, Mac);

/// Index that means no node.
const NONE: u32 = u32::MAX;

/// Node of a port's list. Unused nodes are in a free list, linked by `newer`.
#[derive(Clone, Copy, Debug)]
struct Node {
    station: Station,
    port: PortId,
    seen_ns: u64,
    older: u32,
    newer: u32,
}

/// Stations of one port in the order in which they were last seen.
#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
    len: usize,
}

impl List {
    const EMPTY: Self = Self {
        oldest: NONE,
        newest: NONE,
        len: 0,
    };
}

/// Table of learned addresses. `by_station` has exactly the nodes that are in lists.
#[derive(Debug)]
pub(crate) struct Table {
    ageing_ns: u64,
    hold_ns: u64,
    per_port: usize,
    by_station: HashMap<Station, u32>,
    nodes: Vec<Node>,
    free: u32,
    lists: Vec<List>,
    /// Changes whenever a station comes, goes or moves.
    generation: u64,
}

impl Table {
    pub fn new(config: SwitchConfig) -> Self {
        Self {
            ageing_ns: config.ageing_ns,
            hold_ns: config.move_hold_ns,
            per_port: config.addresses_per_port,
            by_station: HashMap::new(),
            nodes: Vec::new(),
            free: NONE,
            lists: vec![List::EMPTY; crate::MAX_PORTS],
            generation: 0,
        }
    }

    /// Returns a number that is unchanged as long as every station is at the same port and has the
    /// same node.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Advances the generation, for a change that the table itself does not see.
    pub fn change(&mut self) {
        self.generation += 1;
    }

    /// Returns the node of a station. It is valid for one generation.
    pub fn node(&self, station: Station) -> Option<u32> {
        self.by_station.get(&station).copied()
    }

    /// Returns the port of a node.
    pub fn port(&self, at: u32) -> PortId {
        self.nodes[at as usize].port
    }

    /// Whether the station of a node was seen within the ageing time.
    pub fn is_fresh(&self, at: u32, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.nodes[at as usize].seen_ns) < self.ageing_ns
    }

    /// Records that the station of a node has sent from its port.
    pub fn touch(&mut self, at: u32, now_ns: u64) {
        let node = &mut self.nodes[at as usize];
        let list = &mut self.lists[node.port.index()];
        if list.newest == at {
            node.seen_ns = now_ns;
            return;
        }
        unlink(&mut self.nodes, list, at);
        self.link(at, now_ns);
    }

    /// Returns the port of a station, if the station was seen within the ageing time.
    pub fn find(&self, station: Station, now_ns: u64) -> Option<PortId> {
        let at = self.node(station)?;
        self.is_fresh(at, now_ns).then(|| self.port(at))
    }

    /// Records that a station has sent from a port. A station that is at another port moves once it
    /// has been quiet there for the hold time.
    pub fn learn(&mut self, station: Station, port: PortId, now_ns: u64) {
        if self.per_port == 0 {
            return;
        }
        match self.by_station.entry(station) {
            Entry::Occupied(entry) => {
                let at = *entry.get();
                let Node {
                    port: former,
                    seen_ns,
                    ..
                } = self.nodes[at as usize];
                let quiet_ns = now_ns.saturating_sub(seen_ns);
                if former != port && quiet_ns < self.hold_ns {
                    return;
                }
                unlink(&mut self.nodes, &mut self.lists[former.index()], at);
                if former != port {
                    self.generation += 1;
                    self.nodes[at as usize].port = port;
                    self.make_room(port);
                }
                self.link(at, now_ns);
            }
            Entry::Vacant(entry) => {
                let node = Node {
                    station,
                    port,
                    seen_ns: now_ns,
                    older: NONE,
                    newer: NONE,
                };
                let at = self.free;
                let at = if at == NONE {
                    self.nodes.push(node);
                    // At most 256 ports of addresses: far below 2^32.
                    self.nodes.len() as u32 - 1
                } else {
                    self.free = self.nodes[at as usize].newer;
                    self.nodes[at as usize] = node;
                    at
                };
                entry.insert(at);
                self.generation += 1;
                self.make_room(port);
                self.link(at, now_ns);
            }
        }
    }

    /// Removes the port's oldest station if there is no room for one more.
    fn make_room(&mut self, port: PortId) {
        if self.lists[port.index()].len >= self.per_port {
            self.forget(self.lists[port.index()].oldest);
        }
    }

    /// Makes a node the newest of its port.
    fn link(&mut self, at: u32, now_ns: u64) {
        let node = &mut self.nodes[at as usize];
        let list = &mut self.lists[node.port.index()];
        node.seen_ns = now_ns;
        node.older = list.newest;
        node.newer = NONE;
        let before = list.newest;
        list.newest = at;
        list.len += 1;
        match before {
            NONE => list.oldest = at,
            before => self.nodes[before as usize].newer = at,
        }
    }

    fn forget(&mut self, at: u32) {
        let node = self.nodes[at as usize];
        self.generation += 1;
        unlink(&mut self.nodes, &mut self.lists[node.port.index()], at);
        self.by_station.remove(&node.station);
        self.nodes[at as usize].newer = self.free;
        self.free = at;
    }

    /// Removes the stations learned at a port.
    pub fn forget_port(&mut self, port: PortId) {
        while self.lists[port.index()].oldest != NONE {
            self.forget(self.lists[port.index()].oldest);
        }
    }

    /// Removes an address in all VLANs, at any port.
    pub fn forget_mac(&mut self, mac: Mac) {
        let all = self.by_station.iter();
        let found = all.filter(|(station, _)| station.1 == mac);
        let nodes: Vec<u32> = found.map(|(_, at)| *at).collect();
        nodes.into_iter().for_each(|at| self.forget(at));
    }

    /// Whether a port has stations that are older than the ageing time.
    pub fn has_expired(&self, port: PortId, now_ns: u64) -> bool {
        let oldest = self.lists[port.index()].oldest;
        oldest != NONE && !self.is_fresh(oldest, now_ns)
    }

    /// Removes at most `budget` stations of a port that are older than the ageing time.
    pub fn expire(&mut self, port: PortId, now_ns: u64, budget: usize) {
        for _ in 0..budget {
            let oldest = self.lists[port.index()].oldest;
            if oldest == NONE {
                return;
            }
            if self.is_fresh(oldest, now_ns) {
                return;
            }
            self.forget(oldest);
        }
    }

    /// Returns the number of stations at a port.
    pub fn len_of(&self, port: PortId) -> usize {
        self.lists[port.index()].len
    }

    /// Returns the number of all stations.
    pub fn len(&self) -> usize {
        self.by_station.len()
    }
}

/// Removes a node from its port's list.
fn unlink(nodes: &mut [Node], list: &mut List, at: u32) {
    let Node { older, newer, .. } = nodes[at as usize];
    match older {
        NONE => list.oldest = newer,
        older => nodes[older as usize].newer = newer,
    }
    match newer {
        NONE => list.newest = older,
        newer => nodes[newer as usize].older = older,
    }
    list.len -= 1;
}
