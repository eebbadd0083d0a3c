//! The fewest commands that cover a batch.

use iova::IovaRange;

use super::super::Command;

/// Most ranges that are looked at one by one; more become one domain command.
pub(super) const RANGES_MAX: usize = 32;

/// Covers `ranges` and writes the commands, sorted and merged, to the start of `to`; where there are too many, or one is unknown
/// (`None`), everything.
pub(super) fn merge(
    ranges: impl Iterator<Item = Option<IovaRange>>,
    to: &mut [Command; RANGES_MAX],
) -> &[Command] {
    let mut all = [None; RANGES_MAX];
    let mut count = 0;
    for range in ranges {
        if range.is_none() || count == RANGES_MAX {
            to[0] = Command::Domain;
            return &to[..1];
        }
        all[count] = range;
        count += 1;
    }
    all[..count].sort_unstable_by_key(|range| range.map(|range| range.first()));
    let mut len = 0;
    for range in all[..count].iter().flatten() {
        if let Some(Command::Pages(last)) = to[..len].last_mut()
            && range.first().raw() <= last.last().raw().saturating_add(1)
        {
            let end = last.last().max(range.last());
            let pages = end.raw() - last.first().raw() + 1;
            *last = IovaRange::new(last.first(), pages).expect("spans two ranges of the space");
        } else {
            to[len] = Command::Pages(*range);
            len += 1;
        }
    }
    &to[..len]
}
