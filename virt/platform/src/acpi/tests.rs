//! The image parsed again, as an operating system does.

use super::*;

fn word(image: &[u8], at: usize, len: usize) -> u64 {
    image[at..at + len]
        .iter()
        .rev()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn sum(table: &[u8]) -> u8 {
    table.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// Returns the tables that the XSDT names, by signature.
fn tables(image: &[u8]) -> Vec<(String, &[u8])> {
    assert_eq!(&image[..8], b"RSD PTR ");
    assert_eq!(sum(&image[..20]), 0, "RSDP, first part");
    assert_eq!(sum(&image[..36]), 0, "RSDP, all");
    let table = |gpa: u64| {
        let at = (gpa - layout::ACPI_RSDP) as usize;
        let table = &image[at..at + word(image, at + 4, 4) as usize];
        assert_eq!(sum(table), 0, "checksum at {gpa:#x}");
        (String::from_utf8(table[..4].to_vec()).unwrap(), table)
    };
    let (signature, xsdt) = table(word(image, 24, 8));
    assert_eq!(signature, "XSDT");
    let mut found: Vec<_> = (36..xsdt.len())
        .step_by(8)
        .map(|at| table(word(xsdt, at, 8)))
        .collect();
    let fadt = found
        .iter()
        .find(|(signature, _)| signature == "FACP")
        .unwrap()
        .1;
    found.push(table(word(fadt, 140, 8)));
    found
}

fn find<'a>(tables: &[(String, &'a [u8])], signature: &str) -> &'a [u8] {
    tables.iter().find(|(name, _)| name == signature).unwrap().1
}

#[test]
fn every_table_is_reached_from_the_rsdp_with_a_good_checksum() {
    let image = build(&AcpiConfig {
        cpus: 1,
        ..AcpiConfig::default()
    })
    .unwrap();
    let names: Vec<_> = tables(&image).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["FACP", "APIC", "MCFG", "DSDT"]);
}

#[test]
fn the_fadt_is_hardware_reduced_with_sleep_and_reset_ports() {
    let image = build(&AcpiConfig {
        cpus: 1,
        ..AcpiConfig::default()
    })
    .unwrap();
    let tables = tables(&image);
    let fadt = find(&tables, "FACP");
    let flags = word(fadt, 112, 4);
    assert!(flags & 1 << 20 != 0, "HW_REDUCED_ACPI");
    assert!(flags & 1 << 10 != 0, "RESET_REG_SUP");
    // Generic address structures: space 1 (I/O), 8 bits, byte access.
    for (at, port) in [(116, 0x602), (244, 0x600), (256, 0x601)] {
        assert_eq!(word(fadt, at, 4), 0x0100_0801);
        assert_eq!(word(fadt, at + 4, 8), port);
    }
    assert_eq!(fadt[128], layout::RESET_VALUE);
    assert_eq!(word(fadt, 109, 2), 0x24, "no VGA, no RTC");
}

#[test]
fn the_madt_lists_every_vcpu_and_the_ioapic() {
    let image = build(&AcpiConfig {
        cpus: 16,
        ..AcpiConfig::default()
    })
    .unwrap();
    let tables = tables(&image);
    let madt = find(&tables, "APIC");
    assert_eq!(word(madt, 36, 4), 0xfee0_0000);
    let mut at = 44;
    let mut cpus = Vec::new();
    while madt[at] == 0 {
        assert_eq!(madt[at + 1], 8);
        assert_eq!(word(madt, at + 4, 4), 1, "enabled");
        cpus.push(madt[at + 3]);
        at += 8;
    }
    assert_eq!(cpus, (0..16).collect::<Vec<_>>());
    assert_eq!(
        madt[at..at + 12],
        [1, 12, 0, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0]
    );
    assert_eq!(at + 12, madt.len());
}

#[test]
fn the_mcfg_covers_bus_0_only() {
    let image = build(&AcpiConfig {
        cpus: 1,
        ..AcpiConfig::default()
    })
    .unwrap();
    let tables = tables(&image);
    let mcfg = find(&tables, "MCFG");
    assert_eq!(word(mcfg, 44, 8), 0xe000_0000);
    assert_eq!(mcfg[52..56], [0, 0, 0, 0]);
}

/// Returns a complete table of `len` bytes.
fn table(signature: &[u8; 4], len: u32) -> Vec<u8> {
    let mut table = vec![0x5a; len as usize];
    table[..4].copy_from_slice(signature);
    table[4..8].copy_from_slice(&len.to_le_bytes());
    table[9] = 0;
    table[9] = 0u8.wrapping_sub(sum(&table));
    table
}

