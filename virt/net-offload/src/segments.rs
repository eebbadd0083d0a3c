//! Segments of a frame, one after another, in one copy of its headers.

use std::ops::Range;

use crate::layout::{HeaderRoom, Ip, Transport};
use crate::original::{UDP_LENGTH, put, put_sequence, tcp, v4, v6};
use crate::undone::Segmentation;
use crate::{Checksum, FrameBytes, NetHeader};

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
                NetHeader::default()
            },
            headers: &mut self.room.0[..layout.payload],
            payload,
            checksum_start: checksum.start,
            checksum_position: checksum.position(),
        })
    }
}

/// One segment: its headers, and the range of the frame that follows them.
#[derive(Debug)]
pub struct Segment<'s> {
    header: NetHeader,
    headers: &'s mut [u8],
    payload: Range<usize>,
    checksum_start: usize,
    checksum_position: usize,
}

impl Segment<'_> {
    /// Header for the receiver: zero, or NEEDS_CSUM.
    pub fn header(&self) -> NetHeader {
        self.header
    }

    /// Whether the checksum must be [completed](Self::complete) before the headers are used.
    pub fn is_incomplete(&self) -> bool {
        self.header.flags & NetHeader::NEEDS_CSUM == 0
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
