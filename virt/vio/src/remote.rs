//! A device whose rings another process or the kernel (the *other side*) serves, seen by its owner.
//!
//! Nothing of the data path is here: the driver's own doorbell announces available buffers to the
//! other side, and the other side announces used ones to the driver. The owner has the control
//! path: configuration space, start, stop, reset, and the event that the device has broken.
//! [`RemoteDevice`] is that much, without generics, so that this crate does not depend on the
//! protocol of the other side; [`Remote`] makes a [`QueueDevice`] of it.
//!
//! A network device with several queue pairs has a control queue, which is served here, as QEMU
//! does it: by it the driver sets the number of pairs it uses, and the other side receives that
//! alone ([`RemoteDevice::set_pairs`]).
//!
//! A device behind an IOMMU hands translations on to the other side, which keeps them. They are
//! read by [`RemoteMemory`], in the owner's poll, and end by [`RemoteDevice::invalidated`].
//!
//! Called by the owner's thread like any device; implementations may not block it.

use std::fmt;
use std::os::fd::RawFd;

use guest_mem::{Access, Attachment, Budget, Dma, Iova, KeepAlive, Next, Pages, Perm, Ticket};

use crate::device::{
    Activity, CancelReason, DeviceStats, Interrupt, QueueDevice, Revoked, Service,
};
use crate::net::{Control, ControlClass};
use crate::queue_config::{ActivateError, QueueConfig, check_features};

/// Guest memory as a device that is served elsewhere sees it: [`Dma`] without its generics, as far
/// as the control path needs it.
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
        // The answer is ignored: the call is made for the fault record alone.
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

    /// DRIVER_OK: makes the other side serve these rings. Later failures are reported by
    /// [`take_events`](Self::take_events).
    ///
    /// # Errors
    /// The driver's description of its rings is wrong.
    fn start(&mut self, features: u64, queues: &[QueueConfig]) -> Result<(), ActivateError>;

    /// A doorbell that reached us instead of the other side, which is to be passed on.
    fn kick(&mut self, queue: u16);

    /// Whether [`take_events`](Self::take_events) has anything to take. One load.
    fn has_events(&self) -> bool;

    /// Takes the events of the other side, or of the connection to it. True: the device has just
    /// broken, and the driver is to be notified that it needs a reset.
    fn take_events(&mut self) -> bool;

    /// Serves requests of the other side that need guest memory, a bounded amount. Called after
    /// [`take_events`](Self::take_events), and in every poll while
    /// [`is_waiting`](Self::is_waiting). The default is for a device without such requests.
    fn serve(&mut self, memory: &mut dyn RemoteMemory, now_ns: u64) {
        let _ = (memory, now_ns);
    }

    /// Whether something that was asked for waits for guest memory that is absent.
    fn is_waiting(&self) -> bool {
        false
    }

    /// Whether the other side keeps translations, so that it has to be notified when they end.
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

    /// Abandons the wait for the stop: answers of the other side are ignored. From now on the stop
    /// is done.
    fn abandon(&mut self);

    /// The device takes no more buffers until it is reset.
    fn needs_reset(&self) -> bool;

    /// Descriptor that becomes readable when there is an event.
    fn wake_fd(&self) -> RawFd;

    /// Number of queue pairs of a network device. If there are several, it has a control queue
    /// behind them, which is served here.
    fn pairs(&self) -> u16 {
        1
    }

    /// The driver uses so many of its queue pairs from now on; 1 after each [`start`](Self::start).
    fn set_pairs(&mut self, pairs: u16) {
        let _ = pairs;
    }

    /// Interrupts the driver for a queue that is served here.
    fn interrupt(&mut self, queue: u16) {
        let _ = queue;
    }

    /// Descriptor that becomes readable when the driver rings the doorbell of a queue that is
    /// served here.
    fn doorbell(&self, queue: u16) -> Option<RawFd> {
        let _ = queue;
        None
    }

    /// Empties it.
    fn drain_doorbell(&mut self, queue: u16) {
        let _ = queue;
    }
}

/// Interrupts of a queue that is served here: by the way on which the other side's come.
struct OwnInterrupts<'a, I> {
    device: &'a mut dyn RemoteDevice,
    irq: &'a mut I,
}

impl<I: Interrupt> Interrupt for OwnInterrupts<'_, I> {
    fn queue(&mut self, index: u16) {
        self.device.interrupt(index);
    }

    fn config(&mut self) {
        self.irq.config();
    }
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
    /// The queue that is served here, of a device that has one.
    control: Option<Control>,
    /// Its number, while there is a driver that uses it.
    control_queue: Option<u16>,
}

