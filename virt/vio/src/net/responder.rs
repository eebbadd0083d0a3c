//! A built-in peer: answers ARP for its address, ICMP echo, and UDP on every port with the same
//! bytes.
//!
//! It needs no host privileges, so a guest has a peer in a demo, and tests have one whose answers
//! they can compute. Anything else, and anything malformed, is dropped silently.
//!
//! Left out: IPv6, VLAN tags, IP options (dropped from the answer), fragments (dropped).
//! Bound: [`MAX_REPLIES`] frames of at most [`PLAIN_FRAME`] bytes, 389 KiB; the newest is dropped.

use std::collections::VecDeque;
use std::net::Ipv4Addr;

use super::port::{FrameData, FrameReceiver, NetPort, PLAIN_FRAME, RxFrame, TxFrame};
use super::{BURST, NetHeader};
use guest_mem::KeepAlive;
use net_offload::Checksum;

/// Answers waiting for the guest at most.
pub const MAX_REPLIES: usize = 256;

const ETHERNET: usize = 14;
const ARP_LEN: usize = 28;
const IP_LEN: usize = 20;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_ARP: [u8; 2] = [0x08, 0x06];
const BROADCAST: [u8; 6] = [0xff; 6];
const ICMP: u8 = 1;
const UDP: u8 = 17;

/// The built-in peer.
#[derive(Debug)]
pub struct Responder {
    mac: [u8; 6],
    ip: [u8; 4],
    replies: VecDeque<Vec<u8>>,
    /// Buffers to use again.
    spare: Vec<Vec<u8>>,
    dropped: u64,
}

impl Responder {
    /// A peer with these addresses.
    pub fn new(mac: [u8; 6], ip: Ipv4Addr) -> Self {
        Self {
            mac,
            ip: ip.octets(),
            replies: VecDeque::with_capacity(MAX_REPLIES),
            spare: Vec::with_capacity(MAX_REPLIES),
            dropped: 0,
        }
    }

    /// Answers dropped because the guest did not take those before.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Writes the answer to `frame`, if it deserves one.
    fn answer(&self, frame: &[u8], reply: &mut Vec<u8>) -> Option<()> {
        let (ethernet, payload) = frame.split_at_checked(ETHERNET)?;
        let (to, from, kind) = (&ethernet[..6], &ethernet[6..12], &ethernet[12..]);
        if to != self.mac && to != BROADCAST {
            return None;
        }
        reply.extend(from);
        reply.extend(self.mac);
        reply.extend(kind);
        if kind == ETHERTYPE_ARP {
            self.answer_arp(payload, reply)
        } else if kind == ETHERTYPE_IPV4 {
            self.answer_ip(payload, reply)
        } else {
            None
        }
    }

    /// RFC 826: hardware type 1, protocol IPv4, lengths 6 and 4, operation 1; then sender and
    /// target.
    fn answer_arp(&self, packet: &[u8], reply: &mut Vec<u8>) -> Option<()> {
        let packet = packet.get(..ARP_LEN)?;
        if packet[..8] != [0, 1, 8, 0, 6, 4, 0, 1] || packet[24..28] != self.ip {
            return None;
        }
        reply.extend([0, 1, 8, 0, 6, 4, 0, 2]);
        reply.extend(self.mac);
        reply.extend(self.ip);
        reply.extend(&packet[8..18]);
        Some(())
    }

    fn answer_ip(&self, packet: &[u8], reply: &mut Vec<u8>) -> Option<()> {
        let header_len = usize::from(packet.first()? & 0xf) * 4;
        if packet[0] >> 4 != 4 || header_len < IP_LEN {
            return None;
        }
        let header = packet.get(..header_len)?;
        let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
        // Ethernet pads short frames: the header says where the packet ends.
        let payload = packet.get(header_len..total)?;
        // More fragments, or a fragment's offset.
        let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
        let (from, to) = (&header[12..16], &header[16..20]);
        if fragment || to != self.ip || Checksum::new().bytes(header).finish() != 0 {
            return None;
        }
        let start = reply.len();
        let reply_total = u16::try_from(IP_LEN + payload.len()).ok()?;
        reply.extend([0x45, 0]);
        reply.extend(reply_total.to_be_bytes());
        // Identification 0 with "don't fragment"; time to live 64; checksum below.
        reply.extend([0, 0, 0x40, 0, 64, header[9], 0, 0]);
        reply.extend(self.ip);
        reply.extend(from);
        let sum = Checksum::new().bytes(&reply[start..]).finish();
        reply[start + 10..start + 12].copy_from_slice(&sum.to_be_bytes());
        match header[9] {
            ICMP => Self::answer_icmp(payload, reply),
            UDP => Self::answer_udp(payload, from, to, reply),
            _ => None,
        }
    }

