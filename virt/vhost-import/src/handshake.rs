//! What a back end must offer to be a disk of ours, and the descriptors of its rings.

use std::os::fd::{AsFd, OwnedFd};

use vhost_user::frontend::{CallError, Connection, Ring};
use vhost_user::wire::{ProtocolFeatures, Request, VringState, feature as vhost};
use vio::blk::request::feature as blk;
use vio::feature;

use crate::error::ImportError;
use crate::memory::{Memory, RingPlace};

/// Features that a guest may be offered. Each lives in rings and requests, which is the back end's business; what would be ours
/// (writable configuration, resizing) is not among them.
const FEATURES: u64 = feature::VERSION_1
    | feature::EVENT_IDX
    | feature::INDIRECT_DESC
    | feature::IN_ORDER
    | blk::SIZE_MAX
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

/// Protocol features taken where offered.
const PROTOCOL: ProtocolFeatures = ProtocolFeatures(
    ProtocolFeatures::MQ.0
        | ProtocolFeatures::REPLY_ACK.0
        | ProtocolFeatures::CONFIG.0
        | ProtocolFeatures::INFLIGHT_SHMFD.0
        | ProtocolFeatures::CONFIGURE_MEM_SLOTS.0,
);

/// Bytes of `struct virtio_blk_config` up to write-zeroes; back ends refuse to be asked for more than they have.
pub(crate) const CONFIG_LEN: u32 = 60;
/// Its field `num_queues`.
const NUM_QUEUES: std::ops::Range<usize> = 34..36;

/// What a back end offers, as far as it is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Virtio features for the guest.
    pub features: u64,
    /// Protocol features, acknowledged.
    pub protocol: ProtocolFeatures,
    /// Configuration space, with the number of queues asked for.
    pub config: Vec<u8>,
}

/// Everything up to memory, which is shared here too.
pub(crate) fn negotiate(
    connection: &mut Connection,
    memory: &Memory,
    queues: u16,
    queue_size: u16,
) -> Result<Offer, ImportError> {
    let offer = connection.negotiate(Some(PROTOCOL))?;
    let missing = |what| Err(ImportError::NotOffered { what });
    if offer.features & feature::VERSION_1 == 0 {
        return missing("VIRTIO_F_VERSION_1");
    }
    if offer.features & vhost::PROTOCOL_FEATURES == 0 {
        return missing("protocol features");
    }
    if !offer.protocol.contains(ProtocolFeatures::CONFIG) {
        return missing("CONFIG, so nobody knows how large its disk is");
    }
    if offer.queues < u64::from(queues) || (queues > 1 && offer.features & blk::MQ == 0) {
        return Err(ImportError::Queues {
            offered: offer.queues,
            wanted: queues,
        });
    }
    let mut config = connection.config(CONFIG_LEN)?;
    check_config(&config)?;
    config[NUM_QUEUES].copy_from_slice(&queues.to_le_bytes());
    if offer.protocol.contains(ProtocolFeatures::REPLY_ACK) {
        let state = VringState {
            index: 0,
            num: queue_size.into(),
        };
        match connection.call(Request::SetVringNum(state)) {
            Err(CallError::Refused { .. }) => {
                return Err(ImportError::QueueSize { size: queue_size });
            }
            other => other?,
        };
    }
    connection.share_memory(&memory.regions(), memory.file())?;
    Ok(Offer {
        features: offer.features & FEATURES,
        protocol: offer.protocol,
        config,
    })
}

fn check_config(config: &[u8]) -> Result<(), ImportError> {
    let what = match config {
        _ if config.len() != CONFIG_LEN as usize => "its length",
        _ if config[..8] == [0; 8] => "a disk of no sectors",
        _ => return Ok(()),
    };
    Err(ImportError::Config { what })
}

/// The descriptors of a device's rings, by queue number, and the one for errors. All eventfds that the back end has too: it can fill
/// them and make them blocking ones at any time, so they are signalled by [`ring`] and emptied by [`sidecore::drain_eventfd`].
pub(crate) struct RingFds {
    pub kick: Vec<OwnedFd>,
    pub call: Vec<OwnedFd>,
    pub err: OwnedFd,
}

impl RingFds {
    /// A ring as it is told to the back end.
    pub fn ring(&self, place: &RingPlace, base: u16) -> Ring<'_> {
        let at = usize::from(place.index);
        Ring {
            // The device has at most 16 queues.
            index: place.index as u8,
            size: place.size,
            base: base.into(),
            desc: place.desc,
            avail: place.avail,
            used: place.used,
            kick: self.kick[at].as_fd(),
            call: self.call[at].as_fd(),
            err: Some(self.err.as_fd()),
        }
    }
}

/// Signals an eventfd, which the back end may have too. One that is full has been signalled often enough.
pub(crate) fn ring(fd: &OwnedFd) {
    // An error would say that it is no eventfd; all of them are ours.
    let _ = sidecore::signal_eventfd(fd.as_fd());
}
