//! Random TCP and UDP packets, and the naive model: each expected frame is put together afresh from
//! the packet, with checksums summed word by word. Only constants of the crate are used.
#![allow(
    dead_code,
    reason = "a module of several tests, each of which uses a part"
)]

pub mod delivered;

use net_offload::{GsoType, NetHeader, Offloads};
use seeded::Random;

/// All sets of offloads that there are.
pub fn all_sets() -> Vec<Offloads> {
    let bits = [
        Offloads::CSUM,
        Offloads::TSO4,
        Offloads::TSO6,
        Offloads::ECN,
        Offloads::USO4,
        Offloads::USO6,
    ];
    let mut sets = Vec::new();
    for choice in 0u32..64 {
        let chosen = bits
            .iter()
            .enumerate()
            .filter(|(i, _)| choice >> i & 1 != 0);
        let set = chosen.fold(Offloads::NONE, |all, (_, one)| all.with(*one));
        if set == set.consistent() {
            sets.push(set);
        }
    }
    assert_eq!(sets.len(), 29);
    sets
}

/// A packet to be sent: the fields of its headers.
#[derive(Clone, Debug)]
pub struct Packet {
    /// TPID and TCI.
    pub tags: Vec<[u16; 2]>,
    pub is_v6: bool,
    pub is_udp: bool,
    /// IPv4 options, or the bytes of IPv6 extension headers behind their first two bytes: number
    /// and content.
    pub options: Vec<u8>,
    pub extensions: Vec<(u8, Vec<u8>)>,
    pub addresses: [[u8; 16]; 2],
    pub id: u16,
    pub tcp_options: Vec<u8>,
    pub sequence: u32,
    pub flags: u8,
    pub payload: Vec<u8>,
    pub size: u16,
    pub has_ecn: bool,
}

/// A frame as a receiver gets it: kind of segmentation, whether the checksum is partial, bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub gso_type: GsoType,
    pub needs_checksum: bool,
    pub bytes: Vec<u8>,
}

