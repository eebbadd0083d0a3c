//! Port of a switch whose other end is a port of the host instead of a guest: [`Uplink`].
//!
//! ```text
//! host's port ─ receive ─▶ copied to a place of ours ─ send ─▶ switch ─▶ … ─ collect ─▶ the place is free again
//! switch's port ─ receive ─▶ where the frame lies, or a place of ours ─ send ─▶ host's port
//! ```
//! Frames from the host are copied once more than those between guests: the host's port has them in
//! buffers that it needs back at once. Frames for the host are sent from where they are. Work that
//! one side leaves undone is left to the other side if that accepts it, or else done by the switch.
//!
//! Bound: [`PLACES`] frames from the host that receivers have not taken; at that bound, further
//! frames stay in the host's port.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use arrayvec::ArrayVec;
use guest_mem::{Gpa, GuestRam, HugePages, Intent, KeepAlive, PhysMem, RamError, VolatileSlice};
use vio::net::{
    BURST, FrameData, FrameReceiver, MAX_FRAME, NetPort, PortCapabilities, RxFrame, TxFrame, Waits,
};

use crate::SwitchPort;

/// Most frames from the host that are under way.
const PLACES: usize = 64;
/// Bytes of a place: the longest frame. An odd number of cache lines, so that short frames lie in
/// different sets of a cache.
const PLACE: u64 = 65_600;
const _: () = assert!(PLACE >= MAX_FRAME as u64 && (PLACE / 64) % 2 == 1);

/// Frames of both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UplinkCounters {
    /// From the host to the switch.
    pub from_host: u64,
    /// From the switch to the host.
    pub to_host: u64,
    /// Bytes of those from the host.
    pub from_host_bytes: u64,
    /// Bytes of those to the host.
    pub to_host_bytes: u64,
    /// Frames that the host's port, or the switch, did not take.
    pub dropped: u64,
}

/// Memory for frames that lie in none.
struct Places {
    ram: GuestRam,
    keep: KeepAlive,
}

impl Places {
    fn new(count: usize) -> Result<Self, RamError> {
        let len = (count as u64 * PLACE).next_multiple_of(4096);
        let ram = GuestRam::anonymous(&[(Gpa::new(0), len)], HugePages::Never)?;
        let keep = ram.keep_alive();
        Ok(Self { ram, keep })
    }

    /// Copies a frame to place `nth`; `None` if it is too long.
    fn fill(&self, nth: usize, frame: &RxFrame<'_>) -> Option<VolatileSlice<'_>> {
        let len = frame.data.len();
        let gpa = Gpa::new(nth as u64 * PLACE);
        let hva = self.ram.host(gpa, PLACE, Intent::Write).ok()?;
        let whole = VolatileSlice::new(&self.keep, hva, PLACE as u32)?;
        if len as u64 > PLACE {
            return None;
        }
        match frame.data {
            FrameData::Bytes(bytes) => whole.write(0, bytes),
            FrameData::Guest(slices) => {
                let mut at = 0;
                for slice in slices {
                    slice.copy_to(&whole, at);
                    at += slice.len();
                }
            }
        }
        Some(whole.slice(0, len as u32))
    }
}

/// See the head of this module.
pub struct Uplink<H> {
    host: H,
    port: SwitchPort,
    from_host: Places,
    free: Vec<usize>,
    /// Places that the switch keeps, in the order in which they were sent.
    kept: VecDeque<usize>,
    to_host: Places,
    counters: UplinkCounters,
}

impl<H: NetPort> std::fmt::Debug for Uplink<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uplink")
            .field("port", &self.port)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl<H: NetPort> Uplink<H> {
    /// Connects `host`, which reads no frame after [`send`](NetPort::send) has returned, to a port
    /// of a switch.
    ///
    /// # Errors
    /// No memory.
    ///
    /// # Panics
    /// `host` keeps frames.
    pub fn new(mut host: H, mut port: SwitchPort) -> Result<Self, RamError> {
        let (of_host, of_port) = (host.capabilities(), port.capabilities());
        assert!(!of_host.keeps_frames, "a port that sends at once");
        port.start(of_host.send.and(of_port.receive));
        host.start(of_port.send.and(of_host.receive));
        Ok(Self {
            host,
            port,
            from_host: Places::new(PLACES)?,
            free: (0..PLACES).rev().collect(),
            kept: VecDeque::new(),
            to_host: Places::new(BURST)?,
            counters: UplinkCounters::default(),
        })
    }

    /// Returns the counters of the frames that it has moved.
    pub fn counters(&self) -> UplinkCounters {
        self.counters
    }

    /// The port of the switch.
    pub fn port(&self) -> &SwitchPort {
        &self.port
    }

    /// Whether the host's end is there.
    pub fn is_up(&self) -> bool {
        self.host.is_up()
    }

    /// Moves up to `most` frames in either direction; how many, and their bytes.
    pub fn visit(&mut self, most: usize) -> (u64, u64) {
        let before = self.counters;
        let Self {
            host,
            port,
            from_host,
            free,
            kept,
            to_host,
            counters,
        } = self;
        let done = port.collect(0);
        counters.dropped += done.dropped as u64;
        free.extend(kept.drain(..done.frames.min(kept.len())));
        if host.has_frames(0) {
            let copies_up_to = port.capabilities().copies_up_to;
            let mut to = FromHost {
                port: &mut *port,
                places: from_host,
                free,
                kept,
                copies_up_to,
                counters: &mut *counters,
                left: most,
            };
            host.receive(0, &mut to);
        }
        if port.has_frames(0) {
            let mut to = ToHost {
                host,
                places: to_host,
                counters: &mut *counters,
                left: most,
            };
            port.receive(0, &mut to);
        }
        let frames = |of: &UplinkCounters| of.from_host + of.to_host;
        let bytes = |of: &UplinkCounters| of.from_host_bytes + of.to_host_bytes;
        (
            frames(counters) - frames(&before),
            bytes(counters) - bytes(&before),
        )
    }

    /// Whether a visit would move something now.
    pub fn has_work(&mut self) -> bool {
        (self.host.has_frames(0) && !self.free.is_empty())
            || (self.port.has_frames(0) && self.host.send_room(0) != 0)
    }

    /// Returns whether the switch may still read frames from the host in their places.
    pub fn has_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Releases these places at once: the next visit finds their frames done.
    pub fn cancel(&mut self) {
        self.port.cancel(0);
    }

    /// As [`NetPort::arm`], of both.
    pub fn arm(&mut self) {
        self.host.arm();
        self.port.arm();
    }

    /// As [`NetPort::disarm`], of both.
    pub fn disarm(&mut self) {
        self.host.disarm();
        self.port.disarm();
    }

    /// Descriptors that are readable while there is work.
    pub fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        let receive = Waits {
            receive: true,
            send: false,
        };
        self.host.wake_fds(0, receive, fds);
        self.port.wake_fds(0, receive, fds);
    }

