//! Visible capabilities, refusals, and malformed lists.

use super::*;

fn hidden(guest: &GuestConfig, list: Space) -> Vec<(u16, u16)> {
    let hidden = |reason: &Unsupported| match *reason {
        Unsupported::Hidden { space, id, at, .. } if space == list => Some((id, at)),
        _ => None,
    };
    guest.unsupported().iter().filter_map(hidden).collect()
}

fn faults(guest: &GuestConfig) -> Vec<(u16, Fault)> {
    let fault = |reason: &Unsupported| match *reason {
        Unsupported::Malformed { id, fault, .. } => Some((id, fault)),
        _ => None,
    };
    guest.unsupported().iter().filter_map(fault).collect()
}

/// A byte that no device of these tests has.
const MARK: u8 = 0xa5;

fn has_mark(guest: &GuestConfig) -> bool {
    all(guest)
        .iter()
        .any(|word| word.to_le_bytes().contains(&MARK))
}

#[test]
fn of_all_standard_capabilities_five_are_seen() {
    for id in 0..=u8::MAX {
        let mut image = edu();
        image.prepend(0x60, id, &[MARK; 0x3e]);
        let guest = edu_guest(&image);
        let seen = listed(&guest, Space::Standard);
        assert!(!has_mark(&guest), "{id:#x}");
        match id {
            0x01 => assert_eq!(seen, [(0x01, 0x60), (0x05, 0x40)]),
            // The first of two is used.
            0x05 => assert_eq!(seen, [(0x05, 0x60)]),
            // Visible, too, but the marker is no valid content: a length, a version, places of a
            // table.
            0x09 | 0x10 | 0x11 => {
                assert_eq!(seen, [(0x05, 0x40)]);
                assert_eq!(faults(&guest)[0].0, u16::from(id));
            }
            _ => {
                assert_eq!(seen, [(0x05, 0x40)], "{id:#x}");
                assert_eq!(hidden(&guest, Space::Standard), [(u16::from(id), 0x60)]);
            }
        }
    }
}

#[test]
fn of_all_extended_capabilities_the_serial_number_alone_is_seen() {
    for id in 0..=0x60_u16 {
        let mut image = nvme();
        image.0[0x104..0x180].fill(MARK);
        image.word(0x100, 0x1801_0000 | u32::from(id));
        image.words(0x180, &[0x0001_0003, 0x1122_3344, 0x5566_7788]);
        let guest = guest(&image, NVME_BARS, true);
        assert_eq!(listed(&guest, Space::Extended), [(3, 0x100)], "{id:#x}");
        assert_eq!(has_mark(&guest), id == 3, "{id:#x}");
        if id != 3 {
            assert_eq!(hidden(&guest, Space::Extended), [(id, 0x100)]);
            assert_eq!(
                [read(&guest, 0x104), read(&guest, 0x108)],
                [0x1122_3344, 0x5566_7788]
            );
        }
    }
}

/// The ids that matter most, by name, so that a row that is changed by mistake is found.
#[test]
fn translation_services_and_virtual_functions_are_hidden() {
    for id in [
        0x0001, 0x0002, 0x000d, 0x000e, 0x000f, 0x0010, 0x0013, 0x0015, 0x0017, 0x0018, 0x001b,
        0x001d, 0x001e, 0x001f, 0x0024,
    ] {
        let rows: Vec<_> = SEEN
            .iter()
            .filter(|row| row.space == Space::Extended && row.id == id)
            .collect();
        assert_eq!(rows.len(), 1, "{id:#x}");
        assert!(matches!(rows[0].treatment, Treatment::Hidden(_)), "{id:#x}");
    }
}

#[test]
fn each_row_of_the_table_is_the_only_one_of_its_id() {
    for row in SEEN {
        let same = SEEN
            .iter()
            .filter(|other| (other.space, other.id) == (row.space, row.id));
        assert_eq!(same.count(), 1, "{row:?}");
    }
}

