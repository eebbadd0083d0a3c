//! One type for every device, for owners that hold several: the trait's methods are generic, so it is not
//! usable as `dyn`.

use std::os::fd::RawFd;

use guest_mem::{Dma, KeepAlive, Ticket};

use crate::blk::Blk;
use crate::device::{
    ActivateError, Activity, DeviceStats, Interrupt, QueueConfig, Quiesce, VirtioDevice,
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

impl VirtioDevice for AnyDevice {
    fn device_type(&self) -> u16 {
        match self {
            Self::Blk(blk) => blk.device_type(),
            Self::Net(net) => net.device_type(),
            Self::Remote(remote) => remote.device_type(),
        }
    }

    fn features(&self) -> u64 {
        match self {
            Self::Blk(blk) => blk.features(),
            Self::Net(net) => net.features(),
            Self::Remote(remote) => remote.features(),
        }
    }

    fn queue_sizes(&self) -> &[u16] {
        match self {
            Self::Blk(blk) => blk.queue_sizes(),
            Self::Net(net) => net.queue_sizes(),
            Self::Remote(remote) => remote.queue_sizes(),
        }
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        match self {
            Self::Blk(blk) => blk.read_config(offset, out),
            Self::Net(net) => net.read_config(offset, out),
            Self::Remote(remote) => remote.read_config(offset, out),
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        match self {
            Self::Blk(blk) => blk.write_config(offset, data),
            Self::Net(net) => net.write_config(offset, data),
            Self::Remote(remote) => remote.write_config(offset, data),
        }
    }

    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        match self {
            Self::Blk(blk) => blk.activate(features, queues, keep),
            Self::Net(net) => net.activate(features, queues, keep),
            Self::Remote(remote) => remote.activate(features, queues, keep),
        }
    }

    fn poll<D: Dma>(&mut self, dma: &mut D, irq: &mut impl Interrupt, now_ns: u64) -> Activity {
        match self {
            Self::Blk(blk) => blk.poll(dma, irq, now_ns),
            Self::Net(net) => net.poll(dma, irq, now_ns),
            Self::Remote(remote) => remote.poll(dma, irq, now_ns),
        }
    }

    fn kick(&mut self, queue: u16) {
        match self {
            Self::Blk(blk) => blk.kick(queue),
            Self::Net(net) => net.kick(queue),
            Self::Remote(remote) => remote.kick(queue),
        }
    }

    fn ticket_done(&mut self, ticket: Ticket) {
        match self {
            Self::Blk(blk) => blk.ticket_done(ticket),
            Self::Net(net) => net.ticket_done(ticket),
            Self::Remote(remote) => remote.ticket_done(ticket),
        }
    }

    fn arm<D: Dma>(&mut self, dma: &mut D) {
        match self {
            Self::Blk(blk) => blk.arm(dma),
            Self::Net(net) => net.arm(dma),
            Self::Remote(remote) => remote.arm(dma),
        }
    }

    fn has_work<D: Dma>(&mut self, dma: &mut D) -> bool {
        match self {
            Self::Blk(blk) => blk.has_work(dma),
            Self::Net(net) => net.has_work(dma),
            Self::Remote(remote) => remote.has_work(dma),
        }
    }

    fn disarm<D: Dma>(&mut self, dma: &mut D) {
        match self {
            Self::Blk(blk) => blk.disarm(dma),
            Self::Net(net) => net.disarm(dma),
            Self::Remote(remote) => remote.disarm(dma),
        }
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        match self {
            Self::Blk(blk) => blk.wake_fds(),
            Self::Net(net) => net.wake_fds(),
            Self::Remote(remote) => remote.wake_fds(),
        }
    }

    fn quiesce<D: Dma>(&mut self, dma: &mut D) -> Quiesce {
        match self {
            Self::Blk(blk) => blk.quiesce(dma),
            Self::Net(net) => net.quiesce(dma),
            Self::Remote(remote) => remote.quiesce(dma),
        }
    }

    fn resume(&mut self) {
        match self {
            Self::Blk(blk) => blk.resume(),
            Self::Net(net) => net.resume(),
            Self::Remote(remote) => remote.resume(),
        }
    }

    fn reset(&mut self) {
        match self {
            Self::Blk(blk) => blk.reset(),
            Self::Net(net) => net.reset(),
            Self::Remote(remote) => remote.reset(),
        }
    }

    fn cancel_overdue(&mut self) {
        match self {
            Self::Blk(blk) => blk.cancel_overdue(),
            Self::Net(net) => net.cancel_overdue(),
            Self::Remote(remote) => remote.cancel_overdue(),
        }
    }

    fn needs_reset(&self) -> bool {
        match self {
            Self::Blk(blk) => blk.needs_reset(),
            Self::Net(net) => net.needs_reset(),
            Self::Remote(remote) => remote.needs_reset(),
        }
    }

    fn save(&self) -> Option<SavedDevice> {
        match self {
            Self::Blk(blk) => blk.save(),
            Self::Net(net) => net.save(),
            Self::Remote(remote) => remote.save(),
        }
    }

    fn stats(&self) -> DeviceStats {
        match self {
            Self::Blk(blk) => blk.stats(),
            Self::Net(net) => net.stats(),
            Self::Remote(remote) => remote.stats(),
        }
    }
}
