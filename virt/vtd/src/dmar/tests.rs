use super::*;

#[test]
fn one_unit_table_has_the_bytes_of_the_document() {
    let table = build(&DmarConfig::single_unit(46, 0xfed9_0000));
    #[rustfmt::skip]
        let golden = [
            b'D', b'M', b'A', b'R', 64, 0, 0, 0, 1, 0,
            b'E', b'X', b'I', b'T', b'L', b'S',
            b'E', b'X', b'I', b'T', b'L', b'E', b'S', b'S', 1, 0, 0, 0,
            b'E', b'X', b'T', b'L', 1, 0, 0, 0,
            45, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 16, 0, 1, 0, 0, 0, 0, 0, 0xd9, 0xfe, 0, 0, 0, 0,
        ];
    let mut without_sum = table.clone();
    without_sum[CHECKSUM] = 0;
    assert_eq!(without_sum, golden);
    assert_eq!(
        table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)),
        0
    );
}

#[test]
fn two_units_have_the_bytes_of_the_document_the_one_for_the_rest_last() {
    let functions = [SourceId::new(0, 5, 0), SourceId::new(0, 0x1f, 7)];
    let config = DmarConfig::single_unit(39, 0xfed9_0000).with_unit_for(0xfed9_1000, &functions);
    let table = build(&config);
    #[rustfmt::skip]
        let golden = [
            // The header: 96 bytes in all, a host address width of 39 bits.
            b'D', b'M', b'A', b'R', 96, 0, 0, 0, 1, 0,
            b'E', b'X', b'I', b'T', b'L', b'S',
            b'E', b'X', b'I', b'T', b'L', b'E', b'S', b'S', 1, 0, 0, 0,
            b'E', b'X', b'T', b'L', 1, 0, 0, 0,
            38, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            // A DRHD of 32 bytes without INCLUDE_PCI_ALL, and two endpoints.
            0, 0, 32, 0, 0, 0, 0, 0, 0, 0x10, 0xd9, 0xfe, 0, 0, 0, 0,
            1, 8, 0, 0, 0, 0, 5, 0,
            1, 8, 0, 0, 0, 0, 0x1f, 7,
            // A DRHD of 16 bytes with it.
            0, 0, 16, 0, 1, 0, 0, 0, 0, 0, 0xd9, 0xfe, 0, 0, 0, 0,
        ];
    let mut without_sum = table.clone();
    without_sum[CHECKSUM] = 0;
    assert_eq!(without_sum, golden);
    let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    assert_eq!(sum, 0);
    let three = config.with_unit_for(0xfed9_2000, &[SourceId::new(0, 6, 0)]);
    let bases: Vec<u64> = three.units.iter().map(|unit| unit.base).collect();
    assert_eq!(bases, [0xfed9_1000, 0xfed9_2000, 0xfed9_0000]);
}

#[test]
fn unit_of_another_segment_may_stand_behind() {
    let mut config = DmarConfig::single_unit(39, 0xfed9_0000);
    config.units.push(Drhd {
        segment: 1,
        ..config.units[0].clone()
    });
    assert_eq!(build(&config).len(), 80);
}

#[test]
#[should_panic(expected = "stands behind")]
fn unit_behind_the_one_for_the_rest_is_refused() {
    let mut config = DmarConfig::single_unit(39, 0xfed9_0000);
    config.units.push(Drhd {
        include_all: false,
        ..config.units[0].clone()
    });
    build(&config);
}

#[test]
fn scopes_follow_their_unit() {
    let mut config = DmarConfig::single_unit(39, 0xfed9_0000);
    config.units[0].scopes.push(Scope {
        kind: ScopeType::IoApic,
        enumeration_id: 5,
        device: SourceId::new(0xff, 0x1f, 3),
    });
    let table = build(&config);
    assert_eq!(table.len(), 72);
    assert_eq!(table[4], 72);
    assert_eq!(table[50], 24);
    assert_eq!(table[64..], [3, 8, 0, 0, 5, 0xff, 0x1f, 3]);
}

#[test]
#[should_panic(expected = "host address width")]
fn absurd_host_address_width_is_refused() {
    build(&DmarConfig::single_unit(0, 0xfed9_0000));
}
