//! Switch whose ports belong to network devices: frames stay in their sender's memory until a
//! receiver has copied them.
//!
//! ```text
//! sender's visit ─ send ─▶ decision (first 18 bytes, copied) ─▶ queue of each receiver
//! receiver's visit ─ receive ─▶ headers checked (copied), retagged ─▶ payload copied from guest to guest
//! sender's visit ─ collect ─▶ taken by all, or too old: copied for those that have not taken it
//! ```
//! **One copy** from guest to guest, of the payload. The headers on which decisions depend are
//! copied first, and the receiver gets that copy: a sender that changes a frame in flight changes
//! its payload only. A frame of at most [`SHORT`] bytes is copied whole when it is sent: a second
//! copy of a few bytes, out of the cache, costs less than keeping the frame, and the sender has its
//! buffer back at once. Short frames that leave nothing undone are copied into their receiver's
//! queue, and handed to it a burst at a time.
//!
//! **A port that takes nothing** delays no other port. Its queue is bounded ([`QUEUE`]). A frame
//! that stays there for longer than [`KEEP_NS`] is copied by its sender, which then has its buffer
//! back, up to [`COPIED`] bytes for each receiver; beyond these bounds frames are dropped, for that
//! receiver alone.
//!
//! **Wake-up.** A port whose queue gets its first frame wakes its owner: by a descriptor, or, where
//! all ports have one owner ([`Fabric::port_with`]), by a call.
//!
//! Ports may be used by different threads; then frames are copied between cores. One lock guards
//! all, held for a burst; on one core it is never contended, and costs two atomic operations a
//! burst.

mod compose;
mod port;
mod waiting;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use guest_mem::{GuestRam, Hva, KeepAlive};
use net_offload::{NetHeader, Offloads};
use net_switch::{
    Forward, HEAD_LEN, PortConfig, PortCounters, PortId, PortSet, Retag, Switch, SwitchConfig,
    SwitchError,
};

use compose::Composer;
pub use port::SwitchPort;
use waiting::Waiting;

/// Most frames that wait for one receiver.
const QUEUE: usize = 1_024;
/// Largest frame that is copied when it is sent, in bytes.
const SHORT: usize = 256;
/// Longest time that a frame stays in its sender's memory, checked at the sender's visits: 50 µs.
const KEEP_NS: u64 = 50_000;
/// Most bytes of frames that are copied for one receiver.
const COPIED: usize = 1 << 20;

/// Counters of frames from, or for, one port of a switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FabricCounters {
    /// Frames for it that were dropped because its queue was full, or because it took none for too
    /// long.
    pub overflowed: u64,
    /// Frames for it that were copied before it took them.
    pub copied: u64,
    /// Frames of it whose header was wrong for their bytes, counted for each receiver.
    pub wrong_headers: u64,
}

/// A switch, and the frames in it.
#[derive(Clone)]
pub struct Fabric(Arc<Mutex<Shared>>);

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fabric").finish_non_exhaustive()
    }
}

/// Bytes of a frame.
enum Data {
    /// In the sender's memory, where it stays until the sender has collected it.
    Kept {
        keep: KeepAlive,
        slices: Vec<(Hva, u32)>,
    },
    Copied(Box<[u8]>),
    /// In [`Shared::short`], at the frame's place.
    Short,
}

/// A frame under way.
struct Frame {
    from: PortId,
    /// Its number among those of its sender.
    number: u64,
    header: NetHeader,
    head: [u8; HEAD_LEN],
    len: u32,
    forward: Forward,
    /// Receivers in whose queues it is.
    receivers: u32,
    at_ns: u64,
    data: Data,
}

/// State of a frame that the sender has not collected yet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sent {
    /// It is in a receiver's queue, in the sender's memory.
    Kept(usize),
    Done,
    Dropped,
}

struct Port {
    receiver: Offloads,
    /// A driver is there.
    is_started: bool,
    /// Frames for it.
    queue: Waiting,
    /// Segments of the first one that it has taken.
    segments_taken: usize,
    copied_bytes: usize,
    /// Length of the queue, for reads without the lock.
    waiting: Arc<AtomicUsize>,
    wake: Arc<Wake>,
    /// Frames of it, from number `first` on.
    sent: VecDeque<Sent>,
    first: u64,
    counters: FabricCounters,
}

/// How a port's owner learns that frames wait.
enum Wake {
    /// Readable while they do.
    Fd(OwnedFd),
    /// Called when there were none before.
    Call(Box<dyn Fn() + Send + Sync>),
}