impl Remote {
    /// Puts `device` under an owner.
    pub fn new(device: impl RemoteDevice + 'static) -> Self {
        let pairs = device.pairs();
        let control = (pairs > 1).then(|| {
            let class = ControlClass::new(device.features(), device.queue_sizes(), pairs);
            Control::of(class)
        });
        Self {
            device: Box::new(device),
            control,
            control_queue: None,
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
        keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        check_features(self.features(), features)?;
        self.service = Service::Full;
        let index = self
            .control
            .as_ref()
            .and_then(|control| control.class().index(features));
        let (own, theirs): (Vec<_>, Vec<_>) = queues
            .iter()
            .copied()
            .partition(|queue| Some(queue.index) == index);
        if let Some(control) = &mut self.control {
            control.activate(features, &own, keep)?;
        }
        if let Err(error) = self.device.start(features, &theirs) {
            if let Some(control) = &mut self.control {
                control.reset();
            }
            return Err(error);
        }
        self.control_queue = own.first().map(|queue| queue.index);
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
        if let Some(control) = &mut self.control {
            control.set_service(service);
        }
    }

    /// The other side has the memory mapped and may write it until it says that it has stopped: a
    /// reset waits for that, and only a machine that has ended does not.
    fn cancel(&mut self, reason: CancelReason) -> u32 {
        if let Some(control) = &mut self.control {
            control.cancel(reason);
        }
        match reason {
            CancelReason::Reset => {}
            CancelReason::Unmap | CancelReason::End => self.device.abandon(),
        }
        0
    }

    fn reset(&mut self) {
        if self.is_started {
            self.device.reset();
        }
        if let Some(control) = &mut self.control {
            control.reset();
        }
        self.control_queue = None;
        self.service = Service::Full;
        self.is_started = false;
        self.is_serving = false;
    }

    fn poll<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt, now_ns: u64) -> Activity {
        if self.service != Service::Full {
            self.is_serving = self.is_serving && !self.device.stop();
        }
        let has_events = self.device.has_events();
        if has_events && self.device.take_events() {
            irq.config();
        }
        // After the events were taken: a request that comes from here on is an event again.
        if has_events || self.device.is_waiting() {
            self.device.serve(dma, now_ns);
        }
        let mut activity = match has_events {
            true => Activity::Busy,
            false => Activity::Idle,
        };
        if let Some(control) = &mut self.control {
            let device = &mut *self.device;
            let mut own = OwnInterrupts { device, irq };
            if control.poll(dma, &mut own, now_ns) == Activity::Busy {
                activity = Activity::Busy;
            }
            if let Some(pairs) = control.class_mut().take_chosen() {
                self.device.set_pairs(pairs);
            }
        }
        activity
    }

    fn kick(&mut self, queue: u16) {
        match &mut self.control {
            Some(control) if self.control_queue == Some(queue) => control.kick(queue),
            _ => self.device.kick(queue),
        }
    }

    fn ticket_done(&mut self, ticket: Ticket) {
        if let Some(control) = &mut self.control {
            control.ticket_done(ticket);
        }
    }

    /// Arms the control queue. The other side arms the rings that it serves.
    fn arm<D: Dma>(&mut self, dma: &mut D) {
        if let Some(control) = &mut self.control {
            control.arm(dma);
        }
    }

    fn has_work<D: Dma>(&mut self, dma: &mut D) -> bool {
        let control = self.control.as_mut();
        self.device.has_events() || control.is_some_and(|control| control.has_work(dma))
    }

    fn disarm<D: Dma>(&mut self, dma: &mut D) {
        if let Some(control) = &mut self.control {
            control.disarm(dma);
        }
        if let Some(queue) = self.control_queue {
            self.device.drain_doorbell(queue);
        }
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        let doorbell = self
            .control_queue
            .and_then(|queue| self.device.doorbell(queue));
        [self.device.wake_fd()]
            .into_iter()
            .chain(doorbell)
            .collect()
    }

    fn opens_at_ns(&self) -> Option<u64> {
        self.control.as_ref().and_then(Control::opens_at_ns)
    }

    /// The other side has the memory mapped, and its accesses are not visible here: all pages are
    /// in use, from its start to its reset.
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

    /// Returns 1 while the other side serves: only that side knows the number of requests.
    fn in_flight(&self) -> u32 {
        u32::from(self.is_serving)
    }

    fn needs_reset(&self) -> bool {
        self.device.needs_reset() || self.control.as_ref().is_some_and(Control::needs_reset)
    }

    /// The side that serves requests counts them.
    fn stats(&self) -> DeviceStats {
        let control = self.control.as_ref();
        control.map_or_else(DeviceStats::default, Control::stats)
    }
}
