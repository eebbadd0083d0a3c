use super::*;

#[test]
fn vtd_words() {
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
fn vtd_words_are_read_as_they_were_meant() {
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

#[test]
fn amd_words() {
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
fn amd_words_are_read_as_they_were_meant() {
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
