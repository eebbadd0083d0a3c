//! Parts of vhost-user front ends without a VM: the guest's memory, the driver's side of rings, the
//! connection, histograms, and the costs of a server.
//!
//! Reading order: [`memory`] (the guest's memory), [`ring`] (driver's side, split and packed),
//! [`areas`] (where rings lie), [`notifiers`] (a ring's two eventfds), [`link`] (connection and
//! negotiation); [`hist`] (latencies), [`host`] (CPUs and priority), [`process`] (processor time
//! and memory of a server), [`server`] (one as a child process). [`loopback`] is a server in a
//! thread, for tests and for a client's own ceiling; [`naive`] the device's side of rings for it,
//! from the specification and without any haste.
//!
//! The clients are `vhost-blk` and `vhost-net`. Rings are this crate's own, from the specification:
//! it is also the oracle of the servers' tests. Only names of feature bits come from `vio`.
//!
//! **The server is not trusted with the result**: what it writes into rings is checked.
//!
//! **Invariant: this crate does not know about** block requests and network frames.
//!
//! **Left out:** IOTLB (no vIOMMU in front of these clients), dirty logging, live migration.
#![deny(unsafe_code)]

pub mod areas;
pub mod hist;
pub mod host;
pub mod link;
pub mod loopback;
pub mod memory;
pub mod naive;
pub mod notifiers;
pub mod process;
pub mod ring;
pub mod server;
