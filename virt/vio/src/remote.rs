//! A device whose rings somebody else serves, seen by its owner.
//!
//! Nothing of the data path is here: available buffers are announced to the other side by the driver's own doorbell, and
//! used ones to the driver by the other side. What is left to the owner is the control path: configuration
//! space, start, stop, reset, and the news that something broke. [`RemoteDevice`] is that much, without generics, so that this
//! crate needs not know how the other side is spoken to; [`Remote`] makes a [`QueueDevice`] of it.
//!
//! Called by the owner's thread like any device; implementations may not block it.

use std::fmt;
use std::os::fd::RawFd;

use guest_mem::{Dma, KeepAlive, Pages, Ticket};

use crate::device::{
    Activity, CancelReason, DeviceStats, Interrupt, QueueDevice, Service, StoppedQueue,
    check_features,
};
use crate::queue_config::{ActivateError, QueueConfig};
use crate::ring::Ring;
use crate::saved::SavedDevice;
use crate::visit::Visit;

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

/// A [`RemoteDevice`] as a device. Its rings are only described here, so none is ever answered, and the other side is given
/// all of them together: by [`activate`](QueueDevice::activate), or at the first visit behind [`begin`](QueueDevice::begin).
pub struct Remote {
    device: Box<dyn RemoteDevice>,
    features: u64,
    /// Queues of a life that has begun and that the other side does not know of yet.
    starting: Option<Vec<QueueConfig>>,
    service: Service,
    /// The other side was given them.
    is_started: bool,
    /// The other side may use the driver's memory.
    is_serving: bool,
    /// The other side refused them.
    is_broken: bool,
}

impl Remote {
    /// Puts `device` under an owner.
    pub fn new(device: impl RemoteDevice + 'static) -> Self {
        Self {
            device: Box::new(device),
            features: 0,
            starting: None,
            service: Service::Full,
            is_started: false,
            is_serving: false,
            is_broken: false,
        }
    }

    fn start(&mut self, queues: &[QueueConfig]) -> Result<(), ActivateError> {
        self.device.start(self.features, queues)?;
        self.is_started = true;
        self.is_serving = true;
        Ok(())
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
    fn begin(&mut self, features: u64, _keep: KeepAlive) -> Result<(), ActivateError> {
        check_features(self.features(), features)?;
        self.features = features;
        self.starting = Some(Vec::new());
        self.service = Service::Full;
        Ok(())
    }

    fn add_queue(&mut self, ring: Ring) -> Result<(), ActivateError> {
        let config = ring.config();
        let index = config.index;
        match &mut self.starting {
            Some(queues) if queues.iter().all(|queue| queue.index != index) => queues.push(config),
            _ => return Err(ActivateError::QueueIndex { index }),
        }
        Ok(())
    }

    /// The other side learns of all queues at once, and now.
    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        self.begin(features, keep)?;
        self.starting = None;
        self.start(queues)
    }

    /// The other side sees only rings that are enabled.
    fn pause_queue(&mut self, _index: u16, _is_paused: bool) {}

    /// Where a ring stands is known to the other side only: all of them stop, by a reset.
    fn stop_queue<D: Dma>(
        &mut self,
        _index: u16,
        _dma: &mut D,
        _irq: &mut impl Interrupt,
    ) -> Option<StoppedQueue> {
        None
    }

    /// The other side stops as a whole, also where it is only to finish.
    fn set_service(&mut self, service: Service) {
        if service == Service::Full && self.service != service && self.is_started {
            self.device.resume();
            self.is_serving = true;
        }
        self.service = service;
    }

    fn set_memory(&mut self, _keep: KeepAlive) {}

    fn rebind(&mut self) {}

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
        self.starting = None;
        self.service = Service::Full;
        self.is_started = false;
        self.is_serving = false;
        self.is_broken = false;
    }

    fn visit<D: Dma>(
        &mut self,
        _dma: &mut D,
        irq: &mut impl Interrupt,
        _visit: &mut Visit,
    ) -> Activity {
        let mut activity = Activity::Idle;
        if self.service != Service::Full {
            self.is_serving = self.is_serving && !self.device.stop();
        } else if let Some(queues) = self.starting.take() {
            activity = Activity::Busy;
            if self.start(&queues).is_err() {
                self.is_broken = true;
                irq.config();
            }
        }
        if self.device.has_news() {
            activity = Activity::Busy;
            if self.device.take_news() {
                irq.config();
            }
        }
        activity
    }

    fn kick(&mut self, queue: u16) {
        self.device.kick(queue);
    }

    fn ticket_done(&mut self, _ticket: Ticket) {}

    /// Who serves the rings arms them.
    fn arm<D: Dma>(&mut self, _dma: &mut D) {}

    fn has_work<D: Dma>(&mut self, _dma: &mut D) -> bool {
        self.device.has_news() || (self.starting.is_some() && self.service == Service::Full)
    }

    fn disarm<D: Dma>(&mut self, _dma: &mut D) {}

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![self.device.wake_fd()]
    }

    fn has_more<D: Dma>(&mut self, _index: u16, _dma: &mut D) -> bool {
        false
    }

    fn ring(&mut self, _index: u16) -> Option<&mut Ring> {
        None
    }

    fn for_each_ring(&mut self, _each: impl FnMut(&mut Ring)) {}

    /// The other side has the memory mapped, and nobody hears of its accesses: all, from its start to its reset.
    fn in_use<D: Dma>(&mut self, _dma: &D, pages: &Pages) -> u32 {
        if self.is_started { pages.all() } else { 0 }
    }

    /// How many requests there are only the other side knows.
    fn in_flight(&self) -> u32 {
        u32::from(self.is_serving)
    }

    fn needs_reset(&self) -> bool {
        self.is_broken || self.device.needs_reset()
    }

    /// What it takes to go on elsewhere is known to the other side only.
    fn save(&self) -> Option<SavedDevice> {
        None
    }

    /// Requests are counted by who serves them.
    fn stats(&self) -> DeviceStats {
        DeviceStats::default()
    }
}
