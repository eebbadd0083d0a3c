//! The free gaps of a space, by address: a B+tree in which the highest gap that fits is found in
//! logarithmic time with alignment counted.
//!
//! Alignment: a request of `p` pages starts at a multiple of the power of two that holds it, so a
//! gap of `p` pages need not fit it, and the largest gap of a subtree says little. Each node keeps
//! [`natural`] instead: the largest request that fits a gap *so aligned*. It is one number because
//! fitting is monotone in `p` (where `p` pages lie aligned, any fewer do too), so its maximum over
//! a subtree tells exactly whether the subtree has a place.
//!
//! A request aligned to more than its size is first sought as a whole block of its alignment. Where
//! there is none, the [`LOOKS`] highest gaps that could hold its size are tried, and no more.
//!
//! Shape: all gaps are at one depth. A full node splits, an empty one goes, a quarter-full one
//! joins a neighbour it fits into.
//!
//! Cost: four nodes per descent at 65,536 gaps; one descent to search, one or two to change. A
//! search that fails is one descent, or [`LOOKS`] at most. A node has a kilobyte; about 60 bytes
//! per gap.

use alloc::vec::Vec;

use crate::IovaRange;
use crate::wanted::{Wanted, place};

/// Most entries of a node.
const FANOUT: usize = 24;

/// Most gaps that are tried for a request where it is not certain that they fit.
pub(super) const LOOKS: usize = 64;

/// A gap, or a node and with it all gaps under it.
struct Entry {
    /// First page, of the lowest gap.
    first: u64,
    /// [`natural`], of the gap with the most.
    best: u64,
    under: Under,
}

enum Under {
    /// Up to its last page.
    Gap(u64),
    /// Of ascending entries.
    Node(Vec<Entry>),
}

/// The root.
pub(super) struct Gaps(Vec<Entry>);

impl Gaps {
    /// Of ranges that do not touch.
    pub(super) fn new(ranges: &[IovaRange]) -> Self {
        let mut gaps = Self(Vec::new());
        for range in ranges {
            gaps.give(range.first().raw(), range.last().raw());
        }
        gaps
    }

    /// Takes what is wanted from the highest gap that has it: the first page.
    pub(super) fn take(&mut self, wanted: &Wanted) -> Option<u64> {
        let (pages, block) = (wanted.pages, 1 << wanted.order);
        let search = |need| find(&self.0, need, wanted, &mut { LOOKS });
        let (first, last, start) = match pages > block >> 1 {
            true => search(pages),
            false => search(block).or_else(|| search(pages)),
        }?;
        let end = start + (pages - 1);
        let below = (first < start).then(|| gap(first, start - 1));
        let above = (end < last).then(|| gap(end + 1, last));
        self.edit(first, |leaf, at| match (below, above) {
            (Some(below), Some(above)) => {
                leaf[at - 1] = below;
                leaf.insert(at, above);
            }
            (Some(rest), None) | (None, Some(rest)) => leaf[at - 1] = rest,
            (None, None) => drop(leaf.remove(at - 1)),
        });
        Some(start)
    }

    /// Adds pages that lie in no gap, joining them with the gaps they touch.
    pub(super) fn give(&mut self, first: u64, last: u64) {
        let mut is_last = false;
        self.edit(first, |leaf, at| {
            let mut end = last;
            is_last = at == leaf.len();
            if let Some(above) = leaf.get(at) {
                debug_assert!(last < above.first, "given twice");
                if let (true, &Under::Gap(last)) = (above.first == last + 1, &above.under) {
                    end = last;
                    leaf.remove(at);
                }
            }
            match at.checked_sub(1).map(|below| &mut leaf[below]) {
                Some(below) if matches!(below.under, Under::Gap(last) if last + 1 == first) => {
                    *below = gap(below.first, end);
                }
                _ => leaf.insert(at, gap(first, end)),
            }
        });
        // The gap above may be another leaf's first one.
        if is_last
            && let Some((above, end)) = self.starting_to(last + 1)
            && above == last + 1
        {
            self.edit(above, |leaf, at| drop(leaf.remove(at - 1)));
            self.edit(last, |leaf, at| leaf[at - 1] = gap(leaf[at - 1].first, end));
        }
    }

    /// Whether one gap holds all of these pages.
    pub(super) fn holds(&self, first: u64, last: u64) -> bool {
        self.starting_to(first).is_some_and(|(_, end)| last <= end)
    }

    /// Every gap, ascending, as first and last page.
    pub(super) fn for_each(&self, visit: &mut impl FnMut(u64, u64)) {
        walk(&self.0, &mut |entry| {
            if let Under::Gap(last) = entry.under {
                visit(entry.first, last);
            }
        });
    }

    pub(super) fn bytes(&self) -> usize {
        let mut slots = self.0.capacity();
        walk(&self.0, &mut |entry| {
            if let Under::Node(kids) = &entry.under {
                slots += kids.capacity();
            }
        });
        slots * size_of::<Entry>()
    }

    /// The last gap that starts at or below `page`.
    fn starting_to(&self, page: u64) -> Option<(u64, u64)> {
        let mut entries = &self.0;
        loop {
            let entry = &entries[count_to(entries, page).checked_sub(1)?];
            match &entry.under {
                Under::Gap(last) => return Some((entry.first, *last)),
                Under::Node(kids) => entries = kids,
            }
        }
    }

