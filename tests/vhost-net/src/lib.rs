//! A vhost-user-net front end without a VM: the guest's driver and the VMM's half of the protocol
//! in one thread, for loading, checking and measuring network servers.
//!
//! Reading order: [`frame`] (stamps and sums), [`layout`] (where rings and buffers lie), [`queue`]
//! (transmit and receive queues), [`client`] (connection, negotiation, pairs), [`load`] and
//! [`mod@drive`] (measuring), [`account`] (which frames arrived), [`outcome`] (results); [`frames`]
//! (single ones, for tests of what is behind a device). This client's own [`ceiling`] is measured
//! against a server in a thread. Memory, rings and connection are [`vhost_client`]'s. The program
//! and the comparison of servers are in `bench/net`.
//!
//! **How a frame goes.** Each transmit queue numbers its frames. A frame carries the queue's
//! number, its own, the time, and one in [`frame::CHECK_EVERY`] a sum of all its bytes, fresh ones.
//! The receiver, wherever it is among the ports of one [`Driver`], looks each frame up in its
//! sender's account: lost, late, duplicate and forged ones are counted apart from those that
//! arrived. A frame is transmitted from a buffer of its own, which is stamped again only when the
//! server has returned it.
//!
//! **The server is not trusted with the result**: what it writes into rings, headers and lengths is
//! checked, and only frames that the receiver saw are counted as received.
//!
//! Cost: a frame costs this client a few tens of nanoseconds; [`ceiling`] tells how many on the
//! machine at hand. Bursts are of 32.
//!
//! **Left out:** the control queue (front ends of VMMs serve it themselves), IOTLB, offloads but
//! for frames made by the caller ([`drive::Content::Fixed`]), restarts of the server.
#![forbid(unsafe_code)]

pub mod account;
pub mod ceiling;
pub mod client;
pub mod drive;
pub mod frame;
pub mod frames;
pub mod layout;
pub mod load;
pub mod outcome;
pub mod queue;
mod tally;

pub use client::{Client, Options};
pub use drive::{Driver, PortSpec};
pub use vhost_client::{hist, host, loopback, memory, process, ring};
