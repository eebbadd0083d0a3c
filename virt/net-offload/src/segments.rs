//! Segments of a frame, one after another, in one copy of its headers.

use std::ops::Range;

use crate::check::Segmentation;
use crate::layout::{HeaderRoom, Ip, Layout, Transport};
use crate::{Checksum, FrameBytes, VnetHeader};

/// Offsets in an IPv4 header (RFC 791).
mod v4 {
    pub const LENGTH: usize = 2;
    pub const ID: usize = 4;
    pub const CHECKSUM: usize = 10;
}
/// Offset of the payload's length in an IPv6 header (RFC 8200), and the header's own length.
mod v6 {
    pub const LENGTH: usize = 4;
    pub const HEADER: usize = 40;
}
/// Offsets in a TCP header (RFC 9293), and its flags.
mod tcp {
    pub const SEQUENCE: usize = 4;
    pub const FLAGS: usize = 13;
    pub const FIN: u8 = 1;
    pub const PSH: u8 = 8;
    pub const CWR: u8 = 0x80;
}
/// Offset of the length in a UDP header (RFC 768).
const UDP_LENGTH: usize = 4;

/// Fields of the headers that differ between segments, as the sender wrote them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Original {
    ip_length: u16,
    id: u16,
    ip_checksum: u16,
    sequence: u32,
    flags: u8,
    udp_length: u16,
    /// The sum of the pseudo header.
    checksum: u16,
}

impl Original {
    pub fn read(layout: &Layout, room: &HeaderRoom) -> Self {
        let bytes = &room.0;
        let word = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let (l3, l4) = (layout.l3, layout.l4);
        let is_v4 = layout.ip == Ip::V4;
        let is_tcp = layout.transport == Transport::Tcp;
        let high = u32::from(word(l4 + tcp::SEQUENCE)) << 16;
        Self {
            ip_length: word(l3 + if is_v4 { v4::LENGTH } else { v6::LENGTH }),
            id: if is_v4 { word(l3 + v4::ID) } else { 0 },
            ip_checksum: if is_v4 { word(l3 + v4::CHECKSUM) } else { 0 },
            sequence: high | u32::from(word(l4 + tcp::SEQUENCE + 2)),
            flags: if is_tcp { bytes[l4 + tcp::FLAGS] } else { 0 },
            udp_length: word(l4 + UDP_LENGTH),
            checksum: word(l4 + checksum_offset(layout.transport)),
        }
    }

    /// Writes the fields back.
    pub fn restore(&self, layout: &Layout, room: &mut HeaderRoom) {
        let (ip, transport) = room.0.split_at_mut(layout.l4);
        let ip = &mut ip[layout.l3..];
        match layout.ip {
            Ip::V4 => {
                put(ip, v4::LENGTH, self.ip_length);
                put(ip, v4::ID, self.id);
                put(ip, v4::CHECKSUM, self.ip_checksum);
            }
            Ip::V6 => put(ip, v6::LENGTH, self.ip_length),
        }
        match layout.transport {
            Transport::Tcp => {
                put_sequence(transport, self.sequence);
                transport[tcp::FLAGS] = self.flags;
            }
            Transport::Udp => put(transport, UDP_LENGTH, self.udp_length),
        }
        put(transport, checksum_offset(layout.transport), self.checksum);
    }
}

fn checksum_offset(transport: Transport) -> usize {
    match transport {
        Transport::Tcp => 16,
        Transport::Udp => 6,
    }
}

fn put(bytes: &mut [u8], at: usize, word: u16) {
    bytes[at..at + 2].copy_from_slice(&word.to_be_bytes());
}

fn put_sequence(header: &mut [u8], sequence: u32) {
    header[tcp::SEQUENCE..][..4].copy_from_slice(&sequence.to_be_bytes());
}

/// Lending iterator over the segments of a frame: each changes the same copy of the headers.
#[derive(Debug)]
pub struct Segments<'c> {
    segmentation: Segmentation,
    /// Length of the frame.
    len: usize,
    /// The receiver completes checksums.
    takes_checksum: bool,
    room: &'c mut HeaderRoom,
    /// Segments so far.
    done: usize,
}

impl<'c> Segments<'c> {
    pub(crate) fn new(
        segmentation: Segmentation,
        len: usize,
        takes_checksum: bool,
        room: &'c mut HeaderRoom,
    ) -> Self {
        Self {
            segmentation,
            len,
            takes_checksum,
            room,
            done: 0,
        }
    }

