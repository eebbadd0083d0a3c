//! IOTLB messages, which travel in both directions (section "An IOTLB message").

use zerocopy::{FromBytes, IntoBytes};

use super::layout::IotlbRaw;
use super::{DecodeError, Message, RequestId};

/// Bytes of the fields that the specification names. The C structure is padded to 32; both lengths
/// are accepted.
const UNPADDED: usize = 26;

/// Permissions of an IOTLB entry, or the access that missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IotlbAccess {
    /// No access (an update that revokes).
    None,
    /// Read.
    Read,
    /// Write.
    Write,
    /// Both.
    ReadWrite,
}

/// Range of IOVAs with an inclusive end, so that it can also be the whole 64-bit space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IotlbRange {
    /// First IOVA.
    pub first: u64,
    /// Last IOVA; never below `first`.
    pub last: u64,
}

/// One IOTLB message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IotlbMessage {
    /// Type 1, from the back end: no entry allows `access` at `iova`.
    Miss {
        /// Address of the access.
        iova: u64,
        /// Access that was wanted.
        access: IotlbAccess,
    },
    /// Type 2, from the front end: `range` translates to memory at `user_addr`.
    Update {
        /// IOVAs mapped.
        range: IotlbRange,
        /// User address of `range.first`; that of `range.last` does not overflow.
        user_addr: u64,
        /// Access that is allowed.
        access: IotlbAccess,
    },
    /// Type 3, from the front end: entries in `range` are to be removed.
    Invalidate {
        /// IOVAs unmapped. A size of 0 at IOVA 0 means all of them, as QEMU sends it.
        range: IotlbRange,
    },
    /// Type 4, from the back end: an entry exists and forbids `access`.
    AccessFail {
        /// Address of the access.
        iova: u64,
        /// Access that was wanted.
        access: IotlbAccess,
    },
}

impl IotlbMessage {
    /// Whether the message is an update by its type. It may be malformed all the same.
    pub fn is_update(message: &Message) -> bool {
        const KIND: usize = std::mem::offset_of!(IotlbRaw, kind);
        message.head.request == RequestId::IOTLB_MSG
            && !message.head.is_reply()
            && message.payload.get(KIND) == Some(&2)
    }

    pub(super) fn decode(request: RequestId, payload: &[u8]) -> Result<Self, DecodeError> {
        let expected = size_of::<IotlbRaw>();
        let mut bytes = [0; size_of::<IotlbRaw>()];
        if payload.len() != expected && payload.len() != UNPADDED {
            return Err(DecodeError::Size {
                request,
                size: payload.len(),
                expected,
            });
        }
        bytes[..payload.len()].copy_from_slice(payload);
        let raw = IotlbRaw::read_from_bytes(&bytes).expect("the array has the structure's size");

        let bad = |field, value| DecodeError::Field {
            request,
            field,
            value,
        };
        let access = match raw.perm {
            0 => IotlbAccess::None,
            1 => IotlbAccess::Read,
            2 => IotlbAccess::Write,
            3 => IotlbAccess::ReadWrite,
            other => return Err(bad("permissions flags", other.into())),
        };
        let iova = raw.iova;
        let last = raw
            .size
            .checked_sub(1)
            .and_then(|more| iova.checked_add(more));
        match raw.kind {
            1 => Ok(Self::Miss { iova, access }),
            2 => {
                let last = last.ok_or_else(|| bad("size", raw.size))?;
                let user_last = raw.user_addr.checked_add(last - iova);
                user_last.ok_or_else(|| bad("user address", raw.user_addr))?;
                let range = IotlbRange { first: iova, last };
                Ok(Self::Update {
                    range,
                    user_addr: raw.user_addr,
                    access,
                })
            }
            3 if iova == 0 && raw.size == 0 => Ok(Self::Invalidate {
                range: IotlbRange {
                    first: 0,
                    last: u64::MAX,
                },
            }),
            3 => {
                let last = last.ok_or_else(|| bad("size", raw.size))?;
                Ok(Self::Invalidate {
                    range: IotlbRange { first: iova, last },
                })
            }
            4 => Ok(Self::AccessFail { iova, access }),
            other => Err(bad("type", other.into())),
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        // The whole space has size 2^64, which wraps to 0, the encoding of that size.
        let size = |range: &IotlbRange| (range.last - range.first).wrapping_add(1);
        let (iova, size, user_addr, access, kind) = match *self {
            Self::Miss { iova, access } => (iova, 0, 0, access, 1),
            Self::Update {
                ref range,
                user_addr,
                access,
            } => (range.first, size(range), user_addr, access, 2),
            Self::Invalidate { ref range } => (range.first, size(range), 0, IotlbAccess::None, 3),
            Self::AccessFail { iova, access } => (iova, 0, 0, access, 4),
        };
        let perm = match access {
            IotlbAccess::None => 0,
            IotlbAccess::Read => 1,
            IotlbAccess::Write => 2,
            IotlbAccess::ReadWrite => 3,
        };
        IotlbRaw {
            iova,
            size,
            user_addr,
            perm,
            kind,
            padding: [0; 6],
        }
        .as_bytes()
        .to_vec()
    }
}
