//! A device whose rings somebody else serves, seen by its owner.
//!
//! Nothing of the data path is here: available buffers are announced to the other side by the driver's own doorbell, and
//! used ones to the driver by the other side. What is left to the owner is the control path: configuration
//! space, start, stop, reset, and the news that something broke. [`RemoteDevice`] is that much, without generics, so that this
//! crate needs not know how the other side is spoken to; [`Remote`] makes a [`VirtioDevice`] of it.
//!
//! Called by the owner's thread like any device; implementations may not block it.

use std::fmt;
use std::os::fd::RawFd;

use guest_mem::{Dma, KeepAlive, Ticket};

use crate::device::{
    ActivateError, Activity, DeviceStats, Interrupt, QueueConfig, Quiesce, StopReason, VirtioDevice,
};
use crate::saved::SavedDevice;

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
    fn stop(&mut self) -> Quiesce;

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

/// A [`RemoteDevice`] as a device.
pub struct Remote(Box<dyn RemoteDevice>);

impl Remote {
    /// Puts `device` under an owner.
    pub fn new(device: impl RemoteDevice + 'static) -> Self {
        Self(Box::new(device))
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote")
            .field("device_type", &self.0.device_type())
            .finish_non_exhaustive()
    }
}

impl VirtioDevice for Remote {
    fn device_type(&self) -> u16 {
        self.0.device_type()
    }

    fn features(&self) -> u64 {
        self.0.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.0.queue_sizes()
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        self.0.read_config(offset, out);
    }

    /// No writable field is offered.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// The other side has its own mapping of guest memory.
    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        _keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        self.0.start(features, queues)
    }

    fn poll<D: Dma>(&mut self, _dma: &mut D, irq: &mut impl Interrupt, _now_ns: u64) -> Activity {
        if !self.0.has_news() {
            return Activity::Idle;
        }
        if self.0.take_news() {
            irq.config();
        }
        Activity::Busy
    }

    fn kick(&mut self, queue: u16) {
        self.0.kick(queue);
    }

    fn ticket_done(&mut self, _ticket: Ticket) {}

    /// Who serves the rings arms them.
    fn arm<D: Dma>(&mut self, _dma: &mut D) {}

    fn has_work<D: Dma>(&mut self, _dma: &mut D) -> bool {
        self.0.has_news()
    }

    fn disarm<D: Dma>(&mut self, _dma: &mut D) {}

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![self.0.wake_fd()]
    }

    fn quiesce<D: Dma>(&mut self, _dma: &mut D) -> Quiesce {
        self.0.stop()
    }

    fn resume(&mut self) {
        self.0.resume();
    }

    fn reset(&mut self) {
        self.0.reset();
    }

    fn cancel_overdue(&mut self) {
        self.0.give_up();
    }

    /// The other side has the memory mapped and may write it until it says that it has stopped: only a machine that has
    /// ended does not wait for that.
    fn stop_overdue(&mut self, reason: StopReason) {
        match reason {
            StopReason::Pause | StopReason::Reset => {}
            StopReason::End => self.0.give_up(),
        }
    }

    fn needs_reset(&self) -> bool {
        self.0.needs_reset()
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
