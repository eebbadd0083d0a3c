//! The envelope: a header, a payload, descriptors.

use std::os::fd::OwnedFd;

use zerocopy::{FromBytes, IntoBytes};

use super::RequestId;
use super::layout::HeaderRaw;

/// Bytes of a header.
pub const HEADER_LEN: usize = 12;

/// The protocol's version, in the lower two bits of the flags.
pub const VERSION: u32 = 1;

/// Descriptors one message may carry: SET_MEM_TABLE's eight regions.
pub const MAX_FDS: usize = 8;

const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// Request number and flags of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The request, of this message or that it replies to.
    pub request: RequestId,
    /// Version, reply and need_reply; the other bits are reserved and ignored.
    pub flags: u32,
}

impl Head {
    /// A request that asks for an acknowledgement, or one that does not.
    pub const fn request(request: RequestId, need_reply: bool) -> Self {
        let flags = if need_reply {
            VERSION | NEED_REPLY
        } else {
            VERSION
        };
        Self { request, flags }
    }

    /// A reply to `request`.
    pub const fn reply(request: RequestId) -> Self {
        Self {
            request,
            flags: VERSION | REPLY,
        }
    }

    /// The version this message claims; only [`VERSION`] passes the channel.
    pub const fn version(self) -> u32 {
        self.flags & VERSION_MASK
    }

    /// Whether this is a reply.
    pub const fn is_reply(self) -> bool {
        self.flags & REPLY != 0
    }

    /// Whether the sender asks for an acknowledgement (honoured once REPLY_ACK is negotiated).
    pub const fn needs_reply(self) -> bool {
        self.flags & NEED_REPLY != 0
    }
}

/// One message: not interpreted, bounded by the channel.
#[derive(Debug)]
pub struct Message {
    /// Request and flags.
    pub head: Head,
    /// The bytes behind the header.
    pub payload: Vec<u8>,
    /// Ancillary descriptors, in the order they were sent; at most [`MAX_FDS`].
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// A message without descriptors.
    pub const fn new(head: Head, payload: Vec<u8>) -> Self {
        Self {
            head,
            payload,
            fds: Vec::new(),
        }
    }

    /// A reply that carries one number: a value asked for, or an acknowledgement (0 is success).
    pub fn reply_u64(request: RequestId, value: u64) -> Self {
        Self::new(Head::reply(request), value.as_bytes().to_vec())
    }

    /// Header and payload as they are sent.
    ///
    /// # Panics
    /// If the payload is longer than 4 GiB.
    pub fn to_bytes(&self) -> Vec<u8> {
        let size = u32::try_from(self.payload.len()).expect("a payload is far below 4 GiB");
        let raw = HeaderRaw {
            request: self.head.request.0,
            flags: self.head.flags,
            size,
        };
        let mut bytes = Vec::with_capacity(HEADER_LEN + self.payload.len());
        bytes.extend_from_slice(raw.as_bytes());
        bytes.extend_from_slice(&self.payload);
        bytes
    }

    /// Request, flags and size of the payload, from the bytes of a header.
    pub(crate) fn parse_header(bytes: &[u8; HEADER_LEN]) -> (Head, u32) {
        let raw = HeaderRaw::read_from_bytes(bytes).expect("twelve bytes are a header");
        (
            Head {
                request: RequestId(raw.request),
                flags: raw.flags,
            },
            raw.size,
        )
    }
}
