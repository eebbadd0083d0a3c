//! virtio-balloon (virtio 1.2 §5.5), as a polled device: the guest gives pages away, takes them
//! back, and says which are free.
//!
//! *Advertised*: STATS_VQ, DEFLATE_ON_OOM, PAGE_REPORTING and ACCESS_PLATFORM (these three unless
//! configured away), INDIRECT_DESC, EVENT_IDX, VERSION_1. *Not implemented*: MUST_TELL_HOST,
//! FREE_PAGE_HINT (for migration), PAGE_POISON; the legacy interface.
//!
//! **Pages.** Inflate and deflate queues carry arrays of page numbers. Those are guest-physical,
//! whatever IOMMU stands before the device, while its rings and buffers are reached through
//! [`Dma`](guest_mem::Dma) like any other's. A report is a chain of device-writable buffers that
//! *are* the free pages: their addresses are IOVAs, which the IOMMU must allow the device to write.
//! [`Dma::locate`](guest_mem::Dma::locate) says where they lie without touching them, so nothing is
//! brought in only to be dropped. What is not RAM, or not a whole page, is left out and counted;
//! the rest goes to a [`BalloonIo`] in batches.
//!
//! **Ownership of pages.** Without MUST_TELL_HOST a driver may use pages of the balloon before the
//! device has seen the announcement, and it uses reported ones without any. So the device may
//! change the content of a page only between seeing the page named and using the buffer (§5.5.6.2,
//! §5.5.6.7.2). [`BalloonIo`] has either dropped a page before that or answers a ticket, and until
//! that is done the buffer is not used and the device counts as in flight: neither a pause nor a
//! reset is over while pages are being dropped. (No lease is held meanwhile: what a driver unmaps
//! before its report is used may still be dropped. Page numbers reach all of the guest anyway.)
//! MUST_TELL_HOST would gain nothing where memory comes back by itself.
//!
//! **Content of reported pages.** Without PAGE_POISON the driver must treat reported pages as
//! uninitialized (§5.5.6.7.1). The device promises no more than this: each page holds what it held
//! or zeroes, and from the used buffer on only the guest's own stores change that; it never holds
//! what is not the guest's. A driver that expects free pages to keep a value must not accept
//! PAGE_REPORTING then (§5.5.3.1): Linux with `init_on_free` or page poisoning does not.
//!
//! **Statistics.** The device asks by using the one buffer that the driver keeps in the queue; the
//! next one holds the answer (§5.5.6.3). It is read when it comes and *left in the ring* until the
//! next [`Balloon::request_statistics`]. So nothing is in flight meanwhile, and a device that
//! resumes from a saved state reads it again.
//!
//! **Numbers of queues.** The specification lists inflateq 0, deflateq 1, statsq 2, free_page_vq 3,
//! reporting_vq 4, of which three "only exist" with their feature. Linux's driver and QEMU's device
//! take that to mean that what does not exist has no number, and what follows moves up. So does
//! this device, by the features that were *accepted*, as Linux does: reporting is queue 3, and
//! queue 2 without statistics. A driver that counts by the table alone does not find it.
//!
//! **Hostile drivers.** Whatever a chain names is advice that the device may ignore, so a chain
//! that makes no sense is used like any other, and what is wrong with it is ignored and counted:
//! buffers of the wrong direction, arrays that are no multiple of 4 bytes, numbers outside RAM,
//! buffers that the IOMMU refuses. Only breaking the rules of rings ends in DEVICE_NEEDS_RESET.
//! Bounds: a chain is worked off in steps of up to 1 KiB of numbers or [`MAX_RANGES`] looks at
//! buffers, and of [`MAX_RANGES`] ranges and less than 4 MiB of pages; each step is charged to the
//! visit. Between two steps nothing is kept of the chain but how far it was worked off: it is
//! walked again.
//!
//! **Waits.** Pending anywhere repeats the step: numbers are read again, [`BalloonIo`] is asked
//! again, earlier steps stay done. Chains behind one that waits are not looked at meanwhile, since
//! drivers have one at a time in each queue.
//!
//! **IOMMUs and Linux.** Linux's driver never accepts ACCESS_PLATFORM (`virtballoon_validate`), so
//! all its addresses are guest-physical. The device uses whatever view it is lent: behind a unit
//! that translates, its rings would fault. Its function must lie outside such a unit's scope, and
//! then offers no ACCESS_PLATFORM. Nor should a guest give a balloon to its user space: it can name
//! any page.
//!
//! Reading order: this file (the parts of a balloon, and its owner's interface), `class` (the hooks
//! for the body), `take` (steps of a chain), `pages`, `statistics`.

