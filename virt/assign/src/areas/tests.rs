use proptest::prelude::*;

use super::*;

const NVME: MsixPlace = MsixPlace {
    vectors: 65,
    table_bar: 0,
    table: 0x2000,
    pending_bar: 0,
    pending: 0x3000,
};

fn only(bar: usize, range: Range<u64>) -> [Vec<Range<u64>>; BARS] {
    std::array::from_fn(|index| {
        if index == bar {
            vec![range.clone()]
        } else {
            vec![]
        }
    })
}

fn slots(areas: &Areas, bar: u8) -> Vec<(u64, u64)> {
    let slots = areas.slots(bar).iter();
    slots.map(|range| (range.start, range.end)).collect()
}

fn pieces(areas: &Areas, bar: u8, offset: u64, len: u64) -> Vec<(Target, Range<u64>)> {
    let pieces = areas.pieces(bar, offset, len);
    pieces.map(|piece| (piece.target, piece.bytes)).collect()
}

#[test]
fn nvme_table_and_pending_pages_trap_and_registers_do_not() {
    let areas = Areas::new([0x4000, 0, 0, 0, 0, 0], Some(&NVME), &only(0, 0..0x4000));
    assert_eq!(slots(&areas, 0), [(0, 0x2000)]);
}

#[test]
fn virtio_net_page_of_table_and_pending_bits_traps() {
    let place = MsixPlace {
        vectors: 4,
        table_bar: 1,
        table: 0,
        pending_bar: 1,
        pending: 0x800,
    };
    let mut mappable = only(1, 0..0x1000);
    mappable[4].push(0..0x4000);
    let areas = Areas::new([0, 0x1000, 0, 0, 0x4000, 0], Some(&place), &mappable);
    assert_eq!(slots(&areas, 1), []);
    assert_eq!(slots(&areas, 4), [(0, 0x4000)]);
    assert_eq!(
        pieces(&areas, 1, 0x3c, 8),
        [
            (Target::MsixTable(0x3c), 0..4),
            (Target::Registers(0x40), 4..8)
        ]
    );
    assert_eq!(
        pieces(&areas, 1, 0x800, 8),
        [(Target::MsixPending(0), 0..8)]
    );
}

#[test]
fn edu_registers_are_a_slot() {
    let areas = Areas::new([0x10_0000, 0, 0, 0, 0, 0], None, &only(0, 0..0x10_0000));
    assert_eq!(slots(&areas, 0), [(0, 0x10_0000)]);
}

#[test]
fn page_that_registers_share_with_the_table_traps() {
    let place = MsixPlace {
        table: 0x1ff8,
        pending: 0x3ff8,
        vectors: 2,
        ..NVME
    };
    let areas = Areas::new([0x8000, 0, 0, 0, 0, 0], Some(&place), &only(0, 0..0x8000));
    // The table reaches over the end of page 1.
    assert_eq!(slots(&areas, 0), [(0, 0x1000), (0x4000, 0x8000)]);
}

#[test]
fn bar_smaller_than_a_page_traps() {
    let areas = Areas::new([0x800, 0, 0, 0, 0, 0], None, &only(0, 0..0x1000));
    assert_eq!(slots(&areas, 0), []);
}

#[test]
fn bar_that_the_host_does_not_map_traps() {
    let areas = Areas::new([0x4000; BARS], None, &Default::default());
    for bar in 0..BARS as u8 {
        assert_eq!(slots(&areas, bar), []);
    }
}

#[test]
fn access_is_split_where_its_target_changes() {
    let place = MsixPlace {
        vectors: 1,
        table: 0x1000,
        pending: 0x1018,
        ..NVME
    };
    let areas = Areas::new([0x2000, 0, 0, 0, 0, 0], Some(&place), &only(0, 0..0x2000));
    assert_eq!(
        pieces(&areas, 0, 0xfff, 0x1100),
        [
            (Target::Registers(0xfff), 0..1),
            (Target::MsixTable(0), 1..0x11),
            (Target::Registers(0x1010), 0x11..0x19),
            (Target::MsixPending(0), 0x19..0x21),
            (Target::Registers(0x1020), 0x21..0x1001),
            (Target::Beyond, 0x1001..0x1100),
        ]
    );
}

