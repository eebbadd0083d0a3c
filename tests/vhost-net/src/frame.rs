//! Frames as this client makes and checks them.
//!
//! | bytes | what |
//! |---|---|
//! | 0-13 | Ethernet: destination, source, [`ETHERTYPE`] |
//! | 14-15 | the transmit queue's number, little-endian as all below |
//! | 16-23 | the frame's number in that queue |
//! | 24-31 | when it was made available, in nanoseconds |
//! | 32-39 | in one of [`CHECK_EVERY`] frames: [`sum`] of all other bytes |
//! | 40- | in those frames bytes that follow from the number; in others what an earlier one left |

use std::sync::atomic::Ordering::Relaxed;

use crate::memory::Memory;

/// `struct virtio_net_hdr` with `num_buffers`, as VERSION_1 has it always (virtio 1.2 §5.1.6).
pub const HEADER_LEN: u32 = 12;
/// Offset of `num_buffers` in it.
pub const NUM_BUFFERS: usize = 10;
/// The shortest frame that has room for a stamp and a sum.
pub const MIN_FRAME: u32 = 64;
/// The longest one without a VLAN tag, and the check sequence that is not there: as DPDK's
/// `--txpkts=1518`.
pub const MAX_FRAME: u32 = 1518;
/// For local experiments (IEEE 802).
pub const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// Frames of one queue from one that is checked whole to the next.
pub const CHECK_EVERY: u64 = 256;

const TYPE: usize = 12;
const QUEUE: usize = 14;
const NUMBER: usize = 16;
const TIME: usize = 24;
const SUM: usize = 32;
const FILL: usize = 40;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// An address of this client's for a port: locally administered.
pub const fn mac(port: u8) -> Mac {
    [0x02, 0, 0, 0, 0x37, port]
}

/// Fields that a frame holds about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The transmit queue's number.
    pub queue: u16,
    /// The frame's own.
    pub number: u64,
    /// Time at which it was made available, nanoseconds.
    pub time: u64,
}

impl Stamp {
    /// Whether all bytes of the frame are summed.
    pub const fn is_checked(&self) -> bool {
        self.number.is_multiple_of(CHECK_EVERY)
    }
}

/// Writes the part that is the same in all frames of one queue.
pub fn prepare(memory: &Memory, at: usize, to: Mac, from: Mac, queue: u16) {
    let mut head = [0; NUMBER];
    head[..6].copy_from_slice(&to);
    head[6..12].copy_from_slice(&from);
    head[12..14].copy_from_slice(&ETHERTYPE);
    head[QUEUE..].copy_from_slice(&queue.to_le_bytes());
    memory.write(at, &head);
}

/// Stamps a prepared frame of `len` bytes.
#[inline]
pub fn stamp(memory: &Memory, at: usize, len: u32, number: u64, time: u64) {
    memory.store_u64(at + NUMBER, number.to_le(), Relaxed);
    memory.store_u64(at + TIME, time.to_le(), Relaxed);
    if number.is_multiple_of(CHECK_EVERY) {
        fill(memory, at, len, number);
    }
}

/// Fills a frame with bytes of its own, and sums it.
#[cold]
fn fill(memory: &Memory, at: usize, len: u32, number: u64) {
    let mut frame = vec![0; len as usize];
    memory.read(at, &mut frame[..SUM]);
    let mut word = number ^ 0x9e37_79b9_7f4a_7c15;
    for bytes in frame[FILL..].chunks_mut(8) {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
    }
    let sum = sum(&frame);
    frame[SUM..FILL].copy_from_slice(&sum.to_le_bytes());
    memory.write(at + SUM, &frame[SUM..]);
}

/// A sum over a frame's length and all its bytes but those of the sum: one that depends on their
/// order.
pub fn sum(frame: &[u8]) -> u64 {
    let mut sum = frame.len() as u64 ^ 0xcbf2_9ce4_8422_2325;
    for (at, bytes) in frame.chunks(8).enumerate() {
        if at == SUM / 8 {
            continue;
        }
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        sum = (sum ^ u64::from_le_bytes(word)).wrapping_mul(0x0000_0100_0000_01b3);
        sum ^= sum >> 29;
    }
    sum
}