fn with_tables(tables: Vec<Vec<u8>>) -> AcpiConfig {
    AcpiConfig {
        cpus: 1,
        tables,
        ..AcpiConfig::default()
    }
}

#[test]
fn further_tables_follow_the_mcfg_as_they_are_and_in_order() {
    // Neither length is a multiple of 64; the second table is the longer one.
    let (dmar, viot) = (table(b"DMAR", 72), table(b"VIOT", 136));
    for [first, second] in [[&dmar, &viot], [&viot, &dmar]] {
        let image = build(&with_tables(vec![first.clone(), second.clone()])).unwrap();
        let tables = tables(&image);
        let names: Vec<_> = tables.iter().map(|(name, _)| name.as_bytes()).collect();
        let expected = [
            b"FACP",
            b"APIC",
            b"MCFG",
            &first[..4],
            &second[..4],
            b"DSDT",
        ];
        assert_eq!(names, expected);
        assert_eq!(tables[3].1, first);
        assert_eq!(tables[4].1, second);
        let at = |index: usize| tables[index].1.as_ptr().addr() - image.as_ptr().addr();
        assert_eq!(at(3) % 64, 0);
        assert_eq!(at(4), at(3) + first.len().next_multiple_of(64));
    }
}

#[test]
fn tables_beyond_their_area_are_refused() {
    let room = layout::ACPI_END - layout::ACPI_RSDP;
    let half = u32::try_from(room / 2).unwrap();
    assert!(build(&with_tables(vec![table(b"DMAR", half)])).is_ok());
    let both = vec![table(b"DMAR", half), table(b"VIOT", half)];
    assert!(build(&with_tables(both)).is_err());
}

#[test]
fn incomplete_tables_are_a_fault_of_their_owner() {
    let good = table(b"VIOT", 48);
    assert!(is_complete(&good));
    let mut wrong_sum = good.clone();
    wrong_sum[9] ^= 1;
    let mut cut_off = good.clone();
    // The checksum is still right.
    cut_off[46] = cut_off[46].wrapping_add(cut_off.pop().unwrap());
    for table in [&wrong_sum, &cut_off, &table(b"VIOT", 35), &vec![]] {
        assert!(!is_complete(table), "{table:x?}");
    }
}

#[test]
fn the_dsdt_names_its_devices_and_soft_off() {
    let aml = dsdt::aml(&PciResources::default());
    let has = |needle: &[u8]| aml.windows(needle.len()).any(|window| window == needle);
    for name in [&b"PCI0"[..], b"COM1", b"MBRD", b"_S5_"] {
        assert!(has(name), "{}", String::from_utf8_lossy(name));
    }
    // EISA ids: PNP0A08, PNP0501, PNP0C02.
    for id in [0x080a_d041u32, 0x0105_d041, 0x020c_d041] {
        assert!(has(&id.to_le_bytes()), "{id:#x}");
    }
    // \_S5: package of four, the sleep type a byte constant.
    assert!(has(&[b'_', b'S', b'5', b'_', 0x12, 0x07, 0x04, 0x0a, 0x05]));
}

#[test]
fn the_power_button_is_notified_by_a_generic_event_device() {
    let aml = dsdt::aml(&PciResources::default());
    // ACPI §20.2: a device is ExtOp 5B, DeviceOp 82, length, name; §6.1.5: EISA id 41 D0 0C 0C is
    // PNP0C0C.
    let mut button = b"\x5b\x82\x15PWRB".to_vec();
    button.extend(b"\x08_HID\x0c\x41\xd0\x0c\x0c");
    button.extend(b"\x08_UID\x00");
    let mut events = b"\x5b\x82\x3cGED_".to_vec();
    events.extend(b"\x08_HID\x0dACPI0013\x00");
    events.extend(b"\x08_UID\x00");
    // §6.4.3.6: an extended interrupt, consumer, edge, active high, exclusive, one: global
    // interrupt 9; end tag.
    events.extend(b"\x08_CRS\x11\x0e\x0a\x0b\x89\x06\x00\x03\x01\x09\x00\x00\x00\x79\x00");
    // Method (_EVT, 1, Serialized) { Notify (PWRB, 0x80) }: status, §5.6.6: the button was pressed.
    events.extend(b"\x14\x0d_EVT\x09\x86PWRB\x0a\x80");
    for device in [button, events] {
        let has = aml.windows(device.len()).any(|part| part == device);
        assert!(has, "{device:x?} is not in {aml:x?}");
    }
}

