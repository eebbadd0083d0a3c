//! Taking a front end's message apart.

use std::os::fd::OwnedFd;

use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::layout::{ConfigHead, InflightRaw, MemTableHead, SingleRegionRaw, VringAddrRaw};
use super::payload::{NOFD, VRING_F_LOG};
use super::{
    ConfigAccess, ConfigKind, DecodeError, Inflight, IotlbMessage, MAX_CONFIG, MAX_FDS, MemRegion,
    Message, ProtocolFeatures, Request, RequestId, VringAddr, VringFd, VringState,
};

/// Bytes of an inflight description without the padding of the C structure.
const INFLIGHT_UNPADDED: usize = 20;

impl Request {
    /// Reads a message from a front end.
    ///
    /// # Errors
    /// Anything the message alone can get wrong; its descriptors are closed then.
    pub fn decode(message: Message) -> Result<Self, DecodeError> {
        let Message { head, payload, fds } = message;
        if head.is_reply() {
            return Err(DecodeError::Direction {
                request: head.request,
                is_reply: true,
            });
        }
        let mut parts = Parts {
            request: head.request,
            payload,
            fds,
        };
        let request = parts.decode()?;
        parts.expect_fds(0)?;
        Ok(request)
    }
}

/// A message being decoded: descriptors left in `fds` at the end are superfluous.
pub(crate) struct Parts {
    pub request: RequestId,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Parts {
    pub fn decode(&mut self) -> Result<Request, DecodeError> {
        Ok(match self.request {
            RequestId::GET_FEATURES => self.nothing(Request::GetFeatures)?,
            RequestId::SET_FEATURES => Request::SetFeatures(self.fixed()?),
            RequestId::SET_OWNER => self.nothing(Request::SetOwner)?,
            RequestId::RESET_OWNER => self.nothing(Request::ResetOwner)?,
            RequestId::SET_MEM_TABLE => Request::SetMemTable(self.mem_table()?),
            RequestId::SET_VRING_NUM => Request::SetVringNum(self.fixed()?),
            RequestId::SET_VRING_ADDR => Request::SetVringAddr(self.vring_addr()?),
            RequestId::SET_VRING_BASE => Request::SetVringBase(self.fixed()?),
            RequestId::GET_VRING_BASE => {
                let VringState { index, num: _ } = self.fixed()?;
                Request::GetVringBase { index }
            }
            RequestId::SET_VRING_KICK => Request::SetVringKick(self.vring_fd()?),
            RequestId::SET_VRING_CALL => Request::SetVringCall(self.vring_fd()?),
            RequestId::SET_VRING_ERR => Request::SetVringErr(self.vring_fd()?),
            RequestId::GET_PROTOCOL_FEATURES => self.nothing(Request::GetProtocolFeatures)?,
            RequestId::SET_PROTOCOL_FEATURES => {
                Request::SetProtocolFeatures(ProtocolFeatures(self.fixed()?))
            }
            RequestId::GET_QUEUE_NUM => self.nothing(Request::GetQueueNum)?,
            RequestId::SEND_RARP => Request::SendRarp(self.fixed()?),
            RequestId::NET_SET_MTU => Request::NetSetMtu(self.fixed()?),
            RequestId::SET_VRING_ENABLE => match self.fixed()? {
                VringState {
                    index,
                    num: num @ (0 | 1),
                } => Request::SetVringEnable {
                    index,
                    enable: num == 1,
                },
                VringState { num, .. } => return Err(self.field("num", num.into())),
            },
            RequestId::SET_BACKEND_REQ_FD => {
                self.expect_size(0)?;
                Request::SetBackendReqFd(self.one_fd()?)
            }
            RequestId::IOTLB_MSG => match IotlbMessage::decode(self.request, &self.payload)? {
                IotlbMessage::Miss { .. } => return Err(self.field("type", 1)),
                IotlbMessage::AccessFail { .. } => return Err(self.field("type", 4)),
                iotlb => Request::Iotlb(iotlb),
            },
            RequestId::GET_CONFIG => Request::GetConfig(self.config()?.0),
            RequestId::SET_CONFIG => {
                let (access, contents) = self.config()?;
                Request::SetConfig(access, contents)
            }
            RequestId::GET_INFLIGHT_FD => Request::GetInflightFd(self.inflight()?),
            RequestId::SET_INFLIGHT_FD => Request::SetInflightFd(self.inflight()?, self.one_fd()?),
            RequestId::RESET_DEVICE => self.nothing(Request::ResetDevice)?,
            RequestId::GET_MAX_MEM_SLOTS => self.nothing(Request::GetMaxMemSlots)?,
            RequestId::ADD_MEM_REG => Request::AddMemReg(self.single_region()?, self.one_fd()?),
            RequestId::REM_MEM_REG => {
                let region = self.single_region()?;
                // Some front ends send the region's descriptor; it is to be closed unused.
                self.fds.truncate(self.fds.len().saturating_sub(1));
                Request::RemMemReg(region)
            }
            request => return Err(DecodeError::Unknown { request }),
        })
    }

    fn field(&self, field: &'static str, value: u64) -> DecodeError {
        DecodeError::Field {
            request: self.request,
            field,
            value,
        }
    }

    pub fn expect_size(&self, expected: usize) -> Result<(), DecodeError> {
        match self.payload.len() {
            size if size == expected => Ok(()),
            size => Err(DecodeError::Size {
                request: self.request,
                size,
                expected,
            }),
        }
    }

    fn nothing(&self, request: Request) -> Result<Request, DecodeError> {
        self.expect_size(0).map(|()| request)
    }

    /// A payload of one structure.
    pub fn fixed<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T, DecodeError> {
        self.expect_size(size_of::<T>())?;
        Ok(T::read_from_bytes(&self.payload).expect("the size was compared"))
    }

    /// A payload that begins with a structure, and the rest of it.
    pub fn head<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<(T, &[u8]), DecodeError> {
        T::read_from_prefix(&self.payload).map_err(|_| DecodeError::Size {
            request: self.request,
            size: self.payload.len(),
            expected: size_of::<T>(),
        })
    }

    pub fn expect_fds(&self, expected: usize) -> Result<(), DecodeError> {
        match self.fds.len() {
            fds if fds == expected => Ok(()),
            fds => Err(DecodeError::Fds {
                request: self.request,
                fds,
                expected,
            }),
        }
    }

    pub fn one_fd(&mut self) -> Result<OwnedFd, DecodeError> {
        self.expect_fds(1)?;
        Ok(self.fds.pop().expect("the descriptors were counted"))
    }

    fn vring_addr(&self) -> Result<VringAddr, DecodeError> {
        let VringAddrRaw {
            index,
            flags,
            desc,
            used,
            avail,
            log: _,
        } = self.fixed()?;
        if flags & !VRING_F_LOG != 0 {
            return Err(self.field("flags", flags.into()));
        }
        Ok(VringAddr {
            index,
            desc,
            avail,
            used,
        })
    }

    fn vring_fd(&mut self) -> Result<VringFd, DecodeError> {
        let value: u64 = self.fixed()?;
        if value & !(NOFD | 0xff) != 0 {
            return Err(self.field("u64", value));
        }
        let fd = if value & NOFD == 0 {
            Some(self.one_fd()?)
        } else {
            None
        };
        Ok(VringFd {
            index: (value & 0xff) as u8,
            fd,
        })
    }

    fn single_region(&self) -> Result<MemRegion, DecodeError> {
        let SingleRegionRaw { padding: _, region } = self.fixed()?;
        Ok(region)
    }

    fn mem_table(&mut self) -> Result<Vec<(MemRegion, OwnedFd)>, DecodeError> {
        let (head, rest) = self.head::<MemTableHead>()?;
        // The count is compared before it is multiplied, and with what one message can carry.
        let count = head.regions as usize;
        if count > MAX_FDS {
            return Err(self.field("num regions", count as u64));
        }
        // User-mode Linux always sends the two regions that its structure has room for, whatever
        // the count says: whole regions behind those counted are passed over, anything else is
        // refused.
        let len = size_of::<MemRegion>();
        let (sent, ragged) = (rest.len() / len, !rest.len().is_multiple_of(len));
        if ragged || sent < count || sent > MAX_FDS {
            self.expect_size(size_of::<MemTableHead>() + count * len)?;
        }
        self.expect_fds(count)?;
        let regions: Vec<_> = rest
            .chunks_exact(len)
            .take(count)
            .map(|raw| MemRegion::read_from_bytes(raw).expect("a chunk is a region"))
            .collect();
        Ok(regions.into_iter().zip(self.fds.drain(..)).collect())
    }

    /// Decodes an inflight description, with the C structure's padding or without.
    pub fn inflight(&mut self) -> Result<Inflight, DecodeError> {
        if self.payload.len() == INFLIGHT_UNPADDED {
            self.payload.resize(size_of::<InflightRaw>(), 0);
        }
        let InflightRaw {
            mmap_size,
            mmap_offset,
            queues,
            queue_size,
            padding: _,
        } = self.fixed()?;
        Ok(Inflight {
            mmap_size,
            mmap_offset,
            queues,
            queue_size,
        })
    }

    fn config(&mut self) -> Result<(ConfigAccess, Vec<u8>), DecodeError> {
        let (head, contents) = self.head::<ConfigHead>()?;
        let ConfigHead {
            offset,
            size,
            flags,
        } = head;
        if size == 0 || size > MAX_CONFIG {
            return Err(self.field("size", size.into()));
        }
        if offset > MAX_CONFIG - size {
            return Err(self.field("offset", offset.into()));
        }
        let kind = match flags {
            0 => ConfigKind::Writable,
            1 => ConfigKind::Migration,
            other => return Err(self.field("flags", other.into())),
        };
        let contents = contents.to_vec();
        self.expect_size(size_of::<ConfigHead>() + size as usize)?;
        Ok((ConfigAccess { offset, size, kind }, contents))
    }
}
