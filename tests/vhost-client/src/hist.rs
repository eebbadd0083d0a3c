//! A histogram of nanoseconds with a relative error below 1/64, like HdrHistogram with two digits.

/// Steps per power of two.
const STEPS: u64 = 64;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Values from 2^40 ns (18 minutes) on share the last bucket.
const MAX_BITS: u32 = 40;
const BUCKETS: usize = ((MAX_BITS - STEP_BITS + 1) * STEPS as u32) as usize;

/// Counts per bucket, with the exact sum and maximum. 18 KiB.
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: vec![0; BUCKETS],
            count: 0,
            sum: 0,
            max: 0,
        }
    }
}

#[inline]
fn bucket(value: u64) -> usize {
    if value < STEPS {
        return value as usize;
    }
    let exponent = value.ilog2();
    let step = (value >> (exponent - STEP_BITS)) - STEPS;
    let index = u64::from(exponent - STEP_BITS + 1) * STEPS + step;
    (index as usize).min(BUCKETS - 1)
}

/// The first value of a bucket.
fn first(index: usize) -> u64 {
    let (row, step) = (index as u64 / STEPS, index as u64 % STEPS);
    match row {
        0 => step,
        row => (STEPS + step) << (row - 1),
    }
}

impl Histogram {
    /// Counts one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.buckets[bucket(value)] += 1;
        self.count += 1;
        self.sum += value;
        self.max = self.max.max(value);
    }

    /// Values counted.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The greatest value.
    pub const fn max(&self) -> u64 {
        self.max
    }

    /// The mean, 0 of none.
    pub fn mean(&self) -> f64 {
        match self.count {
            0 => 0.0,
            count => self.sum as f64 / count as f64,
        }
    }

    /// The mean of the values up to `limit` by the middles of their buckets, 0 of none, and the
    /// part of all that are above.
    pub fn mean_up_to(&self, limit: u64) -> (f64, f64) {
        let (mut count, mut sum) = (0, 0.0);
        for (index, &values) in self.buckets[..=bucket(limit)].iter().enumerate() {
            count += values;
            sum += values as f64 * first(index).midpoint(first(index + 1) - 1) as f64;
        }
        let above = self.count - count;
        (
            sum / count.max(1) as f64,
            above as f64 / self.count.max(1) as f64,
        )
    }

    /// The value below which a part of all lie, from 0 to 1: the middle of its bucket.
    pub fn quantile(&self, part: f64) -> u64 {
        let rank = (self.count as f64 * part) as u64;
        let mut below = 0;
        for (index, &count) in self.buckets.iter().enumerate() {
            below += count;
            if below > rank {
                return first(index).midpoint(first(index + 1) - 1).min(self.max);
            }
        }
        self.max
    }

    /// Adds another's values.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.count += other.count;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.buckets.fill(0);
        (self.count, self.sum, self.max) = (0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_within_a_sixty_fourth_of_its_bucket() {
        for exponent in 0..MAX_BITS {
            for value in [1_u64 << exponent, (1 << exponent) + (1 << exponent) / 3] {
                let index = bucket(value);
                let (low, next) = (first(index), first(index + 1));
                assert!(low <= value && value < next, "{value}: {low}..{next}");
                assert!(next - low <= (value / 64).max(1));
            }
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_of_a_known_set() {
        let mut all = Histogram::default();
        let mut half = Histogram::default();
        for value in 1..=1000 {
            if value % 2 == 0 { &mut all } else { &mut half }.record(value);
        }
        all.merge(&half);
        assert_eq!((all.count(), all.max()), (1000, 1000));
        assert!((all.mean() - 500.5).abs() < 1e-9);
        for (part, exact) in [(0.5, 500.0), (0.99, 990.0), (0.999, 999.0)] {
            let got = all.quantile(part) as f64;
            assert!((got - exact).abs() <= exact / 64.0, "{part}: {got}");
        }
        assert_eq!(Histogram::default().quantile(0.5), 0);
        let (mean, above) = all.mean_up_to(250);
        assert!((mean - 125.5).abs() <= 2.0 && (above - 0.75).abs() < 0.005);
        assert_eq!(Histogram::default().mean_up_to(u64::MAX), (0.0, 0.0));
    }
}
