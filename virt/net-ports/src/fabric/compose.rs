//! Frames as one receiver gets them: parts of the sender's frame, and bytes of ours in between.

use arrayvec::ArrayVec;
use guest_mem::{Gpa, GuestRam, Hva, Intent, KeepAlive, PhysMem, VolatileSlice};
use net_offload::{
    Checked, Delivery, FrameBytes, HeaderRoom, MAX_HEADERS, NetHeader, Offloads, PartialChecksum,
};
use net_switch::{HEAD_LEN, PortId, Retag};
use vio::net::{BURST, FrameData, FrameReceiver, RxFrame};

use super::{Data, Frame, Shared};

/// Bytes of ours for one frame: headers, and a checksum.
const PLACE: u64 = 512;
const CHECKSUM: u32 = PLACE as u32 - 2;
const _: () = assert!(MAX_HEADERS as u32 <= CHECKSUM);
const ADDRESSES: usize = 12;
const TAG: usize = 4;

/// Memory for bytes of ours, which a receiver copies as it does a guest's.
pub(super) struct Composer {
    ram: GuestRam,
    keep: KeepAlive,
    room: HeaderRoom,
}

impl Composer {
    pub const REGION: [(Gpa, u64); 1] = [(Gpa::new(0), PLACE * BURST as u64)];

    pub fn new(ram: GuestRam) -> Self {
        Self {
            keep: ram.keep_alive(),
            ram,
            room: HeaderRoom::new(),
        }
    }
}

/// A place of a composer's memory.
fn place<'k>(ram: &GuestRam, keep: &'k KeepAlive, nth: usize) -> Option<VolatileSlice<'k>> {
    let gpa = Gpa::new(nth as u64 * PLACE);
    let hva = ram.host(gpa, PLACE, Intent::Write).ok()?;
    VolatileSlice::new(keep, hva, PLACE as u32)
}

/// Bytes of a frame where they lie; `None` where they are no longer mapped.
fn slices_of<'f>(keep: &'f KeepAlive, slices: &[(Hva, u32)]) -> Option<Vec<VolatileSlice<'f>>> {
    let slices = slices.iter();
    let slices = slices.map(|(hva, len)| VolatileSlice::new(keep, *hva, *len));
    slices.collect()
}

/// All bytes of a frame.
pub(super) fn copy_of(keep: &KeepAlive, slices: &[(Hva, u32)], len: u32) -> Option<Box<[u8]>> {
    let mut bytes = vec![0; len as usize].into_boxed_slice();
    let mut at = 0;
    for slice in slices_of(keep, slices)? {
        let end = (at + slice.len() as usize).min(bytes.len());
        slice
            .slice(0, (end - at) as u32)
            .read(0, &mut bytes[at..end]);
        at = end;
    }
    Some(bytes)
}

/// A frame with its tag changed: the head that was read, and the rest of the frame from `from` on.
struct Retagged<'f> {
    head: [u8; HEAD_LEN + TAG],
    head_len: usize,
    /// Start of the rest, in the sender's frame.
    from: usize,
    source: Source<'f>,
    len: usize,
}

enum Source<'f> {
    Guest(&'f [VolatileSlice<'f>]),
    Bytes(&'f [u8]),
}

impl<'f> Retagged<'f> {
    fn new(frame: &Frame, retag: Retag, source: Source<'f>) -> Self {
        let seen = HEAD_LEN.min(frame.len as usize);
        let from = ADDRESSES + if retag.removes { TAG } else { 0 };
        let mut head = [0; HEAD_LEN + TAG];
        head[..ADDRESSES].copy_from_slice(&frame.head[..ADDRESSES]);
        let mut head_len = ADDRESSES;
        if let Some(tag) = retag.inserts {
            head[head_len..head_len + TAG].copy_from_slice(&tag);
            head_len += TAG;
        }
        let rest = &frame.head[from..seen];
        head[head_len..head_len + rest.len()].copy_from_slice(rest);
        head_len += rest.len();
        Self {
            head,
            head_len,
            from: seen,
            source,
            len: head_len + frame.len as usize - seen,
        }
    }

