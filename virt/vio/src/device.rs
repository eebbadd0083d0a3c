//! What every virtio device here is: configuration space, queues to poll, and a way to stop.
//!
//! A device has no transport, no thread and no memory of its own. Its owner (a sidecore) calls
//! [`VirtioDevice::poll`] with the device's view of guest memory; register writes that the transport
//! decodes arrive as the other methods. All calls come from one thread.
//!
//! Life: `activate` at DRIVER_OK; `poll` again and again; to sleep, `arm`, a SeqCst fence, `has_work`,
//! sleep on `wake_fds`, `disarm`; at Status = 0, `quiesce` until it answers [`Quiesce::Done`], then
//! `reset`; while Bus Master is off, `quiesce`, then `resume`.

use std::os::fd::RawFd;

use guest_mem::{Dma, Iova, KeepAlive, Ticket};

use crate::ring::Ring;
use crate::saved::SavedDevice;

/// Feature bit numbers of virtio 1.2 §6 and §2.7 that every device here treats alike.
pub mod feature {
    /// VIRTIO_F_INDIRECT_DESC (28): a descriptor may point at a table of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// VIRTIO_F_EVENT_IDX (29): `used_event` and `avail_event` instead of flags.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// VIRTIO_F_VERSION_1 (32): not a legacy device.
    pub const VERSION_1: u64 = 1 << 32;
    /// VIRTIO_F_ACCESS_PLATFORM (33): ring and buffer addresses go through the platform's IOMMU.
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// VIRTIO_F_RING_PACKED (34): the packed layout instead of the split one.
    pub const RING_PACKED: u64 = 1 << 34;
    /// VIRTIO_F_IN_ORDER (35): buffers come back in the order in which they were made available.
    pub const IN_ORDER: u64 = 1 << 35;
    /// What every device here offers.
    pub const COMMON: u64 = INDIRECT_DESC | EVENT_IDX | VERSION_1 | ACCESS_PLATFORM;
}

/// Whether a poll found something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Activity {
    /// Something was done, or is left to do at once.
    Busy,
    /// Nothing to do until something arrives.
    Idle,
}

/// Answer of [`VirtioDevice::quiesce`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Quiesce {
    /// Nothing is in flight and no lease is held.
    Done,
    /// Call again after the next poll.
    Draining {
        /// Requests the back end has not finished.
        in_flight: u32,
    },
}

/// Why a device is told to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// It goes on later (Bus Master off): what is in flight must end as if nothing had happened.
    Pause,
    /// It is reset: nobody will hear how its requests ended.
    Reset,
    /// Its machine has ended: nobody will start it again either.
    End,
}

/// One queue as the driver has set it up; in packed rings `avail` is the driver's event suppression structure
/// and `used` the device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Queue number.
    pub index: u16,
    /// Entries: a power of two (packed: any number from 1 to 32768), at most the device's maximum for this queue.
    pub size: u16,
    /// Descriptor table (or ring), 16-byte aligned.
    pub desc: Iova,
    /// Driver area: available ring, 2-byte aligned; packed: 4-byte aligned.
    pub avail: Iova,
    /// Device area: used ring, 4-byte aligned, as in packed rings.
    pub used: Iova,
}

/// Why a device refuses DRIVER_OK. The transport answers with DEVICE_NEEDS_RESET.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActivateError {
    /// Features that were not offered, or VERSION_1 missing.
    #[error("the driver accepted features {features:#x} where {offered:#x} are offered")]
    Features {
        /// Accepted by the driver.
        features: u64,
        /// Offered by the device.
        offered: u64,
    },
    /// A size that is zero, no power of two (packed: above 32768), or above the maximum.
    #[error("queue {index} has size {size}, the maximum is {max}")]
    QueueSize {
        /// Queue number.
        index: u16,
        /// Size written by the driver.
        size: u16,
        /// The device's maximum.
        max: u16,
    },
    /// A ring address that is misaligned or wraps.
    #[error("queue {index} has a misaligned or wrapping ring address")]
    QueueAddress {
        /// Queue number.
        index: u16,
    },
    /// A ring that does not lie in guest memory, of a device that is served elsewhere and could not fault later.
    #[error("queue {index} has a ring outside guest memory")]
    QueueMemory {
        /// Queue number.
        index: u16,
    },
    /// A queue number the device does not have, or one given twice.
    #[error("queue {index} does not exist or is given twice")]
    QueueIndex {
        /// Queue number.
        index: u16,
    },
    /// Requests of the time before are still in flight.
    #[error("{in_flight} requests are still in flight")]
    NotQuiesced {
        /// How many.
        in_flight: u32,
    },
}

