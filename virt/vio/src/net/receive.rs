//! Receive queues: bursts of frames from the port into the driver's buffers.
//!
//! ```text
//! port.receive ─▶ deliver(frames): for each: filter, find buffers, translate (and prefetch), take
//!                                  then for each: header, bytes               the copies, together
//! stage all                                                       published at the visit's end
//! ```
//! Frames for each of which the next buffer, one descriptor, suffices are placed in a row of those
//! ([`crate::ring::Single`]), and the others chain by chain. In a row the header is stored only
//! where it differs from the one that is there.
//!
//! A frame for which there are too few buffers stays the port's, until there are more or the ring
//! is full of them: then, or where a frame must fit into one buffer, it is dropped. A buffer that
//! faults is given back with length 0, which drivers count as a short frame.

use arrayvec::ArrayVec;
use guest_mem::{Intent, KeepAlive, Stop, VolatileSlice};
use net_offload::{HEADER_LEN, NetHeader};

use super::pieces::{PieceRange, Pieces, Translated, copy_slices, write_slices};
use super::port::{BURST, FrameData, FrameReceiver, NetPort, RxFrame};
use super::reach::Reach;
use super::{MIN_FRAME, NetClass, NetCore, Queue, charge, frame_cost};
use crate::body::{Context, Environment, Step};
use crate::device::Activity;
use crate::ring::{Chain, Lookahead, RingStop, Segment, Violation};

impl NetClass {
    pub(super) fn receive<E: Environment>(
        &mut self,
        pair: u16,
        queue: &mut Queue,
        cx: &mut Context<'_, E>,
    ) -> Step {
        let is_empty = !queue.has_available(cx.dma)?;
        let state = &mut self.core.pairs[usize::from(pair)];
        state.is_empty = is_empty;
        if is_empty || !self.is_receiving(pair) {
            return Ok(Activity::Idle);
        }
        // Lent to the burst: a count of its own would be another processor's line each time.
        let Some(keep) = self.core.keep.take() else {
            return Ok(Activity::Idle);
        };
        let Self { core, port } = self;
        let mut buffers = ReceiveBuffers {
            core,
            queue,
            cx,
            keep: &keep,
            pair: usize::from(pair),
            over: 0,
            is_short: false,
            stopped: None,
        };
        let port: &mut dyn NetPort = &mut **port;
        port.receive(pair, &mut buffers);
        let (over, stopped) = (buffers.over, buffers.stopped);
        core.keep = Some(keep);
        queue.stage_answers(cx.dma)?;
        match stopped {
            Some(stop) => Err(stop),
            None if over != 0 => Ok(Activity::Busy),
            None => Ok(Activity::Idle),
        }
    }
}

/// The buffers of one receive queue during a visit.
struct ReceiveBuffers<'a, 'b, E: Environment> {
    core: &'a mut NetCore,
    queue: &'a mut Queue,
    cx: &'a mut Context<'b, E>,
    keep: &'a KeepAlive,
    pair: usize,
    /// Frames over so far.
    over: usize,
    /// There are too few buffers for the next frame.
    is_short: bool,
    stopped: Option<RingStop>,
}

/// The next chain of a row, to be filled.
struct Filled<'k> {
    /// Nowhere after a fault.
    place: VolatileSlice<'k>,
    /// Length reported to the driver, in bytes.
    written: u32,
    /// Index of the frame in the burst.
    frame: usize,
}

impl Filled<'_> {
    const FAULTED: Self = Self {
        place: VolatileSlice::EMPTY,
        written: 0,
        frame: 0,
    };
}

/// A frame whose buffers were taken, to be copied.
struct Placed {
    /// Index of the frame in the burst.
    frame: usize,
    buffers: PieceRange,
    num_buffers: u16,
}

/// Outcome of finding buffers for a frame.
enum Found {
    /// They were taken.
    Placed(PieceRange, u16),
    /// The frame is over without any.
    Dropped,
    /// It stays the port's.
    Later,
    /// Those before it are to be copied first.
    NoRoom,
}

impl<E: Environment> FrameReceiver for ReceiveBuffers<'_, '_, E> {
    fn room(&mut self) -> usize {
        match self.may_go_on() && self.has_buffer() {
            true => super::burst(self.cx),
            false => 0,
        }
    }

