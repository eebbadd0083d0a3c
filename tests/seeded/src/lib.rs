//! Random numbers for tests and benchmarks by xorshift64*: repeatable, cheap, not for cryptography.
//!
//! ```
//! let mut random = seeded::Random::new(7);
//! assert!(random.below(10) < 10);
//! assert_eq!(seeded::Random::new(7).bits(), seeded::Random::new(7).bits());
//! ```
#![forbid(unsafe_code)]

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A stream of random numbers, determined by its seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a stream; any seed is valid.
    pub fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(GOLDEN) | 1);
        random.bits();
        random.bits();
        random
    }

    /// Creates the stream of thread or core `id`. Unlike [`new`](Self::new), it does not skip the
    /// first states.
    pub const fn of_core(id: usize) -> Self {
        Self(GOLDEN.wrapping_mul(id as u64 + 1))
    }

    /// Returns 64 random bits, of which the upper ones have the better quality.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number less than `end`, which is not 0: without the modulo's bias, and without its
    /// division.
    #[inline]
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// Returns a number from 0 to 99.
    #[inline]
    pub fn percent(&mut self) -> u8 {
        self.below(100) as u8
    }

    /// Returns a number from 0 up to 1, 1 excluded.
    pub fn part(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns true with the probability `part` (0 to 1).
    pub fn chance(&mut self, part: f64) -> bool {
        self.part() < part
    }

    /// Returns an exponentially distributed number with mean 1.
    pub fn exponential(&mut self) -> f64 {
        // The argument is in (0, 1], so that the logarithm is finite.
        -(1.0 - self.part()).ln()
    }

    /// Returns the number of steps up to an event that has the same chance in every step (geometric
    /// distribution): 1 or more, `mean` on average.
    pub fn geometric(&mut self, mean: f64) -> u64 {
        if mean <= 1.0 {
            return 1;
        }
        let survives = 1.0 - 1.0 / mean;
        1 + ((1.0 - self.part()).ln() / survives.ln()) as u64
    }

    /// Fills `bytes` with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.bits().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_are_those_of_the_definition() {
        // Worked out by hand from v^=v>>12; v^=v<<25; v^=v>>27; v*0x2545F4914F6CDD1D.
        let mut v: u128 = 0x9e37_79b9_7f4a_7c15;
        let mut random = Random::of_core(0);
        for _ in 0..3 {
            v ^= v >> 12;
            v ^= (v << 25) & u128::from(u64::MAX);
            v ^= v >> 27;
            let r = (v * 0x2545_f491_4f6c_dd1d) & u128::from(u64::MAX);
            assert_eq!(u128::from(random.bits()), r);
        }
        assert_ne!(Random::of_core(1).bits(), Random::of_core(0).bits());
    }

    #[test]
    fn lives_have_their_mean() {
        let mut random = Random::new(3);
        for mean in [1.0, 8.0, 300.0] {
            let sum: u64 = (0..200_000).map(|_| random.geometric(mean)).sum();
            let of = sum as f64 / 200_000.0;
            assert!((of / mean - 1.0).abs() < 0.02, "{of} for {mean}");
        }
        let times = (0..100_000).filter(|_| random.chance(0.92)).count();
        assert!((91_000..93_000).contains(&times));
    }
}
