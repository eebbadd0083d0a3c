//! The fewest commands that cover a batch.

use iova::IovaRange;

use super::super::Command;

/// Most ranges that are looked at one by one; more become one domain command.
pub(super) const RANGES_MAX: usize = 32;

/// Commands that cover up to [`RANGES_MAX`] ranges, sorted and merged, without a heap.
pub(super) struct Merged {
    commands: [Command; RANGES_MAX],
    len: usize,
}

impl Merged {
    /// Covers `ranges`; where there are too many, or one is unknown (`None`), everything.
    pub(super) fn of(ranges: impl Iterator<Item = Option<IovaRange>>) -> Self {
        let mut sorted = [None; RANGES_MAX];
        let mut count = 0;
        for range in ranges {
            let (Some(range), true) = (range, count < RANGES_MAX) else {
                return Self::domain();
            };
            let place = sorted[..count].partition_point(|other: &Option<IovaRange>| {
                other.is_some_and(|other| other.first() <= range.first())
            });
            sorted.copy_within(place..count, place + 1);
            sorted[place] = Some(range);
            count += 1;
        }
        let mut merged = Self {
            commands: [Command::Domain; RANGES_MAX],
            len: 0,
        };
        for range in sorted[..count].iter().flatten() {
            merged.add(*range);
        }
        merged
    }

    fn domain() -> Self {
        Self {
            commands: [Command::Domain; RANGES_MAX],
            len: 1,
        }
    }

    /// Adds a range that begins where the last one does or after.
    fn add(&mut self, range: IovaRange) {
        if let Some(Command::Pages(last)) = self.commands[..self.len].last_mut()
            && range.first().raw() <= last.last().raw().saturating_add(1)
        {
            let end = last.last().max(range.last());
            let pages = end.raw() - last.first().raw() + 1;
            *last = IovaRange::new(last.first(), pages).expect("spans two ranges of the space");
            return;
        }
        self.commands[self.len] = Command::Pages(range);
        self.len += 1;
    }

    pub(super) fn commands(&self) -> &[Command] {
        &self.commands[..self.len]
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use iova::IovaPfn;

    use super::*;

    fn range(first: u64, pages: u64) -> IovaRange {
        IovaRange::new(IovaPfn::new(first), pages).unwrap()
    }

    #[test]
    fn adjacent_and_overlapping_ranges_share_a_command() {
        let ranges = [(9, 1), (4, 2), (6, 1), (5, 3), (12, 1)];
        let merged = Merged::of(
            ranges
                .into_iter()
                .map(|(first, pages)| Some(range(first, pages))),
        );
        let expected = [(4, 4), (9, 1), (12, 1)].map(|(f, p)| Command::Pages(range(f, p)));
        assert_eq!(merged.commands(), expected);
    }

    #[test]
    fn too_many_ranges_become_a_domain() {
        let of = |count: u64| Merged::of((0..count).rev().map(|at| Some(range(3 * at + 1, 1))));
        assert_eq!(of(RANGES_MAX as u64).commands().len(), RANGES_MAX);
        assert_eq!(
            of(RANGES_MAX as u64).commands()[1],
            Command::Pages(range(4, 1))
        );
        assert_eq!(of(RANGES_MAX as u64 + 1).commands(), [Command::Domain]);
        assert_eq!(Merged::of([None].into_iter()).commands(), [Command::Domain]);
        assert!(of(0).commands().is_empty());
    }
}