#[test]
fn hidden_capability_in_the_middle_leaves_its_neighbours_in_order() {
    let mut image = edu();
    image.prepend(0x60, 0x03, &[MARK; 6]);
    image.prepend(0x50, 0x01, &[0x03, 0, 0, 0, 0, 0]);
    let guest = edu_guest(&image);
    assert_eq!(
        listed(&guest, Space::Standard),
        [(0x01, 0x50), (0x05, 0x40)]
    );
}

#[test]
fn list_that_loops_ends() {
    let mut image = edu();
    image.prepend(0x60, 0x01, &[3, 0, 0, 0, 0, 0]);
    image.0[0x41] = 0x60;
    let guest = edu_guest(&image);
    assert_eq!(
        listed(&guest, Space::Standard),
        [(0x01, 0x60), (0x05, 0x40)]
    );
    let list = Unsupported::List {
        space: Space::Standard,
        broken: Broken::Loop(0x60),
    };
    assert_eq!(guest.unsupported(), [list]);
}

#[test]
fn link_into_the_header_or_out_of_the_space_ends_the_list() {
    let mut image = edu();
    image.0[0x41] = 0x10;
    let guest = edu_guest(&image);
    assert_eq!(listed(&guest, Space::Standard), [(0x05, 0x40)]);
    let list = Unsupported::List {
        space: Space::Standard,
        broken: Broken::Outside(0x10),
    };
    assert_eq!(guest.unsupported(), [list]);
    let mut image = nvme();
    image.words(0x100, &[0x0801_0003, 1, 2]);
    let guest = super::guest(&image, NVME_BARS, true);
    assert_eq!(listed(&guest, Space::Extended), [(3, 0x100)]);
    let list = Unsupported::List {
        space: Space::Extended,
        broken: Broken::Outside(0x80),
    };
    assert_eq!(guest.unsupported(), [list]);
}

#[test]
fn capability_that_is_cut_off_or_runs_into_another_is_hidden() {
    // At the end of the space: power management has 8 bytes, vendor-specific ones say how many.
    for (id, len, body) in [(0x01, 8, [3, 0]), (0x09, 5, [5, 0])] {
        let mut image = edu();
        image.prepend(0xfc, id, &body);
        let guest = edu_guest(&image);
        assert_eq!(listed(&guest, Space::Standard), [(0x05, 0x40)]);
        let cut = Fault::Cut { len, end: 0x100 };
        assert_eq!(faults(&guest), [(u16::from(id), cut)]);
    }
    // Over the header of another.
    let mut image = edu();
    image.words(0x40, &[0x0010_4809, 0]);
    image.words(0x48, &[0x0080_0005, 0, 0, 0]);
    let guest = edu_guest(&image);
    assert_eq!(listed(&guest, Space::Standard), [(0x05, 0x48)]);
    assert_eq!(
        faults(&guest),
        [(
            0x09,
            Fault::Cut {
                len: 0x10,
                end: 0x48
            }
        )]
    );
}

#[test]
fn vendor_specific_capability_too_short_for_its_length_is_hidden() {
    let mut image = edu();
    image.prepend(0x60, 0x09, &[2, MARK]);
    let guest = edu_guest(&image);
    assert_eq!(faults(&guest), [(0x09, Fault::Short(2))]);
    assert!(!has_mark(&guest));
}

#[test]
fn second_of_a_kind_is_hidden_except_vendor_specific_ones() {
    for (id, body) in [
        (0x05, vec![0x80, 0]),
        (0x01, vec![3, 0]),
        (0x10, vec![0x02, 0]),
        (0x09, vec![4, 0]),
    ] {
        let mut image = edu();
        image.prepend(0xc0, id, &body);
        image.prepend(0x80, id, &body);
        let expected = match id {
            0x09 => vec![(0x09, 0x80), (0x09, 0xc0), (0x05, 0x40)],
            // That of edu is the third.
            0x05 => vec![(0x05, 0x80)],
            _ => vec![(u16::from(id), 0x80), (0x05, 0x40)],
        };
        assert_eq!(listed(&edu_guest(&image), Space::Standard), expected);
    }
}