    /// Changes the leaf in which `page` has its place: `work` is given it, and how many of its gaps
    /// start at or below `page`.
    fn edit(&mut self, page: u64, work: impl FnOnce(&mut Vec<Entry>, usize)) {
        edit(&mut self.0, page, work);
        if self.0.len() > FANOUT {
            let upper = split(&mut self.0);
            let lower = core::mem::take(&mut self.0);
            self.0.extend([node(lower), upper]);
        }
        while let [entry] = &mut self.0[..]
            && let Under::Node(kids) = &mut entry.under
        {
            self.0 = core::mem::take(kids);
        }
    }
}

/// The highest gap with `natural` at least `need` that has a place, unless `looks` gaps had none:
/// its ends, and the highest place in it. Of the entries of a node that begin at or below the limit
/// only the last can reach past it.
fn find(
    entries: &[Entry],
    need: u64,
    wanted: &Wanted,
    looks: &mut usize,
) -> Option<(u64, u64, u64)> {
    let limit = wanted.last.raw();
    for entry in entries.iter().rev() {
        if entry.best < need || entry.first > limit || *looks == 0 {
            continue;
        }
        let found = match &entry.under {
            Under::Node(kids) => find(kids, need, wanted, looks),
            &Under::Gap(last) => {
                *looks -= 1;
                let start = place(entry.first, last.min(limit), wanted.pages, wanted.order);
                start.map(|start| (entry.first, last, start))
            }
        };
        if found.is_some() {
            return found;
        }
    }
    None
}

/// As [`Gaps::edit`], under a node; whether what is said of the node may no longer be true.
fn edit(entries: &mut Vec<Entry>, page: u64, work: impl FnOnce(&mut Vec<Entry>, usize)) -> bool {
    let count = count_to(entries, page);
    let at = count.saturating_sub(1);
    let Some(Under::Node(kids)) = entries.get_mut(at).map(|entry| &mut entry.under) else {
        work(entries, count);
        return true;
    };
    if !edit(kids, page, work) {
        return false;
    }
    let len = kids.len();
    if len == 0 {
        entries.remove(at);
    } else if len > FANOUT {
        let upper = split(kids);
        sum(&mut entries[at]);
        entries.insert(at + 1, upper);
    } else if len > FANOUT / 4 || !join(entries, at) {
        return sum(&mut entries[at]);
    }
    true
}

/// Makes a node of the upper half of one that has an entry too many, with room for as many.
fn split(kids: &mut Vec<Entry>) -> Entry {
    let mut upper = Vec::with_capacity(FANOUT + 1);
    upper.extend(kids.drain(FANOUT / 2..));
    node(upper)
}

/// Joins a node with a neighbour, where they fit into three quarters of one.
fn join(entries: &mut Vec<Entry>, at: usize) -> bool {
    let left = at.min(entries.len().saturating_sub(2));
    if let Some([lower, upper]) = entries.get_mut(left..left + 2)
        && let (Under::Node(kids), Under::Node(more)) = (&mut lower.under, &mut upper.under)
        && kids.len() + more.len() <= FANOUT * 3 / 4
    {
        kids.append(more);
        sum(lower);
        entries.remove(left + 1);
        return true;
    }
    false
}

fn gap(first: u64, last: u64) -> Entry {
    let (best, under) = (natural(first, last), Under::Gap(last));
    Entry { first, best, under }
}

fn node(kids: Vec<Entry>) -> Entry {
    let (first, best, under) = (0, 0, Under::Node(kids));
    let mut node = Entry { first, best, under };
    sum(&mut node);
    node
}

/// Says of a node what is under it; whether that is something else than before.
fn sum(node: &mut Entry) -> bool {
    let was = (node.first, node.best);
    if let Under::Node(kids) = &node.under {
        node.first = kids[0].first;
        node.best = kids.iter().fold(0, |best, kid| best.max(kid.best));
    }
    was != (node.first, node.best)
}

/// Returns the number of entries that start at or below `page`.
fn count_to(entries: &[Entry], page: u64) -> usize {
    entries.partition_point(|entry| entry.first <= page)
}

/// Every entry under a node, ascending.
fn walk(entries: &[Entry], visit: &mut impl FnMut(&Entry)) {
    for entry in entries {
        visit(entry);
        if let Under::Node(kids) = &entry.under {
            walk(kids, visit);
        }
    }
}

/// Largest number of pages that fits in `first..=last` when aligned to the power of two that holds
/// it.
///
/// Let `m` be the most aligned page of the gap. Every smaller power of two divides `m`; hence left
/// of `m` the largest aligned block is the largest power of two that fits, and from `m` on
/// everything up to `last` fits.
fn natural(first: u64, last: u64) -> u64 {
    // Above the highest bit in which `first - 1` and `last` differ nothing can be cleared.
    let most_aligned = match first.checked_sub(1) {
        None => 0,
        Some(below) => {
            let shift = (below ^ last).ilog2();
            last >> shift << shift
        }
    };
    let left = (most_aligned - first).checked_ilog2().map_or(0, |k| 1 << k);
    left.max(last + 1 - most_aligned)
}

#[cfg(test)]
mod tests;