    /// The sender's slices that hold bytes `start..end` of this frame, none of which is in the
    /// head.
    fn guest(&self, start: usize, end: usize, out: &mut Vec<VolatileSlice<'f>>) {
        let Source::Guest(slices) = self.source else {
            return;
        };
        let shift = self.from as i64 - self.head_len as i64;
        let (start, end) = (
            (start as i64 + shift) as usize,
            (end as i64 + shift) as usize,
        );
        let mut at = 0;
        for slice in slices {
            let len = slice.len() as usize;
            let (first, last) = (start.max(at), end.min(at + len));
            if first < last {
                out.push(slice.slice((first - at) as u32, (last - first) as u32));
            }
            at += len;
        }
    }
}

impl FrameBytes for Retagged<'_> {
    fn frame_len(&self) -> usize {
        self.len
    }

    fn pieces(&self, range: std::ops::Range<usize>, each: &mut dyn FnMut(&[u8])) {
        if range.start < self.head_len {
            each(&self.head[range.start..range.end.min(self.head_len)]);
        }
        let (start, end) = (range.start.max(self.head_len), range.end);
        if start >= end {
            return;
        }
        if let Source::Bytes(bytes) = self.source {
            let start = start - self.head_len + self.from;
            each(&bytes[start..end - self.head_len + self.from]);
            return;
        }
        let mut slices = Vec::new();
        self.guest(start, end, &mut slices);
        let mut chunk = [0; 2_048];
        for slice in slices {
            for at in (0..slice.len()).step_by(chunk.len()) {
                let part = &mut chunk[..(slice.len() - at).min(2_048) as usize];
                slice.read(at, part);
                each(part);
            }
        }
    }
}

/// The sender's header, for the frame with its tag changed.
fn moved(header: NetHeader, retag: Retag) -> NetHeader {
    let start = header.csum_start;
    let start = if retag.removes {
        start.saturating_sub(TAG as u16)
    } else {
        start
    };
    let start = start.saturating_add(if retag.inserts.is_some() {
        TAG as u16
    } else {
        0
    });
    NetHeader {
        csum_start: start,
        ..header
    }
}

/// A frame of a burst: its header, and how many of the burst's slices are its own.
struct Part {
    header: NetHeader,
    slices: usize,
}

/// Offers the short frames in front of a port's queue: up to `room` of them, in one burst. How many
/// are over; `None` if the first one is none of these.
pub(super) fn deliver_short(
    shared: &mut Shared,
    id: PortId,
    room: usize,
    to: &mut dyn FrameReceiver,
) -> Option<usize> {
    let port = shared.port(id)?;
    let waiting = port.queue.short().take(room.min(BURST));
    let mut burst = ArrayVec::<_, BURST>::new();
    burst.extend(waiting.map(|bytes| RxFrame {
        header: NetHeader::PLAIN,
        data: FrameData::Bytes(bytes),
    }));
    if burst.is_empty() {
        return None;
    }
    let taken = to.deliver(&burst).min(burst.len());
    drop(burst);
    port.queue.drop_short(taken);
    Some(taken)
}

/// Offers the first frame that waits for a port, or up to `room` of its segments. Returns the
/// number of segments that are done; 0 if the receiver has taken none.
pub(super) fn deliver(
    shared: &mut Shared,
    id: PortId,
    room: usize,
    to: &mut dyn FrameReceiver,
) -> usize {
    let Some(port) = shared.port(id) else {
        return 0;
    };
    let (receiver, skip) = (port.receiver, port.segments_taken);
    let Some(at) = port.queue.front() else {
        return 0;
    };
    let Some(frame) = &shared.frames[at] else {
        return 0;
    };
    let retag = shared.switch.retag(&frame.forward, id);
    let Composer {
        ram,
        keep,
        room: headers,
    } = &mut shared.composer;
    let guest;
    let source = match &frame.data {
        Data::Copied(bytes) => Some(Source::Bytes(bytes)),
        Data::Short => Some(Source::Bytes(&shared.short[at][..frame.len as usize])),
        Data::Kept { keep, slices } => {
            guest = slices_of(keep, slices);
            guest.as_deref().map(Source::Guest)
        }
    };
    let mut is_wrong = true;
    let mut outcome = None;
    if let Some(source) = source {
        let retagged = Retagged::new(frame, retag, source);
        let header = moved(frame.header, retag);
        if let Ok(mut checked) = Checked::check(&header, &retagged, Offloads::ALL, headers) {
            is_wrong = false;
            let count = checked.count(receiver);
            let mut burst = Burst::new(ram, keep, &retagged);
            burst.fill(&mut checked, receiver, skip, room);
            let taken = burst.offer(to);
            outcome = Some((taken, count));
        }
    }
    let from = frame.from;
    if is_wrong && let Some(port) = shared.port(from) {
        port.counters.wrong_headers += 1;
    }
    // A frame that is wrong, or no longer there, is done.
    let (taken, count) = outcome.unwrap_or((1, 0));
    let Some(port) = shared.port(id) else {
        return 0;
    };
    port.segments_taken = skip + taken;
    if port.segments_taken >= count {
        port.segments_taken = 0;
        port.queue.pop_front();
        shared.release(at, id);
    }
    taken
}

