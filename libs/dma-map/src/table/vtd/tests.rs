use super::super::format::{Entry, Leaf};
use super::*;

#[test]
fn second_level_entry_fields_lie_where_the_document_puts_them() {
    let e = SlPte::from_bits;
    assert!(e(0x1).r() && !e(0x2).r());
    assert!(e(0x2).w() && !e(0x1).w());
    assert_eq!(e(0x7c).ign0(), 0x1f);
    assert!(e(0x80).ps());
    assert_eq!(e(0x700).ign1(), 7);
    assert!(e(0x800).snp());
    assert_eq!(e(0x1234_5000).addr(), 0x12345);
    assert_eq!(e(0xf_ffff_ffff_f000).addr(), 0xff_ffff_ffff);
    assert_eq!(e(0x3ff0_0000_0000_0000).ign2(), 0x3ff);
    assert!(e(0x4000_0000_0000_0000).tm());
    assert!(e(0x8000_0000_0000_0000).ign3());
}

#[test]
fn leaf_words() {
    let leaf = |phys, access, level| VtdSecondLevel::leaf(PhysAddr::new(phys), access, level);
    assert_eq!(leaf(0x1234_5000, Access::Read, 1), 0x1234_5001);
    assert_eq!(leaf(0x1234_5000, Access::Write, 1), 0x1234_5002);
    assert_eq!(leaf(0x1234_5000, Access::ReadWrite, 1), 0x1234_5003);
    assert_eq!(leaf(0x1220_0000, Access::ReadWrite, 2), 0x1220_0083);
    assert_eq!(
        leaf(0xf_ffff_c000_0000, Access::Write, 3),
        0x000f_ffff_c000_0082
    );
    assert_eq!(
        VtdSecondLevel::table(PhysAddr::new(0xa_bcde_f000), 4),
        0x000a_bcde_f003
    );
}

#[test]
fn words_are_read_as_they_were_meant() {
    let decode = VtdSecondLevel::decode;
    assert_eq!(decode(0, 3), Entry::Empty);
    assert_eq!(
        decode(0x5003, 3),
        Entry::Table(PhysAddr::new(0x5000)),
        "R, W, no PS"
    );
    let leaf = |phys, access| {
        let phys = PhysAddr::new(phys);
        Entry::Leaf(Leaf { phys, access })
    };
    assert_eq!(decode(0x5003, 1), leaf(0x5000, Access::ReadWrite));
    assert_eq!(decode(0x20_0081, 2), leaf(0x20_0000, Access::Read));
    assert_eq!(
        decode(0x3ff0_0000_0000_5002, 1),
        leaf(0x5000, Access::Write),
        "what is ignored"
    );
}
