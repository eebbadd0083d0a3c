//! Numbers of queues, and the lists of pages, against naive ones.

use proptest::prelude::*;

use super::*;
use crate::ring::Ring;

#[test]
fn queues_have_the_numbers_that_linux_gives_them() {
    use Role::{Deflate, Inflate, Report, Statistics};
    let (stats, report) = (balloon_feature::STATS_VQ, balloon_feature::PAGE_REPORTING);
    for (without, want) in [
        (0, &[Inflate, Deflate, Statistics, Report][..]),
        (report, &[Inflate, Deflate, Statistics]),
        (stats, &[Inflate, Deflate, Report]),
        (stats | report, &[Inflate, Deflate]),
    ] {
        let mut guest = Guest::new(!without);
        assert_eq!(guest.queues.len(), want.len());
        let features = guest.balloon.features() & !without;
        for (index, role) in (0..).zip(want) {
            let queue = guest.balloon.class().queue(index, features);
            assert_eq!(queue.unwrap().role, *role);
        }
        // One that is served already, and one more than there are.
        let ring = Ring::new(&guest.queues[0].config(), SIZE, features).unwrap();
        let refused = guest.balloon.add_queue(ring);
        assert_eq!(refused, Err(crate::ActivateError::QueueIndex { index: 0 }));
        let index = want.len() as u16;
        let ring = AnyDriver::new(guest.mem.clone(), Gpa::new(0x3_0000), index, SIZE, features);
        let ring = Ring::new(&ring.config(), SIZE, features).unwrap();
        let refused = guest.balloon.add_queue(ring);
        assert_eq!(refused, Err(crate::ActivateError::QueueIndex { index }));
    }
}

#[test]
fn offered_features_follow_the_configuration() {
    let make = |deflate_on_oom, reporting, queue_size| {
        let config = BalloonConfig {
            deflate_on_oom,
            reporting,
            queue_size,
            packed: false,
            access_platform: deflate_on_oom,
        };
        Balloon::new(config, &RAM, Box::new(Recorder::default()))
    };
    let all = make(true, true, 32).unwrap();
    let bits = all.features() & !feature::COMMON;
    assert_eq!(all.features() & feature::COMMON, feature::COMMON);
    assert_eq!((bits, all.queue_sizes()), (0b10_0110, &[32; 4][..]));
    let few = make(false, false, 1024).unwrap();
    let bits = few.features() & !feature::COMMON;
    let common = few.features() & feature::COMMON;
    assert_eq!(common, feature::COMMON & !feature::ACCESS_PLATFORM);
    assert_eq!((bits, few.queue_sizes()), (0b00_0010, &[1024; 3][..]));
    for size in [0, 16, 48, 2048] {
        let refused = make(true, true, size).err();
        assert_eq!(refused, Some(BalloonError::QueueSize(size)));
    }
}

#[test]
fn ram_is_a_sorted_list_of_whole_pages() {
    let ram = |regions: &[(u64, u64)]| {
        let regions: Vec<_> = regions
            .iter()
            .map(|(at, len)| (Gpa::new(*at), *len))
            .collect();
        Ram::new(&regions).map(|ram| ram.pages())
    };
    assert_eq!(ram(&[(0, 0x1000), (0x1000, 0x3000)]), Some(4));
    for wrong in [
        &[][..],
        &[(0, 0)],
        &[(0x800, 0x1000)],
        &[(0, 0x1800)],
        &[(0x1000, 0x1000), (0, 0x1000)],
        &[(0, 0x2000), (0x1000, 0x1000)],
        &[(!0xfff, 0x2000)],
    ] {
        assert_eq!(ram(wrong), None, "{wrong:x?}");
    }
}

proptest! {
    /// Against a comparison with each page.
    #[test]
    fn ram_is_found_in_any_range(
        cuts in prop::collection::btree_set(0_u64..40, 2..9),
        first in 0_u64..44,
        count in 0_u64..44,
    ) {
        // Regions between every other two cuts.
        let cuts: Vec<u64> = cuts.into_iter().collect();
        let (pairs, _) = cuts.as_chunks::<2>();
        let regions: Vec<_> = pairs
            .iter()
            .map(|[from, to]| (Gpa::new(from * PAGE_SIZE), (to - from) * PAGE_SIZE))
            .collect();
        let ram = Ram::new(&regions).unwrap();
        let is_ram = |page: u64| pairs.iter().any(|[from, to]| (*from..*to).contains(&page));
        let end = first + count;
        let from = (first..end).find(|page| is_ram(*page));
        let want = from.map(|from| {
            // Regions that touch are two.
            let to = (from + 1..end).find(|page| !is_ram(*page) || pairs.iter().any(|[at, _]| at == page));
            (from, to.unwrap_or(end))
        });
        let found = ram.first_of(Numbers { first, end });
        prop_assert_eq!(found.map(|found| (found.first, found.end)), want);
    }

    #[test]
    fn whole_pages_are_those_inside(start in 0_u64..0x5000, len in 0_u64..0x5000) {
        let whole = Numbers::whole(Gpa::new(start), len);
        let inside = (0..16).filter(|page| page * PAGE_SIZE >= start && (page + 1) * PAGE_SIZE <= start + len);
        prop_assert!((whole.first..whole.end).eq(inside));
    }

    /// A batch holds the pages that were added and no others, and says how many.
    #[test]
    fn a_batch_loses_no_page_and_invents_none(
        added in prop::collection::vec((0_u64..300, 1_u64..40), 0..60),
    ) {
        let mut batch = Batch::new();
        let mut want = BTreeSet::new();
        for (first, count) in added {
            if !batch.has_room() {
                break;
            }
            batch.add(Numbers { first, end: first + count });
            want.extend(first..first + count);
        }
        prop_assert!(batch.ranges().len() <= MAX_RANGES);
        let ranges = batch.ranges().iter();
        let pages: u64 = ranges.clone().map(|range| range.pages).sum();
        prop_assert_eq!(pages, batch.pages());
        let numbers = |range: &PageRange| {
            let first = range.gpa.raw() / PAGE_SIZE;
            first..first + range.pages
        };
        let got: BTreeSet<u64> = ranges.flat_map(numbers).collect();
        prop_assert_eq!(got, want);
    }
}