mod class;
mod pages;
mod statistics;
mod take;

use guest_mem::{Gpa, Ticket};
use serde::{Deserialize, Serialize};

pub use pages::{MAX_RANGES, PageRange};
pub use statistics::Statistics;

use crate::body::{Device, DeviceClass, ServedQueue};
use crate::queue_config::{feature, is_queue_size};
use crate::ring::Chain;
use crate::saved::SavedState;
use pages::{Batch, Ram};

/// Feature bits (§5.5.3).
pub mod balloon_feature {
    /// VIRTIO_BALLOON_F_STATS_VQ (1): there is a queue for memory statistics.
    pub const STATS_VQ: u64 = 1 << 1;
    /// VIRTIO_BALLOON_F_DEFLATE_ON_OOM (2): the driver may take pages back when the guest has no
    /// others.
    pub const DEFLATE_ON_OOM: u64 = 1 << 2;
    /// VIRTIO_BALLOON_F_PAGE_REPORTING (5): there is a queue for reports of free pages.
    pub const PAGE_REPORTING: u64 = 1 << 5;
}

/// Back end of a balloon, which may discard pages that the guest does not need. Never blocks. All
/// calls come from the device's thread.
///
/// Ranges of one call may overlap. The back end may leave any page as it is, such as one that
/// another device is using.
///
/// `Err`: pages are being discarded, and the ticket completes when that is over. Tickets are
/// numbers of the same kind as those of absent memory, since
/// [`QueueDevice::ticket_done`](crate::QueueDevice::ticket_done) reports both: the pager hands out
/// both. Then the call is repeated, or another is made where the guest has changed its buffer; for
/// pages that have been discarded the answer is `Ok`.
pub trait BalloonIo: Send {
    /// The guest has put these pages into the balloon, and announces, if late, when it uses them
    /// again. Their contents may be discarded until this returns `Ok`, and no longer; a page that
    /// is accessed again holds its former content or zeroes.
    fn inflated(&mut self, pages: &[PageRange]) -> Result<(), Ticket>;

    /// The guest takes these pages out of the balloon. It may have used them for long, or never
    /// have put them in.
    fn deflated(&mut self, pages: &[PageRange]);

    /// These pages are free at the moment. As [`inflated`](Self::inflated), but the guest uses them
    /// again without an announcement.
    fn reported(&mut self, pages: &[PageRange]) -> Result<(), Ticket>;

    /// The driver is gone: no page is in the balloon.
    fn reset(&mut self);
}

/// Configuration of a balloon.
#[derive(Clone, Copy, Debug)]
pub struct BalloonConfig {
    /// Entries of each queue at most, a power of two from 32 to 1024: Linux reports 32 ranges at a
    /// time, and does not start with less.
    pub queue_size: u16,
    /// Whether the guest may take pages back when it has no others. Linux then counts them as
    /// memory that it has, and takes them back rather than kill a program.
    pub deflate_on_oom: bool,
    /// Whether the guest is asked to report free pages.
    pub reporting: bool,
    /// Whether packed rings are offered.
    pub packed: bool,
    /// Whether ACCESS_PLATFORM is offered: not by a balloon that no IOMMU stands before.
    pub access_platform: bool,
}

impl Default for BalloonConfig {
    fn default() -> Self {
        Self {
            queue_size: 128,
            deflate_on_oom: true,
            reporting: true,
            packed: false,
            access_platform: true,
        }
    }
}

/// Reason why a balloon cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BalloonError {
    /// Queue size.
    #[error("a queue has 32 to 1024 entries, a power of two, not {0}")]
    QueueSize(u16),
    /// The list of regions.
    #[error("guest RAM is no sorted list of whole pages")]
    Ram,
}

/// Counters of a balloon since it was made, in pages: those announced, and those ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonCounts {
    /// Pages put into the balloon. A page that was put in twice counts twice, here as below.
    pub inflated: u64,
    /// Pages taken back.
    pub deflated: u64,
    /// Pages reported as free.
    pub reported: u64,
    /// Pages named that are not RAM.
    pub outside: u64,
    /// Statistics read.
    pub statistics: u64,
}

/// Role of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Inflate,
    Deflate,
    Statistics,
    Report,
}

/// The queues of a driver that accepted `features`, in the order of their numbers.
fn roles(features: u64) -> impl Iterator<Item = Role> {
    let has = move |bit| features & bit != 0;
    let optional = [
        (Role::Statistics, has(balloon_feature::STATS_VQ)),
        (Role::Report, has(balloon_feature::PAGE_REPORTING)),
    ];
    let optional = optional
        .into_iter()
        .filter_map(|(role, exists)| exists.then_some(role));
    [Role::Inflate, Role::Deflate].into_iter().chain(optional)
}

