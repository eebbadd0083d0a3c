//! Ports without a network behind them, for measurements and as peers of tests: [`Sink`],
//! [`Source`], [`Loop`].
//!
//! Each copies a frame once, as any port has to. Bounds: 1.1 MiB of memory each at most. Places
//! begin an odd number of cache lines from each other: at a power of two, small frames would all
//! fall into a few sets of the caches.

use arrayvec::ArrayVec;
use guest_mem::KeepAlive;

use net_offload::NetHeader;
use vio::net::{BURST, FrameData, FrameReceiver, NetPort, PLAIN_FRAME, RxFrame, TxFrame};

/// Bytes from the beginning of a frame's place to the next one's.
const PLACE: usize = 2048 + 64;
/// Frames that a loop has memory for.
const PLACES: usize = 512;

/// Takes every frame, copies it, and forgets it.
#[derive(Debug)]
pub struct Sink {
    places: Box<[u8]>,
    next: usize,
}

impl Default for Sink {
    fn default() -> Self {
        Self {
            places: vec![0; PLACE * BURST].into(),
            next: 0,
        }
    }
}

impl NetPort for Sink {
    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        for frame in frames {
            let place = &mut self.places[self.next * PLACE..][..PLAIN_FRAME];
            frame.read(0, place);
            self.next = (self.next + 1) % BURST;
        }
        0
    }

    fn has_own_events(&self) -> bool {
        false
    }

    fn has_frames(&mut self, _pair: u16) -> bool {
        false
    }

    fn receive(&mut self, _pair: u16, _to: &mut dyn FrameReceiver) {}

    fn reset(&mut self) {}
}

/// Port that offers the same frame as long as there are buffers, and drops frames sent to it.
#[derive(Debug)]
pub struct Source {
    frame: Vec<u8>,
}

impl Source {
    /// A source of frames of `len` bytes, 14 to [`PLAIN_FRAME`]; `None` for another length. They
    /// are broadcast, with the type that the standard keeps for experiments (IEEE 802, 88B5), and
    /// count up behind it.
    pub fn new(len: usize) -> Option<Self> {
        let head = [
            0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02, 0, 0, 0, 0, 0x53, 0x88, 0xb5,
        ];
        if !(head.len()..=PLAIN_FRAME).contains(&len) {
            return None;
        }
        let rest = (head.len()..len).map(|at| at as u8);
        let frame = head.into_iter().chain(rest).collect();
        Some(Self { frame })
    }
}

impl NetPort for Source {
    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        frames.len()
    }

    fn has_own_events(&self) -> bool {
        false
    }

    fn has_frames(&mut self, _pair: u16) -> bool {
        true
    }

    fn receive(&mut self, _pair: u16, to: &mut dyn FrameReceiver) {
        let frame = RxFrame {
            header: NetHeader::PLAIN,
            data: FrameData::Bytes(&self.frame),
        };
        let frames = [frame; BURST];
        loop {
            let room = to.room().min(BURST);
            if room == 0 || to.deliver(&frames[..room]) == 0 {
                return;
            }
        }
    }

    fn reset(&mut self) {}
}

/// Gives every frame back as it came. While it is full it takes none.
#[derive(Debug)]
pub struct Loop {
    places: Box<[u8]>,
    lens: Box<[u16]>,
    first: usize,
    count: usize,
}

impl Default for Loop {
    fn default() -> Self {
        Self {
            places: vec![0; PLACE * PLACES].into(),
            lens: vec![0; PLACES].into(),
            first: 0,
            count: 0,
        }
    }
}

impl NetPort for Loop {
    fn send_room(&mut self, _pair: u16) -> usize {
        PLACES - self.count
    }

    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        let mut dropped = 0;
        for frame in frames {
            if self.count == PLACES {
                dropped += 1;
                continue;
            }
            let at = (self.first + self.count) % PLACES;
            let place = &mut self.places[at * PLACE..][..PLAIN_FRAME];
            self.lens[at] = frame.read(0, place) as u16;
            self.count += 1;
        }
        dropped
    }

    fn has_own_events(&self) -> bool {
        false
    }

    fn has_frames(&mut self, _pair: u16) -> bool {
        self.count != 0
    }

    fn receive(&mut self, _pair: u16, to: &mut dyn FrameReceiver) {
        while self.count != 0 {
            let room = to.room().min(BURST).min(self.count);
            let held = (self.first..self.first + room).map(|at| {
                let at = at % PLACES;
                let len = usize::from(self.lens[at]);
                RxFrame {
                    header: NetHeader::PLAIN,
                    data: FrameData::Bytes(&self.places[at * PLACE..][..len]),
                }
            });
            let mut frames = ArrayVec::<_, BURST>::new();
            frames.extend(held);
            let over = to.deliver(&frames);
            self.first = (self.first + over) % PLACES;
            self.count -= over;
            if self.count == 0 {
                // The places that are in the cache.
                self.first = 0;
            }
            if over == 0 {
                return;
            }
        }
    }

    fn reset(&mut self) {
        self.count = 0;
    }
}
