//! Numbers from a seed.

/// xorshift64*.
pub struct Random(u64);

impl Random {
    /// Of one core of one run.
    pub fn new(seed: u64, core: u64) -> Self {
        let mixed = (seed ^ core << 56).wrapping_add(1);
        Self(mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 20) % bound
    }

    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// Once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
