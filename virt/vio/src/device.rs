//! Interface of every virtio device here: queues that come and go, visits that serve them, and a
//! way to stop.
//!
//! A device has no transport, no thread and no memory of its own. Its owner (a sidecore)
//! [visits](crate::Device::visit) it with the device's view of guest memory; what a transport
//! decodes arrives as the other methods. All calls come from one thread, and none of them waits.
//!
//! There is one order of calls, whatever the transport. Methods are those of [`QueueDevice`], and
//! the others of [`Device`](crate::Device):
//!
//! ```text
//! begin ─▶ add_queue … ─▶ visit, kick, ticket_done … ─▶ stop_queue … ─▶ reset
//!                             │  ▲                                      ▲
//!                  set_service(Stopped │ Finishing) ── in_flight() = 0 ─┘
//! ```
//!
//! | event | virtio-pci calls | vhost-user calls |
//! |---|---|---|
//! | features, memory known | | `begin` at the first ring's start |
//! | a queue starts | `activate` at DRIVER_OK: `begin`, then `add_queue` for each enabled queue | `add_queue`, `pause_queue` while it is disabled |
//! | a queue stops | | `stop_queue` until it answers |
//! | pause | Bus Master off: `set_service(Stopped)`, visits until `in_flight` is 0 (or [`touches_memory`](QueueDevice::touches_memory) is false), on: `set_service(Full)` | `set_service(Finishing)`, visits until `in_flight` is 0, then `set_memory` or `rebind`, `set_service(Full)` |
//! | reset | Status = 0: `set_service(Stopped)`, visits until `in_flight` is 0, `reset` | `set_service(Finishing)`, visits until `in_flight` is 0, `reset` |
//! | a stop takes too long | `cancel(Reset)` or `cancel(End)`; nothing for a pause | nothing; `cancel(End)` when the front end has gone |
//! | an unmap takes too long | `cancel(Unmap)` | |
//! | sleep | `arm`, a SeqCst fence, `has_work`, sleep on `wake_fds`, `disarm` | the same |

use std::os::fd::RawFd;

use guest_mem::{Dma, Iova, KeepAlive, Pages, Ticket};

use crate::queue_config::{ActivateError, QueueConfig};
use crate::ring::{RingPosition, RingStats};

/// Whether a poll found something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Activity {
    /// Something was done, or is left to do at once.
    Busy,
    /// Nothing to do until something arrives.
    Idle,
}

/// Extent to which a visit serves a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Service {
    /// It takes what the driver makes available, and publishes what has ended.
    #[default]
    Full,
    /// It takes nothing. What was taken is finished and published.
    Finishing,
    /// It touches no ring and no buffer, save by what is in flight. What ends is published once the
    /// service is another one.
    Stopped,
}

/// Request of a network device's front end, which a driver makes in no ring (vhost-user).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkRequest {
    /// The driver's MTU; not done if the network does not carry it.
    Mtu(u64),
    /// The driver has this address, which the network is to learn.
    Announce([u8; 6]),
}

/// Reason why requests in flight are cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// An unmap has waited for the drain limit. Only requests whose leases are
    /// [stale](guest_mem::Dma::is_stale) are cancelled, in the next visit. What cannot be cancelled
    /// stays in flight, with its leases, and makes [`needs_reset`](QueueDevice::needs_reset) true.
    Unmap,
    /// A reset has waited for the drain limit: the driver is not notified how the requests ended.
    /// Slow storage is no fault of the driver, and a reset is not over before the last request. So
    /// a device that could only break itself does nothing, and the reset goes on waiting.
    Reset,
    /// The machine has ended, or the front end has gone: no driver will start the device again
    /// either.
    End,
}

/// Mappings of a device that are revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revoked {
    /// All of them, whatever it is attached to.
    Everything,
    /// Those of a domain, by the IOMMU's number. What is attached to it may have changed too.
    Domain(u32),
    /// Pages of a domain.
    Pages {
        /// The IOMMU's number.
        domain: u32,
        /// First address.
        first: Iova,
        /// Last address.
        last: Iova,
    },
}

/// A queue that has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoppedQueue {
    /// Position of its ring.
    pub position: RingPosition,
    /// Requests that have ended and are not published to the driver, because its ring cannot be
    /// written.
    pub unpublished: u16,
}

/// Sink of a device's interrupts. Called at most twice per queue and poll: once for what an earlier
/// poll could not publish, once for its own.
pub trait Interrupt {
    /// Used buffers of `queue`, for which the driver wants an interrupt.
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
    /// Requests in flight now.
    pub in_flight: u64,
}

impl DeviceStats {
    /// Adds the counters of the device's rings.
    pub(crate) fn with_rings(self, rings: &RingStats) -> Self {
        Self {
            publishes: rings.publishes,
            ring_faults: rings.faults,
            violations: rings.violations,
            pends: rings.pends,
            ..self
        }
    }
}

/// A virtio device as a transport in its owner's process sees it, owned and visited by one thread.
/// The module's head describes the order of calls.
pub trait QueueDevice {
    /// Device type number (virtio 1.2 §5): 1 network, 2 block, 4 entropy, 5 memory
    /// balloon.
    fn device_type(&self) -> u16;

    /// Offered features.
    fn features(&self) -> u64;

    /// Maximum size of each queue; as many as there are queues.
    fn queue_sizes(&self) -> &[u16];

    /// Reads device configuration space; bytes past its end are zero.
    fn read_config(&self, offset: u64, out: &mut [u8]);

