//! Statistics: the device asks by giving the buffer back.

use guest_mem::Iova;

use super::*;
use crate::Service;

const AT: u64 = DATA + 0x2_0000;

fn entries(list: &[(u16, u64)]) -> Vec<u8> {
    let entry = |(tag, value): &(u16, u64)| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat();
    list.iter().flat_map(entry).collect()
}

impl Guest {
    /// The driver's next statistics.
    fn tell(&mut self, bytes: &[u8]) {
        self.mem.put(Gpa::new(AT), bytes);
        self.queues[STATISTICS].add(&[(AT, bytes.len() as u32)], &[]);
        self.poll();
    }
}

#[test]
fn each_tag_has_its_place_and_unknown_ones_none() {
    // Worked out from §5.5.6.3: tag 5, value 0x1122334455667788, then tag 0xbeef.
    let bytes = [
        5, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, //
        0xef, 0xbe, 1, 0, 0, 0, 0, 0, 0, 0, //
        5, 0, 9,
    ];
    let want = Statistics {
        read_at_ns: 3,
        total: Some(0x1122_3344_5566_7788),
        ..Statistics::default()
    };
    assert_eq!(Statistics::parse(&bytes, 3), want);
    let all: Vec<_> = (0..10).map(|tag| (tag, 100 + u64::from(tag))).collect();
    let want = Statistics {
        read_at_ns: 0,
        swap_in: Some(100),
        swap_out: Some(101),
        major_faults: Some(102),
        minor_faults: Some(103),
        free: Some(104),
        total: Some(105),
        available: Some(106),
        caches: Some(107),
        hugetlb_allocations: Some(108),
        hugetlb_failures: Some(109),
    };
    assert_eq!(Statistics::parse(&entries(&all), 0), want);
    let reversed: Vec<_> = all.into_iter().rev().collect();
    assert_eq!(Statistics::parse(&entries(&reversed), 0), want);
    let twice = entries(&[(4, 1), (10, 3), (4, 2)]);
    assert_eq!(Statistics::parse(&twice, 0).free, Some(2));
}

#[test]
fn statistics_are_asked_for_by_giving_the_buffer_back() {
    both(|mask| {
        // Without the event index each used buffer interrupts.
        let mut guest = Guest::new(mask & !feature::EVENT_IDX);
        assert_eq!(guest.balloon.statistics(), None);
        guest.tell(&entries(&[(4, 11)]));
        // What the driver has left is read at once, and kept.
        assert_eq!(guest.balloon.statistics().unwrap().free, Some(11));
        assert_eq!(guest.used(STATISTICS), 0);
        let mut dma = guest.dma();
        guest.balloon.arm(&mut dma);
        assert!(
            !guest.balloon.has_work(&mut dma),
            "a kept buffer is no work"
        );
        for round in 0..3 * u64::from(SIZE) {
            guest.balloon.request_statistics();
            assert!(guest.balloon.has_work(&mut dma));
            assert!(guest.balloon.has_more(STATISTICS as u16, &mut dma));
            let interrupts = guest.irq.total();
            guest.poll();
            assert_eq!(guest.used(STATISTICS), 1);
            assert_eq!(guest.irq.total(), interrupts + 1);
            assert!(!guest.balloon.has_work(&mut dma));
            guest.tell(&entries(&[(4, round), (9, 1)]));
            let got = guest.balloon.statistics().unwrap();
            assert_eq!((got.free, got.hugetlb_failures), (Some(round), Some(1)));
            assert_eq!(guest.used(STATISTICS), 0);
        }
        assert_eq!(guest.balloon.stats().errors, 0);
    });
}

#[test]
fn a_request_without_a_buffer_waits_for_one() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let mut dma = guest.dma();
        guest.balloon.request_statistics();
        guest.poll();
        assert!(!guest.balloon.has_work(&mut dma));
        guest.tell(&entries(&[(4, 1)]));
        assert_eq!(guest.used(STATISTICS), 1, "those may be old");
        guest.tell(&entries(&[(4, 2)]));
        assert_eq!(guest.used(STATISTICS), 0);
        assert_eq!(guest.balloon.statistics().unwrap().free, Some(2));
    });
}

#[test]
fn odd_buffers_still_serve_to_ask() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let mut dma = guest.dma();
        guest.tell(&entries(&[(4, 5)]));
        // Shorter than an entry; of the wrong direction; out of reach.
        dma.iommu.deny(Iova::new(AT), 4096, Perm::Read);
        for odd in 0..3 {
            guest.balloon.request_statistics();
            guest.poll();
            assert_eq!(guest.used(STATISTICS), 1);
            match odd {
                0 => guest.queues[STATISTICS].add(&[(DATA, 9)], &[]),
                1 => guest.queues[STATISTICS].add(&[], &[(DATA, 100)]),
                _ => guest.queues[STATISTICS].add(&[(AT, 10)], &[]),
            };
            guest.poll_through(&mut dma);
            assert_eq!(guest.used(STATISTICS), 0);
            assert_eq!(guest.balloon.stats().errors, odd + 1);
            assert_eq!(guest.balloon.statistics().unwrap().free, Some(5));
        }
        assert!(!guest.balloon.needs_reset());
        guest.balloon.request_statistics();
        guest.poll();
        // As long as the driver likes: the first entries count.
        let mut long: Vec<_> = (0..1000).map(|_| (0x77, 1)).collect();
        long[0] = (4, 6);
        long[64] = (5, 7);
        guest.tell(&entries(&long));
        let got = guest.balloon.statistics().unwrap();
        assert_eq!((got.free, got.total), (Some(6), None));
    });
}

#[test]
fn a_kept_buffer_is_not_in_flight() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        guest.tell(&entries(&[(4, 5)]));
        guest.balloon.set_service(Service::Stopped);
        assert_eq!(guest.balloon.in_flight(), 0);
        let saved = guest.balloon.save().expect("nothing is under way");
        // The kept buffer is still to be taken.
        let queue = &saved.queues[STATISTICS];
        assert_eq!(queue.next_avail, queue.next_used);
        guest.balloon.request_statistics();
        guest.poll();
        assert_eq!(guest.used(STATISTICS), 0, "it is stopped");
        guest.balloon.set_service(Service::Full);
        guest.poll();
        assert_eq!(guest.used(STATISTICS), 1);
    });
}
