//! Numbers from a seed.

/// xorshift64*.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The same numbers for the same seed.
    pub fn new(seed: u64) -> Self {
        // Never 0, from which no other number would follow.
        Self(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed.wrapping_add(1)) | 1)
    }

    /// 56 bits.
    #[expect(
        clippy::should_implement_trait,
        reason = "it never ends, and an iterator's adaptors are of no use here"
    )]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 8
    }

    /// 0 to `bound - 1`; `bound` is at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// An index of something with `len` entries, at least one.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// Once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