#[test]
fn express_of_each_version_has_its_length() {
    // Version, device/port type, room; bytes that the guest sees.
    for (version, kind, room, len) in [
        (1, 9, 0x0c, Some(0x0c)),
        (1, 0, 0x14, Some(0x14)),
        (1, 0, 0x10, None),
        (2, 9, 0x2c, Some(0x2c)),
        (2, 9, 0x3c, Some(0x3c)),
        (2, 0, 0x3c, Some(0x3c)),
        (2, 0, 0x38, None),
        (2, 9, 0x28, None),
        (0, 0, 0x3c, None),
        (3, 0, 0x3c, None),
        (15, 15, 0x3c, None),
    ] {
        let mut image = edu();
        image.prepend(0x60 + room, 0x03, &[0, 0]);
        let flags: u16 = version | kind << 4 | 0x3f00;
        image.prepend(0x60, 0x10, &flags.to_le_bytes());
        let guest = edu_guest(&image);
        let express = u32::from(flags & 0xf | 0x90) << 16 | 0x4010;
        match len {
            Some(_) => assert_eq!(read(&guest, 0x60), express, "{version} {kind}"),
            None => {
                assert_eq!(listed(&guest, Space::Standard), [(5, 0x40)]);
                assert_eq!(read(&guest, 0x60), 0);
                assert_eq!(faults(&guest).len(), 1);
            }
        }
    }
}

#[test]
fn msi_asks_for_32_vectors_at_most() {
    for (code, vectors) in [(0, 1), (3, 8), (5, 32), (6, 32), (7, 32)] {
        let mut image = edu();
        image.word(0x40, 0xfe80_0005 | code << 17);
        let guest = edu_guest(&image);
        assert_eq!(guest.msi().map(MsiLayout::vectors), Some(vectors));
        assert_eq!(read(&guest, 0x40), 0x0080_0005 | code.min(5) << 17);
    }
}

#[test]
fn msix_outside_its_bars_or_over_itself_is_hidden() {
    for (table, pending) in [
        (0x3c00, 0x3000), // 65 entries need 0x410 bytes
        (0x2000, 0x3ff8), // and 16 bytes of pending bits
        (0x2000, 0x2408), // on its last 8 bytes
        (0x2001, 0x3000), // BAR 1 is the upper half
        (0x2000, 0x3006), // there is no BAR 6
        (0x2007, 0x3000),
        (0xffff_fff8, 0x3000),
        (0x2000, 0xffff_fff8),
    ] {
        let mut image = nvme();
        image.words(0x44, &[table, pending]);
        let refused = refusal(&image, NVME_BARS);
        let Refusal::PinOnly(reasons) = refused else {
            panic!("{refused}");
        };
        let malformed = Unsupported::Malformed {
            space: Space::Standard,
            id: 0x11,
            at: 0x40,
            fault: Fault::Place,
        };
        assert_eq!(reasons, [malformed]);
        // Without the pin it is assigned, without interrupts.
        image.0[0x3d] = 0;
        let guest = guest(&image, NVME_BARS, true);
        assert_eq!(
            listed(&guest, Space::Standard),
            [(0x10, 0x80), (0x01, 0x60)]
        );
        assert!(guest.msix().is_none());
    }
    // Beside each other.
    let mut image = nvme();
    image.words(0x44, &[0x2000, 0x2410]);
    assert!(guest(&image, NVME_BARS, true).msix().is_some());
}

