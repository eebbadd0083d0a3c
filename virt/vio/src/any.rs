//! One type for every device, for owners that hold several: the trait's methods are generic, so it is not
//! usable as `dyn`.

use std::os::fd::RawFd;

use guest_mem::{Dma, KeepAlive, Ticket};

use crate::blk::Blk;
use crate::device::{
    ActivateError, Activity, DeviceStats, Interrupt, QueueConfig, Quiesce, StopReason, VirtioDevice,
};
use crate::net::Net;
use crate::remote::Remote;
use crate::saved::SavedDevice;

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

impl VirtioDevice for AnyDevice {
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

    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        each!(self, device => device.activate(features, queues, keep))
    }

    fn poll<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt, now_ns: u64) -> Activity {
        each!(self, device => device.poll(dma, irq, now_ns))
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

    fn quiesce<D: Dma>(&mut self, dma: &mut D) -> Quiesce {
        each!(self, device => device.quiesce(dma))
    }

    fn touches_memory(&self) -> bool {
        each!(self, device => device.touches_memory())
    }

    fn resume(&mut self) {
        each!(self, device => device.resume());
    }

    fn reset(&mut self) {
        each!(self, device => device.reset());
    }

    fn cancel_overdue(&mut self) {
        each!(self, device => device.cancel_overdue());
    }

    fn stop_overdue(&mut self, reason: StopReason) {
        each!(self, device => device.stop_overdue(reason));
    }

    fn needs_reset(&self) -> bool {
        each!(self, device => device.needs_reset())
    }

    fn save(&self) -> Option<SavedDevice> {
        each!(self, device => device.save())
    }

    fn stats(&self) -> DeviceStats {
        each!(self, device => device.stats())
    }
}
