//! Configuration of a switch and its ports.

use crate::Rate;

/// Most ports of a switch.
pub const MAX_PORTS: usize = 256;

/// Address of an interface or a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// All interfaces.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// Whether it names more than one interface.
    pub fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether it may be the address of one interface.
    pub fn is_station(self) -> bool {
        !self.is_group() && self.0 != [0; 6]
    }

    /// Whether frames to it are between the ends of one link, and never forwarded (802.1Q table
    /// 8-1).
    pub fn is_link_local(self) -> bool {
        self.0[..5] == [0x01, 0x80, 0xc2, 0x00, 0x00] && self.0[5] < 0x10
    }
}

/// VLAN identifier, 1 to 4,094.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vid(u16);

impl Vid {
    /// The default VLAN.
    pub const DEFAULT: Self = Self(1);

    /// Creates an ID; `None` for 0 and 4,095, which are reserved, and numbers above 12 bits.
    pub fn new(vid: u16) -> Option<Self> {
        (1..=4094).contains(&vid).then_some(Self(vid))
    }

    /// The number.
    pub fn get(self) -> u16 {
        self.0
    }
}

/// Set of VLANs.
#[derive(Clone, PartialEq, Eq)]
pub struct VidSet(Box<[u64; 64]>);

impl VidSet {
    /// None.
    pub fn none() -> Self {
        Self(Box::new([0; 64]))
    }

    /// All of them.
    pub fn all() -> Self {
        Self(Box::new([!0; 64]))
    }

    /// Adds one.
    pub fn insert(&mut self, vid: Vid) {
        self.0[usize::from(vid.0) / 64] |= 1 << (vid.0 % 64);
    }

    /// Whether it is in the set.
    pub fn contains(&self, vid: Vid) -> bool {
        self.0[usize::from(vid.0) / 64] >> (vid.0 % 64) & 1 != 0
    }
}

impl FromIterator<Vid> for VidSet {
    fn from_iter<I: IntoIterator<Item = Vid>>(vids: I) -> Self {
        let mut set = Self::none();
        vids.into_iter().for_each(|vid| set.insert(vid));
        set
    }
}

impl std::fmt::Debug for VidSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let vids = (1..4095).filter_map(Vid::new);
        let set = vids.filter(|vid| self.contains(*vid));
        f.debug_set().entries(set.map(Vid::get)).finish()
    }
}

/// VLANs of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VlanMode {
    /// One VLAN, whose frames have no tag here.
    Access(Vid),
    /// Several, whose frames have tags here, but for those of the native one.
    Trunk {
        /// VLAN of untagged frames; without one they are dropped.
        native: Option<Vid>,
        /// VLANs whose frames are tagged. The native one needs not be among them.
        tagged: VidSet,
    },
}

impl VlanMode {
    /// Whether frames of this VLAN come to the port.
    pub fn is_member(&self, vid: Vid) -> bool {
        match self {
            Self::Access(own) => *own == vid,
            Self::Trunk { native, tagged } => *native == Some(vid) || tagged.contains(vid),
        }
    }

    /// Whether frames of this VLAN have a tag at the port.
    pub fn is_tagged(&self, vid: Vid) -> bool {
        match self {
            Self::Access(_) => false,
            Self::Trunk { native, .. } => *native != Some(vid),
        }
    }
}

/// Most frames from a port that are flooded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloodLimits {
    /// Rate of frames to groups: broadcast and multicast.
    pub group: Rate,
    /// Rate of frames to unknown addresses.
    pub unknown: Rate,
}

impl Default for FloodLimits {
    /// A thousand frames a second of each kind, as many at once.
    fn default() -> Self {
        let rate = Rate::new(1_000, 1_000);
        Self {
            group: rate,
            unknown: rate,
        }
    }
}

/// A port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// Its VLANs.
    pub vlan: VlanMode,
    /// Addresses it sends from, if these are given; no other port may then.
    pub bound: Vec<Mac>,
    /// It reaches only ports that are not isolated.
    pub is_isolated: bool,
    /// Limits of its flooding.
    pub flood: FloodLimits,
}

impl Default for PortConfig {
    fn default() -> Self {
        Self {
            vlan: VlanMode::Access(Vid::DEFAULT),
            bound: Vec::new(),
            is_isolated: false,
            flood: FloodLimits::default(),
        }
    }
}

/// A switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchConfig {
    /// Time after which an address that is not used is forgotten.
    pub ageing_ns: u64,
    /// Time that an address has to be quiet at its port before it is learned at another one: a port
    /// cannot take over an address that is in use.
    pub move_hold_ns: u64,
    /// Addresses learned at one port at most; at 256 ports and about 64 bytes for each, 16 MiB.
    pub addresses_per_port: usize,
}

impl Default for SwitchConfig {
    /// 300 seconds (802.1Q table 8-6), a second, 1,024 addresses a port.
    fn default() -> Self {
        Self {
            ageing_ns: 300_000_000_000,
            move_hold_ns: 1_000_000_000,
            addresses_per_port: 1_024,
        }
    }
}
