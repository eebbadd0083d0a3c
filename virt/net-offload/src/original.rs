//! Header fields that differ between the segments of a frame, saved before segmentation.

use crate::layout::{HeaderRoom, Ip, Layout, Transport};

/// Offsets in an IPv4 header (RFC 791).
pub(crate) mod v4 {
    pub const LENGTH: usize = 2;
    pub const ID: usize = 4;
    pub const CHECKSUM: usize = 10;
}
/// Offset of the payload's length in an IPv6 header (RFC 8200), and the header's own length.
pub(crate) mod v6 {
    pub const LENGTH: usize = 4;
    pub const HEADER: usize = 40;
}
/// Offsets in a TCP header (RFC 9293), and its flags.
pub(crate) mod tcp {
    pub const SEQUENCE: usize = 4;
    pub const FLAGS: usize = 13;
    pub const FIN: u8 = 1;
    pub const PSH: u8 = 8;
    pub const CWR: u8 = 0x80;
}
/// Offset of the length in a UDP header (RFC 768).
pub(crate) const UDP_LENGTH: usize = 4;

/// Values that these fields had in the unsegmented frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Original {
    ip_length: u16,
    pub id: u16,
    ip_checksum: u16,
    pub sequence: u32,
    pub flags: u8,
    udp_length: u16,
    /// Transport checksum field: the sum of the pseudo header.
    pub checksum: u16,
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

    /// Writes the saved values back into the headers.
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

pub(crate) fn put(bytes: &mut [u8], at: usize, word: u16) {
    bytes[at..at + 2].copy_from_slice(&word.to_be_bytes());
}

pub(crate) fn put_sequence(header: &mut [u8], sequence: u32) {
    header[tcp::SEQUENCE..][..4].copy_from_slice(&sequence.to_be_bytes());
}