/// Reads the stamp of a frame of at least [`MIN_FRAME`] bytes where it lies; `None` where it is no
/// frame of this client's.
#[inline]
pub fn read_stamp(memory: &Memory, at: usize) -> Option<Stamp> {
    let [kind @ .., low, high] = memory.load_u32(at + TYPE, Relaxed).to_ne_bytes();
    (kind == ETHERTYPE).then(|| Stamp {
        queue: u16::from_le_bytes([low, high]),
        number: u64::from_le(memory.load_u64(at + NUMBER, Relaxed)),
        time: u64::from_le(memory.load_u64(at + TIME, Relaxed)),
    })
}

/// Whether a whole frame holds what its sum says.
pub fn is_intact(frame: &[u8]) -> bool {
    let said = frame.get(SUM..FILL).and_then(|sum| sum.try_into().ok());
    said.map(u64::from_le_bytes) == Some(sum(frame))
}

/// The part of a frame that a server makes that is the same in all of them: IPv4 and UDP headers
/// (what testpmd sends behind them is what was in its buffers), or the whole frame.
pub fn constant_part(frame: &[u8]) -> &[u8] {
    match frame.get(12..14) {
        Some([0x08, 0x00]) => frame.get(..14 + 20 + 8).unwrap_or(frame),
        _ => frame,
    }
}

/// Whether an IPv4 header's checksum is right, and the frame as long as its header says; frames of
/// other protocols pass. For frames that a server makes.
pub fn is_plausible(frame: &[u8]) -> bool {
    let Some([0x08, 0x00]) = frame.get(12..14) else {
        return true;
    };
    let Some(header) = frame.get(14..34) else {
        return false;
    };
    let words = header
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let total = u32::from(header[2]) << 8 | u32::from(header[3]);
    let sum: u32 = words.sum();
    let has_options = header[0] != 0x45;
    let is_summed = (sum & 0xffff) + (sum >> 16) == 0xffff;
    (has_options || is_summed) && total as usize + 14 <= frame.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(len: u32, number: u64) -> Vec<u8> {
        let memory = Memory::create(4096).unwrap();
        prepare(&memory, 64, mac(1), mac(2), 7);
        stamp(&memory, 64, len, number, 99);
        let stamp = read_stamp(&memory, 64).unwrap();
        assert_eq!((stamp.queue, stamp.number, stamp.time), (7, number, 99));
        let mut frame = vec![0; len as usize];
        memory.read(64, &mut frame);
        frame
    }

    #[test]
    fn any_byte_changed_lost_or_moved_is_seen() {
        for len in [MIN_FRAME, 65, 127, MAX_FRAME] {
            let good = frame(len, 512);
            assert!(is_intact(&good));
            for at in 0..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 1;
                assert!(!is_intact(&bad), "byte {at} of {len}");
            }
            assert!(!is_intact(&good[..good.len() - 1]));
            let mut moved = good.clone();
            moved.swap(41, 42);
            assert!(!is_intact(&moved));
            let mut longer = good;
            longer.push(0);
            assert!(!is_intact(&longer));
        }
        assert!(!is_intact(&[0; 20]));
    }

    #[test]
    fn an_address_is_in_network_order_and_ours() {
        let frame = frame(64, 1);
        assert_eq!(
            frame[..14],
            *b"\x02\0\0\0\x37\x01\x02\0\0\0\x37\x02\x88\xb5"
        );
    }

    #[test]
    fn a_header_of_ipv4_is_checked_and_others_pass() {
        // RFC 1071's own kind of example: a header known to be right (20 bytes, UDP, 10.0.0.1 to
        // 10.0.0.2).
        let mut frame = vec![0; 64];
        frame[12] = 8;
        let header = [
            0x45, 0, 0, 50, 0, 0, 0, 0, 64, 17, 0x66, 0xb9, 10, 0, 0, 1, 10, 0, 0, 2,
        ];
        frame[14..34].copy_from_slice(&header);
        assert!(is_plausible(&frame));
        frame[20] = 1;
        assert!(!is_plausible(&frame));
        frame[12] = 0x86;
        assert!(is_plausible(&frame));
        frame[12] = 8;
        assert!(!is_plausible(&frame[..33]));
    }
}
