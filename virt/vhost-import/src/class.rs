//! The classes of devices that a back end may serve, and what differs between them.
//!
//! | | block | network |
//! |---|---|---|
//! | configuration space | the back end's (CONFIG) | ours: MAC address, link, MTU |
//! | GET_QUEUE_NUM counts | rings | pairs of rings |
//! | requests of a back end that died | once each, by INFLIGHT_SHMFD; else they are lost | a frame may be sent twice or lost |
//!
//! | control queue | none | ours, if there are several pairs: rings of pairs that the driver does not use are disabled |
//!
//! The second line is what QEMU and DPDK read into the protocol for network devices.

use vhost_user::frontend::{self, CallError, Connection};
use vhost_user::wire::{ProtocolFeatures, Request};
use vio::blk::request::feature as blk;
use vio::feature;
use vio::net::net_feature;

use crate::error::ImportError;

/// Class of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Class {
    /// A block device (virtio 1.2, §5.2).
    Block,
    /// A network device (virtio 1.2, §5.1).
    Net(NetIdentity),
}

/// Properties of a network device that the guest reads and that do not come from the back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetIdentity {
    /// Station address.
    pub mac: [u8; 6],
    /// Largest packet that the network takes, in bytes without the Ethernet header.
    pub mtu: Option<u16>,
}

/// Features of rings, which every back end may offer to a guest.
const RING: u64 =
    feature::VERSION_1 | feature::EVENT_IDX | feature::INDIRECT_DESC | feature::IN_ORDER;

/// Features of a block device that are the back end's business. What would be ours (writable
/// configuration, resizing) is not among them.
const BLOCK: u64 = blk::SIZE_MAX
    | blk::SEG_MAX
    | GEOMETRY
    | blk::RO
    | blk::BLK_SIZE
    | blk::FLUSH
    | TOPOLOGY
    | blk::MQ
    | blk::DISCARD
    | blk::WRITE_ZEROES;
/// VIRTIO_BLK_F_GEOMETRY (4) and VIRTIO_BLK_F_TOPOLOGY (10): fields of the configuration.
const GEOMETRY: u64 = 1 << 4;
const TOPOLOGY: u64 = 1 << 10;

/// Features of a network device that lie in its frames and buffers: checksums (0, 1), segmentation
/// for the guest (7 to 10) and for the host (11 to 14), mergeable buffers (15), segmentation of UDP
/// (54 to 56).
const NET: u64 = 0b11 | 0x1ff << 7 | 0b111 << 54;
/// VIRTIO_NET_F_MTU (3), _MAC (5), _STATUS (16): fields of the configuration, which is ours.
const NET_MTU: u64 = 1 << 3;
const NET_MAC: u64 = 1 << 5;
const NET_STATUS: u64 = 1 << 16;
/// VIRTIO_NET_F_CTRL_VQ (17) and _MQ (22): there are several pairs, and a queue by which the driver
/// sets the number that it uses.
const NET_PAIRS: u64 = net_feature::CTRL_VQ | net_feature::MQ;
/// Field `status` of the configuration.
const STATUS: std::ops::Range<usize> = 6..8;
/// VIRTIO_NET_S_LINK_UP.
const LINK_UP: u16 = 1;

/// Pairs of a network device at most.
const MAX_PAIRS: u16 = 16;

/// Bytes of `struct virtio_blk_config` up to write-zeroes; back ends refuse to be asked for more
/// than they have.
pub(crate) const BLOCK_CONFIG_LEN: u32 = 60;
/// Its field `num_queues`.
const NUM_QUEUES: std::ops::Range<usize> = 34..36;

impl Class {
    /// Device type number (virtio 1.2, §5).
    pub(crate) const fn device_type(&self) -> u16 {
        match self {
            Self::Net(_) => 1,
            Self::Block => 2,
        }
    }

    /// Features that a back end may offer to the guest.
    pub(crate) const fn features(&self) -> u64 {
        match self {
            Self::Block => RING | BLOCK,
            Self::Net(_) => RING | NET,
        }
    }

    /// Features that are offered to the guest whatever the back end offers. They are acknowledged
    /// to the back end only if it offers them.
    pub(crate) const fn own_features(&self, queues: u16) -> u64 {
        let Self::Net(identity) = self else {
            return 0;
        };
        let mtu = match identity.mtu {
            Some(_) => NET_MTU,
            None => 0,
        };
        let pairs = match queues {
            0..=2 => 0,
            _ => NET_PAIRS,
        };
        NET_MAC | NET_STATUS | mtu | pairs
    }

    /// Features that are never acknowledged to the back end: they are served here.
    pub(crate) const fn untold_features(&self) -> u64 {
        match self {
            Self::Block => 0,
            Self::Net(_) => net_feature::CTRL_VQ,
        }
    }

    /// Queues of the device that has `queues` of the back end's.
    pub const fn device_queues(&self, queues: u16) -> u16 {
        match self {
            Self::Net(_) if queues > 2 => queues + 1,
            _ => queues,
        }
    }

    /// Protocol features of this class alone.
    pub(crate) const fn protocol(&self) -> ProtocolFeatures {
        match self {
            Self::Block => ProtocolFeatures::CONFIG,
            Self::Net(_) => ProtocolFeatures(ProtocolFeatures::RARP.0 | ProtocolFeatures::MTU.0),
        }
    }

