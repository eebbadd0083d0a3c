//! Test data from a seed: any part of it can be computed alone, so that either side can check any
//! block.

/// FNV-1a, 64 bits, fed piece by piece. It detects corruption, not forgery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checksum(u64);

impl Default for Checksum {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Checksum {
    /// Returns the checksum of one piece of data.
    #[must_use]
    pub fn of(data: &[u8]) -> u64 {
        let mut sum = Self::default();
        sum.add(data);
        sum.value()
    }

    /// Adds data.
    pub fn add(&mut self, data: &[u8]) {
        for byte in data {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// Returns the checksum of all data added.
    #[must_use]
    pub fn value(self) -> u64 {
        self.0
    }
}

/// Pseudo-random numbers (SplitMix64, Steele et al. 2014): small, seedable, the same on every
/// machine.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Starts at `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    #[expect(
        clippy::should_implement_trait,
        reason = "an endless sequence needs no Option"
    )]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number below `limit`; the bias is below 2⁻³² for limits below 2³².
    ///
    /// # Panics
    /// If `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        assert!(limit > 0, "a range to choose from");
        self.next() % limit
    }
}

fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Fills `data` with the pattern of `seed` from byte `offset` on.
///
/// Word *n* (8 bytes, little-endian) depends on the seed and *n* only, so that data at a wrong
/// place are detected.
///
/// # Panics
/// If `offset` is not a multiple of 8.
pub fn fill(seed: u64, offset: u64, data: &mut [u8]) {
    let mut words = words(seed, offset);
    let (whole, rest) = data.as_chunks_mut::<8>();
    // `words` comes second: a piece too few must not use up a word.
    for (piece, word) in whole.iter_mut().zip(&mut words) {
        *piece = word;
    }
    for (byte, word) in rest.iter_mut().zip(words.next().into_iter().flatten()) {
        *byte = word;
    }
}

/// Returns the offset of the first byte of `data` that differs from the pattern; `None` if none
/// does.
///
/// # Panics
/// If `offset` is not a multiple of 8.
#[must_use]
pub fn first_difference(seed: u64, offset: u64, data: &[u8]) -> Option<u64> {
    let mut at = offset;
    for (word, piece) in words(seed, offset).zip(data.chunks(8)) {
        // Most words are equal, and one comparison shows it.
        if piece == word {
            at += 8;
            continue;
        }
        if let Some(wrong) = (at..)
            .zip(piece.iter().zip(word))
            .find(|(_, (a, b))| **a != *b)
        {
            return Some(wrong.0);
        }
        at += 8;
    }
    None
}

/// Checks that `data`, at byte `offset`, is the pattern.
///
/// # Errors
/// A description of the first difference.
pub fn check(seed: u64, offset: u64, data: &[u8]) -> Result<(), String> {
    match first_difference(seed, offset, data) {
        None => Ok(()),
        Some(byte) => Err(format!("byte {byte:#x} differs from the pattern")),
    }
}

fn words(seed: u64, offset: u64) -> impl Iterator<Item = [u8; 8]> {
    assert!(
        offset.is_multiple_of(8),
        "patterns start at a whole word, not at byte {offset}"
    );
    (offset / 8..).map(move |n| mix(mix(seed).wrapping_add(n)).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_matches_the_published_vectors() {
        // http://www.isthe.com/chongo/tech/comp/fnv/: test vectors of FNV-1a 64.
        assert_eq!(Checksum::of(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(Checksum::of(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(Checksum::of(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn random_matches_the_reference() {
        // First outputs of the published SplitMix64 for the seed 1234567.
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn any_part_equals_the_same_part_of_the_whole() {
        let mut whole = vec![0; 4096];
        fill(7, 0, &mut whole);
        let mut part = vec![0; 101];
        fill(7, 1024, &mut part);
        assert_eq!(part, whole[1024..1125]);
        assert_eq!(first_difference(7, 1024, &part), None);
        part[77] ^= 1;
        assert_eq!(first_difference(7, 1024, &part), Some(1024 + 77));
    }

    #[test]
    fn another_seed_or_place_is_noticed_at_once() {
        let mut data = vec![0; 64];
        fill(7, 0, &mut data);
        assert!(first_difference(8, 0, &data).is_some());
        assert!(first_difference(7, 4096, &data).is_some());
    }
}