    /// Prepares for visits by another thread from now on.
    pub fn rebind(&mut self) {
        self.host.rebind();
        self.port.rebind();
    }

    /// Returns the capabilities of the host's port.
    pub fn capabilities(&self) -> PortCapabilities {
        self.host.capabilities()
    }
}

struct FromHost<'u> {
    port: &'u mut SwitchPort,
    places: &'u Places,
    free: &'u mut Vec<usize>,
    kept: &'u mut VecDeque<usize>,
    copies_up_to: u32,
    counters: &'u mut UplinkCounters,
    left: usize,
}

impl FrameReceiver for FromHost<'_> {
    fn room(&mut self) -> usize {
        self.free.len().min(self.left).min(BURST)
    }

    fn deliver(&mut self, frames: &[RxFrame<'_>]) -> usize {
        let count = frames.len().min(self.room());
        let mut slices = ArrayVec::<VolatileSlice<'_>, BURST>::new();
        for frame in &frames[..count] {
            // There are as many as frames.
            let place = self.free.last().copied();
            let filled = place.and_then(|place| Some((place, self.places.fill(place, frame)?)));
            slices.push(filled.map_or(VolatileSlice::EMPTY, |(place, slice)| {
                self.free.pop();
                // Given back below, unless the switch keeps the frame.
                self.kept.push_back(place);
                slice
            }));
        }
        let mut sent = ArrayVec::<TxFrame<'_>, BURST>::new();
        for (slice, frame) in slices.iter().zip(frames) {
            if slice.is_empty() {
                self.counters.dropped += 1;
                continue;
            }
            sent.push(TxFrame {
                header: frame.header,
                len: slice.len(),
                data: std::slice::from_ref(slice),
            });
            self.counters.from_host_bytes += u64::from(slice.len());
        }
        let first = self.kept.len() - sent.len();
        let dropped = self.port.send(0, &sent, &self.places.keep);
        self.counters.dropped += dropped as u64;
        self.counters.from_host += count as u64;
        let mut at = first;
        for frame in &sent {
            if frame.len > self.copies_up_to {
                at += 1;
            } else if let Some(place) = self.kept.remove(at) {
                self.free.push(place);
            }
        }
        self.left -= count;
        count
    }
}

struct ToHost<'u, H> {
    host: &'u mut H,
    places: &'u Places,
    counters: &'u mut UplinkCounters,
    left: usize,
}

impl<H: NetPort> FrameReceiver for ToHost<'_, H> {
    fn room(&mut self) -> usize {
        self.host.send_room(0).min(self.left).min(BURST)
    }

    fn deliver(&mut self, frames: &[RxFrame<'_>]) -> usize {
        let count = frames.len().min(self.room());
        let copied = frames[..count].iter().enumerate();
        let copied = copied.map(|(nth, frame)| match frame.data {
            FrameData::Bytes(_) => self.places.fill(nth, frame),
            FrameData::Guest(_) => None,
        });
        let copied = copied.map(|copied| copied.unwrap_or(VolatileSlice::EMPTY));
        let copied: ArrayVec<_, BURST> = copied.collect();
        let mut sent = ArrayVec::<TxFrame<'_>, BURST>::new();
        for (frame, copied) in frames[..count].iter().zip(&copied) {
            let data = match frame.data {
                FrameData::Bytes(_) => std::slice::from_ref(copied),
                FrameData::Guest(slices) => slices,
            };
            let len = frame.data.len() as u32;
            if data.iter().all(VolatileSlice::is_empty) {
                self.counters.dropped += 1;
                continue;
            }
            sent.push(TxFrame {
                header: frame.header,
                len,
                data,
            });
            self.counters.to_host_bytes += u64::from(len);
        }
        let dropped = self.host.send(0, &sent, &self.places.keep);
        self.counters.dropped += dropped as u64;
        self.counters.to_host += count as u64;
        self.left -= count;
        count
    }
}