struct Shared {
    switch: Switch,
    ports: Vec<Option<Port>>,
    frames: Vec<Option<Frame>>,
    /// By place, as `frames`.
    short: Vec<[u8; SHORT]>,
    /// Receivers of the burst under way, whose owners are to be woken.
    touched: PortSet,
    free: Vec<usize>,
    spare_slices: Vec<Vec<(Hva, u32)>>,
    composer: Composer,
    start: Instant,
}

impl Fabric {
    /// A switch without ports.
    ///
    /// # Errors
    /// No memory for the headers of a burst.
    pub fn new(config: SwitchConfig) -> Result<Self, guest_mem::RamError> {
        Ok(Self(Arc::new(Mutex::new(Shared {
            switch: Switch::new(config),
            ports: Vec::new(),
            frames: Vec::new(),
            short: Vec::new(),
            touched: PortSet::default(),
            free: Vec::new(),
            spare_slices: Vec::new(),
            composer: Composer::new(GuestRam::in_heap(&Composer::REGION)?),
            start: Instant::now(),
        }))))
    }

    /// Adds a port, whose frames have at most `mtu` bytes of payload where nothing is left undone.
    /// Dropping the port removes it.
    ///
    /// # Errors
    /// There is no room, or another port is bound to the same address.
    pub fn port(&self, config: PortConfig, mtu: u16) -> Result<SwitchPort, SwitchError> {
        SwitchPort::new(self.clone(), config, mtu, None)
    }

    /// As [`port`](Self::port), but without a descriptor: when its queue gets its first frame, the
    /// sending thread calls `wake`. For ports whose devices are all polled by one thread.
    ///
    /// # Errors
    /// As for [`port`](Self::port).
    pub fn port_with(
        &self,
        config: PortConfig,
        mtu: u16,
        wake: Box<dyn Fn() + Send + Sync>,
    ) -> Result<SwitchPort, SwitchError> {
        SwitchPort::new(self.clone(), config, mtu, Some(wake))
    }

    /// Returns the counters of the switch's decisions about frames from a port, and of the frames
    /// moved from it and to it.
    pub fn counters(&self, id: PortId) -> (PortCounters, FabricCounters) {
        let mut shared = self.lock();
        let decided = shared.switch.counters(id);
        let moved = shared.port(id).map(|port| port.counters);
        (decided, moved.unwrap_or_default())
    }

    /// Addresses learned, at one port and in all.
    pub fn learned(&self, id: PortId) -> (usize, usize) {
        self.lock().switch.learned(id)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // A thread that panicked left at worst a frame that no port takes.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn port(&mut self, id: PortId) -> Option<&mut Port> {
        self.ports.get_mut(id.index()).and_then(Option::as_mut)
    }

