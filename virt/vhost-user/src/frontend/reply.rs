//! Decoding of replies to requests.
//!
//! Requests are built by [`Request::encode`](crate::wire::Request::encode) and sent like any
//! message; [`expects_reply`] returns whether one is answered. Replies come in the order of the
//! requests.

use std::os::fd::OwnedFd;

use crate::wire::{ConfigHead, DecodeError, Inflight, Message, Parts, RequestId, VringState};

/// A reply, read as the request demands.
#[derive(Debug)]
pub enum Reply {
    /// The value asked for (features, queues, slots).
    Value(u64),
    /// An acknowledgement: whether the back end did it.
    Ack {
        /// Anything but 0 is a failure.
        is_ok: bool,
    },
    /// GET_VRING_BASE: ring and position.
    RingBase(VringState),
    /// GET_CONFIG: the contents; `None` where the back end refused.
    Config(Option<Vec<u8>>),
    /// GET_INFLIGHT_FD: the region; `None` where the back end has none.
    Inflight(Option<(Inflight, OwnedFd)>),
}

/// Whether a reply will come to this request.
pub const fn expects_reply(request: RequestId, asks_for_ack: bool) -> bool {
    matches!(
        request,
        RequestId::GET_FEATURES
            | RequestId::GET_PROTOCOL_FEATURES
            | RequestId::GET_QUEUE_NUM
            | RequestId::GET_MAX_MEM_SLOTS
            | RequestId::GET_VRING_BASE
            | RequestId::GET_CONFIG
            | RequestId::GET_INFLIGHT_FD
            | RequestId::IOTLB_MSG
    ) || asks_for_ack
}

impl Reply {
    /// Reads the reply to `expected`.
    ///
    /// # Errors
    /// A message that is no reply, or to something else, or whose size or descriptors are wrong.
    pub fn decode(expected: RequestId, message: Message) -> Result<Self, DecodeError> {
        let Message { head, payload, fds } = message;
        let request = head.request;
        if !head.is_reply() {
            return Err(DecodeError::Direction {
                request,
                is_reply: false,
            });
        }
        if request != expected {
            return Err(DecodeError::WrongReply { request, expected });
        }
        let mut parts = Parts {
            request,
            payload,
            fds,
        };
        let reply = match request {
            RequestId::GET_VRING_BASE => Self::RingBase(parts.fixed()?),
            RequestId::GET_CONFIG if parts.payload.is_empty() => Self::Config(None),
            RequestId::GET_CONFIG => {
                let (head, contents) = parts.head::<ConfigHead>()?;
                let all = size_of::<ConfigHead>().saturating_add(head.size as usize);
                parts.expect_size(all)?;
                Self::Config(Some(contents.to_vec()))
            }
            RequestId::GET_INFLIGHT_FD => match parts.inflight()? {
                Inflight { mmap_size: 0, .. } => Self::Inflight(None),
                inflight => Self::Inflight(Some((inflight, parts.one_fd()?))),
            },
            RequestId::GET_FEATURES
            | RequestId::GET_PROTOCOL_FEATURES
            | RequestId::GET_QUEUE_NUM
            | RequestId::GET_MAX_MEM_SLOTS => Self::Value(parts.fixed()?),
            _ => Self::Ack {
                is_ok: parts.fixed::<u64>()? == 0,
            },
        };
        parts.expect_fds(0)?;
        Ok(reply)
    }
}