/// RFC 1071, word by word.
pub fn naive_sum(bytes: &[u8]) -> u16 {
    let mut sum = 0u64;
    for pair in bytes.chunks(2) {
        sum += u64::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u64::from(*low));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

impl Packet {
    pub fn random(random: &mut Random) -> Self {
        let is_v6 = random.chance(0.5);
        let is_udp = random.chance(0.33);
        let mut bytes = |len: u64| {
            let mut bytes = vec![0; len as usize];
            random.fill(&mut bytes);
            bytes
        };
        let mut addresses = [[0; 16]; 2];
        addresses[0].copy_from_slice(&bytes(16));
        addresses[1].copy_from_slice(&bytes(16));
        let any = bytes(64);
        let mut tags = Vec::new();
        if any[0] < 80 {
            if any[0] < 30 {
                tags.push([0x88a8, u16::from(any[1]) << 4 | 1]);
            }
            tags.push([0x8100, u16::from(any[2]) << 4 | 2]);
        }
        let mut extensions = Vec::new();
        if is_v6 && any[3] < 100 {
            if any[4] & 1 != 0 {
                // PadN over all of it.
                let len = 6 + 8 * usize::from(any[5] % 4);
                extensions.push((0, vec![0; len]));
            }
            if any[4] & 2 != 0 {
                // An experimental type with no segments left.
                extensions.push((43, vec![253, 0, 1, 2, 3, 4]));
            }
            if any[4] & 4 != 0 {
                extensions.push((60, vec![0; 14]));
            }
        }
        // No-operations.
        let v4_options = if !is_v6 && any[6] < 60 {
            usize::from(any[7] % 11) * 4
        } else {
            0
        };
        let tcp_options = if any[8] < 128 {
            usize::from(any[9] % 11) * 4
        } else {
            0
        };
        let has_ecn = any[10] < 60 && !is_udp;
        let len = match any[11] % 4 {
            0 => u64::from(any[12]) % 40,
            1 | 2 => u64::from(any[12]) * 20,
            _ => u64::from(any[12]) << 8 | u64::from(any[13]),
        };
        let headers = 14 + 8 + 40 + 60 + 100 + 60;
        let len = len.min(65_535 - headers);
        // At most 128 segments, Linux's bound for UDP.
        let least = len.div_ceil(100).max(1);
        let size = least + u64::from(any[14]) * 8;
        let flags = 0x10 | any[15] & 0x49 | if has_ecn { 0x80 } else { 0 };
        Self {
            tags,
            is_v6,
            is_udp,
            options: vec![1; v4_options],
            extensions,
            addresses,
            id: u16::from_be_bytes([any[16], any[17]]),
            tcp_options: vec![1; tcp_options],
            sequence: u32::from_be_bytes([any[18], any[19], any[20], any[21]]),
            flags,
            payload: bytes(len),
            size: size as u16,
            has_ecn,
        }
    }

    pub fn gso_type(&self) -> GsoType {
        match (self.is_udp, self.is_v6) {
            (true, _) => GsoType::UDP_L4,
            (false, true) => GsoType::TCPV6.with_ecn(self.has_ecn),
            (false, false) => GsoType::TCPV4.with_ecn(self.has_ecn),
        }
    }

    pub fn needs(&self) -> Offloads {
        let one = match (self.is_udp, self.is_v6) {
            (true, true) => Offloads::USO6,
            (true, false) => Offloads::USO4,
            (false, true) => Offloads::TSO6,
            (false, false) => Offloads::TSO4,
        };
        let ecn = if self.has_ecn {
            Offloads::ECN
        } else {
            Offloads::NONE
        };
        Offloads::CSUM.with(one).with(ecn)
    }

    /// Whether it is more than one segment.
    pub fn is_large(&self) -> bool {
        self.payload.len() > usize::from(self.size)
    }

    pub fn l4(&self) -> usize {
        let extensions: usize = self.extensions.iter().map(|one| one.1.len() + 2).sum();
        let ip = if self.is_v6 {
            40 + extensions
        } else {
            20 + self.options.len()
        };
        14 + 4 * self.tags.len() + ip
    }

    pub fn checksum_at(&self) -> usize {
        self.l4() + if self.is_udp { 6 } else { 16 }
    }

    pub fn headers(&self) -> usize {
        self.l4()
            + if self.is_udp {
                8
            } else {
                20 + self.tcp_options.len()
            }
    }

    /// The `nth` segment, which is `payload`.
    pub fn frame(&self, nth: usize, is_last: bool, payload: &[u8], partial: bool) -> Vec<u8> {
        let is_first = nth == 0;
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
        for word in self.tags.iter().flatten() {
            frame.extend(word.to_be_bytes());
        }
        frame.extend(if self.is_v6 {
            [0x86, 0xdd]
        } else {
            [0x08, 0x00]
        });
        let number = if self.is_udp { 17 } else { 6 };
        let mut transport = vec![0x12, 0x34, 0x56, 0x78];
        if self.is_udp {
            transport.extend((8 + payload.len() as u16).to_be_bytes());
            transport.extend([0, 0]);
        } else {
            let sequence = self
                .sequence
                .wrapping_add((nth * usize::from(self.size)) as u32);
            transport.extend(sequence.to_be_bytes());
            let mut flags = self.flags;
            if !is_first {
                flags &= !0x80;
            }
            if !is_last {
                flags &= !0x09;
            }
            let offset = (5 + self.tcp_options.len() as u8 / 4) << 4;
            transport.extend([9, 8, 7, 6, offset, flags, 0x40, 0, 0, 0, 0, 0]);
            transport.extend(&self.tcp_options);
        }
        transport.extend(payload);
        let address = if self.is_v6 { 16 } else { 4 };
        let mut pseudo = Vec::new();
        pseudo.extend(&self.addresses[0][..address]);
        pseudo.extend(&self.addresses[1][..address]);
        pseudo.extend((transport.len() as u32).to_be_bytes());
        pseudo.extend([0, 0, 0, number]);
        let at = if self.is_udp { 6 } else { 16 };
        let sum = if partial {
            naive_sum(&pseudo)
        } else {
            pseudo.extend(&transport);
            match !naive_sum(&pseudo) {
                0 => 0xffff,
                sum => sum,
            }
        };
        transport[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        if self.is_v6 {
            self.push_v6(number, &transport, &mut frame);
        } else {
            self.push_v4(nth, number, &transport, &mut frame);
        }
        frame
    }

    fn push_v4(&self, nth: usize, number: u8, transport: &[u8], frame: &mut Vec<u8>) {
        let len = 20 + self.options.len();
        let mut header = vec![0x40 | (len / 4) as u8, 0];
        header.extend(((len + transport.len()) as u16).to_be_bytes());
        header.extend(self.id.wrapping_add(nth as u16).to_be_bytes());
        header.extend([0x40, 0, 64, number, 0, 0]);
        header.extend(&self.addresses[0][..4]);
        header.extend(&self.addresses[1][..4]);
        header.extend(&self.options);
        let sum = !naive_sum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        frame.extend(header);
        frame.extend(transport);
    }

    fn push_v6(&self, number: u8, transport: &[u8], frame: &mut Vec<u8>) {
        let mut behind = Vec::new();
        for (i, (_, content)) in self.extensions.iter().enumerate() {
            let next = self.extensions.get(i + 1).map_or(number, |one| one.0);
            behind.extend([next, ((content.len() + 2) / 8 - 1) as u8]);
            let start = behind.len();
            behind.extend(content);
            if self.extensions[i].0 != 43 {
                behind[start] = 1;
                behind[start + 1] = (content.len() - 2) as u8;
            }
        }
        behind.extend(transport);
        frame.extend([0x60, 0, 0, 0]);
        frame.extend((behind.len() as u16).to_be_bytes());
        frame.extend([self.extensions.first().map_or(number, |one| one.0), 64]);
        frame.extend(&self.addresses[0]);
        frame.extend(&self.addresses[1]);
        frame.extend(behind);
    }

    /// The frame and its header, as a sender with these offloads makes it; all is done that it may
    /// not leave undone.
    pub fn sent(&self, sender: Offloads) -> (NetHeader, Vec<u8>) {
        let needs_checksum = sender.contains(Offloads::CSUM);
        let frame = self.frame(0, true, &self.payload, needs_checksum);
        let mut header = NetHeader::default();
        if needs_checksum {
            header.flags = NetHeader::NEEDS_CSUM;
            header.csum_start = self.l4() as u16;
            header.csum_offset = if self.is_udp { 6 } else { 16 };
        }
        if sender.contains(self.needs()) {
            header.gso_type = self.gso_type();
            header.gso_size = self.size;
            header.hdr_len = self.headers() as u16;
        }
        (header, frame)
    }

    /// Returns the frames that a receiver with these offloads gets for the packet, as sent by such
    /// a sender.
    pub fn expected(&self, sender: Offloads, receiver: Offloads) -> Vec<Expected> {
        let partial = sender.contains(Offloads::CSUM) && receiver.contains(Offloads::CSUM);
        let is_to_segment = sender.contains(self.needs()) && self.is_large();
        if !is_to_segment || receiver.contains(self.needs()) {
            let gso_type = if is_to_segment {
                self.gso_type()
            } else {
                GsoType::NONE
            };
            return vec![Expected {
                gso_type,
                needs_checksum: partial,
                bytes: self.frame(0, true, &self.payload, partial),
            }];
        }
        let parts = self.payload.chunks(usize::from(self.size));
        let count = parts.len();
        let frames = parts.enumerate().map(|(nth, part)| Expected {
            gso_type: GsoType::NONE,
            needs_checksum: partial,
            bytes: self.frame(nth, nth + 1 == count, part, partial),
        });
        frames.collect()
    }
}
