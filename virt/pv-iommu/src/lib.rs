//! Paravirtual IOMMU: virtio-iommu (virtio 1.3 §5.13), polled like any other virtio device.
//!
//! ```text
//! guest driver ─ request queue ─▶ IommuFunction ─ Request ─▶ PvIommu ◀─ translate ─ every other function's View
//!                                  (IommuClass)  ◀─ status ─  domains
//! guest driver ◀── event queue ──  faults        ◀─ refused ─
//! ```
//! Two halves, which only the machine's owner connects:
//!
//! * [`PvIommu`] is the *unit*: domains, their mappings ([`mappings`]) and the attachments of
//!   endpoints; it translates for all other functions. It executes [`Request`]s as commands, in
//!   their order.
//! * [`IommuFunction`] is the *function*: a virtio device of type 23 whose rings are accessed
//!   without translation. It parses requests ([`wire`]), passes them to the unit, and publishes the
//!   statuses; faults go to the event queue.
//!
//! **Advertised**: INPUT_RANGE (48 bits), DOMAIN_RANGE (16 bits), MAP_UNMAP, PROBE, MMIO,
//! BYPASS_CONFIG; EVENT_IDX, VERSION_1, RING_PACKED. *Not offered*: INDIRECT_DESC, since drivers
//! allocate a table for each request; ACCESS_PLATFORM, since nothing translates for the IOMMU
//! itself; BYPASS, which BYPASS_CONFIG supersedes.
//!
//! **Completion of requests.** MAP is answered at once. UNMAP, DETACH, and ATTACH to another domain
//! are answered when no device's access that began before them can reach the removed mappings: the
//! leases that the change made stale, and no others, have ended, and the functions that follow the
//! mappings (assigned devices) have released the invalidation. Requests behind one that waits are
//! executed meanwhile. If a wait lasts for the drain limit, the requests of those devices are
//! cancelled.
//!
//! **Bounds.** A guest decides the number of domains and mappings: up to [`Config::max_domains`]
//! and [`Config::max_mappings`], beyond which it reads NOMEM. A request that removes many mappings
//! is executed a budget at a time ([`mod@unit`]); requests behind it wait for that. At most
//! [`MAX_REFUSALS`] faults wait for event buffers; those beyond are counted.
//!
//! **Hints.** A MAP names memory that devices are about to reach. Pages that may be absent are
//! requested then ([`mod@unit::hints`]), and windows of 1 MiB around others are populated by a
//! helper thread ([`populate`]), so that the thread which serves the devices takes no page fault
//! there. Each is optional; no answer waits for either, and both are bounded.
//!
//! **Bypass** is off at the start: an endpoint that is not attached reaches nothing.
//!
//! **Left out**: page tables of the guest's (ATTACH_TABLE), several request queues, and making a
//! device from its saved state (the unit's: [`unit::saved`]).
#![forbid(unsafe_code)]

pub mod class;
pub mod function;
pub mod mappings;
pub mod populate;
pub mod unit;
pub mod wire;

pub use class::{Iommu, IommuClass, MAX_REFUSALS, SavedIommu};
pub use function::IommuFunction;
pub use unit::hints::{HintCounts, Hints};
pub use unit::{Config, PvIommu, Stats};
pub use wire::{Request, Status};
