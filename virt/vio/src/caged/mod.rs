//! A device whose model is in another process, which sees the bytes of its requests and nothing
//! else of the guest.
//!
//! A bug in an emulated device goes around any IOMMU as long as the device model has the guest's
//! memory in its address space. Here it does not: this side keeps rings, chains, addresses and the
//! view of memory, copies what a chain gives the device to read into a slot of a shared area
//! ([`worker_area`]), and copies what the device wrote back when it has answered, *translating
//! again*. What the driver has unmapped meanwhile is refused by the IOMMU, as it is to hardware.
//!
//! ```text
//! serve    ring ─ chain ─ View: copy ─▶ slot ─ submit ─▶ ┐
//! complete                              publish, kick ─▶ │ worker process: parse, back end
//! complete                 next_answer, checked ◀─────── ┘
//! finish   used ◀─ chain ◀─ View: copy ◀─ slot
//! ```
//! *No lease is held*: an unmap never waits for the worker, nor does a pause. (PVIOMMU, §4.2, maps
//! and unmaps each page of a buffer in the simulator's address space instead. That cut is the page,
//! costs two mappings a request, and leaves the page's other bytes in view.)
//!
//! **The worker is not trusted.** Every word of its answers is checked ([`worker_area::Owner`]);
//! only bytes of the window that it has answered are copied, into the chain's own writable
//! segments. A breach ends it, and the device needs a reset. One that ends by itself is the
//! business of the [`WorkerProcess`]: it fails the device, or starts another worker, which is given
//! everything that was taken and not answered, from its start. Such a request may be carried out
//! twice; it has not been answered, so its driver has ordered nothing behind it.
//!
//! Nothing that this side has given out can be taken back one by one: a reset that has waited too
//! long ends the process, after which nothing of it is in flight.
//!
//! A chain larger than a slot passes through it in windows, in order. Where memory is absent the
//! queue parks, and the step is repeated. Data that fault end the request with the error status; a
//! status that cannot be written leaves nothing to answer with, and the device needs a reset.
//!
//! *Advertised*: what [`Blk`](crate::blk::Blk) advertises over the same disk, but no IN_ORDER.
//! *Not implemented*: rate limits; other classes than disks.
//!
//! Bounds: as many requests as the area has slots. A chain has at most 2,048 segments of 16 bytes,
//! which are kept in one list a request: 4 MiB for 128 slots and a hostile driver, beside the
//! area's 16.5 MiB.

mod class;
mod copy;
mod request;

use std::os::fd::RawFd;

use guest_mem::{KeepAlive, SharedFile};
use worker_area::Owner;

use crate::blk::{BlkConfig, BlkError, BlkFacts, BlkProfile};
use crate::body::Device;
use crate::log_rate_limit::LogRateLimit;
use crate::ring::Chain;
use request::Request;

/// The shared area, on its owner's side.
pub type Area = Owner<SharedFile>;

/// Change of the worker's process.
#[derive(Debug)]
pub enum WorkerEvent {
    /// It has ended: nothing of it is in flight, in the kernel either.
    Ended,
    /// Another one has begun, over this area, of the same shape, and shows the same disk.
    Started(Area),
    /// There will be no other.
    Gone,
}

/// The worker's process, as the device sees it. No method blocks.
pub trait WorkerProcess: Send {
    /// Wakes it: something was submitted, and it sleeps.
    fn kick(&mut self);

    /// Becomes readable when the worker has answered, if that was asked for, and at each event.
    fn wake_fd(&self) -> RawFd;

    /// Empties it.
    fn drain(&mut self);

    /// Whether there are events. One load.
    fn has_events(&self) -> bool;

    /// Takes the next event.
    fn next_event(&mut self) -> Option<WorkerEvent>;

    /// The worker has answered: if it ends now, that was not for want of a good start.
    fn record_answer(&mut self);

    /// Ends it, and starts another one unless `is_final`. Events follow.
    fn end(&mut self, is_final: bool);
}

/// A block device whose model is in another process.
pub type Caged = Device<CagedClass>;

/// Class of devices whose model is in another process: that side of them that has the guest's
/// memory.
pub struct CagedClass {
    profile: BlkProfile,
    process: Box<dyn WorkerProcess>,
    /// `None` while there is no worker.
    area: Option<Area>,
    /// There will be no worker any more.
    is_gone: bool,
    requests: Vec<Request>,
    free: Vec<u32>,
    /// Requests that the worker has.
    out: u32,
    features: u64,
    keep: Option<KeepAlive>,
    chain: Chain,
    lines: LogRateLimit,
}

/// The requests of one queue that the worker does not have.
#[derive(Default)]
pub struct CagedQueue {
    /// Those that are over and not in the used ring.
    ended: std::collections::VecDeque<u32>,
    /// Those of which a window is to be given to the worker.
    continuing: std::collections::VecDeque<u32>,
    /// The last take found no free slot.
    waits_for_slot: bool,
}

impl Caged {
    /// A device whose worker, in `process`, serves `area` and has told these facts of its disk.
    ///
    /// # Errors
    /// No device can have that configuration over such a disk.
    pub fn new(
        config: &BlkConfig,
        facts: BlkFacts,
        area: Area,
        process: Box<dyn WorkerProcess>,
    ) -> Result<Self, BlkError> {
        let facts = BlkFacts {
            // Windows of one request end behind requests that came later.
            completes_in_order: false,
            ..facts
        };
        let profile = BlkProfile::new(config, &facts)?;
        let slots = area.shape().slots();
        Ok(Self::of(CagedClass {
            profile,
            process,
            area: Some(area),
            is_gone: false,
            requests: (0..slots).map(|_| Request::default()).collect(),
            free: (0..slots).rev().collect(),
            out: 0,
            features: 0,
            keep: None,
            chain: Chain::new(),
            lines: LogRateLimit::default(),
        }))
    }
}

#[cfg(test)]
mod tests;
