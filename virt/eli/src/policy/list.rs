//! Lists of ports or registers that a guest may reach: ranges of numbers, with the treatment of an
//! access to each.

/// Numbers of type `N` (ports, registers), their treatment, of type `R`, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range<N, R> {
    /// The first.
    pub first: N,
    /// The last.
    pub last: N,
    /// Treatment of an access.
    pub rule: R,
    /// Name of the port or register, or the effect of an access to it.
    pub what: &'static str,
}

/// Makes a line of a list.
pub(super) const fn range<N: Copy, R: Copy>(
    first: N,
    last: N,
    rule: R,
    what: &'static str,
) -> Range<N, R> {
    Range {
        first,
        last,
        rule,
        what,
    }
}

impl<N: Copy + Ord, R: Copy> Range<N, R> {
    /// Whether `number` is in it.
    #[must_use]
    pub fn contains(&self, number: N) -> bool {
        self.first <= number && number <= self.last
    }

    /// Whether they have a number in common.
    pub(super) fn meets(&self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}