    /// RFC 792: echo request (8, 0) becomes echo reply (0, 0).
    fn answer_icmp(message: &[u8], reply: &mut Vec<u8>) -> Option<()> {
        if message.len() < 8 || message[..2] != [8, 0] {
            return None;
        }
        if Checksum::new().bytes(message).finish() != 0 {
            return None;
        }
        let start = reply.len();
        reply.extend([0, 0, 0, 0]);
        reply.extend(&message[4..]);
        let sum = Checksum::new().bytes(&reply[start..]).finish();
        reply[start + 2..start + 4].copy_from_slice(&sum.to_be_bytes());
        Some(())
    }

    /// RFC 768: ports swapped, data unchanged.
    fn answer_udp(datagram: &[u8], from: &[u8], to: &[u8], reply: &mut Vec<u8>) -> Option<()> {
        let len = u16::from_be_bytes([*datagram.get(4)?, *datagram.get(5)?]);
        let datagram = datagram.get(..usize::from(len))?;
        let (header, data) = datagram.split_at_checked(8)?;
        let pseudo = Checksum::new()
            .bytes(from)
            .bytes(to)
            .word(u16::from(UDP))
            .word(len);
        // 0: the sender made none.
        if header[6..8] != [0, 0] && pseudo.bytes(datagram).finish() != 0 {
            return None;
        }
        let start = reply.len();
        reply.extend(&header[2..4]);
        reply.extend(&header[..2]);
        reply.extend(&header[4..6]);
        reply.extend([0, 0]);
        reply.extend(data);
        // The pseudo header is the same with its addresses swapped.
        let sum = match pseudo.bytes(&reply[start..]).finish() {
            0 => 0xffff,
            sum => sum,
        };
        reply[start + 6..start + 8].copy_from_slice(&sum.to_be_bytes());
        Some(())
    }
}

impl Responder {
    /// Takes a frame up; false if it had to be dropped.
    pub fn take(&mut self, frame: &[u8]) -> bool {
        if self.replies.len() == MAX_REPLIES {
            self.dropped += 1;
            return false;
        }
        let mut reply = self
            .spare
            .pop()
            .unwrap_or_else(|| Vec::with_capacity(PLAIN_FRAME));
        match self.answer(frame, &mut reply) {
            Some(()) => self.replies.push_back(reply),
            None => {
                reply.clear();
                self.spare.push(reply);
            }
        }
        true
    }

    /// The next answer.
    pub fn next_reply(&self) -> Option<&[u8]> {
        self.replies.front().map(Vec::as_slice)
    }
}

impl NetPort for Responder {
    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        let mut buf = [0; PLAIN_FRAME];
        let taken = frames.iter().filter(|frame| {
            let len = frame.read(0, &mut buf);
            self.take(&buf[..len])
        });
        frames.len() - taken.count()
    }

    fn has_frames(&mut self, pair: u16) -> bool {
        pair == 0 && !self.replies.is_empty()
    }

    fn receive(&mut self, _pair: u16, to: &mut dyn FrameReceiver) {
        loop {
            let room = to.room().min(BURST);
            let replies = self.replies.iter().take(room);
            let frames: Vec<RxFrame<'_>> = replies
                .map(|reply| RxFrame {
                    header: NetHeader::PLAIN,
                    data: FrameData::Bytes(reply),
                })
                .collect();
            let over = to.deliver(&frames);
            if over == 0 {
                return;
            }
            for mut reply in self.replies.drain(..over) {
                reply.clear();
                self.spare.push(reply);
            }
        }
    }

    fn reset(&mut self) {
        self.replies.clear();
    }
}