/// Frames that are offered at once.
struct Burst<'b> {
    ram: &'b GuestRam,
    keep: &'b KeepAlive,
    frame: &'b Retagged<'b>,
    slices: Vec<VolatileSlice<'b>>,
    parts: Vec<Part>,
    /// Frames that lie in one piece of our memory, since their data was copied before.
    bytes: Vec<Vec<u8>>,
}

impl<'b> Burst<'b> {
    fn new(ram: &'b GuestRam, keep: &'b KeepAlive, frame: &'b Retagged<'b>) -> Self {
        Self {
            ram,
            keep,
            frame,
            slices: Vec::new(),
            parts: Vec::new(),
            bytes: Vec::new(),
        }
    }

    fn fill(&mut self, checked: &mut Checked<'_>, receiver: Offloads, skip: usize, room: usize) {
        let end = self.frame.frame_len();
        match checked.deliver(receiver) {
            Delivery::Unchanged(one) => {
                let head = match one.headers {
                    [] => &self.frame.head[..self.frame.head_len],
                    headers => headers,
                };
                self.push(one.header, head, head.len()..end, None);
            }
            Delivery::Checksum(partial) => {
                let head = &self.frame.head[..self.frame.head_len];
                let sum = partial.complete(self.frame);
                self.push(
                    NetHeader::default(),
                    head,
                    head.len()..end,
                    Some((partial, sum)),
                );
            }
            Delivery::Segments(segments) => {
                let mut segments = segments.skip(skip);
                while self.parts.len() < room
                    && let Some(mut segment) = segments.next()
                {
                    segment.complete(self.frame);
                    self.push(segment.header(), segment.headers(), segment.payload(), None);
                }
            }
        }
    }

    /// Adds a frame: `head`, then `rest` of the sender's frame, in which a checksum may take the
    /// place of two bytes.
    fn push(
        &mut self,
        header: NetHeader,
        head: &[u8],
        rest: std::ops::Range<usize>,
        sum: Option<(PartialChecksum, u16)>,
    ) {
        let sum = sum.map(|(partial, sum)| (partial.position(), sum.to_be_bytes()));
        if let Source::Bytes(_) = self.frame.source {
            let mut bytes = head.to_vec();
            self.frame.pieces(rest, &mut |piece| bytes.extend(piece));
            if let Some((at, sum)) = sum {
                bytes[at..at + 2].copy_from_slice(&sum);
            }
            self.bytes.push(bytes);
            self.parts.push(Part { header, slices: 0 });
            return;
        }
        let Some(own) = place(self.ram, self.keep, self.parts.len()) else {
            return;
        };
        let before = self.slices.len();
        own.write(0, head);
        self.slices.push(own.slice(0, head.len() as u32));
        match sum {
            // The head ends before any transport header.
            Some((at, sum)) => {
                own.write(CHECKSUM, &sum);
                self.frame.guest(rest.start, at, &mut self.slices);
                self.slices.push(own.slice(CHECKSUM, 2));
                self.frame.guest(at + 2, rest.end, &mut self.slices);
            }
            None => self.frame.guest(rest.start, rest.end, &mut self.slices),
        }
        let slices = self.slices.len() - before;
        self.parts.push(Part { header, slices });
    }

    /// Offers the parts to the receiver; returns the number of those it is done with.
    fn offer(&self, to: &mut dyn FrameReceiver) -> usize {
        let mut rest = &self.slices[..];
        let mut bytes = self.bytes.iter();
        let mut frames = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let (own, behind) = rest.split_at(part.slices);
            rest = behind;
            let data = match (part.slices, bytes.next()) {
                (0, Some(bytes)) => FrameData::Bytes(bytes),
                _ => FrameData::Guest(own),
            };
            frames.push(RxFrame {
                header: part.header,
                data,
            });
        }
        to.deliver(&frames).min(frames.len())
    }
}
