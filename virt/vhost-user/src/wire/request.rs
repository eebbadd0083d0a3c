//! Requests of the front end, and their encoding (`decode` is the way back).

use std::os::fd::OwnedFd;

use zerocopy::{Immutable, IntoBytes};

use super::layout::{ConfigHead, InflightRaw, MemTableHead, SingleRegionRaw, VringAddrRaw};
use super::payload::{
    ConfigAccess, ConfigKind, Inflight, MemRegion, NOFD, VringAddr, VringFd, VringState,
};
use super::{Head, IotlbMessage, Message, ProtocolFeatures, RequestId};

/// A request of the front end. Descriptors are owned: what refuses a request closes them.
#[derive(Debug)]
#[expect(
    missing_docs,
    reason = "the specification's names, in its order; payloads are documented"
)]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<(MemRegion, OwnedFd)>),
    SetVringNum(VringState),
    SetVringAddr(VringAddr),
    SetVringBase(VringState),
    GetVringBase {
        index: u32,
    },
    SetVringKick(VringFd),
    SetVringCall(VringFd),
    SetVringErr(VringFd),
    GetProtocolFeatures,
    SetProtocolFeatures(ProtocolFeatures),
    GetQueueNum,
    /// The address in the lowest 6 bytes.
    SendRarp(u64),
    NetSetMtu(u64),
    SetVringEnable {
        index: u32,
        enable: bool,
    },
    SetBackendReqFd(OwnedFd),
    Iotlb(IotlbMessage),
    GetConfig(ConfigAccess),
    SetConfig(ConfigAccess, Vec<u8>),
    GetInflightFd(Inflight),
    SetInflightFd(Inflight, OwnedFd),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(MemRegion, OwnedFd),
    RemMemReg(MemRegion),
}

impl Request {
    /// The request's number.
    pub const fn id(&self) -> RequestId {
        match self {
            Self::GetFeatures => RequestId::GET_FEATURES,
            Self::SetFeatures(_) => RequestId::SET_FEATURES,
            Self::SetOwner => RequestId::SET_OWNER,
            Self::ResetOwner => RequestId::RESET_OWNER,
            Self::SetMemTable(_) => RequestId::SET_MEM_TABLE,
            Self::SetVringNum(_) => RequestId::SET_VRING_NUM,
            Self::SetVringAddr(_) => RequestId::SET_VRING_ADDR,
            Self::SetVringBase(_) => RequestId::SET_VRING_BASE,
            Self::GetVringBase { .. } => RequestId::GET_VRING_BASE,
            Self::SetVringKick(_) => RequestId::SET_VRING_KICK,
            Self::SetVringCall(_) => RequestId::SET_VRING_CALL,
            Self::SetVringErr(_) => RequestId::SET_VRING_ERR,
            Self::GetProtocolFeatures => RequestId::GET_PROTOCOL_FEATURES,
            Self::SetProtocolFeatures(_) => RequestId::SET_PROTOCOL_FEATURES,
            Self::GetQueueNum => RequestId::GET_QUEUE_NUM,
            Self::SendRarp(_) => RequestId::SEND_RARP,
            Self::NetSetMtu(_) => RequestId::NET_SET_MTU,
            Self::SetVringEnable { .. } => RequestId::SET_VRING_ENABLE,
            Self::SetBackendReqFd(_) => RequestId::SET_BACKEND_REQ_FD,
            Self::Iotlb(_) => RequestId::IOTLB_MSG,
            Self::GetConfig(_) => RequestId::GET_CONFIG,
            Self::SetConfig(..) => RequestId::SET_CONFIG,
            Self::GetInflightFd(_) => RequestId::GET_INFLIGHT_FD,
            Self::SetInflightFd(..) => RequestId::SET_INFLIGHT_FD,
            Self::ResetDevice => RequestId::RESET_DEVICE,
            Self::GetMaxMemSlots => RequestId::GET_MAX_MEM_SLOTS,
            Self::AddMemReg(..) => RequestId::ADD_MEM_REG,
            Self::RemMemReg(_) => RequestId::REM_MEM_REG,
        }
    }

