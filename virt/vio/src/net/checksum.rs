//! The internet checksum (RFC 1071).

/// A checksum being summed up. Parts may be of any length; each odd one is followed by a zero byte, so
/// only the last may be odd where that matters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Checksum(u64);

impl Checksum {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the 16-bit words of `bytes`.
    #[must_use]
    pub fn bytes(self, bytes: &[u8]) -> Self {
        // 2^48 words fit; a frame has fewer than 2^10.
        let mut sum = self.0;
        let mut words = bytes.chunks_exact(2);
        for word in &mut words {
            sum += u64::from(u16::from_be_bytes([word[0], word[1]]));
        }
        if let [last] = words.remainder() {
            sum += u64::from(*last) << 8;
        }
        Self(sum)
    }

    /// Adds one word.
    #[must_use]
    pub fn word(self, word: u16) -> Self {
        Self(self.0 + u64::from(word))
    }

    /// The one's complement of the sum. Over bytes that contain their own correct checksum: 0.
    pub fn finish(self) -> u16 {
        let mut sum = self.0;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
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
    fn a_real_ipv4_header_sums_to_zero() {
        // Captured: 172.16.10.99 to 172.16.10.12, header checksum b1e6.
        let header = [
            0x45, 0x00, 0x00, 0x3c, 0x1c, 0x46, 0x40, 0x00, 0x40, 0x06, 0xb1, 0xe6, 0xac, 0x10,
            0x0a, 0x63, 0xac, 0x10, 0x0a, 0x0c,
        ];
        assert_eq!(Checksum::new().bytes(&header).finish(), 0);
    }

    #[test]
    fn an_odd_last_byte_is_the_high_half_of_its_word() {
        assert_eq!(Checksum::new().bytes(&[0x12]).finish(), !0x1200);
        assert_eq!(Checksum::new().bytes(&[0xff; 3]).finish(), !0xff00);
    }
}