#[test]
fn ends_of_the_address_space_are_safe() {
    let wrong = Range {
        start: 0x3000,
        end: 0x1000,
    };
    let ranges = vec![0..u64::MAX, wrong, u64::MAX - 1..u64::MAX];
    let mappable = std::array::from_fn(|_| ranges.clone());
    let areas = Areas::new([u64::MAX; BARS], Some(&NVME), &mappable);
    assert_eq!(slots(&areas, 0), [(0, 0x2000), (0x4000, !0xfff)]);
    assert_eq!(
        pieces(&areas, 0, u64::MAX - 2, 8),
        [
            (Target::Registers(u64::MAX - 2), 0..2),
            (Target::Beyond, 2..8)
        ]
    );
    assert_eq!(
        pieces(&areas, 0, u64::MAX, u64::MAX),
        [(Target::Beyond, 0..u64::MAX)]
    );
    assert_eq!(pieces(&areas, 6, 0, 4), [(Target::Beyond, 0..4)]);
    assert_eq!(pieces(&areas, 0, 0x2000, 0), []);
    assert_eq!(slots(&areas, 6), []);
}

/// Target of one byte, by asking each range.
fn byte_target(size: u64, place: Option<&MsixPlace>, at: u64) -> Target {
    if at >= size {
        return Target::Beyond;
    }
    match place {
        Some(place) if place.table_bytes().contains(&at) => {
            Target::MsixTable(at - u64::from(place.table))
        }
        Some(place) if place.pending_bytes().contains(&at) => {
            Target::MsixPending(at - u64::from(place.pending))
        }
        _ => Target::Registers(at),
    }
}

fn is_msix(target: Target) -> bool {
    matches!(target, Target::MsixTable(_) | Target::MsixPending(_))
}

proptest! {
    /// Each page is a slot exactly if the host maps all of it and no byte of it is MSI-X's; each
    /// byte of an access has the target that it has alone.
    #[test]
    fn agrees_with_byte_by_byte(
        pages in 0_u64..9,
        odd in prop_oneof![Just(0_u64), 1_u64..4096],
        (vectors, table, pending) in (1_u16..200, 0_u32..0x1000, 0_u32..0x1000),
        has_msix: bool,
        ranges in prop::collection::vec((0_u64..0xa000, 0_u64..0xa000), 0..5),
        accesses in prop::collection::vec((0_u64..0xa000, 0_u64..64), 1..40),
    ) {
        let size = pages * PAGE + odd;
        let place = MsixPlace { vectors, table_bar: 2, table: table * 8, pending_bar: 2, pending: pending * 8 };
        let (table, pending) = (place.table_bytes(), place.pending_bytes());
        prop_assume!(table.end <= pending.start || pending.end <= table.start);
        let place = (has_msix && table.end.max(pending.end) <= size).then_some(&place);
        let mut mappable: [Vec<Range<u64>>; BARS] = Default::default();
        mappable[2] = ranges.iter().map(|(start, end)| *start..*end).collect();
        let mut sizes = [0; BARS];
        sizes[2] = size;
        let areas = Areas::new(sizes, place, &mappable);
        for page in 0..11 {
            let bytes = page * PAGE..(page + 1) * PAGE;
            let by_host = bytes.end <= size && covers(&mappable[2], &bytes);
            let traps = bytes.clone().any(|at| is_msix(byte_target(size, place, at)));
            let is_slot = areas.slots(2).iter().any(|slot| slot.start <= bytes.start && bytes.end <= slot.end);
            prop_assert_eq!(is_slot, by_host && !traps, "page {}", page);
        }
        for pair in areas.slots(2).windows(2) {
            prop_assert!(pair[0].end <= pair[1].start);
        }
        for (offset, len) in accesses {
            let mut next = 0;
            for piece in areas.pieces(2, offset, len) {
                prop_assert_eq!(piece.bytes.start, next);
                prop_assert!(piece.bytes.end > next);
                for at in piece.bytes.clone() {
                    let expected = byte_target(size, place, offset + at);
                    let inside = at - piece.bytes.start;
                    let got = match piece.target {
                        Target::MsixTable(first) => Target::MsixTable(first + inside),
                        Target::MsixPending(first) => Target::MsixPending(first + inside),
                        Target::Registers(first) => Target::Registers(first + inside),
                        Target::Beyond => Target::Beyond,
                    };
                    prop_assert_eq!(got, expected);
                }
                next = piece.bytes.end;
            }
            prop_assert_eq!(next, len);
        }
    }
}

/// Whether whole pages of `ranges`, each rounded inward by itself, have all of the page `bytes`.
fn covers(ranges: &[Range<u64>], bytes: &Range<u64>) -> bool {
    ranges
        .iter()
        .any(|range| range.start <= bytes.start && bytes.end <= range.end)
}
