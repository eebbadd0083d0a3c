//! The tree against a map of free pages.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::testing::{Out, Phase, Random, World};
use crate::wanted::place;
use crate::{Aperture, Request};

impl Tree {
    /// Panics where gaps and ranges out do not divide the usable pages (nothing may be
    /// [taken](Self::take)). Linear.
    fn check(&self) {
        self.gaps.check();
        let live = self.live.iter();
        let mut pieces: Vec<_> = live.map(|(first, size)| (first, size & !PINNED)).collect();
        let mut add = |first, last| pieces.push((first, last + 1 - first));
        self.gaps.for_each(&mut add);
        pieces.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (first, pages) in pieces {
            match joined.last_mut() {
                Some((start, sum)) if *start + *sum == first => *sum += pages,
                _ => joined.push((first, pages)),
            }
        }
        let usable = self.usable.iter();
        let usable = usable.map(|range| (range.first().raw(), range.pages()));
        assert!(usable.eq(joined), "a page is in no piece, or in two");
    }
}

/// Free gaps as a map, searched from the top.
struct Naive(BTreeMap<u64, u64>);

impl Naive {
    fn fits(&self, w: &Wanted) -> Option<(u64, u64)> {
        self.0.iter().rev().find_map(|(&first, &last)| {
            let last = last.min(w.last.raw());
            Some((first, place(first, last, w.pages, w.order)?))
        })
    }

    /// Whether the tree must find a place where there is one: not for what is aligned to more than
    /// its size, where no whole block is left and many gaps might do.
    fn is_sure(&self, w: &Wanted) -> bool {
        let block = Wanted {
            pages: 1 << w.order,
            ..*w
        };
        let large = self
            .0
            .iter()
            .filter(|&(first, last)| last + 1 - first >= w.pages);
        w.order == order_of(w.pages) || self.fits(&block).is_some() || large.count() <= gaps::LOOKS
    }

    fn take(&mut self, gap: u64, start: u64, pages: u64) {
        let last = self.0.remove(&gap).expect("a gap");
        assert!(
            gap <= start && start + pages - 1 <= last,
            "taken from one gap"
        );
        if gap < start {
            self.0.insert(gap, start - 1);
        }
        if start + pages <= last {
            self.0.insert(start + pages, last);
        }
    }

