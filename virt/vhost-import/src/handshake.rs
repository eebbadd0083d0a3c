//! Which messages in which order: negotiation, memory, starting and stopping rings. The order is QEMU's.

use std::os::fd::{AsFd, OwnedFd};

use vhost_user::frontend::Reply;
use vhost_user::wire::{
    ConfigAccess, ConfigKind, Inflight, ProtocolFeatures, Request, RequestId, VringAddr, VringFd,
    VringState, feature as vhost,
};
use vio::blk::request::feature as blk;
use vio::feature;

use crate::connection::Connection;
use crate::error::{CallError, ImportError};
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

/// What went wrong while rings were started.
pub(crate) enum StartError {
    /// Another connection may do better.
    Connection(CallError),
    /// The device cannot go on.
    Broken(ImportError),
}

impl From<CallError> for StartError {
    fn from(error: CallError) -> Self {
        match error.is_of_the_connection() {
            true => Self::Connection(error),
            false => Self::Broken(error.into()),
        }
    }
}

/// Everything up to memory, which is shared here too.
pub(crate) fn negotiate(
    connection: &mut Connection,
    memory: &Memory,
    queues: u16,
    queue_size: u16,
) -> Result<Offer, ImportError> {
    connection.call(Request::SetOwner)?;
    let offered = connection.value(Request::GetFeatures)?;
    let missing = |what| Err(ImportError::NotOffered { what });
    if offered & feature::VERSION_1 == 0 {
        return missing("VIRTIO_F_VERSION_1");
    }
    if offered & vhost::PROTOCOL_FEATURES == 0 {
        return missing("protocol features");
    }
    let protocol = ProtocolFeatures(connection.value(Request::GetProtocolFeatures)?) & PROTOCOL;
    connection.call(Request::SetProtocolFeatures(protocol))?;
    connection.acks = protocol.contains(ProtocolFeatures::REPLY_ACK);
    if !protocol.contains(ProtocolFeatures::CONFIG) {
        return missing("CONFIG, so nobody knows how large its disk is");
    }
    let has = match protocol.contains(ProtocolFeatures::MQ) {
        true => connection.value(Request::GetQueueNum)?,
        false => 1,
    };
    if has < u64::from(queues) || (queues > 1 && offered & blk::MQ == 0) {
        return Err(ImportError::Queues {
            offered: has,
            wanted: queues,
        });
    }
    let config = read_config(connection, queues)?;
    if connection.acks {
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
    share_memory(connection, memory, protocol)?;
    Ok(Offer {
        features: offered & FEATURES,
        protocol,
        config,
    })
}

fn read_config(connection: &mut Connection, queues: u16) -> Result<Vec<u8>, ImportError> {
    let access = ConfigAccess {
        offset: 0,
        size: CONFIG_LEN,
        kind: ConfigKind::Writable,
    };
    let Some(Reply::Config(Some(mut config))) = connection.call(Request::GetConfig(access))? else {
        let request = RequestId::GET_CONFIG;
        return Err(CallError::Refused { request }.into());
    };
    if config.len() != CONFIG_LEN as usize {
        let what = "its length";
        return Err(ImportError::Config { what });
    }
    if config[..8] == [0; 8] {
        let what = "a disk of no sectors";
        return Err(ImportError::Config { what });
    }
    config[NUM_QUEUES].copy_from_slice(&queues.to_le_bytes());
    Ok(config)
}

fn share_memory(
    connection: &mut Connection,
    memory: &Memory,
    protocol: ProtocolFeatures,
) -> Result<(), ImportError> {
    /// Regions in one SET_MEM_TABLE.
    const TABLE: u64 = 8;
    let regions = memory.regions();
    let has_slots = protocol.contains(ProtocolFeatures::CONFIGURE_MEM_SLOTS);
    let slots = match has_slots {
        true => connection.value(Request::GetMaxMemSlots)?,
        false => TABLE,
    };
    if slots < regions.len() as u64 {
        let regions = regions.len();
        return Err(ImportError::Slots { slots, regions });
    }
    let file = || memory.file().map_err(ImportError::Host);
    if has_slots {
        for region in regions {
            connection.call(Request::AddMemReg(region, file()?))?;
        }
    } else {
        let table = regions
            .into_iter()
            .map(|region| Ok((region, file()?)))
            .collect::<Result<_, ImportError>>()?;
        connection.call(Request::SetMemTable(table))?;
    }
    Ok(())
}

/// The region of requests in flight: as described, and its file.
pub(crate) type InflightRegion = (Inflight, OwnedFd);

/// A region for these rings.
pub(crate) fn inflight_region(
    connection: &mut Connection,
    queues: u16,
    queue_size: u16,
) -> Result<InflightRegion, CallError> {
    let wanted = Inflight {
        mmap_size: 0,
        mmap_offset: 0,
        queues,
        queue_size,
    };
    match connection.call(Request::GetInflightFd(wanted))? {
        // Its numbers are not looked into: who made it gets it back, or its successor does.
        Some(Reply::Inflight(Some(region))) => Ok(region),
        _ => Err(CallError::Refused {
            request: RequestId::GET_INFLIGHT_FD,
        }),
    }
}

/// The descriptors of a device's rings, by queue number, and the one for errors. All eventfds that the back end has too: it can fill
/// them and make them blocking ones at any time, so they are signalled by [`ring`] and emptied by [`sidecore::drain_eventfd`].
pub(crate) struct RingFds {
    pub kick: Vec<OwnedFd>,
    pub call: Vec<OwnedFd>,
    pub err: OwnedFd,
}

/// Signals an eventfd that the back end has too. One that is full has been signalled often enough.
pub(crate) fn ring(fd: &OwnedFd) {
    // An error would say that it is no eventfd; all of them are ours.
    let _ = sidecore::signal_eventfd(fd.as_fd());
}

/// The driver's features: they say how rings look, and so the region.
pub(crate) fn set_features(connection: &mut Connection, features: u64) -> Result<(), CallError> {
    let features = features | vhost::PROTOCOL_FEATURES;
    connection.call(Request::SetFeatures(features)).map(drop)
}

/// Describes the rings, each with its base, and enables them. Done when the back end has done it.
pub(crate) fn start_rings(
    connection: &mut Connection,
    inflight: Option<&InflightRegion>,
    rings: &[(RingPlace, u16)],
    fds: &RingFds,
) -> Result<(), StartError> {
    let host = |error| StartError::Broken(ImportError::Host(error));
    if let Some((region, file)) = inflight {
        let file = file.try_clone().map_err(host)?;
        connection.call(Request::SetInflightFd(*region, file))?;
    }
    for (ring, base) in rings {
        let index = u32::from(ring.index);
        let state = |num| VringState { index, num };
        let fd = |fd: &OwnedFd| {
            let fd = fd.as_fd().try_clone_to_owned().map_err(host)?;
            Ok::<_, StartError>(VringFd {
                // The device has at most 16 queues.
                index: ring.index as u8,
                fd: Some(fd),
            })
        };
        let at = usize::from(ring.index);
        connection.call(Request::SetVringNum(state(ring.size.into())))?;
        connection.call(Request::SetVringBase(state((*base).into())))?;
        connection.call(Request::SetVringAddr(VringAddr {
            index,
            desc: ring.desc,
            avail: ring.avail,
            used: ring.used,
            log: None,
        }))?;
        connection.call(Request::SetVringErr(fd(&fds.err)?))?;
        connection.call(Request::SetVringCall(fd(&fds.call[at])?))?;
        connection.call(Request::SetVringKick(fd(&fds.kick[at])?))?;
    }
    for (ring, _) in rings {
        let (index, enable) = (ring.index.into(), true);
        connection.call(Request::SetVringEnable { index, enable })?;
    }
    // A request with a reply: everything before it has been done, acknowledged or not.
    connection.value(Request::GetFeatures)?;
    Ok(())
}

/// Stops the rings; where each stands.
pub(crate) fn stop_rings(
    connection: &mut Connection,
    rings: &[RingPlace],
) -> Result<Vec<u16>, CallError> {
    let request = RequestId::GET_VRING_BASE;
    let mut bases = Vec::with_capacity(rings.len());
    for ring in rings {
        let index = u32::from(ring.index);
        let enable = false;
        connection.call(Request::SetVringEnable { index, enable })?;
        let reply = connection.call(Request::GetVringBase { index })?;
        match reply {
            Some(Reply::RingBase(state)) if state.index == index => {
                let base = u16::try_from(state.num);
                bases.push(base.map_err(|_| CallError::Refused { request })?);
            }
            _ => return Err(CallError::Refused { request }),
        }
    }
    Ok(bases)
}