    fn deliver(&mut self, frames: &[RxFrame<'_>]) -> usize {
        let mut over = 0;
        if !self.core.throttle.is_limited() {
            while over < frames.len() && self.stopped.is_none() && !self.is_short {
                match self.deliver_to_singles(&frames[over..]) {
                    Ok(0) => break,
                    Ok(more) => over += more,
                    Err(stop) => {
                        self.stopped = Some(stop);
                        break;
                    }
                }
            }
        }
        if over < frames.len() {
            over += self.deliver_to_chains(&frames[over..]);
        }
        self.over += over;
        over
    }
}

impl<E: Environment> ReceiveBuffers<'_, '_, E> {
    /// Gives frames to the guest as long as each fits into the next buffer, of one descriptor, as
    /// small ones do: one look at the ring, one question of where memory is. So many are over: the
    /// next one is `deliver_to_chains`'s, if that is none.
    fn deliver_to_singles(&mut self, frames: &[RxFrame<'_>]) -> Result<usize, RingStop> {
        let Self {
            core, queue, cx, ..
        } = self;
        let most = frames.len().min(BURST);
        let found = queue.peek_singles(cx.dma, &mut core.singles[..most])?;
        let mut reach = Reach::new(self.keep);
        let mut filled = ArrayVec::<Filled<'_>, BURST>::new();
        let (mut over, mut bytes, mut spent) = (0, 0, 0);
        let left = cx.visit.left();
        for frame in &frames[..most] {
            if spent >= left {
                break;
            }
            let len = frame.data.len();
            match core.judge(frame, len) {
                Judged::Unwanted => {}
                Judged::Wrong => cx.stats.errors += 1,
                Judged::Wanted => {
                    let Some(single) = core.singles[..found].get(filled.len()) else {
                        break;
                    };
                    // At most `max_received`.
                    let need = (HEADER_LEN + len) as u32;
                    if !single.is_writable() || single.len() < need {
                        break;
                    }
                    match reach.slice(cx.dma, single.iova(), need, Intent::Overwrite) {
                        Ok(Some(place)) => {
                            // The header's line is read, the others are written.
                            place.prefetch();
                            place.prefetch_to_write(HEADER_LEN as u32);
                            filled.push(Filled {
                                place,
                                written: need,
                                frame: over,
                            });
                            bytes += len as u64;
                        }
                        Err(Stop::Fault(_)) => {
                            cx.stats.errors += 1;
                            filled.push(Filled::FAULTED);
                        }
                        Ok(None) | Err(Stop::Pending(_)) => break,
                    }
                }
            }
            spent += frame_cost(len as u32);
            over += 1;
        }
        cx.visit.take_requests(over as u64, spent);
        if !filled.is_empty() {
            core.pairs[self.pair].wanting = Lookahead::default();
            cx.stats.requests += filled.len() as u64;
            cx.stats.read_bytes += bytes;
            for Filled { place, frame, .. } in &filled {
                if !place.is_empty() {
                    fill(place, &frames[*frame]);
                }
            }
            let written = filled.iter().map(|filled| filled.written);
            queue.answer_singles(cx.dma, &core.singles[..filled.len()], written);
        }
        Ok(over)
    }

    /// Gives frames to the guest, in whatever chains there are.
    fn deliver_to_chains(&mut self, frames: &[RxFrame<'_>]) -> usize {
        let keep = self.keep;
        let mut pieces = Pieces::new();
        let mut placed = ArrayVec::<Placed, BURST>::new();
        let mut over = 0;
        while over < frames.len() && self.may_go_on() {
            let frame = &frames[over];
            let len = frame.data.len();
            match self.place(frame, len, keep, &mut pieces) {
                Ok(Found::Placed(buffers, num_buffers)) => {
                    placed.push(Placed {
                        frame: over,
                        buffers,
                        num_buffers,
                    });
                    self.cx.stats.requests += 1;
                    self.cx.stats.read_bytes += len as u64;
                }
                Ok(Found::Dropped) => {}
                Ok(Found::Later) => break,
                Ok(Found::NoRoom) => {
                    copy(frames, &mut placed, &mut pieces);
                    continue;
                }
                Err(stop) => {
                    self.stopped = Some(stop);
                    break;
                }
            }
            charge(self.cx, len as u32);
            over += 1;
            if placed.is_full() || !pieces.has_room() {
                copy(frames, &mut placed, &mut pieces);
            }
        }
        copy(frames, &mut placed, &mut pieces);
        over
    }
}

/// Copies a frame that takes one buffer, in one piece. The header is mostly the one that is there:
/// its line, where the frame has others, then stays in both processors' caches.
#[inline(always)]
fn fill(place: &VolatileSlice<'_>, frame: &RxFrame<'_>) {
    const PLAIN: [u8; HEADER_LEN] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let header = match frame.header == NetHeader::PLAIN {
        true => PLAIN,
        false => frame.header.to_bytes(1),
    };
    place.update(0, &header);
    match frame.data {
        FrameData::Bytes(bytes) => place.write(HEADER_LEN as u32, bytes),
        FrameData::Guest(slices) => {
            copy_slices(slices, std::slice::from_ref(place), HEADER_LEN as u32);
        }
    }
}

/// Copies all that were placed, and forgets where.
#[inline]
fn copy(frames: &[RxFrame<'_>], placed: &mut ArrayVec<Placed, BURST>, pieces: &mut Pieces<'_>) {
    for place in placed.drain(..) {
        let frame = &frames[place.frame];
        let to = pieces.get(place.buffers);
        let header = frame.header.to_bytes(place.num_buffers);
        if let [only] = to
            && let FrameData::Bytes(bytes) = frame.data
        {
            only.write(0, &header);
            only.write(HEADER_LEN as u32, bytes);
            continue;
        }
        write_slices(to, 0, &header);
        match frame.data {
            FrameData::Bytes(bytes) => {
                write_slices(to, HEADER_LEN as u32, bytes);
            }
            FrameData::Guest(slices) => copy_slices(slices, to, HEADER_LEN as u32),
        }
    }
    pieces.clear();
}

impl<E: Environment> ReceiveBuffers<'_, '_, E> {
    /// Whether frames may be taken, as far as everything but buffers goes.
    fn may_go_on(&mut self) -> bool {
        if self.stopped.is_some() || self.is_short || self.cx.is_over() {
            return false;
        }
        let is_open = self.core.throttle.is_open(self.cx.visit.now_ns());
        self.cx.stats.throttled += u64::from(!is_open);
        is_open
    }

    fn has_buffer(&mut self) -> bool {
        match self.queue.has_available(self.cx.dma) {
            Ok(has_buffer) => {
                self.core.pairs[self.pair].is_empty = !has_buffer;
                has_buffer
            }
            Err(stop) => {
                self.stopped = Some(stop);
                false
            }
        }
    }

    /// Finds and takes buffers for `frame`, of `len` bytes.
    fn place<'k>(
        &mut self,
        frame: &RxFrame<'_>,
        len: usize,
        keep: &'k KeepAlive,
        pieces: &mut Pieces<'k>,
    ) -> Result<Found, RingStop> {
        match self.core.judge(frame, len) {
            Judged::Wanted => {}
            Judged::Unwanted => return Ok(Found::Dropped),
            Judged::Wrong => {
                self.cx.stats.errors += 1;
                return Ok(Found::Dropped);
            }
        }
        // At most `max_received`.
        let need = (HEADER_LEN + len) as u32;
        let (chains, enough) = match self.gather(need)? {
            Some(found) => found,
            None => return Ok(self.too_few()),
        };
        let found = self.translate(need, chains, keep, pieces);
        let buffers = match found {
            Ok(Translated::All(range)) => Some(range),
            Ok(Translated::NoRoom) => return Ok(Found::NoRoom),
            Err(Stop::Fault(_)) => None,
            Err(pending) => {
                let all = self.core.chains[..chains].iter();
                let all = all.flat_map(|chain| chain.writable().wanted(0, need, Intent::Write));
                return Err(self.queue.wait_for(self.cx.dma, pending, all));
            }
        };
        let mut left = need;
        for chain in &self.core.chains[..chains] {
            let bytes = chain.writable().len().min(left);
            left -= bytes;
            let written = if buffers.is_some() { bytes } else { 0 };
            self.queue.answer(chain, written)?;
        }
        self.core.pairs[self.pair].wanting = Lookahead::default();
        self.core
            .throttle
            .charge(self.cx.visit.now_ns(), len as u64);
        Ok(match buffers {
            Some(range) => Found::Placed(range, enough),
            None => {
                self.cx.stats.requests += 1;
                self.cx.stats.errors += 1;
                Found::Dropped
            }
        })
    }

    /// Collects buffers for `need` bytes from the next chains, without consuming them: how many
    /// chains, for code and for the header. `None` if they do not suffice. Every chain has room for
    /// a byte, so there are `need` at most.
    #[inline]
    fn gather(&mut self, need: u32) -> Result<Option<(usize, u16)>, RingStop> {
        self.core.pairs[self.pair].wanting = Lookahead::default();
        let chain = &mut self.core.chains[0];
        if !self.queue.peek(self.cx.dma, chain)? {
            self.core.pairs[self.pair].is_empty = true;
            return Ok(None);
        }
        let room = chain.writable().len();
        // §5.1.6.3.1: the header fits into the first buffer, and every buffer holds something.
        if room < HEADER_LEN as u32 {
            return Err(self.queue.park(Violation::Truncated));
        }
        match room >= need {
            true => Ok(Some((1, 1))),
            false => self.gather_more(need),
        }
    }

    #[cold]
    fn gather_more(&mut self, need: u32) -> Result<Option<(usize, u16)>, RingStop> {
        let core = &mut *self.core;
        let wanting = &mut core.pairs[self.pair].wanting;
        let (mut left, mut nth) = (need, 0);
        while left != 0 {
            if nth != 0 && !core.is_mergeable {
                return Ok(None);
            }
            if nth == core.chains.len() {
                core.chains.push(Chain::default());
            }
            let chain = &mut core.chains[nth];
            if !self.queue.peek_ahead(self.cx.dma, wanting, chain)? {
                return Ok(None);
            }
            if chain.writable().is_empty() {
                return Err(self.queue.park(Violation::Truncated));
            }
            left -= chain.writable().len().min(left);
            nth += 1;
        }
        // A frame has 65,565 bytes with its header at most, and a ring 1024 chains.
        Ok(Some((nth, u16::try_from(nth).unwrap_or(u16::MAX))))
    }

    /// Decides whether a frame for which there are too few buffers waits or is dropped.
    #[cold]
    fn too_few(&mut self) -> Found {
        let state = &mut self.core.pairs[self.pair];
        if state.is_empty {
            return Found::Later;
        }
        // More buffers may come, unless the ring is full of them, or a frame must fit into one.
        let is_full = self.queue.in_flight() == 0 && self.queue.is_exhausted(state.wanting);
        if self.core.is_mergeable && !is_full {
            self.is_short = true;
            return Found::Later;
        }
        state.wanting = Lookahead::default();
        self.cx.stats.errors += 1;
        Found::Dropped
    }

    #[inline]
    fn translate<'k>(
        &mut self,
        need: u32,
        chains: usize,
        keep: &'k KeepAlive,
        pieces: &mut Pieces<'k>,
    ) -> guest_mem::Access<Translated> {
        let dma = &mut *self.cx.dma;
        match &self.core.chains[..chains] {
            [only] => {
                let segments = only.writable().slice(0, need);
                pieces.translate(dma, keep, segments, Intent::Overwrite)
            }
            all => {
                let mut left = need;
                let segments = all.iter().flat_map(move |chain| {
                    let take = chain.writable().len().min(left);
                    left -= take;
                    chain.writable().slice(0, take)
                });
                let segments: Vec<Segment> = segments.collect();
                pieces.translate(dma, keep, segments.iter().copied(), Intent::Overwrite)
            }
        }
    }
}

/// Whether a frame is for the driver.
enum Judged {
    Wanted,
    /// Its filter lets it not pass.
    Unwanted,
    /// The port may not hand it over.
    Wrong,
}

impl NetCore {
    #[inline(always)]
    fn judge(&self, frame: &RxFrame<'_>, len: usize) -> Judged {
        if !self.wants(frame) {
            return Judged::Unwanted;
        }
        match (MIN_FRAME as usize..=self.max_received as usize).contains(&len)
            && self.takes_header(frame, len)
        {
            true => Judged::Wanted,
            false => Judged::Wrong,
        }
    }

    /// Whether the driver's filter lets the frame pass.
    #[inline]
    fn wants(&self, frame: &RxFrame<'_>) -> bool {
        // A front end that serves the control queue itself filters nothing here.
        if !self.has_control || self.filter.passes_all() {
            return true;
        }
        let mut head = [0; 18];
        let len = frame.data.read(0, &mut head);
        self.filter.passes(&self.mac, &head[..len])
    }

    /// Whether the frame leaves no more over than the driver has taken on.
    #[inline]
    fn takes_header(&self, frame: &RxFrame<'_>, len: usize) -> bool {
        // A port that hands over more is at fault; the driver is spared.
        frame.header.is_plain() || frame.header.check(len as u32, self.receiver).is_ok()
    }
}
