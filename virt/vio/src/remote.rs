//! A device whose rings somebody else serves, seen by its owner.
//!
//! Nothing of the data path is here: available buffers are announced to the other side by the driver's own doorbell, and
//! used ones to the driver by the other side. What is left to the owner is the control path: configuration
//! space, start, stop, reset, and the news that something broke. [`RemoteDevice`] is that much, without generics, so that this
//! crate needs not know how the other side is spoken to; [`Remote`] makes a [`QueueDevice`] of it.
//!
//! A device behind an IOMMU hands translations on to the other side, which keeps them: [`RemoteMemory`] is where they are read, in
//! the owner's poll, and [`RemoteDevice::invalidated`] where they end.
//!
//! Called by the owner's thread like any device; implementations may not block it.

use std::fmt;
use std::os::fd::RawFd;

use guest_mem::{Access, Attachment, Budget, Dma, Iova, KeepAlive, Next, Pages, Perm, Ticket};

use crate::device::{
    Activity, CancelReason, DeviceStats, Interrupt, QueueDevice, Revoked, Service,
};
use crate::queue_config::{ActivateError, QueueConfig, check_features};

/// Guest memory as a device that is served elsewhere sees it: [`Dma`] without its generics, as far as the control path needs it.
pub trait RemoteMemory {
    /// See [`Dma::attachment`].
    fn attachment(&self) -> Access<Attachment>;

    /// See [`Dma::next_mapping`].
    fn next_mapping(&self, from: Iova, last: Iova, budget: &mut Budget) -> Access<Next>;

    /// A little-endian word.
    ///
    /// # Errors
    /// As of any access of the device, whose refusal the IOMMU records.
    fn read_u16(&mut self, at: Iova) -> Access<u16>;

    /// Has the IOMMU record that it refuses the device an access, if it does.
    fn record_refusal(&mut self, at: Iova, perm: Perm);
}

impl<D: Dma> RemoteMemory for D {
    fn attachment(&self) -> Access<Attachment> {
        Dma::attachment(self)
    }

    fn next_mapping(&self, from: Iova, last: Iova, budget: &mut Budget) -> Access<Next> {
        Dma::next_mapping(self, from, last, budget)
    }

