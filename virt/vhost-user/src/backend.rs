//! The session of a back end: which messages make sense when, with which values.
//!
//! [`Session::handle`] takes a message and gives a [`Step`]: a reply, or nothing, or an [`Event`]
//! for the daemon. An event is not yet true: the daemon does what it says (maps memory, starts a
//! ring) and tells the outcome to [`Session::finish`], which gives the reply. Only then the
//! session's own state changes, so what the daemon refuses has never happened. While an event
//! waits, no further message is taken: the protocol is strictly ordered, and draining a ring may
//! take long.
//!
//! **Refusals.** With REPLY_ACK and need_reply they are told, and the session goes on; so it does
//! where the reply itself can say no (GET_CONFIG, GET_INFLIGHT_FD, IOTLB_MSG). A refusal that
//! cannot be told is
//! [`Fatal`]: a front end that believes in a ring we do not serve has a disk that hangs.
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
