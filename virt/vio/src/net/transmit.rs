//! Transmit queues: bursts of frames from the driver to the port.
//!
//! ```text
//! for up to BURST chains: peek, translate (and prefetch), take       the walk: misses are begun
//! for each: header, read once and checked                            and end here
//! port.send(all that are right)                                      one call; the port copies
//! stage all                                                          published at the visit's end
//! ```
//! Small frames, which lie in one descriptor each, are walked as a row ([`crate::ring::Single`]) by
//! `burst_of_singles`, in which all of that is one step for the burst, and which ends before a
//! frame that lies otherwise, waits, or is limited: the next burst is `burst`'s, which takes any.
//!
//! A wait ends the burst before the chain it concerns. What a port keeps stays taken, with a lease
//! on each piece, until the port has done with it.

use arrayvec::ArrayVec;
use guest_mem::{Dma, Intent, KeepAlive, LeaseId, LeaseStop, Stop, VolatileSlice};
use net_offload::{GsoType, HEADER_LEN, NetHeader, Offloads};

use super::pieces::{PieceRange, Pieces, Translated};
use super::port::{BURST, NetPort, TxFrame};
use super::reach::Reach;
use super::{MIN_FRAME, NetClass, NetCore, Queue, charge, frame_cost, wanted};
use crate::body::{Context, Environment, Step};
use crate::device::Activity;
use crate::ring::{RingStop, Token, Violation};

/// A frame that the port keeps.
pub(super) struct Kept {
    token: Token,
    leases: Vec<LeaseId>,
    bytes: u32,
}

/// A frame whose chain was taken.
#[derive(Clone, Copy)]
struct TakenFrame<'k> {
    /// Its header in guest memory, if in one piece; otherwise it was read.
    head: VolatileSlice<'k>,
    header: [u8; HEADER_LEN],
    len: u32,
    data: PieceRange,
    is_whole: bool,
}

/// Outcome of looking at the next chain.
enum Walked<'k> {
    Frame(TakenFrame<'k>),
    /// None, or none for which there is room in this burst.
    End,
}

impl NetClass {
    pub(super) fn transmit<E: Environment>(
        &mut self,
        pair: u16,
        queue: &mut Queue,
        cx: &mut Context<'_, E>,
    ) -> Step {
        if !queue.has_available(cx.dma)? {
            return Ok(Activity::Idle);
        }
        let is_up = self.is_up();
        let room = match is_up {
            true => self.port.send_room(pair).min(super::burst(cx)),
            // Nothing is sent, and the driver gets its buffers back.
            false => super::burst(cx),
        };
        self.core.pairs[usize::from(pair)].is_blocked = room == 0;
        if room == 0 {
            cx.stats.backpressure += 1;
            return Ok(Activity::Idle);
        }
        // Lent to the burst: a count of its own would be another processor's line each time.
        let Some(keep) = self.core.keep.take() else {
            return Ok(Activity::Idle);
        };
        // Behind a frame that is kept, others wait in order.
        let keeps_none = !self.core.keeps_frames || queue.own.kept.is_empty();
        let is_plain = is_up && keeps_none && !self.core.throttle.is_limited();
        let sent = match is_plain {
            true => self.burst_of_singles(pair, queue, cx, &keep, room),
            false => Ok(0),
        };
        let step = match sent {
            Ok(0) => self.burst(pair, queue, cx, &keep, room, is_up),
            Ok(_) => Ok(Activity::Busy),
            Err(stop) => Err(stop),
        };
        self.core.keep = Some(keep);
        step
    }

