//! Random numbers, repeatable and cheap: xorshift64*.

/// A generator; the same seed gives the same numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Any seed will do.
    pub fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        random.bits();
        random.bits();
        random
    }

    /// Sixty-four bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Less than `end`, which is not 0; without the modulo's bias, and without its division.
    #[inline]
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// From 0 to 99.
    #[inline]
    pub fn percent(&mut self) -> u8 {
        self.below(100) as u8
    }

    /// Exponentially distributed with mean 1.
    pub fn exponential(&mut self) -> f64 {
        // In (0, 1], so that the logarithm is finite.
        let uniform = ((self.bits() >> 11) + 1) as f64 / (1_u64 << 53) as f64;
        -uniform.ln()
    }
}