    /// Sends the back end the device's MTU, if there is one and the back end takes it.
    pub(crate) fn tell(
        &self,
        connection: &mut Connection,
        protocol: ProtocolFeatures,
    ) -> Result<(), ImportError> {
        let Self::Net(NetIdentity { mtu: Some(mtu), .. }) = *self else {
            return Ok(());
        };
        if !protocol.contains(ProtocolFeatures::MTU) {
            return Ok(());
        }
        match connection.call(Request::NetSetMtu(mtu.into())) {
            Err(CallError::Refused { .. }) => Err(ImportError::Mtu { mtu }),
            other => Ok(other.map(drop)?),
        }
    }

    /// Has the back end announce where the guest is now, if it can.
    pub(crate) fn announce(
        &self,
        connection: &mut Connection,
        protocol: ProtocolFeatures,
    ) -> Result<(), CallError> {
        match self {
            Self::Net(identity) if protocol.contains(ProtocolFeatures::RARP) => {
                let [a, b, c, d, e, f] = identity.mac;
                let mac = u64::from_le_bytes([a, b, c, d, e, f, 0, 0]);
                match connection.call(Request::SendRarp(mac)) {
                    // It serves the guest all the same.
                    Err(CallError::Refused { .. }) => Ok(()),
                    other => other.map(drop),
                }
            }
            _ => Ok(()),
        }
    }

    /// Whether a back end that died may leave a request undone, or do it twice, unless it has kept
    /// a record of it.
    pub(crate) const fn loses_nothing(&self) -> bool {
        matches!(self, Self::Block)
    }

    /// Whether a device of this class has so many queues.
    pub(crate) const fn has_queues(&self, queues: u16) -> bool {
        match self {
            Self::Block => queues >= 1 && queues <= 16,
            Self::Net(_) => queues >= 2 && queues <= 2 * MAX_PAIRS && queues.is_multiple_of(2),
        }
    }

    /// Checks that the back end has `queues` rings.
    pub(crate) fn check_queues(
        &self,
        offer: &frontend::Offer,
        queues: u16,
    ) -> Result<(), ImportError> {
        let has_all = match self {
            Self::Block => {
                u64::from(queues) <= offer.queues && (queues == 1 || offer.features & blk::MQ != 0)
            }
            // One that is not asked has one pair.
            Self::Net(_) => u64::from(queues.div_ceil(2)) <= offer.queues,
        };
        match has_all {
            true => Ok(()),
            false => Err(ImportError::Queues {
                offered: offer.queues,
                wanted: queues,
            }),
        }
    }

    /// The configuration space.
    pub(crate) fn config(
        &self,
        connection: &mut Connection,
        offer: &frontend::Offer,
        queues: u16,
    ) -> Result<Vec<u8>, ImportError> {
        match self {
            Self::Block => block_config(connection, offer, queues),
            Self::Net(identity) => Ok(identity.config(queues / 2)),
        }
    }
}

impl NetIdentity {
    /// The configuration space (§5.1.4).
    pub(crate) fn config(&self, pairs: u16) -> Vec<u8> {
        let mut config = self.mac.to_vec();
        config.extend(LINK_UP.to_le_bytes());
        // Pairs, and the MTU: behind features that may not be offered.
        config.extend(pairs.to_le_bytes());
        config.extend(self.mtu.unwrap_or(0).to_le_bytes());
        config
    }
}

/// Sets the state of the link in a network device's configuration space.
pub(crate) fn set_link(config: &mut [u8], is_up: bool) {
    let status = match is_up {
        true => LINK_UP,
        false => 0,
    };
    config[STATUS].copy_from_slice(&status.to_le_bytes());
}

fn block_config(
    connection: &mut Connection,
    offer: &frontend::Offer,
    queues: u16,
) -> Result<Vec<u8>, ImportError> {
    if !offer.protocol.contains(ProtocolFeatures::CONFIG) {
        let what = "CONFIG, so nobody knows how large its disk is";
        return Err(ImportError::NotOffered { what });
    }
    let mut config = connection.config(BLOCK_CONFIG_LEN)?;
    let what = match &config[..] {
        config if config.len() != BLOCK_CONFIG_LEN as usize => Some("its length"),
        config if config[..8] == [0; 8] => Some("a disk of no sectors"),
        _ => None,
    };
    if let Some(what) = what {
        return Err(ImportError::Config { what });
    }
    config[NUM_QUEUES].copy_from_slice(&queues.to_le_bytes());
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_features_of_a_class_are_the_specifications() {
        // Virtio 1.2, §5.2.3: SIZE_MAX 1, SEG_MAX 2, GEOMETRY 4, RO 5, BLK_SIZE 6, FLUSH 9,
        // TOPOLOGY 10, MQ 12, DISCARD 13, WRITE_ZEROES 14.
        assert_eq!(BLOCK, 0x7676);
        // §5.1.3: CSUM 0, GUEST_CSUM 1, GUEST_TSO4 7, _TSO6 8, _ECN 9, _UFO 10, HOST_TSO4 11, _TSO6
        // 12, _ECN 13, _UFO 14, MRG_RXBUF 15; GUEST_USO4 54, GUEST_USO6 55, HOST_USO 56.
        assert_eq!(NET, 0x01c0_0000_0000_ff83);
    }
}
