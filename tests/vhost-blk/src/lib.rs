//! A vhost-user-blk front end without a VM: the guest's driver and the VMM's half of the protocol
//! in one thread, for loading, checking and measuring block servers.
//!
//! Reading order: [`memory`] (the guest's memory), [`ring`] (driver's side, split and packed),
//! [`layout`] and [`queue`] (block requests in slots), [`client`] (connection, negotiation,
//! restart), then what is done with them: [`load`] and [`mod@drive`] (measuring), [`stats`] and
//! [`hist`] (results); [`verify`] with [`checked`], [`verdict`], [`journal`] and [`stamp`]
//! (checking, across restarts of the server). [`loopback`] is a server for tests and for this
//! client's own [`ceiling`]; [`host`] has CPUs and what they cost, [`process`] what a server costs.
//! The program `vhost-blk` and the comparison of servers are in `bench/serve`.
//!
//! Rings, requests and statuses are this crate's own, from the specification: it is also the oracle
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
pub mod hist;
pub mod host;
pub mod journal;
pub mod killer;
pub mod layout;
pub mod load;
pub mod loopback;
pub mod memory;
pub mod process;
pub mod queue;
pub mod ring;
pub mod stamp;
pub mod stats;
pub mod verdict;
pub mod verify;

pub use client::{Client, Options};
pub use drive::{Run, RunError, drive};