/// Where a device's interrupts go. Called at most twice per queue and poll: once for what an earlier poll
/// could not publish, once for its own.
pub trait Interrupt {
    /// Used buffers of `queue`, which the driver wants to hear of.
    fn queue(&mut self, queue: u16);
    /// Configuration change, which includes DEVICE_NEEDS_RESET.
    fn config(&mut self);
}

/// Counters of one device since it was made; all counts unless a unit is named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Requests (or frames, both directions) taken from the queues.
    pub requests: u64,
    /// Requests completed with an error status, and frames dropped.
    pub errors: u64,
    /// Bytes moved from the back end to the guest.
    pub read_bytes: u64,
    /// Bytes moved from the guest to the back end.
    pub written_bytes: u64,
    /// Doorbells that arrived.
    pub kicks: u64,
    /// Interrupts asked for.
    pub interrupts: u64,
    /// Used-index stores.
    pub publishes: u64,
    /// Faults of a ring's own addresses; each parked its queue.
    pub ring_faults: u64,
    /// Protocol violations of the driver.
    pub violations: u64,
    /// Times a queue parked on a ticket.
    pub pends: u64,
    /// Times a queue was left because the back end, or the table of leases, had no room.
    pub backpressure: u64,
    /// Times a queue was left because of the rate limit.
    pub throttled: u64,
    /// Requests cancelled for taking longer than the drain limit.
    pub cancelled: u64,
    /// Rogue accesses of the misbehaving test mode that the IOMMU refused.
    pub rogue_blocked: u64,
    /// Rogue accesses that went through.
    pub rogue_allowed: u64,
    /// Requests in flight now.
    pub in_flight: u64,
}

/// A virtio device, owned and polled by one thread.
pub trait VirtioDevice {
    /// Device type number (virtio 1.2 §5): 1 network, 2 block.
    fn device_type(&self) -> u16;

    /// Offered features.
    fn features(&self) -> u64;

    /// Maximum size of each queue; as many as there are queues.
    fn queue_sizes(&self) -> &[u16];

    /// Reads device configuration space; bytes past its end are zero.
    fn read_config(&self, offset: u64, out: &mut [u8]);

    /// Writes device configuration space; writes to read-only fields are ignored.
    fn write_config(&mut self, offset: u64, data: &[u8]);

