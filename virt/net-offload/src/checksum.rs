//! The internet checksum (RFC 1071).

use std::ops::Range;

use crate::FrameBytes;

/// Sum of 16-bit words, under way. Bytes may be added in pieces of any length, as one row.
#[derive(Clone, Copy, Debug, Default)]
pub struct Checksum {
    /// Sum of 32-bit words, big-endian; carries stay in its upper half.
    sum: u64,
    /// The row is of an odd number of bytes so far: the next one is the low half of its word.
    is_odd: bool,
}

impl Checksum {
    /// The sum of nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends `bytes` to the row.
    #[must_use]
    pub fn bytes(mut self, mut bytes: &[u8]) -> Self {
        if self.is_odd
            && let [first, rest @ ..] = bytes
        {
            self.sum += u64::from(*first);
            self.is_odd = false;
            bytes = rest;
        }
        // 2^32 words of 32 bits fit; a frame has fewer than 2^15. Four sums, so that additions
        // overlap.
        let (blocks, rest) = bytes.as_chunks::<16>();
        let mut sums = [0u64; 4];
        for block in blocks {
            let (words, _) = block.as_chunks::<4>();
            for (sum, word) in sums.iter_mut().zip(words) {
                *sum += u64::from(u32::from_be_bytes(*word));
            }
        }
        self.sum += sums.iter().sum::<u64>();
        let (words, last) = rest.as_chunks::<2>();
        for word in words {
            self.sum += u64::from(u16::from_be_bytes(*word));
        }
        if let [last] = last {
            self.sum += u64::from(*last) << 8;
            self.is_odd = true;
        }
        self
    }

    /// Appends a range of a frame to the row.
    #[must_use]
    pub fn frame(self, frame: &(impl FrameBytes + ?Sized), range: Range<usize>) -> Self {
        let mut sum = self;
        frame.pieces(range, &mut |piece| sum = sum.bytes(piece));
        sum
    }

    /// Adds one word that is not of the row.
    #[must_use]
    pub fn word(mut self, word: u16) -> Self {
        self.sum += u64::from(word);
        self
    }

    /// Returns the sum itself: the value of the checksum field of a frame whose checksum is
    /// partial.
    pub fn partial(self) -> u16 {
        let mut sum = self.sum;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    /// The one's complement of the sum. Over bytes that contain their own correct checksum: 0.
    pub fn finish(self) -> u16 {
        !self.partial()
    }

    /// The checksum of a transport header: never 0, which in UDP means that there is none (RFC
    /// 768), and is the same number as 0xffff.
    pub fn transport(self) -> u16 {
        match self.finish() {
            0 => 0xffff,
            sum => sum,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_rfc_1071() {
        // §3: 0001 f203 f4f5 f6f7 sums to ddf2.
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(Checksum::new().bytes(&bytes).finish(), !0xddf2);
    }

    #[test]
    fn pieces_of_any_length_sum_to_what_the_whole_does() {
        let bytes = Vec::from_iter((0..200u32).map(|i| (i * 151 + 7) as u8));
        for len in 0..bytes.len() {
            // Word by word, as RFC 1071 has it.
            let mut sum = 0u32;
            for pair in bytes[..len].chunks(2) {
                sum += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low));
            }
            let naive = (sum & 0xffff) + (sum >> 16);
            for cut in 0..=len {
                let (front, back) = bytes[..len].split_at(cut);
                let sum = Checksum::new().bytes(front).bytes(&[]).bytes(back);
                assert_eq!(u32::from(sum.partial()), naive, "{cut} of {len}");
            }
        }
    }
}
