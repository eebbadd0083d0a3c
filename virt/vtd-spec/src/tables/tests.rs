use super::*;

#[test]
fn root_entry_fields_lie_where_the_document_puts_them() {
    let e = RootEntry::from_bits;
    assert!(e(0x1).p());
    assert_eq!(e(0xffe).rsvd0(), 0x7ff);
    assert_eq!(e(0x1234_5000).ctp(), 0x12345);
    assert_eq!(e(0x8000_0000_0000_0000).ctp(), 0x8_0000_0000_0000);
    assert_eq!(e(1 << 64).rsvd1(), 1);
}

#[test]
fn context_entry_fields_lie_where_the_document_puts_them() {
    let e = ContextEntry::from_bits;
    assert!(e(0x1).p());
    assert!(e(0x2).fpd() && !e(0x1).fpd());
    assert_eq!(e(0x0).tt(), TranslationType::SecondLevel);
    assert_eq!(e(0x4).tt(), TranslationType::SecondLevelWithAts);
    assert_eq!(e(0x8).tt(), TranslationType::PassThrough);
    assert_eq!(e(0xc).tt(), TranslationType::Reserved);
    assert_eq!(e(0xff0).rsvd0(), 0xff);
    assert_eq!(e(0x1234_5000).slptptr(), 0x12345);
    assert_eq!(e(0x2 << 64).aw(), 2);
    assert_eq!(e(0x78 << 64).avail(), 0xf);
    assert!(e(0x80 << 64).rsvd1());
    assert_eq!(e(0xab_cd00 << 64).did(), 0xabcd);
    assert_eq!(e(0x100_0000 << 64).rsvd2(), 1);
}

#[test]
fn second_level_entry_fields_lie_where_the_document_puts_them() {
    let e = SlPte::from_bits;
    assert!(e(0x1).r() && e(0x2).w() && !e(0x1).w() && !e(0x2).r());
    assert_eq!((e(0x7c).ign0(), e(!0x7c).ign0()), (0x1f, 0));
    assert!(e(0x80).ps() && !e(!0x80).ps());
    assert_eq!((e(0x700).ign1(), e(!0x700).ign1()), (7, 0));
    assert!(e(0x800).snp() && !e(!0x800).snp());
    assert_eq!(e(0x1234_5000).addr(), 0x12345);
    assert_eq!(e(0xf_ffff_ffff_f000).addr(), 0xff_ffff_ffff);
    assert_eq!(e(!0xf_ffff_ffff_f000).addr(), 0);
    assert_eq!(e(0x3ff0_0000_0000_0000).ign2(), 0x3ff);
    assert!(e(1 << 62).tm() && !e(1 << 62).ign3());
    assert!(e(1 << 63).ign3() && !e(1 << 63).tm());
}
