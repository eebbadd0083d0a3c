use super::super::format::{Entry, Leaf};
use super::*;

#[test]
fn fields_lie_where_the_document_puts_them() {
    let e = AmdPte::from_bits;
    assert!(e(0x1).pr() && !e(0x2).pr());
    assert!(e(0x20).a() && e(0x40).d());
    assert_eq!(e(0xe00).next_level(), 7);
    assert_eq!(e(0x200).next_level(), 1);
    assert_eq!(e(0x1234_5000).addr(), 0x12345);
    assert_eq!(e(0xf_ffff_ffff_f000).addr(), 0xff_ffff_ffff);
    assert_eq!(e(0x07f0_0000_0000_0000).rsvd(), 0x7f);
    assert!(e(0x0800_0000_0000_0000).u());
    assert!(e(0x1000_0000_0000_0000).fc());
    assert!(e(0x2000_0000_0000_0000).ir());
    assert!(e(0x4000_0000_0000_0000).iw());
    assert!(e(0x8000_0000_0000_0000).ign2());
}

#[test]
fn words() {
    let leaf = |phys, access, level| AmdV1::leaf(PhysAddr::new(phys), access, level);
    assert_eq!(leaf(0x1234_5000, Access::Read, 1), 0x3000_0000_1234_5001);
    assert_eq!(leaf(0x1234_5000, Access::Write, 1), 0x5000_0000_1234_5001);
    assert_eq!(
        leaf(0x1220_0000, Access::ReadWrite, 2),
        0x7000_0000_1220_0001
    );
    let table = |page, level| AmdV1::table(PhysAddr::new(page), level);
    assert_eq!(table(0x1234_5000, 2), 0x6000_0000_1234_5201);
    assert_eq!(table(0x1234_5000, 4), 0x6000_0000_1234_5601);
}

#[test]
fn words_are_read_as_they_were_meant() {
    assert_eq!(AmdV1::decode(0, 2), Entry::Empty);
    assert_eq!(
        AmdV1::decode(0x6000_0000_0000_5201, 2),
        Entry::Table(PhysAddr::new(0x5000))
    );
    let leaf = Leaf {
        phys: PhysAddr::new(0x20_0000),
        access: Access::Write,
    };
    assert_eq!(AmdV1::decode(0x5000_0000_0020_0001, 2), Entry::Leaf(leaf));
}
