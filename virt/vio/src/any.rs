//! One type for every device, for owners that hold several: the trait's methods are generic, so it is not
//! usable as `dyn`.

use std::os::fd::RawFd;
use std::path::PathBuf;

use guest_mem::{Dma, KeepAlive, Ticket};

use crate::blk::Blk;
use crate::device::{
    ActivateError, Activity, CancelReason, DeviceStats, Interrupt, QueueConfig, QueueDevice,
    Service, StoppedQueue,
};
use crate::net::Net;
use crate::remote::Remote;
use crate::ring::{Ring, Violation};
use crate::saved::SavedDevice;
use crate::visit::Visit;

/// Any device of this crate.
pub enum AnyDevice {
    /// A block device.
    Blk(Box<Blk>),
    /// A network device.
    Net(Box<Net>),
    /// A device that is served elsewhere.
    Remote(Remote),
}

impl From<Blk> for AnyDevice {
    fn from(blk: Blk) -> Self {
        Self::Blk(Box::new(blk))
    }
}

impl From<Net> for AnyDevice {
    fn from(net: Net) -> Self {
        Self::Net(Box::new(net))
    }
}

impl From<Remote> for AnyDevice {
    fn from(remote: Remote) -> Self {
        Self::Remote(remote)
    }
}

macro_rules! each {
    ($self:ident, $device:ident => $then:expr) => {
        match $self {
            Self::Blk($device) => $then,
            Self::Net($device) => $then,
            Self::Remote($device) => $then,
        }
    };
}

impl QueueDevice for AnyDevice {
    fn device_type(&self) -> u16 {
        each!(self, device => device.device_type())
    }

    fn features(&self) -> u64 {
        each!(self, device => device.features())
    }

    fn queue_sizes(&self) -> &[u16] {
        each!(self, device => device.queue_sizes())
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        each!(self, device => device.read_config(offset, out));
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        each!(self, device => device.write_config(offset, data));
    }

    fn begin(&mut self, features: u64, keep: KeepAlive) -> Result<(), ActivateError> {
        each!(self, device => device.begin(features, keep))
    }

    fn add_queue(&mut self, ring: Ring) -> Result<(), ActivateError> {
        each!(self, device => device.add_queue(ring))
    }

    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        each!(self, device => device.activate(features, queues, keep))
    }

    fn pause_queue(&mut self, index: u16, is_paused: bool) {
        each!(self, device => device.pause_queue(index, is_paused));
    }

    fn stop_queue<D: Dma>(
        &mut self,
        index: u16,
        dma: &mut D,
        irq: &mut impl Interrupt,
    ) -> Option<StoppedQueue> {
        each!(self, device => device.stop_queue(index, dma, irq))
    }

    fn set_service(&mut self, service: Service) {
        each!(self, device => device.set_service(service));
    }

    fn set_memory(&mut self, keep: KeepAlive) {
        each!(self, device => device.set_memory(keep));
    }

    fn rebind(&mut self) {
        each!(self, device => device.rebind());
    }

    fn cancel(&mut self, reason: CancelReason) -> u32 {
        each!(self, device => device.cancel(reason))
    }

    fn reset(&mut self) {
        each!(self, device => device.reset());
    }

    fn visit<D: Dma>(
        &mut self,
        dma: &mut D,
        irq: &mut impl Interrupt,
        visit: &mut Visit,
    ) -> Activity {
        each!(self, device => device.visit(dma, irq, visit))
    }

    fn kick(&mut self, queue: u16) {
        each!(self, device => device.kick(queue));
    }

    fn ticket_done(&mut self, ticket: Ticket) {
        each!(self, device => device.ticket_done(ticket));
    }

    fn arm<D: Dma>(&mut self, dma: &mut D) {
        each!(self, device => device.arm(dma));
    }

    fn has_work<D: Dma>(&mut self, dma: &mut D) -> bool {
        each!(self, device => device.has_work(dma))
    }

    fn disarm<D: Dma>(&mut self, dma: &mut D) {
        each!(self, device => device.disarm(dma));
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        each!(self, device => device.wake_fds())
    }

    fn has_more<D: Dma>(&mut self, index: u16, dma: &mut D) -> bool {
        each!(self, device => device.has_more(index, dma))
    }

    fn opens_at_ns(&self) -> Option<u64> {
        each!(self, device => device.opens_at_ns())
    }

    fn ring(&mut self, index: u16) -> Option<&mut Ring> {
        each!(self, device => device.ring(index))
    }

    fn for_each_ring(&mut self, each: impl FnMut(&mut Ring)) {
        each!(self, device => device.for_each_ring(each));
    }

    fn in_flight(&self) -> u32 {
        each!(self, device => device.in_flight())
    }

    fn touches_memory(&self) -> bool {
        each!(self, device => device.touches_memory())
    }

    fn needs_reset(&self) -> bool {
        each!(self, device => device.needs_reset())
    }

    fn violation(&self) -> Option<Violation> {
        each!(self, device => device.violation())
    }

    fn path(&self) -> Option<PathBuf> {
        each!(self, device => device.path())
    }

    fn save(&self) -> Option<SavedDevice> {
        each!(self, device => device.save())
    }

    fn stats(&self) -> DeviceStats {
        each!(self, device => device.stats())
    }
}
