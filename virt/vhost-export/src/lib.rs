//! A virtio block device served over vhost-user to any VMM: socket, session, guest memory and rings of one device,
//! as one [`Poller`](sidecore::Poller) of a sidecore.
//!
//! ```text
//! listener ─ accept ─▶ Peer: socket ─▶ vhost_user::Session ─▶ Event ──▶ memory (ForeignRam), queues, inflight region
//!                                                                           │
//! guest's rings ── probe fires ──▶ Export::poll ─▶ vio::Blk::visit ◀────────┘ ─▶ calls (eventfds)
//! ```
//! Reading order: [`Export`] (what a sidecore polls), `peer` (one connection, from accept to its end), `events` (what
//! the session asks for), `memory` (regions, ring addresses), `queue` (kick, call, coalescing), `journal` (the inflight region).
//!
//! **One device, one socket, one front end at a time.** A second one that connects is turned away by closing its connection.
//! When a front end goes, its requests in flight are drained, then cancelled, before its memory is unmapped; then the
//! listener accepts the next.
//!
//! **What waits.** Stopping a ring, changing memory, resetting: each drains what is in flight first. It is a state of the
//! peer (`Task`), never a loop; the session takes no message meanwhile.
//!
//! **The front end is not trusted.** `vhost-user` checks its messages, `guest-mem` its memory (also when the file shrinks
//! later), `vio` its rings. Here: kick and call must be eventfds; a broken ring ends in the device's needs-reset state, which
//! is logged once and signalled on the error descriptor; a lost page ends the connection. All of it costs the
//! front end's own share of the core.
//!
//! **Left out:** devices behind a vIOMMU (IOTLB messages), dirty logging for migration, network devices. Their
//! protocol features are not offered.
#![forbid(unsafe_code)]

mod closer;
mod events;
mod export;
mod journal;
mod log;
mod memory;
mod peer;
mod probe;
mod queue;

pub use export::{Export, ExportConfig, ExportStats};
pub use probe::RingProbe;
