//! A virtio device of our VMM, a disk or a network interface, whose rings another process serves
//! over vhost-user (the *front end's* side of QEMU's `docs/interop/vhost-user.rst`): the
//! counterpart of `vhost-export`.
//!
//! ```text
//! guest's driver ── rings in shared guest RAM ──────────────────────▶ back end (exitless serve, qemu-storage-daemon, SPDK)
//!       │ doorbell ─▶ KVM ─▶ kick eventfd ─────────────────────────────▶ │
//!       ◀── MSI ── KVM ◀── call eventfd (irqfd) ◀────────────────────────┘
//! registers ─▶ owner ─▶ Import (vio::RemoteDevice) ─ orders ─▶ link thread ─ socket ─▶ back end's session
//! ```
//! The data path does not come here at all: neither the VMM's threads nor its sidecore see a
//! request. Here is the control path. Reading order: [`Import`] (the owner's handle, never blocks),
//! [`Class`] (differences between disks and networks), `link` (the thread that talks to the back
//! end, and reconnects), `active` (rings, started and stopped), `handshake` (features that a back
//! end must offer), `memory` (shared regions, ring addresses). Requests and their order are
//! [`vhost_user::frontend`]'s.
//!
//! **Behind an IOMMU** the back end sees IOVAs, and asks for the translations that it lacks:
//! ```text
//! back end ─ MISS ─▶ link thread ─ question ─▶ owner: the guest's tables ─ entry, or a refusal ─▶ link thread ─ UPDATE ─▶ back end
//! guest's unmap ─▶ owner: Import::invalidated, held ─ invalidation ─▶ link thread ─ INVALIDATE ─▶ back end ─ answer ─▶ released
//! ```
//! `exchange` (one order for both), `follow` (the owner's part), `iotlb` (the link thread's). Only
//! the owner reads tables, since it alone knows in which order they change. An invalidation is held
//! until the back end has answered; after the owner's limit ([`Import`]'s `hold_overdue`) the
//! connection is closed and the device needs a reset. That a back end has forgotten is its word: it
//! has all of the memory mapped, and what it has mapped cannot be taken from it.
//!
//! **Start.** [`Import::connect`] negotiates once, in the caller's thread, and fails with what is
//! missing. The device then offers what that back end offered, for as long as it lives.
//!
//! **A back end that dies** is connected to again, every 5 ms at first and every 200 ms at last,
//! for ever; the guest sees its requests take longer. Its rings are started where their used index
//! stands. Requests in flight are recorded in the region of INFLIGHT_SHMFD, which is kept here and
//! given to the successor. A back end without one may lose requests: it is used again only if
//! nothing was in flight or everything completes in order (VIRTIO_F_IN_ORDER); otherwise the device
//! needs a reset, and the log has the reason.
//!
//! **The back end is not trusted** with our time: every reply is bounded in size, and all but one
//! have a limit ([`ImportConfig`]). A stop has none: the back end answers it when its last request
//! has ended, and may write guest memory until then. It ends with the answer, the connection, or
//! when the owner gives up, as a machine that ends does. An operation that no limit covers (the
//! close of a descriptor of the back end that is slow to close) blocks the link thread, hence its
//! own device, and no other thread. The back end is trusted with guest memory, as vhost-user is
//! built: it maps all of it.
//!
//! **Several pairs** of a network device bring a control queue, which the owner serves
//! ([`vio::Remote`]). The back end receives its result alone: rings of pairs that the driver does
//! not use are disabled.
//!
//! **Left out:** packed rings (where a ring stands after a crash cannot be read from guest memory),
//! other commands of a control queue, a configuration that changes at run time, migration. None of
//! them is offered to the guest.
#![forbid(unsafe_code)]

mod active;
mod class;
mod config;
mod error;
mod exchange;
mod follow;
mod handshake;
mod import;
mod iotlb;
mod kernel;
mod link;
mod memory;
mod reconnect;
mod shared;
#[cfg(test)]
mod tests;

pub use class::{Class, NetIdentity};
pub use config::{ImportConfig, KernelConfig};
pub use error::ImportError;
pub use import::Import;
pub use kernel::{KernelBackEnd, KernelRing};