    /// A burst of frames that lie in one descriptor each, as small ones do: no state of a chain,
    /// one look at the ring, one question of where memory is. How many: the next one is `burst`'s,
    /// if that is none.
    fn burst_of_singles<E: Environment>(
        &mut self,
        pair: u16,
        queue: &mut Queue,
        cx: &mut Context<'_, E>,
        keep: &KeepAlive,
        room: usize,
    ) -> Result<usize, RingStop> {
        const HEAD: u32 = HEADER_LEN as u32;
        let Self { core, port } = self;
        let (sender, max_frame) = (core.sender, core.max_frame);
        // A longer one would be kept, with leases.
        let longest = match core.keeps_frames {
            true => core.copies_up_to,
            false => u32::MAX,
        };
        let found = queue.peek_singles(cx.dma, &mut core.singles[..room])?;
        let mut reach = Reach::new(keep);
        let mut data = ArrayVec::<VolatileSlice<'_>, BURST>::new();
        let mut spent = 0;
        let left = cx.visit.left();
        for single in &core.singles[..found] {
            let Some(len) = single.len().checked_sub(HEAD) else {
                break;
            };
            if spent >= left || single.is_writable() || len > longest {
                break;
            }
            // One that is not looked at has no bytes.
            let mut bytes = VolatileSlice::EMPTY;
            if (MIN_FRAME..=max_frame).contains(&len) {
                match reach.slice(cx.dma, single.iova(), single.len(), Intent::Read) {
                    Ok(Some(whole)) => {
                        bytes = whole.slice(HEAD, len);
                        bytes.prefetch();
                    }
                    Err(Stop::Fault(_)) => {}
                    Ok(None) | Err(Stop::Pending(_)) => break,
                }
            }
            spent += frame_cost(bytes.len());
            data.push(bytes);
        }
        let taken = data.len();
        if taken == 0 {
            return Ok(0);
        }
        cx.visit.take_requests(taken as u64, spent);
        cx.stats.requests += taken as u64;
        let mut frames = ArrayVec::<TxFrame<'_>, BURST>::new();
        for (single, data) in core.singles[..taken].iter().zip(&data) {
            let len = data.len();
            let header = match sender {
                // The driver may leave nothing over: whatever its headers say is ignored.
                Offloads::NONE => Ok(NetHeader::PLAIN),
                sender => match reach.slice(cx.dma, single.iova(), HEAD, Intent::Read) {
                    Ok(Some(head)) if len != 0 => {
                        let mut bytes = [0; HEADER_LEN];
                        head.read(0, &mut bytes);
                        NetHeader::from_bytes(&bytes).check(len, sender)
                    }
                    _ => Ok(NetHeader::PLAIN),
                },
            };
            match header {
                Ok(header) if (MIN_FRAME..=core.longest(&header)).contains(&len) => {
                    frames.push(TxFrame {
                        header,
                        len,
                        data: std::slice::from_ref(data),
                    });
                }
                _ => cx.stats.errors += 1,
            }
        }
        send(&mut **port, pair, &frames, keep, cx);
        queue.answer_singles(cx.dma, &core.singles[..taken], std::iter::repeat(0));
        Ok(taken)
    }