    /// Segments that are still to come.
    pub fn remaining(&self) -> usize {
        let payload = self.len - self.segmentation.layout.payload;
        payload.div_ceil(self.segmentation.size) - self.done
    }

    /// Leaves out the first `count` segments, which the receiver has already.
    #[must_use]
    pub fn skip(mut self, count: usize) -> Self {
        let all = self.done + self.remaining();
        self.done = (self.done + count).min(all);
        self
    }

    /// The next segment.
    #[expect(
        clippy::should_implement_trait,
        reason = "a segment borrows the headers, which an Iterator's item cannot"
    )]
    pub fn next(&mut self) -> Option<Segment<'_>> {
        let Segmentation {
            layout,
            size,
            original,
            checksum,
            ..
        } = self.segmentation;
        let from = layout.payload + self.done * size;
        if from >= self.len {
            return None;
        }
        let payload = from..self.len.min(from + size);
        let is_first = self.done == 0;
        let is_last = payload.end == self.len;
        // The length that the sender's sum of the pseudo header has, and the one it is to have.
        let (whole, part) = (
            self.len - layout.l4,
            layout.payload - layout.l4 + payload.len(),
        );
        let (ip, transport) = self.room.0.split_at_mut(layout.l4);
        let ip = &mut ip[layout.l3..];
        match layout.ip {
            Ip::V4 => {
                put(ip, v4::LENGTH, (ip.len() + part) as u16);
                put(ip, v4::ID, original.id.wrapping_add(self.done as u16));
                put(ip, v4::CHECKSUM, 0);
                let sum = Checksum::new().bytes(ip).finish();
                put(ip, v4::CHECKSUM, sum);
            }
            Ip::V6 => put(ip, v6::LENGTH, (ip.len() - v6::HEADER + part) as u16),
        }
        match layout.transport {
            Transport::Tcp => {
                let offset = (self.done * size) as u32;
                put_sequence(transport, original.sequence.wrapping_add(offset));
                let clear_first = if is_first { 0 } else { tcp::CWR };
                let clear_last = if is_last { 0 } else { tcp::FIN | tcp::PSH };
                transport[tcp::FLAGS] = original.flags & !clear_first & !clear_last;
            }
            Transport::Udp => put(transport, UDP_LENGTH, part as u16),
        }
        let adjusted = Checksum::new()
            .word(original.checksum)
            .word(!(whole as u16))
            .word(part as u16);
        let position = checksum.position() - layout.l4;
        put(transport, position, adjusted.partial());
        self.done += 1;
        Some(Segment {
            header: if self.takes_checksum {
                checksum.header()
            } else {
                VnetHeader::default()
            },
            headers: &mut self.room.0[..layout.payload],
            payload,
            checksum_start: checksum.start,
            checksum_position: checksum.position(),
        })
    }
}

/// One segment: its headers, and which bytes of the frame follow them.
#[derive(Debug)]
pub struct Segment<'s> {
    header: VnetHeader,
    headers: &'s mut [u8],
    payload: Range<usize>,
    checksum_start: usize,
    checksum_position: usize,
}

impl Segment<'_> {
    /// Header for the receiver: zero, or NEEDS_CSUM. `num_buffers` is the device's to set.
    pub fn header(&self) -> VnetHeader {
        self.header
    }

    /// Whether the checksum must be [completed](Self::complete) before the headers are used.
    pub fn is_incomplete(&self) -> bool {
        self.header.flags & VnetHeader::NEEDS_CSUM == 0
    }

    /// Bytes of the frame that follow the headers.
    pub fn payload(&self) -> Range<usize> {
        self.payload.clone()
    }

    /// Length of the segment.
    pub fn frame_len(&self) -> usize {
        self.headers.len() + self.payload.len()
    }

    /// Headers of the segment. Their transport checksum is partial, unless it has been completed.
    pub fn headers(&self) -> &[u8] {
        self.headers
    }

    /// Completes the checksum with the payload as it is in `frame`, if the receiver does not.
    pub fn complete(&mut self, frame: &(impl FrameBytes + ?Sized)) {
        if self.is_incomplete() {
            let sum = Checksum::new()
                .bytes(&self.headers[self.checksum_start..])
                .frame(frame, self.payload.clone());
            put(self.headers, self.checksum_position, sum.transport());
        }
    }
}
