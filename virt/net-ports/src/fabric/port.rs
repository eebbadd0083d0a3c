//! Port of a switch, as seen by its device.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use guest_mem::KeepAlive;
use net_switch::{Forward, HEAD_LEN, PortConfig, PortCounters, PortId, SwitchError};
use rustix::event::{EventfdFlags, eventfd};
use vio::net::{
    BURST, Collected, FrameReceiver, NetPort, Offloads, PortCapabilities, TxFrame, Waits,
};

use super::compose;
use super::{
    Data, Fabric, FabricCounters, Frame, KEEP_NS, Port, SHORT, Sent, Shared, Waiting, Wake,
};

/// A port of a switch. Dropped, it is removed from it.
pub struct SwitchPort {
    fabric: Fabric,
    id: PortId,
    mtu: u16,
    waiting: Arc<AtomicUsize>,
    wake: Arc<Wake>,
    /// Number of frames that are kept, or whose end has not been collected yet.
    kept: usize,
}

impl std::fmt::Debug for SwitchPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SwitchPort")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl SwitchPort {
    pub(super) fn new(
        fabric: Fabric,
        config: PortConfig,
        mtu: u16,
        wake: Option<Box<dyn Fn() + Send + Sync>>,
    ) -> Result<Self, SwitchError> {
        let wake = match wake {
            Some(wake) => Wake::Call(wake),
            None => {
                let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
                Wake::Fd(fd.map_err(|_| SwitchError::Full)?)
            }
        };
        let wake = Arc::new(wake);
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
            queue: Waiting::default(),
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
            kept: 0,
        })
    }

    /// Its name in the switch.
    pub fn id(&self) -> PortId {
        self.id
    }

    /// Returns the counters of the switch's decisions about frames from it, and of the frames
    /// moved from it and to it.
    pub fn counters(&self) -> (PortCounters, FabricCounters) {
        self.fabric.counters(self.id)
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
            copies_up_to: SHORT as u32,
        }
    }

    fn start(&mut self, receiver: Offloads) {
        if let Some(port) = self.fabric.lock().port(self.id) {
            port.receiver = receiver;
            port.is_started = true;
        }
    }

    /// Sets the offloads with which waiting frames are delivered from now on. A frame of which the
    /// driver has received a part cannot be continued with other offloads, and is dropped.
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
        self.kept = 0;
    }

    /// Sends frames. Drops of kept frames are reported by [`collect`](NetPort::collect), in order
    /// with the frames that were not dropped.
    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], keep: &KeepAlive) -> usize {
        let mut shared = self.fabric.lock();
        let now = shared.now_ns();
        let mut dropped = 0;
        let mut last = None;
        for frame in frames {
            if frame.len as usize <= SHORT {
                dropped += usize::from(!send_short(&mut shared, self.id, frame, now, &mut last));
            } else {
                last = None;
                self.kept += 1;
                send_kept(&mut shared, self.id, frame, keep, now);
            }
        }
        shared.tell_receivers();
        dropped
    }

    fn collect(&mut self, _pair: u16) -> Collected {
        let mut collected = Collected::default();
        if self.kept == 0 {
            return collected;
        }
        let mut shared = self.fabric.lock();
        let now = shared.now_ns();
        while let Some(port) = shared.port(self.id)
            && let Some(sent) = port.sent.front().copied()
        {
            if let Sent::Kept(place) = sent {
                let at = shared.frames[place].as_ref().map(|frame| frame.at_ns);
                if at.is_some_and(|at| now.saturating_sub(at) < KEEP_NS) {
                    break;
                }
                // This completes it.
                shared.copy_out(place);
                continue;
            }
            port.sent.pop_front();
            port.first += 1;
            collected.frames += 1;
            collected.dropped += usize::from(sent == Sent::Dropped);
        }
        self.kept -= collected.frames;
        collected
    }

    fn has_kept(&self, _pair: u16) -> bool {
        self.kept != 0
    }

    fn cancel(&mut self, _pair: u16) {
        self.fabric.lock().let_go(self.id);
    }

    /// Returns whether the device must be polled in each sweep: not if a call wakes the owner.
    fn has_own_events(&self) -> bool {
        matches!(*self.wake, Wake::Fd(_))
    }

    fn has_frames(&mut self, pair: u16) -> bool {
        pair == 0 && self.waiting.load(Ordering::Relaxed) != 0
    }

    fn receive(&mut self, _pair: u16, to: &mut dyn FrameReceiver) {
        let mut shared = self.fabric.lock();
        loop {
            let room = to.room().min(BURST);
            let has_frames = shared
                .port(self.id)
                .is_some_and(|port| port.queue.len() != 0);
            if room == 0 || !has_frames {
                break;
            }
            let taken = match compose::deliver_short(&mut shared, self.id, room, to) {
                Some(taken) => taken,
                None => compose::deliver(&mut shared, self.id, room, to),
            };
            if taken == 0 {
                break;
            }
        }
        if let Some(port) = shared.port(self.id) {
            port.show_waiting();
        }
    }

    fn wake_fds(&self, _pair: u16, waits: Waits, fds: &mut Vec<RawFd>) {
        if waits.receive
            && let Wake::Fd(fd) = &*self.wake
        {
            fds.push(fd.as_raw_fd());
        }
    }
}

