//! Shapes of the tree, and `natural` against its definition.

use super::*;
use crate::IovaPfn;

impl Gaps {
    /// Panics where order, shape or what is said of nodes is wrong, or where a search misses a gap.
    /// A search for each gap.
    pub(in crate::tree) fn check(&self) {
        let mut end = None;
        self.for_each(&mut |first, last| {
            assert!(end < Some(first) && first <= last, "gaps ascend apart");
            end = Some(last + 1);
            assert!(self.holds(first, last), "a search finds {first:#x}");
            let below = first.checked_sub(1);
            assert!(
                below.is_none_or(|below| !self.holds(below, last)),
                "gaps end"
            );
        });
        depth(&self.0);
    }
}

/// Levels under a node.
fn depth(entries: &[Entry]) -> usize {
    assert!(entries.len() <= FANOUT);
    let mut depths = entries.iter().map(|entry| match &entry.under {
        Under::Gap(last) => {
            assert_eq!(entry.best, natural(entry.first, *last));
            0
        }
        Under::Node(kids) => {
            let lowest = kids.first().expect("no node is empty");
            assert_eq!(entry.first, lowest.first);
            assert_eq!(Some(entry.best), kids.iter().map(|kid| kid.best).max());
            depth(kids)
        }
    });
    let first = depths.next().unwrap_or(0);
    assert!(
        depths.all(|other| other == first),
        "all gaps are at one depth"
    );
    1 + first
}

/// Takes one page.
fn take(gaps: &mut Gaps, order: u8, limit: u64) -> Option<u64> {
    let last = IovaPfn::new(limit);
    gaps.take(&Wanted {
        pages: 1,
        order,
        last,
    })
}

/// The definition, tried out.
fn natural_by_trying(first: u64, last: u64) -> u64 {
    (1..=last + 1 - first)
        .filter(|&pages| {
            let order = crate::wanted::order_of(pages);
            (first..=last).any(|at| at % (1 << order) == 0 && at + pages - 1 <= last)
        })
        .max()
        .expect("one page always fits")
}

/// Every second page is a gap, then runs of them vanish in every order; full and nearly empty nodes
/// lie side by side.
#[test]
fn nodes_split_join_and_vanish() {
    const GAPS: u64 = 6000;
    for run in [1, 3, 40, 500, GAPS] {
        let mut gaps = Gaps::new(&[]);
        let mut left = std::collections::BTreeSet::new();
        for step in 0..GAPS {
            // 7 and 6000 have no common factor.
            let page = 1 + step * 7 % GAPS * 2;
            gaps.give(page, page);
            left.insert(page);
        }
        gaps.check();
        let mut seed = run;
        while !left.is_empty() {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(11);
            let from = (seed >> 33) % (2 * GAPS);
            let doomed: Vec<u64> = left.range(from..).copied().take(run as usize).collect();
            // Downwards, each run in turn.
            for &page in doomed.iter().rev() {
                assert_eq!(take(&mut gaps, 0, page), Some(page));
                left.remove(&page);
            }
            if left.len() % 16 == 0 || run > 3 {
                gaps.check();
            }
            if doomed.is_empty() {
                let &lowest = left.first().expect("not empty");
                assert_eq!(take(&mut gaps, 0, lowest), Some(lowest));
                left.remove(&lowest);
            }
        }
        gaps.check();
        assert!(gaps.0.is_empty() && !gaps.holds(1, 1));
    }
}

/// The lowest nodes vanish while the next one is too full to join them, so that it becomes the
/// first; then gaps come back far below all that it had.
#[test]
fn gaps_far_below_a_node_that_became_the_first_are_found() {
    const GAPS: u64 = 1500;
    for kept in (50..GAPS).step_by(25) {
        let mut gaps = Gaps::new(&[]);
        // 7919 is prime: every second page, in a mixed order.
        let mixed = |count| (0..count).map(move |step| 1 + step * 7919 % count * 2);
        mixed(GAPS).for_each(|page| gaps.give(page, page));
        let gone = GAPS - kept;
        for page in (0..gone).map(|step| 1 + step * 2) {
            assert_eq!(take(&mut gaps, 0, page), Some(page));
        }
        gaps.check();
        for page in mixed(gone) {
            gaps.give(page, page);
        }
        gaps.check();
        assert!(
            mixed(GAPS).all(|page| gaps.holds(page, page)),
            "{kept} kept"
        );
    }
}

#[test]
fn natural_is_the_largest_aligned_request_that_fits() {
    for first in 0..70 {
        for last in first..140 {
            assert_eq!(
                natural(first, last),
                natural_by_trying(first, last),
                "{first}..={last}"
            );
        }
    }
    let top = (1 << 52) - 1;
    assert_eq!((natural(0, top), natural(1, top)), (1 << 52, 1 << 51));
}

/// The cost of a failing request that is aligned to more than its size has a bound, so the request
/// may fail where a low gap would fit it.
#[test]
fn where_no_whole_block_is_left_the_highest_gaps_are_tried() {
    let mut gaps = Gaps::new(&[]);
    let looks = LOOKS as u64;
    // One page at a multiple of 8, and gaps above it that have none.
    gaps.give(8, 8);
    for number in 2..=looks {
        gaps.give(8 * number + 1, 8 * number + 2);
    }
    assert_eq!(take(&mut gaps, 3, u64::MAX), Some(8));
    gaps.give(8, 8);
    gaps.give(8 * looks + 9, 8 * looks + 10);
    assert_eq!(take(&mut gaps, 3, u64::MAX), None);
    assert_eq!(take(&mut gaps, 3, 8 * looks), Some(8));
}