    /// The message to send. `need_reply` asks for an acknowledgement (REPLY_ACK must be
    /// negotiated).
    pub fn encode(self, need_reply: bool) -> Message {
        let head = Head::request(self.id(), need_reply);
        let (payload, fds) = self.into_parts();
        Message { head, payload, fds }
    }

    fn into_parts(self) -> (Vec<u8>, Vec<OwnedFd>) {
        match self {
            Self::GetFeatures
            | Self::SetOwner
            | Self::ResetOwner
            | Self::GetProtocolFeatures
            | Self::GetQueueNum
            | Self::ResetDevice
            | Self::GetMaxMemSlots => (Vec::new(), Vec::new()),
            Self::SetBackendReqFd(fd) => (Vec::new(), vec![fd]),
            Self::SetFeatures(value)
            | Self::SetProtocolFeatures(ProtocolFeatures(value))
            | Self::SendRarp(value)
            | Self::NetSetMtu(value) => (bytes(&value), Vec::new()),
            Self::SetMemTable(regions) => encode_mem_table(regions),
            Self::SetVringNum(state) | Self::SetVringBase(state) => (bytes(&state), Vec::new()),
            Self::GetVringBase { index } => (bytes(&VringState { index, num: 0 }), Vec::new()),
            Self::SetVringEnable { index, enable } => {
                let num = enable.into();
                (bytes(&VringState { index, num }), Vec::new())
            }
            Self::SetVringAddr(VringAddr {
                index,
                desc,
                avail,
                used,
            }) => {
                let raw = VringAddrRaw {
                    index,
                    flags: 0,
                    desc,
                    used,
                    avail,
                    log: 0,
                };
                (bytes(&raw), Vec::new())
            }
            Self::SetVringKick(vring) | Self::SetVringCall(vring) | Self::SetVringErr(vring) => {
                let flag = if vring.fd.is_none() { NOFD } else { 0 };
                (
                    bytes(&(u64::from(vring.index) | flag)),
                    vring.fd.into_iter().collect(),
                )
            }
            Self::Iotlb(iotlb) => (iotlb.encode(), Vec::new()),
            // The contents travel in both directions; QEMU sends zeroes in the request.
            Self::GetConfig(access) => (config(access, &[]), Vec::new()),
            Self::SetConfig(access, contents) => (config(access, &contents), Vec::new()),
            Self::GetInflightFd(inflight) => (bytes(&inflight.raw()), Vec::new()),
            Self::SetInflightFd(inflight, fd) => (bytes(&inflight.raw()), vec![fd]),
            Self::AddMemReg(region, fd) => (single_region(region), vec![fd]),
            Self::RemMemReg(region) => (single_region(region), Vec::new()),
        }
    }
}

impl Inflight {
    pub(crate) const fn raw(self) -> InflightRaw {
        let Self {
            mmap_size,
            mmap_offset,
            queues,
            queue_size,
        } = self;
        InflightRaw {
            mmap_size,
            mmap_offset,
            queues,
            queue_size,
            padding: 0,
        }
    }
}

fn bytes<T: IntoBytes + Immutable>(value: &T) -> Vec<u8> {
    value.as_bytes().to_vec()
}

fn single_region(region: MemRegion) -> Vec<u8> {
    bytes(&SingleRegionRaw { padding: 0, region })
}

/// Head and contents, filled up with zeroes to the size the head names.
pub(crate) fn config(access: ConfigAccess, contents: &[u8]) -> Vec<u8> {
    let flags = match access.kind {
        ConfigKind::Writable => 0,
        ConfigKind::Migration => 1,
    };
    let mut payload = bytes(&ConfigHead {
        offset: access.offset,
        size: access.size,
        flags,
    });
    payload.extend_from_slice(contents);
    payload.resize(size_of::<ConfigHead>() + access.size as usize, 0);
    payload
}

fn encode_mem_table(table: Vec<(MemRegion, OwnedFd)>) -> (Vec<u8>, Vec<OwnedFd>) {
    let regions = u32::try_from(table.len()).expect("a table has a few regions");
    let mut payload = bytes(&MemTableHead {
        regions,
        padding: 0,
    });
    let mut fds = Vec::with_capacity(table.len());
    for (region, fd) in table {
        payload.extend_from_slice(region.as_bytes());
        fds.push(fd);
    }
    (payload, fds)
}
