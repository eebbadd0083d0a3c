//! Assignment of physical devices to a guest, behind an emulated VT-d unit: DMA is confined to the
//! memory that the guest has mapped, and only that memory is pinned, so that the rest can be
//! overcommitted.
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
//! | [`areas`] | the bytes of BARs that trap, and those that may be memory slots |
//! | [`shadow`] | follows the guest's tables: the difference between them and the book becomes calls |
//! | [`container_mappings`], [`reach`] | the mappings; the pages of the guest that they keep in use |
//! | [`policy`] | the time of the physical unmapping after the guest's, and its bounds |
//! | [`calls`] | the thread that makes a container's calls, in order |
//! | [`function`], [`hardware`] | the device as a function of a machine's owner, over a device behind a trait |
//! | [`vfio_device`] | that device of VFIO |
//!
//! **Ownership.** All but the call thread belongs to the machine's owner. A container has one
//! device, since two devices of a guest may be attached to two domains. A mapping keeps its memory
//! ([`vfio::ExternalMap`]), also past the machine's end.
//!
//! **Invariants.** A page is in use from before the call that maps it until after the call that
//! unmaps it has succeeded. An unmap is complete for the guest only when the device does not reach
//! the page, or, under a policy that permits it, within the policy's bounds. Results of the kernel
//! are compared with the book. VT-d §6.1 (caching mode), §4.
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
