//! Random numbers of all loops: xorshift64*, seeded by the thread's number.

/// A stream of numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of thread `id`.
    pub fn new(id: usize) -> Self {
        Self(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(id as u64 + 1))
    }

    /// The next number; loops take its upper bits.
    #[inline]
    pub fn next(&mut self) -> u64 {
        let mut v = self.0;
        v ^= v >> 12;
        v ^= v << 25;
        v ^= v >> 27;
        self.0 = v;
        v.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number from 0 up to 1, 1 excluded.
    pub fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Whether something that happens in `part` (0 to 1) of all cases happens now.
    pub fn chance(&mut self, part: f64) -> bool {
        self.part() < part
    }

    /// How many steps something lives that ends in every step with the same chance: 1 or more, `mean` on average.
    pub fn geometric(&mut self, mean: f64) -> u64 {
        if mean <= 1.0 {
            return 1;
        }
        let survives = 1.0 - 1.0 / mean;
        1 + ((1.0 - self.part()).ln() / survives.ln()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_are_those_of_the_definition() {
        // Worked out by hand from v^=v>>12; v^=v<<25; v^=v>>27; v*0x2545F4914F6CDD1D.
        let mut v: u128 = 0x9e37_79b9_7f4a_7c15;
        let mut random = Random::new(0);
        for _ in 0..3 {
            v ^= v >> 12;
            v ^= (v << 25) & u128::from(u64::MAX);
            v ^= v >> 27;
            let r = (v * 0x2545_f491_4f6c_dd1d) & u128::from(u64::MAX);
            assert_eq!(u128::from(random.next()), r);
        }
        assert_ne!(Random::new(1).next(), Random::new(0).next());
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
