//! The check of a header against its frame.

use crate::layout::{HeaderRoom, Layout, Transport};
use crate::original::Original;
use crate::undone::{PartialChecksum, Segmentation, Undone};
use crate::{FrameBytes, GsoType, HeaderError, MAX_FRAME, MIN_FRAME, NetHeader, Offloads};

/// Most segments of one frame: 65,535 bytes by 48, the least that Linux sends (`tcp_min_snd_mss`).
/// A `gso_size` of 1 would have one frame of a guest cost as many as 65,481.
pub const MAX_SEGMENTS: usize = 1_366;
/// Most segments of one frame of UDP, which Linux has as a constant (`UDP_MAX_SEGMENTS`): a TAP
/// refuses more.
pub const MAX_UDP_SEGMENTS: usize = 128;

/// Frame whose header has been compared with it.
#[derive(Debug)]
pub struct Checked<'r> {
    pub(crate) len: usize,
    pub(crate) undone: Undone,
    /// The sender is the host's kernel, and its header states that checksums are right.
    pub(crate) is_valid: bool,
    pub(crate) room: &'r mut HeaderRoom,
}

impl<'r> Checked<'r> {
    /// Compares a header with its frame. Of a sender that has not negotiated checksum offload
    /// nothing in the header is read.
    ///
    /// # Errors
    /// The header is wrong.
    pub fn check(
        header: &NetHeader,
        frame: &(impl FrameBytes + ?Sized),
        sent: Offloads,
        room: &'r mut HeaderRoom,
    ) -> Result<Self, HeaderError> {
        let len = frame.frame_len();
        if !(MIN_FRAME..=MAX_FRAME).contains(&len) {
            return Err(HeaderError::FrameLength(len));
        }
        let undone = if sent.contains(Offloads::CSUM) {
            find_undone(header, frame, sent, room)?
        } else {
            Undone::Nothing
        };
        Ok(Self {
            len,
            undone,
            is_valid: false,
            room,
        })
    }

    /// Trusts the statement of `header` that the checksums are right: for the host's kernel only.
    #[must_use]
    pub fn believing(mut self, header: &NetHeader) -> Self {
        self.is_valid = header.flags & NetHeader::DATA_VALID != 0;
        self
    }

    /// Length of the frame.
    pub fn frame_len(&self) -> usize {
        self.len
    }

    /// Frames that a receiver with these offloads gets of it.
    pub fn count(&self, receiver: Offloads) -> usize {
        match &self.undone {
            Undone::Segments(segments) if !receiver.contains(segments.needs()) => {
                (self.len - segments.layout.payload).div_ceil(segments.size)
            }
            _ => 1,
        }
    }
}

fn find_undone(
    header: &NetHeader,
    frame: &(impl FrameBytes + ?Sized),
    sent: Offloads,
    room: &mut HeaderRoom,
) -> Result<Undone, HeaderError> {
    let len = frame.frame_len();
    // No longer than `MAX_FRAME`.
    let header = header.check(len as u32, sent)?;
    if header.is_plain() {
        return Ok(Undone::Nothing);
    }
    let checksum = PartialChecksum {
        start: usize::from(header.csum_start),
        offset: usize::from(header.csum_offset),
    };
    if header.gso_type == GsoType::NONE {
        return Ok(Undone::Checksum(checksum));
    }
    let layout = Layout::read(frame, room)?;
    let segmentation = Segmentation {
        layout,
        size: usize::from(header.gso_size),
        has_ecn: header.gso_type.has_ecn(),
        checksum,
        original: Original::read(&layout, room),
    };
    if segmentation.gso_type() != header.gso_type.kind() {
        return Err(HeaderError::Protocol);
    }
    // USO of the other version of IP.
    if !sent.contains(segmentation.needs()) {
        return Err(HeaderError::NotNegotiated(header.gso_type));
    }
    let offset = match layout.transport {
        Transport::Tcp => 16,
        Transport::Udp => 6,
    };
    if (checksum.start, checksum.offset) != (layout.l4, offset) {
        return Err(HeaderError::SegmentChecksum);
    }
    let most = match layout.transport {
        Transport::Tcp => MAX_SEGMENTS,
        Transport::Udp => MAX_UDP_SEGMENTS,
    };
    let payload = len - layout.payload;
    match payload.div_ceil(segmentation.size) {
        // Nothing to divide: as Linux has it, an ordinary frame.
        0 | 1 => Ok(Undone::Checksum(checksum)),
        count if count > most => Err(HeaderError::TooManySegments(count)),
        _ => Ok(Undone::Segments(segmentation)),
    }
}
