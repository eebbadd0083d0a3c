//! The lab's devices, word for word.

use super::*;

/// All words that are not zero.
fn nonzero(guest: &GuestConfig) -> Vec<(u16, u32)> {
    let words = all(guest).into_iter();
    (0..4096)
        .step_by(4)
        .zip(words)
        .filter(|(_, word)| *word != 0)
        .collect()
}

#[test]
fn nvme_word_for_word() {
    let guest = guest(&nvme(), NVME_BARS, true);
    let expected = [
        (0x00, 0x0010_1b36),
        (0x04, 0x0010_0000),
        (0x08, 0x0108_0202),
        (0x10, 0x0000_0004),
        (0x2c, 0x1100_1af4),
        (0x34, 0x0000_0040),
        (0x40, 0x0040_8011),
        (0x44, 0x0000_2000),
        (0x48, 0x0000_3000),
        // D0, no events, no other state.
        (0x60, 0x0003_0001),
        (0x64, 0x0000_0008),
        // Version 2, integrated endpoint; FLR and error reporting; the host's payload and request
        // sizes; no link.
        (0x80, 0x0092_6010),
        (0x84, 0x1000_8020),
        (0x88, 0x0000_2810),
    ];
    assert_eq!(nonzero(&guest), expected);
    let bits = [
        (0x04, 0x0406),
        (0x0c, 0xffff),
        (0x10, 0xffff_c000),
        (0x14, 0xffff_ffff),
        (0x3c, 0xff),
        (0x40, 0xc000_0000),
        (0x64, 0x0000_0003),
        (0x88, 0x0000_79ff),
    ];
    assert_eq!(writable(&guest), bits);
    assert_eq!(guest.unsupported(), []);
    assert_eq!(
        guest.bar_kinds()[..2],
        [BarKind::Memory64(0x4000), BarKind::Upper]
    );
    let msix = guest.msix().expect("MSI-X");
    assert_eq!(
        (msix.vectors, msix.table_bytes(), msix.pending_bytes()),
        (65, 0x2000..0x2410, 0x3000..0x3010)
    );
    let through = ReadThrough {
        at: 0x8a,
        mask: 0x20,
        from: Dynamic::DeviceStatus(0x8a),
    };
    assert_eq!(guest.read_through(), [through]);
}

#[test]
fn virtio_net_word_for_word() {
    let guest = guest(&virtio_net(), VIRTIO_NET_BARS, false);
    let expected = [
        (0x00, 0x1041_1af4),
        (0x04, 0x0010_0000),
        (0x08, 0x0200_0001),
        (0x20, 0x0000_0004),
        (0x2c, 0x1100_1af4),
        (0x34, 0x0000_0098),
        (0x40, 0x0110_0009),
        (0x44, 0x0000_0004),
        (0x4c, 0x0000_1000),
        (0x50, 0x0310_4009),
        (0x54, 0x0000_0004),
        (0x58, 0x0000_1000),
        (0x5c, 0x0000_1000),
        (0x60, 0x0410_5009),
        (0x64, 0x0000_0004),
        (0x68, 0x0000_2000),
        (0x6c, 0x0000_1000),
        (0x70, 0x0214_6009),
        (0x74, 0x0000_0004),
        (0x78, 0x0000_3000),
        (0x7c, 0x0000_1000),
        (0x80, 0x0000_0004),
        (0x84, 0x0514_7009),
        (0x98, 0x0003_8411),
        (0x9c, 0x0000_0001),
        (0xa0, 0x0000_0801),
    ];
    assert_eq!(nonzero(&guest), expected);
    // The window of the capability at 0x84 (BAR, offset, length, data) is not among them.
    let bits = [
        (0x04, 0x0406),
        (0x0c, 0xffff),
        (0x14, 0xffff_f000),
        (0x20, 0xffff_c000),
        (0x24, 0xffff_ffff),
        (0x3c, 0xff),
        (0x98, 0xc000_0000),
    ];
    assert_eq!(writable(&guest), bits);
    assert_eq!(guest.unsupported(), [Unsupported::ExpansionRom]);
    assert_eq!(guest.read_through(), []);
    assert_eq!(guest.msix().map(|msix| msix.vectors), Some(4));
}

#[test]
fn edu_word_for_word() {
    let guest = edu_guest(&edu());
    let expected = [
        (0x00, 0x11e8_1234),
        (0x04, 0x0010_0000),
        (0x08, 0x00ff_0010),
        (0x2c, 0x1100_1af4),
        (0x34, 0x0000_0040),
        (0x40, 0x0080_0005),
    ];
    assert_eq!(nonzero(&guest), expected);
    let bits = [
        (0x04, 0x0406),
        (0x0c, 0xffff),
        (0x10, 0xfff0_0000),
        (0x3c, 0xff),
        (0x40, 0x0071_0000),
        (0x44, 0xffff_fffc),
        (0x48, 0xffff_ffff),
        (0x4c, 0x0000_ffff),
    ];
    assert_eq!(writable(&guest), bits);
    assert_eq!(guest.unsupported(), []);
    assert_eq!(guest.msi(), Some(MsiLayout::new(0, true, false)));
}
