//! A paravirtual IOMMU: virtio-iommu (virtio 1.3 §5.13), polled like any other virtio device.
//!
//! ```text
//! guest driver ─ request queue ─▶ IommuFunction ─ Request ─▶ PvIommu ◀─ translate ─ every other function's View
//!                                  (IommuClass)  ◀─ status ─  domains
//! guest driver ◀── event queue ──  faults        ◀─ refused ─
//! ```
//! Two halves, which only the machine's owner connects:
//!
//! * [`PvIommu`] is the *unit*: domains, what is mapped in them ([`mappings`]) and which endpoint
//!   is attached where; it translates for all other functions. It takes [`Request`]s as commands,
//!   in their order.
//! * [`IommuFunction`] is the *function*: a virtio device of type 23 whose rings are reached past
//!   the unit. It parses requests ([`wire`]), gives them to the unit, and shows the statuses;
//!   faults go to the event queue.
//!
//! **Advertised**: INPUT_RANGE (48 bits), DOMAIN_RANGE (16 bits), MAP_UNMAP, PROBE, MMIO,
//! BYPASS_CONFIG; EVENT_IDX, VERSION_1, RING_PACKED. *Not offered*: INDIRECT_DESC, since drivers
//! allocate a table for each request; ACCESS_PLATFORM, since nothing translates for the IOMMU
//! itself; BYPASS, which BYPASS_CONFIG supersedes.
//!
//! **When a request is answered.** MAP at once. UNMAP, DETACH, and ATTACH to another domain when no
//! device's access that began before them can reach what they took away: the leases that the change
//! made stale, and no others, have ended, and whoever follows the mappings has let go. Requests
//! behind one that waits go on. A wait that lasts for the drain limit has the requests of those
//! devices cancelled.
//!
//! **Bounds.** A guest decides how many domains and mappings there are: up to
//! [`Config::max_domains`] and [`Config::max_mappings`], beyond which it reads NOMEM. One that
//! takes many mappings away at once is served a budget at a time ([`mod@unit`]); what comes behind
//! waits for that. At most [`MAX_REFUSALS`] faults wait for event buffers; those beyond are
//! counted.
//!
//! **Hints.** A MAP says which memory devices are about to reach. Pages that may be absent are
//! asked for then ([`mod@unit::hints`]), and windows of 1 MiB around others are populated by a
//! thread that helps ([`populate`]), so that the thread which serves the devices meets no page
//! fault there. Each is a choice; no answer waits for either, and both are bounded.
//!
//! **Bypass** is off at the start: an endpoint that nobody attached reaches nothing.
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
