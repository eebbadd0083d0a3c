//! Physical devices in a guest, behind an emulated VT-d unit: DMA confined to what the guest has
//! mapped, and only that memory pinned, so that the rest can be overcommitted.
//!
//! ```text
//! guest's driver ─ registers ─▶ BAR: memory slot, or function ─▶ VFIO device      no exit but for the MSI-X table
//!               ─ PTE, invalidation ─▶ vtd (CAP.CM) ─▶ shadow ─▶ call thread ─▶ VFIO container: pinned, mapped
//!               ◀─ KVM ◀─ eventfd ◀─ interrupt                     └─▶ book, reach ─▶ «is this page in use?» ◀─ pager, balloon
//! ```
//!
//! | module | |
//! |---|---|
//! | [`config`] | configuration space, as the guest sees it |
//! | [`areas`] | which bytes of BARs trap, and which may be memory slots |
//! | [`shadow`] | follows the guest's tables: the difference between them and the book becomes calls |
//! | [`container_mappings`], [`reach`] | what is mapped where; which pages of the guest that makes in use |
//! | [`policy`] | when what the guest has unmapped is unmapped here, and what bounds that |
//! | [`calls`] | the thread that makes a container's calls, in order |
//! | [`function`], [`hardware`] | the device as a function of a machine's owner, over a device behind a trait |
//! | [`vfio_device`] | that device of VFIO |
//!
//! **Who owns what.** All but the call thread is the owner's. A container has one device, since two
//! devices of a guest may be attached to two domains. Memory that is mapped is kept by the mapping
//! ([`vfio::ExternalMap`]), also past the machine's end.
//!
//! **What must hold.** A page is in use from before the call that maps it until after the call that
//! unmaps it has succeeded. An unmap is complete for the guest only when the device does not reach
//! the page, or, under a policy that says so, within its bounds. What the kernel answers is
//! compared with the book. VT-d §6.1 (caching mode), §4.
//!
//! **Left out.** iommufd (no stock Debian kernel has it), the legacy interrupt pin, peer to peer (a
//! BAR in a guest's tables is refused), page requests, dirty tracking, several functions of one
//! group.
//!
//! UNSAFETY: denied here and opted into by `pin`, which promises that guest memory stays mapped.
#![deny(unsafe_code)]

pub mod areas;
pub mod calls;
pub mod config;
pub mod container_mappings;
pub mod function;
pub mod hardware;
mod pin;
pub mod policy;
pub mod reach;
pub mod shadow;
mod unreached;
pub mod vfio_device;

pub use pin::Pinned;
