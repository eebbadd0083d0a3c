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