    fn give(&mut self, first: u64, pages: u64) {
        let mut last = first + pages - 1;
        if let Some(after) = self.0.remove(&(last + 1)) {
            last = after;
        }
        match self.0.range_mut(..first).next_back() {
            Some((_, end)) if *end + 1 == first => *end = last,
            _ => drop(self.0.insert(first, last)),
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Alloc(Request),
    Free(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pages = prop_oneof![3 => 1..5u64, 2 => 1..70u64, 1 => 1..600u64];
    let align = prop_oneof![3 => Just(0u8), 1 => 0..10u8];
    let last = prop_oneof![2 => Just(u64::MAX), 1 => 0..2300u64];
    let alloc = (pages, align, last).prop_map(|(pages, align, last)| {
        Step::Alloc(
            Request::pages(pages)
                .aligned(align)
                .at_most(IovaPfn::new(last.min(1 << 51))),
        )
    });
    prop::collection::vec(
        prop_oneof![alloc, any::<usize>().prop_map(Step::Free)],
        1..300,
    )
}

fn aperture() -> Aperture {
    let reserved = [range_at(900, 11), range_at(1536, 1)];
    Aperture::new(IovaPfn::new(1), IovaPfn::new(2222), &reserved).expect("pages remain")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// A request is satisfied whenever some gap fits; without extra alignment it gets the highest
    /// place there is.
    #[test]
    fn the_highest_place_that_fits_is_given(steps in steps()) {
        let aperture = aperture();
        let mut tree = Tree::new(aperture.usable());
        let usable = aperture.usable().iter();
        let mut naive = Naive(usable.map(|r| (r.first().raw(), r.last().raw())).collect());
        let mut out: Vec<IovaRange> = Vec::new();
        for step in steps {
            match step {
                Step::Alloc(request) => {
                    let w = Wanted::of(&request).expect("valid");
                    let got = tree.alloc(w.pages, w.order, w.last);
                    let highest = naive.fits(&w);
                    if naive.is_sure(&w) {
                        prop_assert_eq!(got.is_some(), highest.is_some(), "{:?}", w);
                    }
                    let Some(got) = got else { continue };
                    let start = got.first().raw();
                    prop_assert!(start % (1 << w.order) == 0 && got.last() <= w.last);
                    if w.order == order_of(w.pages) {
                        prop_assert_eq!(highest.map(|h| h.1), Some(start));
                    }
                    let gap = naive.0.range(..=start).next_back().map(|(&gap, _)| gap);
                    naive.take(gap.expect("free"), start, got.pages());
                    out.push(got);
                }
                Step::Free(_) if out.is_empty() => {}
                Step::Free(at) => {
                    let range = out.swap_remove(at % out.len());
                    tree.free(range).expect("allocated");
                    prop_assert!(tree.free(range).is_err());
                    naive.give(range.first().raw(), range.pages());
                }
            }
            tree.check();
            let chunks: std::collections::BTreeSet<u64> = out
                .iter()
                .flat_map(|r| r.first().raw() / CHUNK_PAGES..=r.last().raw() / CHUNK_PAGES)
                .collect();
            prop_assert_eq!(tree.chunks(), chunks.len() as u64);
        }
        for range in out.drain(..) {
            tree.free(range).expect("allocated");
        }
        prop_assert_eq!((tree.live_ranges(), tree.live_pages(), tree.chunks()), (0, 0, 0));
    }
}

/// Gap for gap, with all that nodes must keep checked every few steps.
#[test]
fn gaps_are_those_of_a_map_through_phases_that_fragment_and_clear() {
    const STEPS: u32 = 40_000;
    let world = World::small(1);
    for seed in 0..6 {
        let mut random = Random::new(seed);
        let mut gaps = Gaps::new(world.aperture.usable());
        let usable = world.aperture.usable().iter();
        let mut naive = Naive(usable.map(|r| (r.first().raw(), r.last().raw())).collect());
        let mut out = Out::default();
        let mut step = 0;
        while step < STEPS {
            let phase = Phase::random(&mut random, &world);
            for _ in 0..phase.steps {
                step += 1;
                if random.below(100) < u64::from(phase.share) {
                    let w = Wanted::of(&phase.request(&mut random, &world)).expect("valid");
                    let got = gaps.take(&w);
                    let highest = naive.fits(&w);
                    if naive.is_sure(&w) {
                        assert_eq!(got.is_some(), highest.is_some(), "{w:?}");
                    }
                    let Some(start) = got else { break };
                    if w.order == order_of(w.pages) {
                        assert_eq!(highest.map(|(_, start)| start), got, "{w:?}");
                    }
                    let gap = naive.0.range(..=start).next_back().map(|(&gap, _)| gap);
                    naive.take(gap.expect("free"), start, w.pages);
                    out.insert(range_at(start, w.pages));
                } else if let Some(range) = out.take(phase.victim, &mut random) {
                    gaps.give(range.first().raw(), range.last().raw());
                    naive.give(range.first().raw(), range.pages());
                }
                if step % 128 == 0 {
                    gaps.check();
                }
            }
            let mut all = Vec::new();
            gaps.for_each(&mut |first, last| all.push((first, last)));
            assert_eq!(all, naive.0.clone().into_iter().collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_gap_as_large_as_the_request_need_not_fit_it() {
    let mut tree = Tree::new(&[range_at(5, 10)]);
    // 5..=14 holds 8..=11 aligned, and 8..=14 has 7 pages from a multiple of 8 on.
    assert_eq!(tree.alloc(8, 0, IovaPfn::MAX), None);
    assert_eq!(tree.alloc(7, 0, IovaPfn::MAX), Some(range_at(8, 7)));
    assert_eq!(tree.pages_at(IovaPfn::new(8)), Some(7));
    assert_eq!(tree.alloc(1, 0, IovaPfn::new(4)), None);
    assert_eq!(tree.alloc(1, 0, IovaPfn::new(6)), Some(range_at(6, 1)));
}

#[test]
fn the_whole_64_bit_space_is_one_range() {
    let mut tree = Tree::new(&[range_at(0, 1 << 52)]);
    let all = tree.alloc(1 << 52, 0, IovaPfn::MAX).expect("free");
    assert_eq!(tree.alloc(1, 0, IovaPfn::MAX), None);
    tree.free(all).expect("allocated");
    assert!(tree.alloc((1 << 51) + 1, 0, IovaPfn::MAX).is_some());
}

/// CPU time of this thread, nanoseconds: independent of other load on the machine.
fn on_cpu_ns() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let ns = stat.split(' ').next().and_then(|ns| ns.parse().ok());
    ns.expect("nanoseconds first")
}

/// `cargo test --release -p iova -- --ignored --nocapture tree_speed`
#[test]
#[ignore = "prints times"]
fn tree_speed() {
    for (name, max_pages, window) in [
        ("1", 1, 65_536),
        ("1-32", 32, 65_536),
        ("1-512", 512, 65_536),
    ] {
        let mut tree = Tree::new(&[range_at(1, (1 << 36) - 1)]);
        let mut random = Random::new(0);
        let mut slots: Vec<_> = (0..window)
            .map(|_| {
                tree.alloc(1 + (random.next() >> 20) % max_pages, 0, IovaPfn::MAX)
                    .expect("room")
            })
            .collect();
        for round in 0..3 {
            let pairs = 2_000_000;
            let start = on_cpu_ns();
            for _ in 0..pairs {
                let r = random.next();
                let slot = &mut slots[(r >> 40) as usize % window];
                tree.free(*slot).expect("allocated");
                *slot = tree
                    .alloc(1 + (r >> 20) % max_pages, 0, IovaPfn::MAX)
                    .expect("room");
            }
            let ns = (on_cpu_ns() - start) / f64::from(pairs);
            println!("{name} pages, {window} out, round {round}: {ns:.0} ns");
        }
        let mut gaps = 0;
        tree.gaps.for_each(&mut |_, _| gaps += 1);
        println!("{gaps} gaps");
    }
}