#[test]
fn the_panic_notice_is_a_pvpanic_device_at_its_port() {
    let aml = dsdt::aml(&PciResources::default());
    let mut device = b"\x5b\x82\x2dPEVT".to_vec();
    device.extend(b"\x08_HID\x0dQEMU0001\x00");
    device.extend(b"\x08_UID\x00");
    // ACPI §6.4.2.5: an I/O port descriptor, 16 bits decoded, from 505h to 505h, alignment 1, one
    // port; end tag.
    device.extend(b"\x08_CRS\x11\x0d\x0a\x0a\x47\x01\x05\x05\x05\x05\x01\x01\x79\x00");
    let has = aml.windows(device.len()).any(|part| part == device);
    assert!(has, "{device:x?} is not in {aml:x?}");
}

#[test]
fn a_window_beyond_4_gib_and_pins_appear_where_they_are_needed() {
    let plain = dsdt::aml(&PciResources::default());
    let pci = PciResources {
        high: 0x70_0000_0000..0x71_0000_0000,
        pins: vec![PinRoute {
            slot: 3,
            pin: 1,
            input: 19,
        }],
        ..PciResources::default()
    };
    let aml = dsdt::aml(&pci);
    let has = |aml: &[u8], needle: &[u8]| aml.windows(needle.len()).any(|part| part == needle);
    // A QWord address space descriptor's smallest and largest address.
    let mut window = 0x70_0000_0000_u64.to_le_bytes().to_vec();
    window.extend(0x70_ffff_ffff_u64.to_le_bytes());
    // An entry: slot 3 any function, INTA, no link device, global interrupt 19.
    let route = [0x0c, 0xff, 0xff, 0x03, 0x00, 0x00, 0x00, 0x0a, 19];
    for needle in [&window[..], b"_PRT", &route] {
        assert!(has(&aml, needle) && !has(&plain, needle), "{needle:x?}");
    }
}

#[test]
fn a_slot_that_may_be_ejected_is_a_device_whose_ej0_writes_its_number() {
    let pci = PciResources {
        ejectable: vec![5, 31],
        ..PciResources::default()
    };
    let aml = dsdt::aml(&pci);
    // ACPI §20.2.5.2: OperationRegion (EJRG, SystemIO, 0x610, 1), and a field of byte accesses, no
    // lock, writes as zeroes: 8 bits.
    let mut wanted = b"\x5b\x80EJRG\x01\x0b\x10\x06\x01".to_vec();
    wanted.extend(b"\x5b\x81\x0bEJRG\x41EJSL\x08");
    for (name, slot) in [(b"SL05", 5), (b"SL31", 31)] {
        // Device (SL05) { Name (_ADR, 0x50000) Name (_SUN, 5) Method (_EJ0, 1, Serialized) { EJSL =
        // 5 } }
        wanted.extend(b"\x5b\x82\x24");
        wanted.extend(name);
        wanted.extend([&b"\x08_ADR\x0c\0\0"[..], &[slot, 0]].concat());
        wanted.extend([&b"\x08_SUN\x0a"[..], &[slot]].concat());
        wanted.extend([&b"\x14\x0d_EJ0\x09\x70\x0a"[..], &[slot], b"EJSL"].concat());
    }
    let has = aml.windows(wanted.len()).any(|part| part == wanted);
    assert!(has, "{wanted:x?} is not in {aml:x?}");
    let plain = dsdt::aml(&PciResources::default());
    assert!(
        !plain
            .windows(4)
            .any(|part| part == b"_EJ0" || part == b"EJRG")
    );
}

/// The ACPI component architecture's disassembler and compiler read every block, if they are
/// installed.
#[test]
fn iasl_reads_the_dsdt_and_compiles_it_again() {
    use std::process::Command;
    if Command::new("iasl").arg("-v").output().is_err() {
        println!("skipped: iasl (acpica-tools) is not installed");
        return;
    }
    let all = PciResources {
        high: layout::PCI_WINDOW_HIGH,
        pins: vec![PinRoute {
            slot: 3,
            pin: 1,
            input: 19,
        }],
        ejectable: vec![4, 5],
    };
    for pci in [PciResources::default(), all] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("dsdt.aml"), dsdt(&pci)).unwrap();
        for (options, file) in [("-d", "dsdt.aml"), ("-oa", "dsdt.dsl")] {
            let output = Command::new("iasl")
                .args([options, file])
                .current_dir(folder.path())
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{options} {file}: {text}");
        }
        let source = std::fs::read_to_string(folder.path().join("dsdt.dsl")).unwrap();
        let ejections = source.matches("Method (_EJ0, 1, Serialized)").count();
        assert_eq!(ejections, pci.ejectable.len(), "{source}");
    }
}
