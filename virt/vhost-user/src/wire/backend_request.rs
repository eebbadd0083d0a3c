//! Requests of the back end, over the socket of SET_BACKEND_REQ_FD.

use super::{BackendRequestId, DecodeError, Head, IotlbMessage, Message, RequestId};

/// One request to the front end (section "Back-end message types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendRequest {
    /// A miss or a forbidden access.
    Iotlb(IotlbMessage),
    /// The device's configuration space changed.
    ConfigChange,
}

impl BackendRequest {
    /// The request's number.
    pub const fn id(&self) -> BackendRequestId {
        match self {
            Self::Iotlb(_) => BackendRequestId::IOTLB_MSG,
            Self::ConfigChange => BackendRequestId::CONFIG_CHANGE_MSG,
        }
    }

    /// The message to send. `need_reply` asks for an acknowledgement (REPLY_ACK must be
    /// negotiated).
    pub fn encode(&self, need_reply: bool) -> Message {
        let payload = match self {
            Self::Iotlb(iotlb) => iotlb.encode(),
            Self::ConfigChange => Vec::new(),
        };
        Message::new(Head::request(RequestId(self.id().0), need_reply), payload)
    }

    /// Reads a message that came from a back end; for front ends.
    ///
    /// # Errors
    /// Unknown requests, wrong sizes, superfluous descriptors, and IOTLB messages that only a front
    /// end sends. `request` in them is the number; names of front-end requests do not apply.
    pub fn decode(message: &Message) -> Result<Self, DecodeError> {
        let request = message.head.request;
        if message.head.is_reply() {
            return Err(DecodeError::Direction {
                request,
                is_reply: true,
            });
        }
        if !message.fds.is_empty() {
            return Err(DecodeError::Fds {
                request,
                fds: message.fds.len(),
                expected: 0,
            });
        }
        match BackendRequestId(request.0) {
            BackendRequestId::IOTLB_MSG => match IotlbMessage::decode(request, &message.payload)? {
                iotlb @ (IotlbMessage::Miss { .. } | IotlbMessage::AccessFail { .. }) => {
                    Ok(Self::Iotlb(iotlb))
                }
                IotlbMessage::Update { .. } => Err(DecodeError::Field {
                    request,
                    field: "type",
                    value: 2,
                }),
                IotlbMessage::Invalidate { .. } => Err(DecodeError::Field {
                    request,
                    field: "type",
                    value: 3,
                }),
            },
            BackendRequestId::CONFIG_CHANGE_MSG if message.payload.is_empty() => {
                Ok(Self::ConfigChange)
            }
            BackendRequestId::CONFIG_CHANGE_MSG => Err(DecodeError::Size {
                request,
                size: message.payload.len(),
                expected: 0,
            }),
            _ => Err(DecodeError::Unknown { request }),
        }
    }
}
