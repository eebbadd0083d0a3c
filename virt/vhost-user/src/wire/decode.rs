//! Taking a front end's message apart.

use std::os::fd::OwnedFd;

use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::layout::{
    ConfigHead, LogRaw, MemTableHead, RegionRaw, SingleRegionRaw, VringAddrRaw, VringStateRaw,
};
use super::request::{NOFD, VRING_F_LOG};
use super::{
    ConfigAccess, ConfigKind, DecodeError, Inflight, IotlbMessage, LogArea, MAX_CONFIG, MAX_FDS,
    MemRegion, ProtocolFeatures, Request, RequestId, VringAddr, VringFd, VringState,
};

/// A message being taken apart: what is left in `fds` at the end is superfluous.
pub(super) struct Parts {
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
            RequestId::SET_LOG_BASE => {
                let LogRaw { size, offset } = self.fixed()?;
                Request::SetLogBase(LogArea { size, offset }, self.one_fd()?)
            }
            RequestId::SET_LOG_FD => Request::SetLogFd(self.only_fd()?),
            RequestId::SET_VRING_NUM => Request::SetVringNum(self.vring_state()?),
            RequestId::SET_VRING_ADDR => Request::SetVringAddr(self.vring_addr()?),
            RequestId::SET_VRING_BASE => Request::SetVringBase(self.vring_state()?),
            RequestId::GET_VRING_BASE => Request::GetVringBase {
                index: self.vring_state()?.index,
            },
            RequestId::SET_VRING_KICK => Request::SetVringKick(self.vring_fd()?),
            RequestId::SET_VRING_CALL => Request::SetVringCall(self.vring_fd()?),
            RequestId::SET_VRING_ERR => Request::SetVringErr(self.vring_fd()?),
            RequestId::GET_PROTOCOL_FEATURES => self.nothing(Request::GetProtocolFeatures)?,
            RequestId::SET_PROTOCOL_FEATURES => {
                Request::SetProtocolFeatures(ProtocolFeatures(self.fixed()?))
            }
            RequestId::GET_QUEUE_NUM => self.nothing(Request::GetQueueNum)?,
            RequestId::SET_VRING_ENABLE => match self.vring_state()? {
                VringState {
                    index,
                    num: num @ (0 | 1),
                } => Request::SetVringEnable {
                    index,
                    enable: num == 1,
                },
                VringState { num, .. } => return Err(self.field("num", num.into())),
            },
            RequestId::SEND_RARP => {
                let [a, b, c, d, e, f, _, _] = self.fixed::<[u8; 8]>()?;
                Request::SendRarp {
                    mac: [a, b, c, d, e, f],
                }
            }
            RequestId::NET_SET_MTU => {
                let value: u64 = self.fixed()?;
                Request::NetSetMtu(value.try_into().map_err(|_| self.field("MTU", value))?)
            }
            RequestId::SET_BACKEND_REQ_FD => Request::SetBackendReqFd(self.only_fd()?),
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
            RequestId::GET_INFLIGHT_FD => {
                Request::GetInflightFd(Inflight::decode(self.request, &self.payload)?)
            }
            RequestId::SET_INFLIGHT_FD => Request::SetInflightFd(
                Inflight::decode(self.request, &self.payload)?,
                self.one_fd()?,
            ),
            RequestId::RESET_DEVICE => self.nothing(Request::ResetDevice)?,
            RequestId::GET_MAX_MEM_SLOTS => self.nothing(Request::GetMaxMemSlots)?,
            RequestId::ADD_MEM_REG => Request::AddMemReg(self.single_region()?, self.one_fd()?),
            RequestId::REM_MEM_REG => {
                let region = self.single_region()?;
                // Some front ends send the region's descriptor; it is to be closed unused.
                self.fds.truncate(self.fds.len().saturating_sub(1));
                Request::RemMemReg(region)
            }
            RequestId::SET_STATUS => {
                let value: u64 = self.fixed()?;
                Request::SetStatus(value.try_into().map_err(|_| self.field("status", value))?)
            }
            RequestId::GET_STATUS => self.nothing(Request::GetStatus)?,
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

    fn expect_size(&self, expected: usize) -> Result<(), DecodeError> {
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

    fn fixed<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T, DecodeError> {
        self.expect_size(size_of::<T>())?;
        Ok(T::read_from_bytes(&self.payload).expect("the size was compared"))
    }

    fn one_fd(&mut self) -> Result<OwnedFd, DecodeError> {
        match (self.fds.pop(), self.fds.len()) {
            (Some(fd), 0) => Ok(fd),
            (fd, more) => Err(DecodeError::Fds {
                request: self.request,
                fds: more + usize::from(fd.is_some()),
                expected: 1,
            }),
        }
    }

    /// A descriptor and no payload.
    fn only_fd(&mut self) -> Result<OwnedFd, DecodeError> {
        self.expect_size(0)?;
        self.one_fd()
    }

    fn vring_state(&self) -> Result<VringState, DecodeError> {
        let VringStateRaw { index, num } = self.fixed()?;
        Ok(VringState { index, num })
    }

    fn vring_addr(&self) -> Result<VringAddr, DecodeError> {
        let VringAddrRaw {
            index,
            flags,
            desc,
            used,
            avail,
            log,
        } = self.fixed()?;
        let log = match flags {
            0 => None,
            VRING_F_LOG => Some(log),
            other => return Err(self.field("flags", other.into())),
        };
        Ok(VringAddr {
            index,
            desc,
            avail,
            used,
            log,
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
        Ok(MemRegion::from_raw(region))
    }

    fn mem_table(&mut self) -> Result<Vec<(MemRegion, OwnedFd)>, DecodeError> {
        let head_len = size_of::<MemTableHead>();
        let Ok((head, rest)) = MemTableHead::read_from_prefix(&self.payload) else {
            self.expect_size(head_len)?;
            return Ok(Vec::new());
        };
        // The count is compared before it is multiplied, and with what one message can carry.
        let count = head.regions as usize;
        if count > MAX_FDS {
            return Err(self.field("num regions", count as u64));
        }
        // User-mode Linux always sends the two regions that its structure has room for, whatever the count
        // says: whole regions behind those counted are passed over, anything else is refused.
        let (sent, ragged) = (
            rest.len() / size_of::<RegionRaw>(),
            !rest.len().is_multiple_of(size_of::<RegionRaw>()),
        );
        if ragged || sent < count || sent > MAX_FDS {
            self.expect_size(head_len + count * size_of::<RegionRaw>())?;
        }
        if self.fds.len() != count {
            let fds = self.fds.len();
            return Err(DecodeError::Fds {
                request: self.request,
                fds,
                expected: count,
            });
        }
        let regions = rest
            .chunks_exact(size_of::<RegionRaw>())
            .take(count)
            .map(|raw| {
                MemRegion::from_raw(RegionRaw::read_from_bytes(raw).expect("a chunk is a region"))
            });
        Ok(regions.zip(self.fds.drain(..)).collect())
    }

    fn config(&mut self) -> Result<(ConfigAccess, Vec<u8>), DecodeError> {
        let head_len = size_of::<ConfigHead>();
        let Ok((head, contents)) = ConfigHead::read_from_prefix(&self.payload) else {
            let size = self.payload.len();
            return Err(DecodeError::Size {
                request: self.request,
                size,
                expected: head_len,
            });
        };
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
        self.expect_size(head_len + size as usize)?;
        Ok((ConfigAccess { offset, size, kind }, contents))
    }
}
