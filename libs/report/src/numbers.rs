//! Medians and spreads, and numbers formatted for people.

/// Returns the median of `numbers`; 0 if there are none.
pub fn median(numbers: impl IntoIterator<Item = f64>) -> f64 {
    let mut numbers: Vec<_> = numbers.into_iter().collect();
    numbers.sort_by(f64::total_cmp);
    match numbers.len() {
        0 => 0.0,
        len if len % 2 == 1 => numbers[len / 2],
        len => f64::midpoint(numbers[len / 2 - 1], numbers[len / 2]),
    }
}

/// One figure over several runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Median of the runs.
    pub median: f64,
    /// Least of the runs.
    pub min: f64,
    /// Greatest of the runs.
    pub max: f64,
}

impl Measured {
    /// Summarizes these runs; `None` if there are none.
    pub fn of(runs: impl IntoIterator<Item = f64>) -> Option<Self> {
        let runs: Vec<_> = runs.into_iter().collect();
        let fold = |pick: fn(f64, f64) -> f64| runs.iter().copied().reduce(pick);
        Some(Self {
            min: fold(f64::min)?,
            max: fold(f64::max)?,
            median: median(runs),
        })
    }

    /// Returns the difference between the greatest and the least run.
    pub fn spread(&self) -> f64 {
        self.max - self.min
    }

    /// Returns the figure multiplied by `factor`: scaled, or in another unit.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            median: self.median * factor,
            min: self.min * factor,
            max: self.max * factor,
        }
    }
}

/// Formats a value in few digits, with a unit prefix if it is large: `950.0 k`, `4.80 M`, `37`.
pub fn short(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.2} G", v / 1e9),
        v if v >= 1e6 => format!("{:.2} M", v / 1e6),
        v if v >= 1e4 => format!("{:.1} k", v / 1e3),
        v if v >= 10.0 => format!("{v:.0}"),
        v => format!("{v:.2}"),
    }
}

/// Returns the sample below which the fraction `part` (0 to 1) of `samples` lies; 0 if there are
/// none. Reorders `samples`.
pub fn percentile(samples: &mut [u64], part: f64) -> u64 {
    if samples.is_empty() {
        return 0;
    }
    let at = ((samples.len() - 1) as f64 * part.clamp(0.0, 1.0)).round() as usize;
    *samples.select_nth_unstable(at).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_even_and_nothing() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median([]), 0.0);
    }

    #[test]
    fn a_figure_has_its_extremes_and_nothing_has_none() {
        let of = Measured::of([3.0, 1.0, 7.0]).expect("three runs");
        assert_eq!(
            (of.min, of.median, of.max, of.spread()),
            (1.0, 3.0, 7.0, 6.0)
        );
        assert_eq!(of.times(2.0).max, 14.0);
        assert_eq!(Measured::of([]), None);
    }

    #[test]
    fn percentiles_count_from_both_ends() {
        let mut samples: Vec<u64> = (0..=100).rev().collect();
        let of = [0.0, 0.5, 0.99, 1.0].map(|part| percentile(&mut samples, part));
        assert_eq!(of, [0, 50, 99, 100]);
        assert_eq!(percentile(&mut [], 0.5), 0);
    }
}
