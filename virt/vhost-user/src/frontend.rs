//! The front end's side: requests and their replies over one socket, in the order that back ends expect, which is QEMU's.
//!
//! ```text
//! Connection::open ─▶ negotiate ─▶ config ─▶ share_memory ─▶ set_features ─▶ give_inflight ─▶ start_rings … stop_ring
//! ```
//! A [`Connection`] is one socket, from its opening to its end. What outlives it (the memory, the rings' places and descriptors,
//! the [`InflightRegion`]) is its user's, who says it all again over the next one. Replies are read by [`Reply::decode`].

mod connection;
mod error;
mod reply;
mod setup;

pub use connection::Connection;
pub use error::CallError;
pub use reply::{Reply, expects_reply};
pub use setup::{InflightRegion, Offer, Ring};
