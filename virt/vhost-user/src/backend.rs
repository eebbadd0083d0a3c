//! The session of a back end: the messages that are valid in each state, and their values.
//!
//! [`Session::handle`] takes a message and returns a [`Step`]: a reply, or nothing, or an [`Event`]
//! for the daemon. An event has not taken effect yet: the daemon carries it out (maps memory,
//! starts a ring) and passes the outcome to [`Session::finish`], which returns the reply. Only then
//! the session's own state changes, so an event that the daemon refuses leaves no trace. While an
//! event is pending, no further message is taken: the protocol is strictly ordered, and draining a
//! ring may take long.
//!
//! **Refusals.** With REPLY_ACK and need_reply a refusal is sent to the front end, and the session
//! goes on; so it does where the reply itself can express an error (GET_CONFIG, GET_INFLIGHT_FD,
//! IOTLB_MSG). A refusal that cannot be sent is [`Fatal`]: if a front end took a ring as served
//! that is not, its disk would hang.
//!
//! **Rings.** A ring starts at SET_VRING_KICK (a kick descriptor counts as a kick: work may be
//! queued) and stops at GET_VRING_BASE. It is *enabled* by SET_VRING_ENABLE, or always where bit 30
//! was never acknowledged. Kick, call and err descriptors can be replaced at any time, and the last
//! two outlive a stop. Addresses are checked for alignment and overflow; whether they lie in memory
//! is the daemon's to find out.
//!
//! **Bound:** descriptors kept are those of the regions, three per ring, and those in the waiting
//! event.

mod config;
mod error;
mod event;
mod memory;
mod reply;
mod ring;
mod ring_requests;
mod session;
#[cfg(test)]
mod tests;

pub use config::{Config, ConfigError, MAX_QUEUES, MAX_RING_SIZE, SUPPORTED};
pub use error::{Fatal, Refusal, RequestError};
pub use event::{Answer, Event, Step};
pub use memory::Region;
pub use ring::{Kick, RingBase, RingConfig, RingLayout};
pub use session::Session;

use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A descriptor that the session and the daemon both hold; closed with the last of them.
pub type SharedFd = Arc<OwnedFd>;
