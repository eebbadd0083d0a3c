//! Host-to-guest half of ELVIS (A. Gordon et al., *Towards Exitless and Efficient Paravirtual I/O*,
//! SYSTOR 2012; Amit's thesis, §3.9), and no instruction of it: a virtio block function of a
//! hypervisor without a VMM. A core of the host's polls its ring and completes by an interrupt of
//! the guest's own, so that neither a request nor its completion exits.
//!
//! **Scope.** Virtio 1.2 over PCI (§4.1, modern), one queue, a disk in memory (§5.2).
//!
//! * [`function`]: configuration space, and the layout of the BAR.
//! * [`registers`]: the common configuration structure.
//! * [`messages`]: the MSI-X table, as the guest wrote it.
//! * [`request`]: a block request, from its header to its status.
//! * [`poller`]: the I/O core's own: it takes [`Settings`](poller::Settings), and serves.
//!
//! **Flow.** The core that runs the guest owns function, registers and messages, and makes settings
//! of them; the I/O core owns the queue, and the disk. Settings go from one to the other as a
//! whole, and are acknowledged: until then the guest is not entered, so that after a reset, or a
//! mask, no former request or interrupt takes effect any more.
//!
//! **Bounds.** A poll serves one request, of at most [`request::TRANSFER_MAX`] bytes in at most
//! [`poller::QUEUE_MAX`] pieces. Every address is checked by the [`Memory`](virtqueue::Memory). A
//! ring that breaks the protocol stops its queue until a reset.
//!
//! **Left out.** The interrupt pin and the ISR (a driver uses MSI-X), the configuration access
//! capability (§4.1.4.9), several queues, discard, a persistent disk; the guest-to-host half, which
//! is the polling itself.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod function;
pub mod messages;
pub mod poller;
pub mod registers;
pub mod request;

#[cfg(test)]
mod fake;

/// Vector of an interrupt.
pub type Vector = u8;