    fn burst<E: Environment>(
        &mut self,
        pair: u16,
        queue: &mut Queue,
        cx: &mut Context<'_, E>,
        keep: &KeepAlive,
        room: usize,
        is_up: bool,
    ) -> Step {
        let Self { core, port } = self;
        let keeps = core.keeps_frames && is_up;
        let mut pieces = Pieces::new();
        let mut taken = ArrayVec::<TakenFrame<'_>, BURST>::new();
        let mut stopped = None;
        let first_kept = queue.own.kept.len();
        // Frames that were answered at once, which are the first ones if there are any.
        let mut at_once = 0;
        while taken.len() < room && pieces.has_room() && !cx.is_over() {
            if !core.throttle.is_open(cx.visit.now_ns()) {
                cx.stats.throttled += u64::from(taken.is_empty());
                break;
            }
            match core.walk(queue, cx, keep, &mut pieces, keeps) {
                Ok(Walked::Frame(frame)) => {
                    // One of another length is not looked at.
                    let bytes = if frame.is_whole { frame.len } else { 0 };
                    core.throttle.charge(cx.visit.now_ns(), bytes.into());
                    charge(cx, bytes);
                    at_once += usize::from(queue.own.kept.is_empty());
                    taken.push(frame);
                }
                Ok(Walked::End) => break,
                Err(stop) => {
                    stopped = Some(stop);
                    break;
                }
            }
        }
        cx.stats.requests += taken.len() as u64;
        let mut frames = ArrayVec::<TxFrame<'_>, BURST>::new();
        for (at, frame) in taken.iter_mut().enumerate() {
            let header = match core.sender {
                // The driver may leave nothing over: whatever its headers say is ignored.
                Offloads::NONE => Ok(NetHeader::PLAIN),
                sender => {
                    if !frame.head.is_empty() {
                        frame.head.read(0, &mut frame.header);
                    }
                    NetHeader::from_bytes(&frame.header).check(frame.len, sender)
                }
            };
            let header = header.ok().filter(|header| {
                let most = core.longest(header);
                frame.is_whole && is_up && (MIN_FRAME..=most).contains(&frame.len)
            });
            let Some(header) = header else {
                cx.stats.errors += 1;
                if keeps {
                    // Behind those before it, which the port ends first.
                    if let Some(at) = (first_kept + at).checked_sub(at_once) {
                        queue.own.kept[at].bytes = 0;
                    }
                }
                continue;
            };
            frames.push(TxFrame {
                header,
                len: frame.len,
                data: pieces.get(frame.data),
            });
        }
        send(&mut **port, pair, &frames, keep, cx);
        if keeps {
            core.end_kept(queue, cx.dma, 0);
        }
        queue.stage_answers(cx.dma)?;
        match stopped {
            Some(stop) => Err(stop),
            None if !taken.is_empty() => Ok(Activity::Busy),
            None => Ok(Activity::Idle),
        }
    }
}

