//! A vhost-user-blk front end without a VM: the guest's driver and the VMM's half of the protocol
//! in one thread, for loading, checking and measuring block servers.
//!
//! Memory, rings, connection, histograms and the server in a thread are [`vhost_client`]'s, under
//! their names here too.
//!
//! Reading order: [`layout`] and [`queue`] (block requests in slots), [`client`] (negotiation,
//! restart), then what is done with them: [`load`] and [`mod@drive`] (measuring), [`stats`]
//! (results); [`verify`] with [`checked`], [`verdict`], [`journal`] and [`stamp`]
//! (checking, across restarts of the server); this client's own [`ceiling`].
//! The program `vhost-blk` and the comparison of servers are in `bench/serve`.
//!
//! Requests and statuses are this crate's own, from the specification: it is also the oracle
//! of the servers' tests. Only names of feature bits come from `vio`.
//!
//! **The server is not trusted with the result**: what it writes into rings is checked, statuses
//! are counted, and silence is noticed.
//!
//! **Left out:** IOTLB (no vIOMMU in front of this client), dirty logging, live migration.
#![deny(unsafe_code)]

pub mod ceiling;
pub mod checked;
pub mod client;
pub mod drive;
pub mod journal;
pub mod killer;
pub mod layout;
pub mod load;
pub mod queue;
pub mod stamp;
pub mod stats;
pub mod verdict;
pub mod verify;

pub use vhost_client::{hist, host, loopback, memory, process, ring};

pub use client::{Client, Options};
pub use drive::{Run, RunError, drive};
