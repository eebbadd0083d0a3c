//! The work on a packet: its checksum, and a copy.

use std::hint::black_box;
use std::sync::Arc;

use dma_map::Clock;

use crate::map::rig::Time;

/// Memory that packets lie in: more than a first-level cache, less than a second.
const MEMORY: usize = 512 << 10;

/// One core's packets.
pub struct Work {
    time: Arc<Time>,
    packets: Vec<u8>,
    copy: Vec<u8>,
    size: usize,
    pad_ns: u64,
    at: usize,
}

impl Work {
    /// Packets of `size` bytes, each worked on for at least `pad_ns`.
    pub fn new(size: usize, pad_ns: u64) -> Self {
        Self {
            time: Time::shared(),
            packets: (0..MEMORY.max(size)).map(|i| i as u8).collect(),
            copy: vec![0; size],
            size,
            pad_ns,
            at: 0,
        }
    }

    /// Works on the next packet.
    #[inline]
    pub fn packet(&mut self) {
        let end = (self.pad_ns > 0).then(|| self.time.now() + self.pad_ns);
        let packet = &self.packets[self.at..self.at + self.size];
        black_box(checksum(packet));
        self.copy.copy_from_slice(packet);
        black_box(&self.copy);
        // Whole packets only, so that none wraps.
        self.at += self.size;
        if self.at + self.size > self.packets.len() {
            self.at = 0;
        }
        if let Some(end) = end {
            // Without a pause, which takes 140 cycles on many processors and would round the
            // padding up.
            while self.time.now() < end {}
        }
    }
}

/// The internet checksum: the complement of the ones' complement sum of 16-bit words, big-endian
/// (RFC 1071).
pub fn checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u64;
    let mut words = bytes.chunks_exact(4);
    for word in &mut words {
        // Four bytes at a time add up to the same, folded.
        sum += u64::from(u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
    }
    let mut last = [0; 4];
    last[..words.remainder().len()].copy_from_slice(words.remainder());
    sum += u64::from(u32::from_be_bytes(last));
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_standard() {
        // RFC 1071 §3: the sum of these is ddf2.
        let example = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(checksum(&example), !0xddf2);
        assert_eq!(checksum(&[0x12]), !0x1200);
        assert_eq!(checksum(&[]), 0xffff);
    }

    #[test]
    fn a_padded_packet_takes_its_time() {
        let mut work = Work::new(1500, 20_000);
        let time = Time::shared();
        let start = time.now();
        for _ in 0..1000 {
            work.packet();
        }
        assert!(time.now() - start >= 20_000_000);
    }
}