/// Position in the next chain up to which it was processed.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// Bytes of page numbers, or of reported buffers.
    done: u32,
    /// Something of it was ignored.
    is_odd: bool,
}

/// State of one queue of a balloon.
pub struct BalloonQueue {
    role: Role,
    progress: Progress,
    /// The statistics in the next chain were read; it waits to be asked for.
    is_read: bool,
    /// Pages are being dropped until this is done.
    dropping: Option<Ticket>,
}

type Queue = ServedQueue<BalloonQueue>;

/// A virtio memory balloon.
pub type Balloon = Device<BalloonClass>;

/// Class of balloons: the part of the device that is particular to them.
pub struct BalloonClass {
    features: u64,
    queue_sizes: Vec<u16>,
    io: Box<dyn BalloonIo>,
    ram: Ram,
    /// `num_pages`: pages that the balloon is to have.
    target: u32,
    /// `actual`: pages that it has, as the driver says.
    actual: u32,
    /// Number of changes of the target, modulo 256.
    generation: u8,
    /// Reused.
    chain: Chain,
    batch: Batch,
    statistics: Option<Statistics>,
    /// New statistics were asked for.
    wants_statistics: bool,
    counts: BalloonCounts,
}

/// Part of the saved state that only balloons have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedBalloon {
    /// Pages in the balloon, as its driver has written into the configuration space.
    pub actual: u32,
}

impl SavedState for SavedBalloon {
    const TYPE: u16 = BalloonClass::TYPE;
    const VERSION: u32 = 1;
}

impl Balloon {
    /// A balloon of a guest whose RAM lies in these regions, addresses and lengths in bytes; its
    /// pages go to `io`. It is to be empty until [`set_target`](Self::set_target).
    pub fn new(
        config: BalloonConfig,
        ram: &[(Gpa, u64)],
        io: Box<dyn BalloonIo>,
    ) -> Result<Self, BalloonError> {
        let size = config.queue_size;
        if !is_queue_size(size, 32) {
            return Err(BalloonError::QueueSize(size));
        }
        let ram = Ram::new(ram).ok_or(BalloonError::Ram)?;
        let mut features = feature::COMMON & !feature::ACCESS_PLATFORM | balloon_feature::STATS_VQ;
        for (bit, is_offered) in [
            (balloon_feature::DEFLATE_ON_OOM, config.deflate_on_oom),
            (balloon_feature::PAGE_REPORTING, config.reporting),
            (feature::RING_PACKED, config.packed),
            (feature::ACCESS_PLATFORM, config.access_platform),
        ] {
            features |= if is_offered { bit } else { 0 };
        }
        Ok(Self::of(BalloonClass {
            features,
            queue_sizes: roles(features).map(|_| size).collect(),
            io,
            ram,
            target: 0,
            actual: 0,
            generation: 0,
            chain: Chain::default(),
            batch: Batch::new(),
            statistics: None,
            wants_statistics: false,
            counts: BalloonCounts::default(),
        }))
    }

    /// Sets the target: so many pages of 4 KiB, or all that the guest has if those are fewer. The
    /// next visit notifies the driver, which does what it can, when it can.
    pub fn set_target(&mut self, pages: u32) {
        let class = self.class_mut();
        let most = u32::try_from(class.ram.pages()).unwrap_or(u32::MAX);
        let target = pages.min(most);
        if class.target != target {
            class.target = target;
            class.generation = class.generation.wrapping_add(1);
            self.config_changed();
        }
    }

    /// Pages that the balloon is to have.
    pub fn target(&self) -> u32 {
        self.class().target
    }

    /// Pages that it has, as the driver says. It may say anything.
    pub fn actual(&self) -> u32 {
        self.class().actual
    }

    /// Asks the driver for new statistics, by the next visit or as soon as it has a buffer there.
    /// Nothing comes from a driver that has not accepted STATS_VQ.
    pub fn request_statistics(&mut self) {
        self.class_mut().wants_statistics = true;
    }

    /// Returns the last statistics of this driver; a reset of the device clears them.
    pub fn statistics(&self) -> Option<&Statistics> {
        self.class().statistics.as_ref()
    }

    /// Returns the counters of the pages that the guest has announced.
    pub fn counts(&self) -> BalloonCounts {
        self.class().counts
    }
}

#[cfg(test)]
mod tests;
