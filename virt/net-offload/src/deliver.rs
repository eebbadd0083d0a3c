//! Delivery of a checked frame to a receiver.

use crate::check::Checked;
use crate::segments::Segments;
use crate::undone::{PartialChecksum, Undone};
use crate::{NetHeader, Offloads};

/// Form in which one receiver gets a frame.
#[derive(Debug)]
pub enum Delivery<'c> {
    /// The frame's bytes as they are, behind this header. Where there is a
    /// [`headers`](Unchanged::headers), these bytes take the place of the frame's first ones, which
    /// may have changed since they were checked.
    Unchanged(Unchanged<'c>),
    /// The frame with its checksum completed, behind a header that is all zero.
    Checksum(PartialChecksum),
    /// Several frames.
    Segments(Segments<'c>),
}

/// A frame that its receiver gets in one piece, with the offloaded work left to the receiver.
#[derive(Debug)]
pub struct Unchanged<'c> {
    /// Header for the receiver.
    pub header: NetHeader,
    /// Headers of the frame as they were checked; empty for one that is not to be segmented.
    pub headers: &'c [u8],
}

impl Checked<'_> {
    /// Returns the form in which a receiver with these offloads gets the frame. May be called for
    /// several receivers, one after another.
    pub fn deliver(&mut self, receiver: Offloads) -> Delivery<'_> {
        let takes_checksum = receiver.contains(Offloads::CSUM);
        match self.undone {
            Undone::Nothing => {
                let is_valid = self.is_valid && takes_checksum;
                let flags = if is_valid { NetHeader::DATA_VALID } else { 0 };
                Delivery::Unchanged(Unchanged {
                    header: NetHeader {
                        flags,
                        ..NetHeader::default()
                    },
                    headers: &[],
                })
            }
            Undone::Checksum(checksum) if takes_checksum => Delivery::Unchanged(Unchanged {
                header: checksum.header(),
                headers: &[],
            }),
            Undone::Checksum(checksum) => Delivery::Checksum(checksum),
            Undone::Segments(segments) if receiver.contains(segments.needs()) => {
                // A receiver before may have had segments made of them.
                segments.original.restore(&segments.layout, self.room);
                Delivery::Unchanged(Unchanged {
                    header: NetHeader {
                        gso_type: segments.gso_type().with_ecn(segments.has_ecn),
                        gso_size: segments.size as u16,
                        hdr_len: segments.layout.payload as u16,
                        ..segments.checksum.header()
                    },
                    headers: &self.room.0[..segments.layout.payload],
                })
            }
            Undone::Segments(segments) => {
                Delivery::Segments(Segments::new(segments, self.len, takes_checksum, self.room))
            }
        }
    }
}
