//! Effects of a guest's writes, and bits that are read through.

use super::*;

const NONE: Effects = Effects {
    command: None,
    msi: None,
    msix: None,
    function_reset: false,
};

#[test]
fn command_is_reported_when_memory_or_bus_master_change() {
    let mut guest = guest(&nvme(), NVME_BARS, true);
    let command = |memory, bus_master| Effects {
        command: Some(Command { memory, bus_master }),
        ..NONE
    };
    assert_eq!(guest.write(0x04, 2, 0x0002), command(true, false));
    assert_eq!(guest.write(0x04, 2, 0x0006), command(true, true));
    assert_eq!(
        guest.write(0x04, 2, 0x0406),
        NONE,
        "the legacy pin is not there"
    );
    assert_eq!(guest.write(0x05, 1, 0xff), NONE);
    assert_eq!(guest.write(0x04, 1, 0x04), command(false, true));
    assert_eq!(guest.write(0x10, 4, 0xfe00_0000), NONE);
    assert_eq!(guest.space().bars().address(0), Some(0xfe00_0000));
}

#[test]
fn msix_control_is_reported_when_it_changes() {
    let mut guest = guest(&nvme(), NVME_BARS, true);
    let msix = |is_enabled, is_masked| Effects {
        msix: Some(MsixControl {
            is_enabled,
            is_masked,
        }),
        ..NONE
    };
    assert_eq!(guest.write(0x42, 2, 0xc000), msix(true, true));
    assert_eq!(guest.write(0x42, 2, 0xc000), NONE);
    assert_eq!(guest.write(0x43, 1, 0x80), msix(true, false));
    assert_eq!(guest.write(0x44, 4, u32::MAX), NONE);
    assert_eq!(guest.write(0x40, 4, 0), msix(false, false));
}

#[test]
fn msi_registers_are_reported_when_they_change() {
    let mut image = edu();
    // 64-bit, mask bits, 4 vectors.
    image.word(0x40, 0x0184_0005);
    let mut guest = edu_guest(&image);
    let mut expected = MsiRegisters::default();
    let reported = |registers| Effects {
        msi: Some(registers),
        ..NONE
    };
    expected.address = 0xfee0_1004;
    assert_eq!(guest.write(0x44, 4, 0xfee0_1007), reported(expected));
    expected.address |= 0x55 << 32;
    assert_eq!(guest.write(0x48, 4, 0x55), reported(expected));
    expected.data = 0x4041;
    assert_eq!(guest.write(0x4c, 4, 0xffff_4041), reported(expected));
    expected.mask = 0b1010;
    assert_eq!(guest.write(0x50, 4, 0xfffa), reported(expected));
    (expected.is_enabled, expected.allocated_log2) = (true, 2);
    assert_eq!(
        guest.write(0x42, 2, 0x0051),
        reported(expected),
        "8 of 4 vectors are 4"
    );
    assert_eq!(guest.write(0x42, 2, 0x0051), NONE);
    assert_eq!(
        guest.write(0x54, 4, u32::MAX),
        NONE,
        "pending bits are read only"
    );
}

#[test]
fn msi_pending_bits_are_the_functions_own() {
    for (control, at) in [(0x0184, 0x54), (0x0104, 0x50)] {
        let mut image = edu();
        image.word(0x40, control << 16 | 5);
        let guest = edu_guest(&image);
        let through = ReadThrough {
            at,
            mask: 0xf,
            from: Dynamic::MsiPending,
        };
        assert_eq!(guest.read_through(), [through]);
        assert_eq!(guest.read(at, 4, |_| 0xffff_fff5), 5);
        assert_eq!(guest.read(at, 1, |_| 0xffff_fff5), 5);
        assert_eq!(guest.read(at + 1, 1, |_| u32::MAX), 0);
        // Unaligned accesses do not reach here, and would be right.
        assert_eq!(guest.read(at - 2, 4, |_| 5), 5 << 16);
        assert_eq!(guest.read(at - 2, 2, |_| u32::MAX), 0);
    }
}