/// Gives the port frames that are right.
#[inline]
fn send<E: Environment>(
    port: &mut dyn NetPort,
    pair: u16,
    frames: &[TxFrame<'_>],
    keep: &KeepAlive,
    cx: &mut Context<'_, E>,
) {
    if frames.is_empty() {
        return;
    }
    let dropped = port.send(pair, frames, keep).min(frames.len());
    let bytes: u64 = frames.iter().map(|frame| u64::from(frame.len)).sum();
    cx.stats.errors += dropped as u64;
    // Of those dropped by the port the lengths are not known: as good as sent.
    cx.stats.written_bytes += if dropped == frames.len() { 0 } else { bytes };
}

impl NetCore {
    /// Takes the next chain, with its pieces translated.
    fn walk<'k, E: Environment>(
        &mut self,
        queue: &mut Queue,
        cx: &mut Context<'_, E>,
        keep: &'k KeepAlive,
        pieces: &mut Pieces<'k>,
        keeps: bool,
    ) -> Result<Walked<'k>, RingStop> {
        let chain = &mut self.chains[0];
        if !queue.peek(cx.dma, chain)? {
            return Ok(Walked::End);
        }
        let readable = chain.readable();
        let Some(len) = readable.len().checked_sub(HEADER_LEN as u32) else {
            return Err(queue.park(Violation::Truncated));
        };
        let mut frame = TakenFrame {
            head: VolatileSlice::EMPTY,
            header: [0; HEADER_LEN],
            len,
            data: PieceRange::default(),
            is_whole: (MIN_FRAME..=self.max_frame).contains(&len),
        };
        // One that is not kept comes behind those that are, in order.
        let is_behind = keeps && !queue.own.kept.is_empty();
        let keeps = keeps && frame.is_whole && len > self.copies_up_to;
        let mut leases = Vec::new();
        if frame.is_whole {
            match self.reach(cx.dma, keep, pieces, &mut frame, keeps, &mut leases) {
                Ok(true) => {}
                Ok(false) => return Ok(Walked::End),
                Err(Stop::Fault(_)) => frame.is_whole = false,
                Err(pending) => {
                    leases.into_iter().for_each(|lease| cx.dma.release(lease));
                    let all = wanted(&self.chains[0]);
                    return Err(queue.wait_for(cx.dma, pending, all));
                }
            }
        }
        let chain = &self.chains[0];
        if keeps || is_behind {
            let token = queue.take(chain)?;
            let bytes = if keeps && frame.is_whole { len } else { 0 };
            queue.own.kept.push_back(Kept {
                token,
                leases,
                bytes,
            });
        } else {
            queue.answer(chain, 0)?;
        }
        Ok(Walked::Frame(frame))
    }

    /// Translates header and data of the frame in `chains[0]`; false if it is not for this burst.
    fn reach<'k, D: Dma>(
        &mut self,
        dma: &mut D,
        keep: &'k KeepAlive,
        pieces: &mut Pieces<'k>,
        frame: &mut TakenFrame<'k>,
        keeps: bool,
        leases: &mut Vec<LeaseId>,
    ) -> Result<bool, Stop> {
        let readable = self.chains[0].readable();
        let head = HEADER_LEN as u32;
        if self.sender == Offloads::NONE {
            // Not looked at.
        } else if readable.segments()[0].len >= head
            && let Some(first) = readable.slice(0, head).next()
            && let (hva, len) = dma.host(first.iova, head, Intent::Read)?
            && len == head
            && let Some(slice) = VolatileSlice::new(keep, hva, head)
        {
            slice.prefetch();
            frame.head = slice;
        } else {
            readable.read(dma, 0, &mut frame.header)?;
        }
        if keeps && !self.lease(dma, leases, frame.len)? {
            return Ok(false);
        }
        let data = self.chains[0].readable().slice(head, frame.len);
        match pieces.translate(dma, keep, data, Intent::Read)? {
            Translated::All(range) => frame.data = range,
            Translated::NoRoom => {
                leases.drain(..).for_each(|lease| dma.release(lease));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Holds the data of the frame in `chains[0]` by leases; false if there are too few now.
    fn lease<D: Dma>(
        &mut self,
        dma: &mut D,
        leases: &mut Vec<LeaseId>,
        len: u32,
    ) -> Result<bool, Stop> {
        for segment in self.chains[0].readable().slice(HEADER_LEN as u32, len) {
            let (mut iova, mut left) = (segment.iova, segment.len);
            while left != 0 {
                match dma.lease(iova, left, Intent::Read) {
                    Ok(lease) => {
                        leases.push(lease.id);
                        left -= lease.len;
                        iova = iova.checked_add(lease.len.into()).unwrap_or(iova);
                    }
                    Err(LeaseStop::Access(stop)) => {
                        leases.drain(..).for_each(|lease| dma.release(lease));
                        return Err(stop);
                    }
                    Err(LeaseStop::Full(full)) => {
                        let need = leases.len() + 1;
                        leases.drain(..).for_each(|lease| dma.release(lease));
                        if need > full.most {
                            return Err(guest_mem::DmaFault::BadRange.into());
                        }
                        self.wants_leases = need;
                        return Ok(false);
                    }
                }
            }
        }
        self.wants_leases = 0;
        Ok(true)
    }

    /// Length at most of a frame with this header.
    #[inline(always)]
    fn longest(&self, header: &NetHeader) -> u32 {
        match header.gso_type {
            GsoType::NONE => self.plain_frame,
            _ => self.max_frame,
        }
    }

    /// Ends `frames` more frames that the port has kept, and those that were never sent in front of
    /// them.
    pub(super) fn end_kept<D: Dma>(&mut self, queue: &mut Queue, dma: &mut D, frames: usize) {
        let mut left = frames;
        while let Some(kept) = queue.own.kept.front() {
            if kept.bytes != 0 {
                if left == 0 {
                    return;
                }
                left -= 1;
            }
            if let Some(kept) = queue.own.kept.pop_front() {
                kept.leases.into_iter().for_each(|lease| dma.release(lease));
                queue.end(kept.token, 0);
            }
        }
    }
}