    /// A place for a frame.
    fn place(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.frames.push(None);
            self.short.push([0; SHORT]);
            self.frames.len() - 1
        })
    }

    /// Puts the frame at `place` into the queues of its receivers; returns whether there is one.
    /// Otherwise the place is free again.
    fn enqueue(&mut self, place: usize) -> bool {
        let Some(frame) = &self.frames[place] else {
            return false;
        };
        let mut receivers = 0;
        for id in frame.forward.ports.iter() {
            receivers += u32::from(self.push(id, |queue| queue.push(place)));
        }
        if receivers != 0 {
            if let Some(frame) = &mut self.frames[place] {
                frame.receivers = receivers;
            }
            return true;
        }
        self.free.push(place);
        if let Some(frame) = self.frames[place].take() {
            self.reuse(frame.data);
        }
        false
    }

    /// Puts a short frame that leaves nothing undone into the queues of its receivers, unchanged;
    /// returns whether there is one. `None` if one of them must get it with another tag.
    #[inline]
    fn enqueue_short(&mut self, forward: &Forward, bytes: &[u8]) -> Option<bool> {
        let as_it_is = |id| self.switch.retag(forward, id) == Retag::default();
        if let Some(only) = forward.only() {
            return as_it_is(only).then(|| self.push(only, |queue| queue.push_short(bytes)));
        }
        if !forward.ports.iter().all(as_it_is) {
            return None;
        }
        let mut has_receiver = false;
        for id in forward.ports.iter() {
            has_receiver |= self.push(id, |queue| queue.push_short(bytes));
        }
        Some(has_receiver)
    }

    /// Puts a frame into the queue of one receiver, if a driver is there; whether there was room.
    #[inline]
    fn push(&mut self, id: PortId, into: impl FnOnce(&mut Waiting) -> bool) -> bool {
        let Some(port) = self.port(id).filter(|port| port.is_started) else {
            return false;
        };
        if !into(&mut port.queue) {
            port.counters.overflowed += 1;
            return false;
        }
        self.touched.insert(id);
        true
    }

    /// Wakes the owners of the ports that have received frames in this burst.
    fn tell_receivers(&mut self) {
        for id in std::mem::take(&mut self.touched).iter() {
            if let Some(port) = self.port(id) {
                port.show_waiting();
            }
        }
    }

    fn reuse(&mut self, data: Data) {
        if let Data::Kept { mut slices, .. } = data
            && self.spare_slices.len() < QUEUE
        {
            slices.clear();
            self.spare_slices.push(slices);
        }
    }

    /// A receiver has done with a frame, which is no longer in its queue.
    fn release(&mut self, place: usize, receiver: PortId) {
        let Some(frame) = &mut self.frames[place] else {
            return;
        };
        frame.receivers -= 1;
        let is_last = frame.receivers == 0;
        if matches!(frame.data, Data::Short) {
            if is_last {
                self.frames[place] = None;
                self.free.push(place);
            }
            return;
        }
        let copied = match &frame.data {
            Data::Copied(bytes) => bytes.len(),
            Data::Kept { .. } | Data::Short => 0,
        };
        if let Some(port) = self.port(receiver) {
            port.copied_bytes -= copied;
        }
        if is_last && let Some(frame) = self.frames[place].take() {
            self.free.push(place);
            self.tell(frame.from, frame.number);
            self.reuse(frame.data);
        }
    }

    /// A sender has its buffer back.
    fn tell(&mut self, from: PortId, number: u64) {
        if let Some(port) = self.port(from)
            && let Some(at) = number.checked_sub(port.first)
            && let Some(sent) = port.sent.get_mut(at as usize)
        {
            *sent = Sent::Done;
        }
    }

    /// Copies a frame out of its sender's memory, for those receivers that have room for a copy;
    /// the others lose it.
    fn copy_out(&mut self, place: usize) {
        let Some(mut frame) = self.frames[place].take() else {
            return;
        };
        let Data::Kept { keep, slices } = &frame.data else {
            self.frames[place] = Some(frame);
            return;
        };
        let bytes = compose::copy_of(keep, slices, frame.len);
        for id in frame.forward.ports.iter() {
            let Some(port) = self.port(id) else {
                continue;
            };
            let Some(at) = port.queue.position(place) else {
                continue;
            };
            let has_room = port.copied_bytes + frame.len as usize <= COPIED;
            if has_room && bytes.is_some() {
                port.copied_bytes += frame.len as usize;
                port.counters.copied += 1;
                continue;
            }
            port.queue.remove(at);
            if at == 0 {
                port.segments_taken = 0;
            }
            port.show_waiting();
            port.counters.overflowed += 1;
            frame.receivers -= 1;
        }
        let (from, number) = (frame.from, frame.number);
        match bytes.filter(|_| frame.receivers != 0) {
            Some(bytes) => {
                let kept = std::mem::replace(&mut frame.data, Data::Copied(bytes));
                self.reuse(kept);
                self.frames[place] = Some(frame);
            }
            None => {
                self.free.push(place);
                self.reuse(frame.data);
            }
        }
        self.tell(from, number);
    }

    /// Takes all frames for a port out of its queue.
    fn clear_queue(&mut self, id: PortId) {
        let Some(port) = self.port(id) else { return };
        port.segments_taken = 0;
        let places = port.queue.clear();
        port.show_waiting();
        places.into_iter().for_each(|at| self.release(at, id));
    }

    /// Copies all frames of a port that are kept, which releases their memory.
    fn let_go(&mut self, id: PortId) {
        let Some(port) = self.port(id) else { return };
        let kept = port.sent.iter().filter_map(|sent| match sent {
            Sent::Kept(place) => Some(*place),
            _ => None,
        });
        let kept: Vec<usize> = kept.collect();
        kept.into_iter().for_each(|place| self.copy_out(place));
    }
}

impl Port {
    fn show_waiting(&mut self) {
        let len = self.queue.len();
        // Pairs with the load of a device that is polled: it may see this late, as it may a
        // frame. No other thread stores: the lock is held.
        let former = self.waiting.load(Ordering::Relaxed);
        self.waiting.store(len, Ordering::Relaxed);
        match &*self.wake {
            Wake::Call(wake) if former == 0 && len != 0 => wake(),
            Wake::Call(_) => {}
            Wake::Fd(fd) => {
                if former == 0 && len != 0 {
                    // Full means that it is readable already.
                    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
                }
                if former != 0 && len == 0 {
                    let _ = rustix::io::read(fd, &mut [0; 8]);
                }
            }
        }
    }
}
