//! The vhost-user protocol without its rings: the messages between a VMM (the *front end*) and a
//! process that serves its virtqueues (the *back end*), and the state of each side.
//!
//! Follows QEMU's `docs/interop/vhost-user.rst` ("vhost-user protocol"), whose words are used here;
//! its numbers are in the machine's byte order.
//!
//! ```text
//! socket ─▶ channel::Receiver ─▶ Message ─▶ backend::Session ─▶ Step::Event ─▶ the daemon acts
//!                                              │                                   │
//! socket ◀─ channel::Sender ◀──── Message ◀────┴──── Session::finish ◀─────────────┘
//! ```
//! Reading order: [`wire`] (layouts, [`wire::Request`]), [`channel`] (bytes and descriptors, never
//! blocking), [`backend`] (the session: order, values, negotiation), [`frontend`] (the other side:
//! a socket whose user waits for replies, and the order of requests); apart from them, [`inflight`]
//! (what a back end keeps for its successor, in case it is killed).
//!
//! **Caller.** One thread per connection at a time, which may be a sidecore: but for a front end's
//! requests nothing blocks, nothing locks, and one call does a bounded amount of work. The
//! session does no I/O at all, so a sequence of messages always gives the same replies and events.
//!
//! **The peer is not trusted.** Sizes are bounded before memory is taken, descriptors are owned
//! from the moment they arrive and closed with the message that is refused, each value is checked
//! once, and every error is a typed value that names the request and the field. A refusal is
//! reported to the front end where the protocol has a way to; where it has none, the session ends.
//!
//! **Left out:** rings and memory (mapping, translation), devices, dirty logging, post-copy
//! migration, the device's status, RARP, MTU, in-band notifications, crypto, GPU and cross-endian
//! requests. None of them is offered, and a front end that sends them all the same is refused.
#![forbid(unsafe_code)]

pub mod backend;
mod chain;
pub mod channel;
pub mod frontend;
pub mod inflight;
pub mod wire;

pub use chain::chain;
