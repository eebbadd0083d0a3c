//! What the replies to requests say.
//!
//! Requests are built by [`Request::encode`](crate::wire::Request::encode) and sent like any message; which of them
//! are answered is [`expects_reply`]'s to tell. Replies come in the order of the requests.

use std::os::fd::OwnedFd;

use zerocopy::FromBytes;

use crate::wire::{
    ConfigHead, DecodeError, Inflight, Message, RequestId, VringState, VringStateRaw,
};

/// A reply, read as the request demands.
#[derive(Debug)]
pub enum Reply {
    /// The value asked for (features, queues, slots, status).
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
            | RequestId::GET_STATUS
            | RequestId::GET_VRING_BASE
            | RequestId::GET_CONFIG
            | RequestId::GET_INFLIGHT_FD
            | RequestId::SET_LOG_BASE
            | RequestId::IOTLB_MSG
    ) || asks_for_ack
}

impl Reply {
    /// Reads the reply to `expected`.
    ///
    /// # Errors
    /// A message that is no reply, or to something else, or whose size or descriptors are wrong.
    pub fn decode(expected: RequestId, message: Message) -> Result<Self, DecodeError> {
        let Message {
            head,
            payload,
            mut fds,
        } = message;
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
        let size = payload.len();
        let reply = match request {
            RequestId::GET_VRING_BASE => {
                let expected = size_of::<VringStateRaw>();
                let VringStateRaw { index, num } = VringStateRaw::read_from_bytes(&payload)
                    .map_err(|_| DecodeError::Size {
                        request,
                        size,
                        expected,
                    })?;
                Self::RingBase(VringState { index, num })
            }
            RequestId::GET_CONFIG if payload.is_empty() => Self::Config(None),
            RequestId::GET_CONFIG => {
                let expected = size_of::<ConfigHead>();
                let (head, contents) =
                    ConfigHead::read_from_prefix(&payload).map_err(|_| DecodeError::Size {
                        request,
                        size,
                        expected,
                    })?;
                if contents.len() != head.size as usize {
                    let expected = expected.saturating_add(head.size as usize);
                    return Err(DecodeError::Size {
                        request,
                        size,
                        expected,
                    });
                }
                Self::Config(Some(contents.to_vec()))
            }
            RequestId::GET_INFLIGHT_FD => match Inflight::decode(request, &payload)? {
                Inflight { mmap_size: 0, .. } => Self::Inflight(None),
                inflight => {
                    let missing = DecodeError::Fds {
                        request,
                        fds: 0,
                        expected: 1,
                    };
                    Self::Inflight(Some((inflight, fds.pop().ok_or(missing)?)))
                }
            },
            _ => {
                let expected = size_of::<u64>();
                let value = u64::read_from_bytes(&payload).map_err(|_| DecodeError::Size {
                    request,
                    size,
                    expected,
                })?;
                match request {
                    RequestId::GET_FEATURES
                    | RequestId::GET_PROTOCOL_FEATURES
                    | RequestId::GET_QUEUE_NUM
                    | RequestId::GET_MAX_MEM_SLOTS
                    | RequestId::GET_STATUS => Self::Value(value),
                    _ => Self::Ack { is_ok: value == 0 },
                }
            }
        };
        match fds.len() {
            0 => Ok(reply),
            fds => Err(DecodeError::Fds {
                request,
                fds,
                expected: 0,
            }),
        }
    }
}
