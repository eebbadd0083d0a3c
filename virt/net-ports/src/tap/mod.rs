//! A TAP interface of the host (Linux `Documentation/networking/tuntap.rst`), with offloads and
//! several queues.
//!
//! **Headers are passed through** in both directions: the kernel checks those of a guest, and makes
//! none that the guest's driver has not taken on (TUNSETOFFLOAD, which is for the whole interface).
//! A frame whose header it refuses is dropped and counted.
//!
//! **Receiving**: one read is posted ahead in the io_uring of the polling thread, so that a poll
//! for a frame is a load. When it has completed, nonblocking reads are submitted at once, as many
//! as there were frames lately, and another waiting one (before Linux 6.4, which does not take
//! nonblocking reads, that one alone). Frames for which the driver has no buffers are left in the
//! interface's own bounded queue. Where the host refuses io_uring, a poll is a nonblocking read.
//!
//! **Sending** is a `writev` for each frame, from the guest's memory, that does not wait.
//!
//! Deleting an interface takes the link down, which is logged once; frames sent then are dropped.
//!
//! Bound: [`SLOTS`] buffers for each queue, of 64 KiB.
//!
//! UNSAFETY: `ioctl`; `writev` of a header and guest memory; reads of the kernel into buffers that
//! stay until they have completed ([`queue`]).

mod open;
mod queue;
mod queues;

use std::os::fd::RawFd;

use guest_mem::KeepAlive;
use vio::net::{BURST, FrameReceiver, NetPort, Offloads, PortCapabilities, TxFrame, Waits};

use open::Interface;
pub use open::{TapError, TapOptions};
use queue::{Queue, SendError};
pub use queues::TapQueues;

/// Buffers of one queue.
const SLOTS: usize = BURST;

/// Counters of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapCounters {
    /// Frames of the guest whose header the kernel refused.
    pub wrong_headers: u64,
    /// Frames of the guest that the interface did not take: it is down, full or gone.
    pub refused: u64,
}

/// A TAP interface as the port of a device.
#[derive(Debug)]
pub struct TapPort {
    interface: Interface,
    queues: Vec<Queue>,
    /// Queues that the driver uses.
    in_use: u16,
    is_started: bool,
    /// Offloads that the driver has accepted.
    receiver: Offloads,
    is_gone: bool,
    counters: TapCounters,
}

impl TapPort {
    /// The port of a device over the queues of an interface.
    pub fn new(queues: TapQueues) -> Self {
        let (interface, files) = queues.into_parts();
        let queues = Vec::from_iter(files.into_iter().map(Queue::new));
        let mut port = Self {
            interface,
            in_use: queues.len() as u16,
            queues,
            is_started: false,
            receiver: Offloads::NONE,
            is_gone: false,
            counters: TapCounters::default(),
        };
        port.use_queues(1);
        port
    }

    /// Counters.
    pub fn counters(&self) -> TapCounters {
        self.counters
    }

    fn use_queues(&mut self, count: u16) {
        let count = count.clamp(1, self.queues.len() as u16);
        for (nth, queue) in self.queues.iter_mut().enumerate() {
            let (was, is) = (nth < usize::from(self.in_use), nth < usize::from(count));
            if was != is {
                queue.stop();
                // An interface that has gone refuses, and has no queues.
                let _ = queue.set_attached(is);
            }
        }
        self.in_use = count;
    }

    /// The interface has been deleted, and does not come back under these descriptors.
    fn set_gone(&mut self) {
        if !std::mem::replace(&mut self.is_gone, true) {
            tracing::error!(
                "TAP {} is gone: the link of its device stays down until this process is started \
                 again",
                self.interface.name
            );
        }
    }

    /// The queue of a pair, if frames may go through it.
    fn queue(&mut self, pair: u16) -> Option<&mut Queue> {
        let may = self.is_started && !self.is_gone && pair < self.in_use;
        self.queues.get_mut(usize::from(pair)).filter(|_| may)
    }
}

impl NetPort for TapPort {
    fn capabilities(&self) -> PortCapabilities {
        let tso = Offloads::CSUM.with(Offloads::TSO4).with(Offloads::TSO6);
        let all = match self.interface.has_uso {
            true => Offloads::ALL,
            false => tso.with(Offloads::ECN),
        };
        PortCapabilities {
            send: all,
            receive: all,
            mtu: self.interface.mtu,
            pairs: self.queues.len() as u16,
            keeps_frames: false,
            copies_up_to: 0,
        }
    }

    fn start(&mut self, receiver: Offloads) {
        self.set_receiver(receiver);
        self.use_queues(1);
        self.is_started = true;
    }

    fn set_receiver(&mut self, receiver: Offloads) {
        self.receiver = receiver;
        // USO of one version of IP alone is not asked for. An interface that has gone refuses.
        if let Some(queue) = self.queues.first() {
            let _ = queue.set_offloads(receiver.tun_flags());
        }
    }

    fn set_pairs(&mut self, pairs: u16) {
        self.use_queues(pairs);
    }

    /// Discards the frames for the former driver, which are stale for the next one.
    fn reset(&mut self) {
        self.is_started = false;
        for queue in &mut self.queues[..usize::from(self.in_use)] {
            queue.stop();
            queue.discard();
        }
        self.set_receiver(Offloads::NONE);
    }

    fn is_up(&self) -> bool {
        !self.is_gone
    }

    fn send(&mut self, pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        let Some(queue) = self.queue(pair) else {
            return frames.len();
        };
        let (mut wrong, mut refused, mut is_gone) = (0, 0, false);
        for frame in frames {
            match queue.send(frame) {
                Ok(()) => {}
                Err(SendError::Header) => wrong += 1,
                Err(SendError::Refused) => refused += 1,
                Err(SendError::Gone) => {
                    refused += 1;
                    is_gone = true;
                }
            }
        }
        self.counters.wrong_headers += wrong;
        self.counters.refused += refused;
        if is_gone {
            self.set_gone();
        }
        (wrong + refused) as usize
    }

    fn has_frames(&mut self, pair: u16) -> bool {
        let Some(queue) = self.queue(pair) else {
            return false;
        };
        let has_frames = queue.has_frames();
        if queue.is_gone() {
            self.set_gone();
        }
        has_frames
    }

    fn receive(&mut self, pair: u16, to: &mut dyn FrameReceiver) {
        let receiver = self.receiver;
        let Some(queue) = self.queue(pair) else {
            return;
        };
        while to.room() != 0 && queue.has_frames() {
            if queue.deliver(to, receiver) == 0 {
                return;
            }
        }
    }

    fn arm(&mut self) {
        if !self.is_started || self.is_gone {
            return;
        }
        for queue in &mut self.queues[..usize::from(self.in_use)] {
            queue.arm();
        }
    }

    fn disarm(&mut self) {
        self.queues.iter_mut().for_each(Queue::disarm);
    }

    fn wake_fds(&self, pair: u16, waits: Waits, fds: &mut Vec<RawFd>) {
        let may = waits.receive && self.is_started && !self.is_gone && pair < self.in_use;
        if let Some(queue) = self.queues.get(usize::from(pair)).filter(|_| may) {
            fds.push(queue.wake_fd());
        }
    }

    fn rebind(&mut self) {
        self.queues.iter_mut().for_each(Queue::stop);
    }
}
