use super::*;

fn space() -> ConfigSpace {
    let identity = Identity {
        vendor: 0x1af4,
        device: 0x1042,
        class: 0x01_80_00,
        revision: 1,
        subsystem_vendor: 0x1af4,
        subsystem: 0x1042,
    };
    let mut kinds = [BarKind::Absent; BARS];
    kinds[0] = BarKind::Memory32(0x8000);
    ConfigSpace::new(&identity, kinds)
}

#[test]
fn the_header_reads_as_the_specification_lays_it_out() {
    let config = space();
    assert_eq!(config.read(0x00, 4), 0x1042_1af4);
    assert_eq!(config.read(0x08, 4), 0x0180_0001);
    assert_eq!(config.read(0x0e, 1), 0, "type 0, single function");
    assert_eq!(config.read(0x2c, 4), 0x1042_1af4);
    assert_eq!(config.read(0x06, 2), 0);
    assert_eq!(config.read(0x34, 1), 0);
    assert_eq!(config.read(0x3d, 1), 0, "no INTx pin");
    assert_eq!(config.read(0x100, 4), 0, "no extended capability");
}

#[test]
fn capabilities_form_a_list_in_order() {
    let mut config = space();
    let express = config.add_express_endpoint();
    let msix = config.add_msix(5, (0, 0x4000), (0, 0x5000));
    let vendor = config.add_capability(0x09, &[0; 14]);
    assert_eq!(config.read(0x06, 2), 0x10);
    assert_eq!(config.read(0x34, 1), u32::from(express));
    assert_eq!(config.read(express, 4), 0x0092_0010 | u32::from(msix) << 8);
    assert_eq!(config.read(msix, 4), 0x0004_0011 | u32::from(vendor) << 8);
    assert_eq!(config.read(msix + 4, 4), 0x4000);
    assert_eq!(config.read(msix + 8, 4), 0x5000);
    assert_eq!(config.read(vendor, 2), 0x0009);
    for offset in [express, msix, vendor] {
        assert_eq!(offset % 4, 0);
    }
}

#[test]
fn only_msix_enable_and_mask_can_be_written() {
    let mut config = space();
    let msix = config.add_msix(5, (0, 0x4000), (0, 0x5000));
    assert!(config.write(msix, 4, u32::MAX));
    assert_eq!(config.read(msix, 4), 0xc004_0011);
    assert_eq!(config.msix_control(), (true, true));
    config.write(msix + 3, 1, 0x80);
    assert_eq!(config.msix_control(), (true, false));
    assert!(!config.write(msix + 4, 4, u32::MAX));
    assert_eq!(config.read(msix + 4, 4), 0x4000);
}

#[test]
fn identification_cannot_be_written_and_scratch_bytes_can() {
    let mut config = space();
    for reg in (0..0x40).step_by(4) {
        config.write(reg, 4, u32::MAX);
    }
    assert_eq!(config.read(0x00, 4), 0x1042_1af4);
    assert_eq!(config.read(0x08, 4), 0x0180_0001);
    assert_eq!(config.read(0x3c, 4), 0xff);
    assert_eq!(config.read(0x10, 4), 0xffff_8000);
}

#[test]
fn a_capability_can_be_made_writable_and_ends_are_safe() {
    let mut config = space();
    let cap = config.add_capability(0x09, &[0; 18]);
    config.make_writable(cap + 16, &[0xff; 4]);
    config.write(cap + 16, 4, 0x1234_5678);
    assert_eq!(config.bytes(cap + 16, 4), 0x1234_5678u32.to_le_bytes());
    assert_eq!(config.read(4095, 4), 0xffff_ff00);
    config.write(4095, 4, u32::MAX);
}

#[test]
fn extended_capabilities_form_a_list_of_their_own() {
    let mut config = space();
    let first = config.add_extended_capability(0x0001, 2, &[0x11; 6]);
    let second = config.add_extended_capability(0x000b, 1, &[0x22; 4]);
    assert_eq!((first, second), (0x100, 0x10c));
    assert_eq!(config.read(0x100, 4), 0x10c2_0001);
    assert_eq!(config.read(0x10c, 4), 0x0001_000b);
    assert_eq!(config.read(0x110, 4), 0x2222_2222);
    assert_eq!(config.read(0x34, 1), 0, "the conventional list is empty");
}

