//! A virtio device served over vhost-user to any VMM: socket, session, guest memory and rings of
//! one device, as one [`Poller`](sidecore::Poller) of a sidecore.
//!
//! ```text
//! listener ─ accept ─▶ Peer: socket ─▶ vhost_user::Session ─▶ Event ──▶ memory (ForeignRam), queues, inflight region
//!                                                                           │
//! guest's rings ── probe fires ──▶ Export::poll ─▶ Device::visit ◀────────┘ ─▶ calls (eventfds)
//! ```
//! Reading order: [`Export`] (the poller of a sidecore), `peer` (one connection, from accept to its
//! end), `events` (requests of the session), `memory` (regions, ring addresses), `iotlb`
//! (translations), `queue` (kick, call, coalescing), `journal` (the inflight region).
//!
//! **One device, one socket, one front end at a time.** A second one that connects is turned away
//! by closing its connection. When a front end goes, its requests in flight are drained, then
//! cancelled, before its memory is unmapped; one that connects meanwhile waits in the listener's
//! queue, unless a request cannot be cancelled either.
//!
//! A connection for which the process has no descriptor left is closed as well, by means of one
//! that is kept for that (`spare`).
//!
//! **Drivers come and go on one connection.** The device begins with the features acknowledged when
//! its first ring starts, and is reset when its last one stops, so a driver finds it whole whatever
//! the one before did.
//!
//! **Waits.** Stopping a ring, changing memory, resetting: each waits for requests in flight
//! first, without a limit, because slow storage is no fault of the guest; the log says so after a
//! second. It is a state of the peer (`Task`), never a loop: other devices go on, the front end's
//! further messages wait in its socket, its disconnection is noticed, and the core may sleep.
//! Requests that end meanwhile are published to the driver, all of them before GET_VRING_BASE is
//! answered. Only at the end of a connection are requests cancelled, if they can be.
//!
//! **A move to another core** waits for requests in flight too, and the device is served meanwhile,
//! but for short pauses (`core_move`).
//!
//! **Memory that may be absent** ([`RegionMemory`]). A ring whose memory is not there yet starts
//! when it is; afterwards its queue parks on a ticket, and other queues go on. A ticket ends by a
//! message; that of a ring or a connection that has gone meanwhile, or of memory that was replaced,
//! is forgotten.
//!
//! **The front end is not trusted.** `vhost-user` checks its messages, `guest-mem` its memory (also
//! when the file shrinks later), `vio` its rings. Here: descriptors are checked to be of harmless
//! kinds before any use, and are closed on other threads (`deferred_drop`); kicks must be
//! eventfds, calls those or sockets, and neither is ever waited for; a broken ring ends in the
//! device's needs-reset state, which is signalled on the error descriptor; a lost page ends the
//! connection; one that does not read its replies is not read from; kicks for nothing are muted;
//! lines of log are bounded (`log`). All of it costs the front end's own share of the core.
//! `docs/threat-model.md` has the claims with their tests, and what remains.
//!
//! **Behind a vIOMMU** (`iotlb`): addresses are IOVAs once ACCESS_PLATFORM is acknowledged,
//! translated by a [`DeviceTlb`](guest_mem::DeviceTlb). A miss parks the queue that met it; an
//! invalidation is answered when nothing that it covers is in use. ACCESS_PLATFORM is offered to
//! front ends that have acknowledged REPLY_ACK and BACKEND_REQ.
//!
//! **Left out:** dirty logging for migration. Its protocol feature is not offered.
#![forbid(unsafe_code)]

mod config;
mod core_move;
mod deferred_drop;
mod events;
mod export;
mod iotlb;
mod journal;
mod log;
mod memory;
mod peer;
mod probe;
mod queue;
mod spare;

pub use config::{ExportConfig, ExportStats};
pub use export::{Export, ExportMessage};
pub use memory::RegionMemory;
pub use peer::has_inflight_regions;
pub use probe::RingProbe;