#[test]
fn device_with_the_legacy_pin_alone_is_refused_and_says_so() {
    let mut image = edu();
    image.0[0x06] = 0;
    let refused = refusal(&image, EDU_BARS);
    assert_eq!(refused, Refusal::PinOnly(vec![]));
    assert!(
        refused.to_string().contains("legacy interrupt pin"),
        "{refused}"
    );
    let mut image = edu();
    image.list_from(0xfc);
    image.word(0xfc, 0x0080_0005);
    let refused = refusal(&image, EDU_BARS).to_string();
    assert!(refused.contains("capability 0x5 at 0xfc"), "{refused}");
}

#[test]
fn bridges_absent_devices_and_odd_lengths_are_refused() {
    let mut image = edu();
    image.0[0x0e] = 0x81;
    assert_eq!(refusal(&image, EDU_BARS), Refusal::HeaderType(1));
    assert_eq!(refusal(&Image(vec![0xff; 256]), EDU_BARS), Refusal::Absent);
    for len in [0, 1, 64, 255, 257, 4095, 4097] {
        assert_eq!(
            refusal(&Image(vec![0; len]), EDU_BARS),
            Refusal::Length(len)
        );
    }
}

#[test]
fn function_of_several_is_shown_as_the_only_one() {
    let mut image = edu();
    image.0[0x0e] = 0x80;
    assert_eq!(edu_guest(&image).read(0x0e, 1, |_| 0), 0);
}

#[test]
fn bars_are_shown_by_kind_and_size() {
    use BarKind::{Absent, Memory32, Memory64, Upper};
    let io = |bar| Unsupported::Bar {
        bar,
        reason: BarReason::Io,
    };
    let kind = |bar| Unsupported::Bar {
        bar,
        reason: BarReason::Type,
    };
    let size = |bar, size| Unsupported::Bar {
        bar,
        reason: BarReason::Size(size),
    };
    let (a, m) = (Absent, Memory32(0x1000));
    for (registers, sizes, kinds, reasons) in [
        ([0, 0, 0, 0, 0, 0], [0x1000; 6], [m; 6], vec![]),
        (
            [8, 0, 0, 0, 0, 0],
            [0x1000, 0, 0, 0, 0, 0],
            [m, a, a, a, a, a],
            vec![],
        ),
        (
            [0xc001, 0, 0, 0, 0, 0],
            [0x20, 0x1000, 0, 0, 0, 0],
            [a, m, a, a, a, a],
            vec![io(0)],
        ),
        (
            [4, 1, 0, 0, 0, 0],
            [1 << 40, 5, 0, 0, 0, 0],
            [Memory64(1 << 40), Upper, a, a, a, a],
            vec![],
        ),
        (
            [4, 1, 0, 0, 0, 0],
            [1 << 41, 5, 0, 0, 0, 0],
            [a; 6],
            vec![size(0, 1 << 41)],
        ),
        (
            [0, 0, 0, 0, 0, 4],
            [0, 0, 0, 0, 0, 0x1000],
            [a; 6],
            vec![kind(5)],
        ),
        (
            [2, 6, 0, 0, 0, 0],
            [0x1000, 0x1000, 0, 0, 0, 0],
            [a; 6],
            vec![kind(0), kind(1)],
        ),
        (
            [0; 6],
            [1 << 32, 0x1800, 8, u64::MAX, 1 << 31, 16],
            [a, a, a, a, Memory32(1 << 31), Memory32(16)],
            vec![
                size(0, 1 << 32),
                size(1, 0x1800),
                size(2, 8),
                size(3, u64::MAX),
            ],
        ),
    ] {
        let mut image = edu();
        image.words(0x10, &registers);
        let guest = guest(&image, sizes, false);
        assert_eq!(guest.bar_kinds(), kinds, "{registers:x?} {sizes:x?}");
        assert_eq!(guest.unsupported(), reasons);
        let seen = guest.bar_sizes().into_iter().zip(sizes).zip(kinds);
        for ((seen, size), kind) in seen {
            let is_hidden = matches!(kind, Absent | Upper);
            assert_eq!(seen, if is_hidden { 0 } else { size });
        }
    }
}