/// Sends a frame that is copied now; returns false if no port gets it. `last`: head and decision of
/// the frame before it in its burst.
#[inline]
fn send_short(
    shared: &mut Shared,
    from: PortId,
    frame: &TxFrame<'_>,
    now: u64,
    last: &mut Option<([u8; HEAD_LEN], Forward)>,
) -> bool {
    let mut bytes = [0; SHORT];
    let bytes = &mut bytes[..frame.len as usize];
    if frame.read(0, bytes) < bytes.len() {
        return false;
    }
    let whole = bytes.first_chunk::<HEAD_LEN>().copied();
    let same = last.filter(|(head, _)| whole == Some(*head));
    let forward = match same {
        Some((_, forward)) if shared.switch.forward_again(from, &forward) => forward,
        _ => {
            let seen = bytes.len().min(HEAD_LEN);
            let Ok(forward) = shared.switch.forward(from, &bytes[..seen], now) else {
                *last = None;
                return false;
            };
            *last = whole.map(|head| (head, forward));
            forward
        }
    };
    if frame.header.is_plain()
        && let Some(has_receiver) = shared.enqueue_short(&forward, bytes)
    {
        return has_receiver;
    }
    let place = shared.place();
    shared.short[place][..bytes.len()].copy_from_slice(bytes);
    let mut head = [0; HEAD_LEN];
    let seen = bytes.len().min(HEAD_LEN);
    head[..seen].copy_from_slice(&bytes[..seen]);
    shared.frames[place] = Some(Frame {
        from,
        number: 0,
        header: frame.header,
        head,
        len: frame.len,
        forward,
        receivers: 0,
        at_ns: now,
        data: Data::Short,
    });
    shared.enqueue(place)
}

/// Sends a frame that stays where it is until its receivers have taken it.
fn send_kept(shared: &mut Shared, from: PortId, frame: &TxFrame<'_>, keep: &KeepAlive, now: u64) {
    let mut head = [0; HEAD_LEN];
    let seen = frame.read(0, &mut head);
    let decided = shared.switch.forward(from, &head[..seen], now);
    let Some(port) = shared.port(from) else {
        return;
    };
    let number = port.first + port.sent.len() as u64;
    let mut sent = Sent::Dropped;
    if let Ok(forward) = decided {
        let mut slices = shared.spare_slices.pop().unwrap_or_default();
        slices.extend(frame.data.iter().map(|one| (one.hva(), one.len())));
        let place = shared.place();
        shared.frames[place] = Some(Frame {
            from,
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
        });
        if shared.enqueue(place) {
            sent = Sent::Kept(place);
        }
    }
    if let Some(port) = shared.port(from) {
        port.sent.push_back(sent);
    }
}
