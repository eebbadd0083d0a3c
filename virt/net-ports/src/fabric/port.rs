//! One port of a switch, as the device that has it sees it.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use guest_mem::KeepAlive;
use net_switch::{HEAD_LEN, PortConfig, PortCounters, PortId, SwitchError};
use rustix::event::{EventfdFlags, eventfd};
use vio::net::{
    BURST, Collected, FrameReceiver, NetPort, Offloads, PortCapabilities, TxFrame, Waits,
};

use super::compose;
use super::{Data, Fabric, FabricCounters, Frame, KEEP_NS, Port, Sent};

/// A port of a switch. Dropped, it is removed from it.
#[derive(Debug)]
pub struct SwitchPort {
    fabric: Fabric,
    id: PortId,
    mtu: u16,
    waiting: Arc<AtomicUsize>,
    wake: Arc<OwnedFd>,
}

impl SwitchPort {
    pub(super) fn new(fabric: Fabric, config: PortConfig, mtu: u16) -> Result<Self, SwitchError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(|_| SwitchError::Full)?);
        let waiting = Arc::new(AtomicUsize::new(0));
        let mut shared = fabric.lock();
        let now = shared.now_ns();
        let id = shared.switch.add(config, now)?;
        if shared.ports.len() <= id.index() {
            shared.ports.resize_with(id.index() + 1, || None);
        }
        shared.ports[id.index()] = Some(Port {
            receiver: Offloads::NONE,
            is_started: false,
            queue: VecDeque::new(),
            segments_taken: 0,
            copied_bytes: 0,
            waiting: Arc::clone(&waiting),
            wake: Arc::clone(&wake),
            sent: VecDeque::new(),
            first: 0,
            counters: FabricCounters::default(),
        });
        drop(shared);
        Ok(Self {
            fabric,
            id,
            mtu,
            waiting,
            wake,
        })
    }

    /// What the switch has decided about frames from it, and what has become of those.
    pub fn counters(&self) -> (PortCounters, FabricCounters) {
        let mut shared = self.fabric.lock();
        let decided = shared.switch.counters(self.id);
        let moved = shared.port(self.id).map(|port| port.counters);
        (decided, moved.unwrap_or_default())
    }
}

impl Drop for SwitchPort {
    fn drop(&mut self) {
        let mut shared = self.fabric.lock();
        shared.let_go(self.id);
        shared.clear_queue(self.id);
        shared.ports[self.id.index()] = None;
        shared.switch.remove(self.id);
    }
}

impl NetPort for SwitchPort {
    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities {
            send: Offloads::ALL,
            receive: Offloads::ALL,
            mtu: self.mtu,
            pairs: 1,
            keeps_frames: true,
        }
    }

    fn start(&mut self, receiver: Offloads) {
        if let Some(port) = self.fabric.lock().port(self.id) {
            port.receiver = receiver;
            port.is_started = true;
        }
    }

    /// What waits is delivered as the driver wants it now; a frame of which it has got a part is finished in another way, and is
    /// dropped.
    fn set_receiver(&mut self, receiver: Offloads) {
        let mut shared = self.fabric.lock();
        let Some(port) = shared.port(self.id) else {
            return;
        };
        port.receiver = receiver;
        if std::mem::take(&mut port.segments_taken) != 0
            && let Some(place) = port.queue.pop_front()
        {
            port.show_waiting();
            shared.release(place, self.id);
        }
    }

    fn reset(&mut self) {
        let mut shared = self.fabric.lock();
        shared.let_go(self.id);
        shared.clear_queue(self.id);
        shared.switch.link_down(self.id);
        if let Some(port) = shared.port(self.id) {
            port.is_started = false;
            port.first += port.sent.len() as u64;
            port.sent.clear();
        }
    }

    /// All that was dropped is told by [`collect`](NetPort::collect), in order with what was not.
    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], keep: &KeepAlive) -> usize {
        let mut shared = self.fabric.lock();
        let now = shared.now_ns();
        for frame in frames {
            let mut head = [0; HEAD_LEN];
            let seen = frame.read(0, &mut head);
            let decided = shared.switch.forward(self.id, &head[..seen], now);
            let Some(port) = shared.port(self.id) else {
                return 0;
            };
            let number = port.first + port.sent.len() as u64;
            let sent = match decided {
                Err(_) => Sent::Dropped,
                Ok(forward) => {
                    let mut slices = shared.spare_slices.pop().unwrap_or_default();
                    slices.extend(frame.data.iter().map(|one| (one.hva(), one.len())));
                    shared.enqueue(Frame {
                        from: self.id,
                        number,
                        header: frame.header,
                        head,
                        len: frame.len,
                        forward,
                        receivers: 0,
                        at_ns: now,
                        data: Data::Kept {
                            keep: KeepAlive::clone(keep),
                            slices,
                        },
                    })
                }
            };
            if let Some(port) = shared.port(self.id) {
                port.sent.push_back(sent);
            }
        }
        0
    }

    fn collect(&mut self, _pair: u16) -> Collected {
        let mut shared = self.fabric.lock();
        let now = shared.now_ns();
        let mut collected = Collected::default();
        loop {
            let Some(port) = shared.port(self.id) else {
                return collected;
            };
            match port.sent.front().copied() {
                None => return collected,
                Some(Sent::Kept(place)) => {
                    let at = shared.frames[place].as_ref().map(|frame| frame.at_ns);
                    if at.is_some_and(|at| now.saturating_sub(at) < KEEP_NS) {
                        return collected;
                    }
                    // Which makes it done.
                    shared.copy_out(place);
                }
                Some(sent) => {
                    port.sent.pop_front();
                    port.first += 1;
                    collected.frames += 1;
                    collected.dropped += usize::from(sent == Sent::Dropped);
                }
            }
        }
    }

    fn cancel(&mut self, _pair: u16) {
        self.fabric.lock().let_go(self.id);
    }

    fn has_frames(&mut self, pair: u16) -> bool {
        pair == 0 && self.waiting.load(Ordering::Relaxed) != 0
    }

    fn receive(&mut self, _pair: u16, to: &mut dyn FrameReceiver) {
        let mut shared = self.fabric.lock();
        loop {
            let room = to.room().min(BURST);
            if room == 0 || self.waiting.load(Ordering::Relaxed) == 0 {
                return;
            }
            if compose::deliver(&mut shared, self.id, room, to) == 0 {
                return;
            }
        }
    }

    fn wake_fds(&self, _pair: u16, waits: Waits, fds: &mut Vec<RawFd>) {
        if waits.receive {
            fds.push(self.wake.as_raw_fd());
        }
    }
}