#[test]
fn a_pending_interrupt_drives_the_pin_unless_it_is_off_or_msix_is_on() {
    let mut config = space();
    assert!(!config.set_interrupt(true), "there is no pin");
    config.set_pin(1);
    let msix = config.add_msix(1, (0, 0x4000), (0, 0x5000));
    assert_eq!(config.read(0x3d, 1), 1);
    assert!(config.pin_level());
    assert_eq!(config.read(0x06, 1) & 8, 8);
    config.write(0x04, 2, 1 << 10);
    assert!(!config.pin_level());
    assert_eq!(config.read(0x06, 1) & 8, 8, "pending all the same");
    config.write(0x04, 2, 0);
    config.write(msix + 2, 2, 0x8000);
    assert!(!config.pin_level());
    config.write(msix + 2, 2, 0);
    assert!(config.pin_level());
    assert!(!config.set_interrupt(false));
    assert_eq!(config.read(0x06, 1) & 8, 0);
}

#[test]
fn placed_capability_keeps_its_offset_and_the_list_its_order() {
    let mut config = space();
    assert_eq!(config.place_capability(0x98, 0x09, &[3, 0, 0]), Ok(()));
    assert_eq!(config.place_capability(0x40, 0x01, &[0; 6]), Ok(()));
    assert_eq!(config.read(0x34, 1), 0x98);
    assert_eq!(config.read(0x98, 2), 0x4009);
    assert_eq!(config.read(0x40, 2), 0x0001);
    let behind = config.add_capability(0x09, &[0; 2]);
    assert_eq!(behind, 0xa0, "behind the one with the highest offset");
    assert_eq!(config.read(0x40, 2), 0xa001);
}

#[test]
fn capability_over_another_or_outside_the_space_is_refused() {
    let mut config = space();
    assert_eq!(config.place_capability(0x50, 0x09, &[0; 14]), Ok(()));
    for (at, len) in [
        (0x44, 13),
        (0x50, 2),
        (0x5c, 2),
        (0x3c, 2),
        (0xfc, 5),
        (0x62, 2),
        (0x100, 2),
        (0xfffc, 2),
    ] {
        let refused = config.place_capability(at, 0x09, &vec![0; len - 2]);
        assert_eq!(refused, Err(NoRoom { id: 0x09, at, len }));
    }
    assert_eq!(config.read(0x50, 2), 0x0009, "no link to what was refused");
    assert_eq!(config.place_capability(0x44, 0x09, &[0; 10]), Ok(()));
    assert_eq!(config.place_capability(0xfc, 0x09, &[0; 2]), Ok(()));
}

#[test]
fn msi_registers_are_what_the_guest_writes_within_the_layout() {
    for (is_wide, has_masks, data, len) in [
        (false, false, 0x8, 10),
        (true, false, 0xc, 14),
        (false, true, 0x8, 20),
        (true, true, 0xc, 24),
    ] {
        let mut config = space();
        let layout = MsiLayout::new(2, is_wide, has_masks);
        config.place_msi(0x40, layout).expect("free");
        let before: Vec<_> = (0..64).map(|i| config.read(0x40 + 4 * i, 4)).collect();
        for reg in (0x40..0x100).step_by(4) {
            config.write(reg, 4, u32::MAX);
        }
        let mut expected = before;
        expected[0] |= 0x0071_0000;
        expected[1] = 0xffff_fffc;
        if is_wide {
            expected[2] = u32::MAX;
        }
        expected[data / 4] = 0xffff;
        if has_masks {
            expected[data / 4 + 1] = 0xf;
        }
        let after: Vec<_> = (0..64).map(|i| config.read(0x40 + 4 * i, 4)).collect();
        assert_eq!(after[..48], expected[..48], "{len} bytes");
        let high = if is_wide {
            u64::from(u32::MAX) << 32
        } else {
            0
        };
        let registers = MsiRegisters {
            is_enabled: true,
            allocated_log2: 2,
            address: high | 0xffff_fffc,
            data: 0xffff,
            mask: if has_masks { 0xf } else { 0 },
        };
        assert_eq!(config.msi_registers(), Some(registers));
    }
}

#[test]
fn pin_is_not_asserted_while_msi_is_on() {
    let mut config = space();
    config.set_pin(1);
    let layout = MsiLayout::new(0, true, false);
    config.place_msi(0x40, layout).expect("free");
    assert!(config.set_interrupt(true));
    config.write(0x42, 2, 1);
    assert!(!config.pin_level());
}
