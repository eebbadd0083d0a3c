//! Receive filter of a driver (virtio 1.2 §5.1.6.5.1 to §5.1.6.5.3): modes, MAC table, VLANs.
//!
//! Bounds: [`MAC_ENTRIES`] addresses of each kind, behind which all of that kind pass, as in other
//! implementations; a bit for each VLAN.

use serde::{Deserialize, Serialize};

/// Addresses of one kind that are compared; a longer table lets all of its kind pass.
pub const MAC_ENTRIES: usize = 64;

/// 802.1Q tag in the place of the type.
const VLAN_TAG: [u8; 2] = [0x81, 0x00];
const VLANS: usize = 4096;

/// A station or group address.
pub type Mac = [u8; 6];

/// One half of the MAC table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MacList {
    /// At most [`MAC_ENTRIES`].
    pub entries: Vec<Mac>,
    /// The driver named more: all pass.
    pub is_overflowed: bool,
}

impl MacList {
    fn passes(&self, mac: &Mac) -> bool {
        self.is_overflowed || self.entries.contains(mac)
    }
}

/// Which frames the driver wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    /// All addresses pass.
    pub promiscuous: bool,
    /// All groups pass.
    pub all_multicast: bool,
    /// All stations pass.
    pub all_unicast: bool,
    /// No group passes, but for broadcast.
    pub no_multicast: bool,
    /// No station passes.
    pub no_unicast: bool,
    /// Broadcast does not pass.
    pub no_broadcast: bool,
    /// Stations besides the device's own address.
    pub unicast: MacList,
    /// Groups.
    pub multicast: MacList,
    /// VLANs that pass, a bit each; absent where the driver has accepted no filter: all.
    pub vlans: Option<Vec<u64>>,
}

impl Default for Filter {
    fn default() -> Self {
        Self::new(false)
    }
}

impl Filter {
    /// At the start of a driver: promiscuous, and, where VLANs are filtered, without any.
    pub fn new(filters_vlans: bool) -> Self {
        Self {
            promiscuous: true,
            all_multicast: false,
            all_unicast: false,
            no_multicast: false,
            no_unicast: false,
            no_broadcast: false,
            unicast: MacList::default(),
            multicast: MacList::default(),
            vlans: filters_vlans.then(|| vec![0; VLANS / 64]),
        }
    }

    /// Whether every frame passes, so that none need be looked at.
    #[inline]
    pub fn passes_all(&self) -> bool {
        self.promiscuous && self.vlans.is_none()
    }

    /// Lets VLAN `id` pass or not; false if there is no such VLAN.
    pub fn set_vlan(&mut self, id: u16, passes: bool) -> bool {
        let Some(vlans) = &mut self.vlans else {
            return false;
        };
        let Some(word) = vlans.get_mut(usize::from(id) / 64) else {
            return false;
        };
        let bit = 1 << (id % 64);
        match passes {
            true => *word |= bit,
            false => *word &= !bit,
        }
        true
    }

    /// Whether a frame that begins like `head`, of at least 14 bytes, passes to the station `own`.
    pub fn passes(&self, own: &Mac, head: &[u8]) -> bool {
        let Some((to, rest)) = head.split_first_chunk::<6>() else {
            return false;
        };
        if let (Some(vlans), Some(tag)) = (&self.vlans, rest.get(6..10))
            && tag[..2] == VLAN_TAG
        {
            let id = usize::from(u16::from_be_bytes([tag[2], tag[3]]) & 0xfff);
            if vlans
                .get(id / 64)
                .is_none_or(|word| word >> (id % 64) & 1 == 0)
            {
                return false;
            }
        }
        if self.promiscuous {
            return true;
        }
        if *to == [0xff; 6] {
            return !self.no_broadcast;
        }
        if to[0] & 1 != 0 {
            return !self.no_multicast && (self.all_multicast || self.multicast.passes(to));
        }
        !self.no_unicast && (self.all_unicast || to == own || self.unicast.passes(to))
    }
}