    /// DRIVER_OK. `features` are those the driver accepted; `queues` the enabled ones; `keep` keeps
    /// guest memory mapped for as long as asynchronous I/O may use it. After an error the device stays inactive.
    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        keep: KeepAlive,
    ) -> Result<(), ActivateError>;

    /// A bounded batch of every queue. `now_ns` is any monotonic clock.
    fn poll<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt, now_ns: u64) -> Activity;

    /// The driver rang the doorbell of `queue`; un-parks a queue whose ring faulted.
    fn kick(&mut self, queue: u16);

    /// What `ticket` stood for has happened: the queues parked on it run again.
    fn ticket_done(&mut self, ticket: Ticket);

    /// Asks the driver, for every queue, to ring the doorbell for what comes next. Follow it with a
    /// SeqCst fence and [`has_work`](VirtioDevice::has_work): what came before is not announced.
    fn arm<D: Dma>(&mut self, dma: &mut D);

    /// Whether anything has arrived that a poll would take up: available buffers, completions, frames.
    fn has_work<D: Dma>(&mut self, dma: &mut D) -> bool;

    /// Polling goes on: tells the driver not to ring, as far as that is free.
    fn disarm<D: Dma>(&mut self, dma: &mut D);

    /// Level-readable descriptors that become readable, once armed, when there is work. Ask after every
    /// [`arm`](VirtioDevice::arm): a source that cannot be served at the moment is left out.
    fn wake_fds(&self) -> Vec<RawFd>;

    /// Stops taking buffers (no ring or buffer of the driver is touched from the first call on, save by
    /// requests in flight), and says whether anything is still in flight.
    fn quiesce<D: Dma>(&mut self, dma: &mut D) -> Quiesce;

    /// Whether what is in flight may still touch guest memory. Once it may not, after [`quiesce`](VirtioDevice::quiesce), Bus Master
    /// is off; a reset waits for [`Quiesce::Done`] all the same, since a write of before must not overtake one of after it.
    fn touches_memory(&self) -> bool {
        true
    }

    /// Takes up polling after [`quiesce`](VirtioDevice::quiesce) without a reset (Bus Master back on).
    fn resume(&mut self);

    /// Back to the state before [`activate`](VirtioDevice::activate). Only after [`Quiesce::Done`];
    /// earlier it panics, for a forgotten request would write into freed guest memory.
    fn reset(&mut self);

    /// An unmap has waited for the drain limit: cancels everything in flight. What cannot be cancelled stays in
    /// flight, with its leases, and makes [`needs_reset`](VirtioDevice::needs_reset) true; what has succeeded when it is
    /// cancelled, or in spite of it, is a success.
    fn cancel_overdue(&mut self);

    /// A stop ([`quiesce`](VirtioDevice::quiesce)) has waited for the drain limit; called once. Slow storage is no fault of
    /// the driver, and a stop is not over before its last request: whoever can do nothing but break the device, or
    /// fail a request that would have succeeded, does nothing, and the stop goes on waiting.
    fn stop_overdue(&mut self, reason: StopReason) {
        let _ = reason;
    }

    /// DEVICE_NEEDS_RESET (virtio 1.2 §2.1.1): the device takes no more buffers until it is reset.
    fn needs_reset(&self) -> bool;

    /// What another instance needs to go on from here; `None` unless the device is quiesced and every
    /// ended request has been published ([`resume`](VirtioDevice::resume) and poll, then try again).
    fn save(&self) -> Option<SavedDevice>;

    /// Counters.
    fn stats(&self) -> DeviceStats;
}

/// Reads `out.len()` bytes at `offset` of a configuration space; zero behind its end.
pub(crate) fn read_space(space: &[u8], offset: u64, out: &mut [u8]) {
    out.fill(0);
    let Ok(offset) = usize::try_from(offset) else {
        return;
    };
    let Some(rest) = space.get(offset..) else {
        return;
    };
    let len = rest.len().min(out.len());
    out[..len].copy_from_slice(&rest[..len]);
}

/// The rings of an activation, in the order given; the checks all devices share.
pub(crate) fn make_queues(
    offered: u64,
    sizes: &[u16],
    features: u64,
    queues: &[QueueConfig],
) -> Result<Vec<Ring>, ActivateError> {
    if features & !offered != 0 || features & feature::VERSION_1 == 0 {
        return Err(ActivateError::Features { features, offered });
    }
    let mut rings: Vec<Ring> = Vec::with_capacity(queues.len());
    for config in queues {
        let index = config.index;
        let Some(&max) = sizes.get(usize::from(index)) else {
            return Err(ActivateError::QueueIndex { index });
        };
        if rings.iter().any(|ring| ring.index() == index) {
            return Err(ActivateError::QueueIndex { index });
        }
        rings.push(Ring::new(config, max, features)?);
    }
    Ok(rings)
}