#[test]
fn transactions_pending_is_read_from_the_device_and_nothing_else() {
    let guest = guest(&nvme(), NVME_BARS, true);
    let ones = |from| {
        assert_eq!(from, Dynamic::DeviceStatus(0x8a));
        u32::MAX
    };
    assert_eq!(guest.read(0x88, 4, ones), 0x0020_2810);
    assert_eq!(guest.read(0x8a, 2, ones), 0x20);
    assert_eq!(guest.read(0x8b, 1, ones), 0);
    for reg in (0..4096).step_by(4).filter(|reg| *reg != 0x88) {
        guest.read(reg, 4, |from| panic!("{from:?} at {reg:#x}"));
    }
    guest.read(0x88, 2, |from| panic!("{from:?} with the control register"));
}

#[test]
fn function_reset_is_reported_where_it_is_shown() {
    for can_reset in [true, false] {
        let reported = Effects {
            function_reset: can_reset,
            ..NONE
        };
        let fresh = guest(&nvme(), NVME_BARS, can_reset);
        assert_eq!(read(&fresh, 0x84) & 1 << 28 != 0, can_reset);
        for (reg, len, value) in [
            (0x88, 4, 0xa810),
            (0x88, 2, 0x8000),
            (0x89, 1, 0x80),
            (0x86, 4, 0x8000_0000),
        ] {
            let mut guest = fresh.clone();
            assert_eq!(guest.write(reg, len, value), reported, "{reg:#x} {len}");
            assert_eq!(read(&guest, 0x88) & 0x8000, 0, "the bit reads zero");
        }
        let mut guest = fresh.clone();
        for (reg, len, value) in [
            (0x88, 1, 0x80),
            (0x88, 1, 0x8000),
            (0x8a, 2, 0x8000),
            (0x84, 4, u32::MAX),
            (0x88, 4, 0x8000_0000),
        ] {
            assert_eq!(guest.write(reg, len, value), NONE, "{reg:#x} {len}");
        }
    }
}

#[test]
fn device_control_is_storage() {
    let mut guest = guest(&nvme(), NVME_BARS, true);
    assert_eq!(guest.write(0x88, 2, 0x7fff), NONE);
    assert_eq!(read(&guest, 0x88), 0x79ff);
    assert_eq!(guest.write(0x88, 2, 0), NONE);
    assert_eq!(read(&guest, 0x88), 0);
}

#[test]
fn power_states_are_storage_and_those_that_are_not_there_are_not_taken() {
    let mut guest = guest(&nvme(), NVME_BARS, true);
    for (state, taken) in [
        (3, 3),
        (1, 3),
        (2, 3),
        (0, 0),
        (1, 0),
        (2, 0),
        (0xffff_ff03, 3),
    ] {
        assert_eq!(guest.write(0x64, 4, state), NONE);
        assert_eq!(read(&guest, 0x64), 8 | taken);
    }
    let rest = guest.write(0x65, 1, 0xff);
    assert_eq!((rest, read(&guest, 0x64)), (NONE, 0xb));
}

#[test]
fn reset_takes_back_all_but_bars_and_their_decoding() {
    let fresh = guest(&nvme(), NVME_BARS, true);
    let mut guest = fresh.clone();
    for reg in (0..4096).step_by(4) {
        guest.write(reg, 4, u32::MAX);
    }
    guest.write(0x10, 4, 0x1234_4000);
    guest.write(0x14, 4, 0x12);
    let effects = guest.reset();
    let expected = Effects {
        command: Some(Command {
            memory: true,
            bus_master: false,
        }),
        msix: Some(MsixControl::default()),
        ..NONE
    };
    assert_eq!(effects, expected);
    assert_eq!(guest.space().bars().decoded(0), Some(0x12_1234_4000));
    let mut untouched = fresh;
    untouched.write(0x04, 2, 2);
    untouched.write(0x10, 4, 0x1234_4000);
    untouched.write(0x14, 4, 0x12);
    assert_eq!(all(&guest), all(&untouched));
    assert_eq!(guest.reset(), NONE);
}
