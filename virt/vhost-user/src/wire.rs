//! Wire format: identifiers, layouts, and the two families of requests as typed values.
//!
//! A [`Message`] is bytes with descriptors, as the channel carries them; [`Request`] is one from
//! the front end with its payload decoded, [`BackendRequest`] one from the back end. Decoding takes
//! the message, so that descriptors are either in the request or closed. It checks what depends on
//! the message alone (sizes, number of descriptors, reserved bits); `backend` checks what depends
//! on the session.

mod backend_request;
mod decode;
mod error;
mod id;
mod iotlb;
mod layout;
mod message;
mod payload;
mod request;
#[cfg(test)]
mod tests;

pub use backend_request::BackendRequest;
pub(crate) use decode::Parts;
pub use error::DecodeError;
pub use id::{BackendRequestId, ProtocolFeatures, RequestId, feature};
pub use iotlb::{IotlbAccess, IotlbMessage, IotlbRange};
pub(crate) use layout::ConfigHead;
pub use message::{HEADER_LEN, Head, MAX_FDS, Message, VERSION};
pub use payload::{
    ConfigAccess, ConfigKind, Inflight, MAX_CONFIG, MemRegion, VringAddr, VringFd, VringState,
};
pub use request::Request;
pub(crate) use request::config;