    /// Writes device configuration space; writes to read-only fields are ignored.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// Returns the generation of the configuration space (§2.5.1). It changes whenever the device
    /// has changed the space, and then there is a configuration interrupt. A write of the driver is
    /// no such change.
    fn config_generation(&self) -> u8 {
        0
    }

    /// Begins at DRIVER_OK with these queues, each from its start. `keep` keeps guest memory mapped
    /// for as long as asynchronous I/O may use it. Nothing is left of a former activation; after an
    /// error nothing has begun.
    ///
    /// # Errors
    /// Features that are not offered, or VERSION_1 missing; requests in flight; queues that there
    /// are not, or that are laid out wrongly.
    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        keep: KeepAlive,
    ) -> Result<(), ActivateError>;

    /// Sets the extent to which visits serve the device; [`Service::Full`] after
    /// [`activate`](Self::activate).
    fn set_service(&mut self, service: Service);

    /// Cancels the requests in flight that `reason` concerns, and returns their number
    /// ([`CancelReason::Unmap`] finds them later, and returns 0). What has succeeded when it is
    /// cancelled, or in spite of it, is a success. Visits collect the ends; but for
    /// [`CancelReason::Unmap`] none is published any more before a reset: a cancelled request has
    /// not failed, and a successor may run it again. A pause cancels nothing.
    fn cancel(&mut self, reason: CancelReason) -> u32;

    /// Ends the activation: back to the state before [`activate`](Self::activate).
    ///
    /// # Panics
    /// If a request is in flight: it would write into freed guest memory.
    fn reset(&mut self);

    /// Takes chains that the driver makes available and publishes requests that have ended, as far
    /// as the [service](Self::set_service) allows, in a visit with the budget of an owner that
    /// counts no costs. `Busy` also if it ended before the chains did. `now_ns` is any monotonic
    /// clock.
    fn poll<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt, now_ns: u64) -> Activity;

    /// The driver rang the doorbell of `queue`; a queue whose ring faulted tries again at once.
    fn kick(&mut self, queue: u16);

    /// Completes `ticket`: the queues parked on it run again.
    fn ticket_done(&mut self, ticket: Ticket);

    /// Asks the driver, for every queue, to ring the doorbell for what comes next. Follow it with a
    /// SeqCst fence and [`has_work`](Self::has_work): what came before is not announced.
    fn arm<D: Dma>(&mut self, dma: &mut D);

    /// Whether anything has arrived that a visit would take up: available buffers, completions,
    /// frames.
    fn has_work<D: Dma>(&mut self, dma: &mut D) -> bool;

    /// Visits go on: asks the driver not to ring, as far as that costs nothing.
    fn disarm<D: Dma>(&mut self, dma: &mut D);

    /// Level-readable descriptors that become readable, once armed, when there is work. Ask after
    /// every [`arm`](Self::arm): a source that cannot be served at the moment is left out.
    fn wake_fds(&self) -> Vec<RawFd>;

    /// Returns the time at which a visit is due although nothing has arrived, in nanoseconds of the
    /// visits' clock. Queues that a rate limit holds back may go on then, and those whose ring
    /// faulted, or whose storage could not begin because the host lacked something, try again
    /// ([`RETRY_NS`](crate::ring::RETRY_NS)). `None` if the last visit left nothing behind for one
    /// of these reasons.
    fn opens_at_ns(&self) -> Option<u64> {
        None
    }

    /// Returns those of `pages` that it accesses without asking memory again, by a host address
    /// outside a lease: they cannot be evicted now. These are the pages of its rings' windows that
    /// are current.
    fn in_use<D: Dma>(&mut self, dma: &D, pages: &Pages) -> u32;

    /// Whether it keeps translations beyond a call, and so must be notified of revoked ones
    /// ([`invalidated`](Self::invalidated)). The memory itself keeps account of windows and leases.
    fn hears_invalidations(&self) -> bool {
        false
    }

    /// Notifies the device of revoked mappings. Called between two visits, before the invalidation
    /// is complete. Returns whether the invalidation waits for this device, which then returns
    /// `hold` in [`take_released`](Self::take_released).
    fn invalidated(&mut self, what: Revoked, hold: u64) -> bool {
        let _ = (what, hold);
        false
    }

    /// Releases an invalidation at once, whatever that takes: it has waited for this device for the
    /// owner's limit.
    fn hold_overdue(&mut self, hold: u64) {
        let _ = hold;
    }

    /// Takes the `hold` of an invalidation that need not wait any longer. Called after each visit,
    /// until there is none.
    fn take_released(&mut self) -> Option<u64> {
        None
    }

    /// Requests that the back end has not finished; at least 1 if it cannot be known that there is
    /// none.
    fn in_flight(&self) -> u32;

    /// Whether requests in flight may still touch guest memory. Once they may not, after
    /// [`Service::Stopped`], Bus Master is off. A reset waits for the last request all the same,
    /// since a write from before it must not be ordered after one from after it.
    fn touches_memory(&self) -> bool {
        self.in_flight() != 0
    }

    /// DEVICE_NEEDS_RESET (virtio 1.2 §2.1.1): the device takes no more buffers until it is reset.
    fn needs_reset(&self) -> bool;

    /// Counters.
    fn stats(&self) -> DeviceStats;
}

/// Reads `out.len()` bytes at `offset` of a configuration space; bytes behind its end are zero.
pub fn read_space(space: &[u8], offset: u64, out: &mut [u8]) {
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