    fn read_u16(&mut self, at: Iova) -> Access<u16> {
        let mut bytes = [0; 2];
        self.read(at, &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    fn record_refusal(&mut self, at: Iova, perm: Perm) {
        // What it answers is of no interest: the tables have been looked at.
        let _ = self.locate(at, 1, perm);
    }
}

/// The control path of a device that is served elsewhere. No method blocks.
pub trait RemoteDevice: Send {
    /// Device type number (virtio 1.2 §5).
    fn device_type(&self) -> u16;

    /// Offered features.
    fn features(&self) -> u64;

    /// Maximum size of each queue.
    fn queue_sizes(&self) -> &[u16];

    /// Reads device configuration space; bytes past its end are zero.
    fn read_config(&self, offset: u64, out: &mut [u8]);

    /// DRIVER_OK: the other side is to serve these rings. What goes wrong later is told by
    /// [`take_news`](Self::take_news).
    ///
    /// # Errors
    /// The driver's description of its rings is wrong.
    fn start(&mut self, features: u64, queues: &[QueueConfig]) -> Result<(), ActivateError>;

    /// A doorbell that reached us instead of the other side, which is to be passed on.
    fn kick(&mut self, queue: u16);

    /// Whether [`take_news`](Self::take_news) has anything to take. One load.
    fn has_news(&self) -> bool;

    /// Takes up what the other side, or the connection to it, has told. True: the device has just broken, and the driver
    /// is to be told that it needs a reset.
    fn take_news(&mut self) -> bool;

    /// Does what the other side has asked for and guest memory is needed for, a bounded amount. Called after
    /// [`take_news`](Self::take_news), and in every poll while [`is_waiting`](Self::is_waiting). As it stands: it asks for nothing.
    fn serve(&mut self, memory: &mut dyn RemoteMemory, now_ns: u64) {
        let _ = (memory, now_ns);
    }

    /// Whether something that was asked for waits for guest memory that is absent.
    fn is_waiting(&self) -> bool {
        false
    }

    /// Whether the other side keeps translations, so that it has to be told when they end.
    fn keeps_translations(&self) -> bool {
        false
    }

    /// See [`QueueDevice::invalidated`].
    fn invalidated(&mut self, what: Revoked, hold: u64) -> bool {
        let _ = (what, hold);
        false
    }

    /// See [`QueueDevice::hold_overdue`].
    fn hold_overdue(&mut self, hold: u64) {
        let _ = hold;
    }

    /// See [`QueueDevice::take_released`].
    fn take_released(&mut self) -> Option<u64> {
        None
    }

    /// Asks the other side to stop, once, and says whether it has.
    fn stop(&mut self) -> bool;

    /// Starts again what [`stop`](Self::stop) has stopped, where it was.
    fn resume(&mut self);

    /// Back to the state before [`start`](Self::start); only after a stop that is done.
    fn reset(&mut self);

    /// Nobody waits for the stop any more: the other side is not heard. From now on the stop is done.
    fn give_up(&mut self);

    /// The device takes no more buffers until it is reset.
    fn needs_reset(&self) -> bool;

    /// Becomes readable when there is news.
    fn wake_fd(&self) -> RawFd;
}

/// A [`RemoteDevice`] as a device. Its rings are only described here, and the other side is given
/// all of them together.
pub struct Remote {
    device: Box<dyn RemoteDevice>,
    service: Service,
    /// The other side was given them.
    is_started: bool,
    /// The other side may use the driver's memory.
    is_serving: bool,
}

impl Remote {
    /// Puts `device` under an owner.
    pub fn new(device: impl RemoteDevice + 'static) -> Self {
        Self {
            device: Box::new(device),
            service: Service::Full,
            is_started: false,
            is_serving: false,
        }
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote")
            .field("device_type", &self.device.device_type())
            .finish_non_exhaustive()
    }
}

impl QueueDevice for Remote {
    fn device_type(&self) -> u16 {
        self.device.device_type()
    }

    fn features(&self) -> u64 {
        self.device.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.device.queue_sizes()
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        self.device.read_config(offset, out);
    }

    /// The other side has its own mapping of guest memory.
    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        _keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        check_features(self.features(), features)?;
        self.service = Service::Full;
        self.device.start(features, queues)?;
        self.is_started = true;
        self.is_serving = true;
        Ok(())
    }

    /// The other side stops as a whole, also where it is only to finish.
    fn set_service(&mut self, service: Service) {
        if service == Service::Full && self.service != service && self.is_started {
            self.device.resume();
            self.is_serving = true;
        }
        self.service = service;
    }

    /// The other side has the memory mapped and may write it until it says that it has stopped: a reset waits for that, and
    /// only a machine that has ended does not.
    fn cancel(&mut self, reason: CancelReason) -> u32 {
        match reason {
            CancelReason::Reset => {}
            CancelReason::Unmap | CancelReason::End => self.device.give_up(),
        }
        0
    }

    fn reset(&mut self) {
        if self.is_started {
            self.device.reset();
        }
        self.service = Service::Full;
        self.is_started = false;
        self.is_serving = false;
    }

    fn poll<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt, now_ns: u64) -> Activity {
        if self.service != Service::Full {
            self.is_serving = self.is_serving && !self.device.stop();
        }
        let has_news = self.device.has_news();
        if has_news && self.device.take_news() {
            irq.config();
        }
        // After the news were taken: what is asked for from here on is news again.
        if has_news || self.device.is_waiting() {
            self.device.serve(dma, now_ns);
        }
        match has_news {
            true => Activity::Busy,
            false => Activity::Idle,
        }
    }

    fn kick(&mut self, queue: u16) {
        self.device.kick(queue);
    }

    fn ticket_done(&mut self, _ticket: Ticket) {}

    /// Who serves the rings arms them.
    fn arm<D: Dma>(&mut self, _dma: &mut D) {}

    fn has_work<D: Dma>(&mut self, _dma: &mut D) -> bool {
        self.device.has_news()
    }

    fn disarm<D: Dma>(&mut self, _dma: &mut D) {}

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![self.device.wake_fd()]
    }

    /// The other side has the memory mapped, and nobody hears of its accesses: all, from its start to its reset.
    fn in_use<D: Dma>(&mut self, _dma: &D, pages: &Pages) -> u32 {
        if self.is_started { pages.all() } else { 0 }
    }

    fn hears_invalidations(&self) -> bool {
        self.device.keeps_translations()
    }

    fn invalidated(&mut self, what: Revoked, hold: u64) -> bool {
        self.device.invalidated(what, hold)
    }

    fn hold_overdue(&mut self, hold: u64) {
        self.device.hold_overdue(hold);
    }

    fn take_released(&mut self) -> Option<u64> {
        self.device.take_released()
    }

    /// How many requests there are only the other side knows.
    fn in_flight(&self) -> u32 {
        u32::from(self.is_serving)
    }

    fn needs_reset(&self) -> bool {
        self.device.needs_reset()
    }

    /// Requests are counted by who serves them.
    fn stats(&self) -> DeviceStats {
        DeviceStats::default()
    }
}
