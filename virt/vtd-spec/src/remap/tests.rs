use super::*;

#[test]
fn interrupt_entry_fields_lie_where_the_document_puts_them() {
    let e = InterruptEntry::from_bits;
    assert!(e(0x1).p() && e(0x2).fpd() && e(0x4).dm() && e(0x8).rh() && e(0x10).tm());
    assert_eq!(e(0xe0).dlm(), 7);
    assert_eq!(e(0xf00).avail(), 0xf);
    assert_eq!(e(0x7000).rsvd0(), 7);
    assert!(e(0x8000).im());
    assert_eq!(e(0x41_0000).v(), 0x41);
    assert_eq!(e(0xff00_0000).rsvd1(), 0xff);
    assert_eq!(e(0x1234_5678_0000_0000).dst(), 0x1234_5678);
    assert_eq!(e(0xabcd << 64).sid(), 0xabcd);
    assert_eq!(e(0x3_0000 << 64).sq(), 3);
    assert_eq!(e(0x4_0000 << 64).svt(), SourceValidation::Requester);
    assert_eq!(e(0x8_0000 << 64).svt(), SourceValidation::Bus);
    assert_eq!(e(0xffff_ffff_fff0_0000 << 64).rsvd2(), 0xfff_ffff_ffff);
}

#[test]
fn messages_that_name_an_entry_have_its_number_where_the_document_puts_it() {
    // Handle 5: bits 19:5; the format is bit 4, the sixteenth bit of the handle bit 2.
    assert_eq!(RemappableAddress::of(5).into_bits(), 0xfee0_00b0);
    assert_eq!(RemappableAddress::of(0x8000).into_bits(), 0xfee0_0014);
    assert_eq!(RemappableAddress::of(0x7fff).into_bits(), 0xfeef_fff0);
    assert!(RemappableAddress::from_bits(0x8).shv());
    let r = RemappableRedirection::from_bits;
    assert_eq!(r(0x41).vector(), 0x41);
    assert_eq!(r(0x700).zero(), 7);
    assert!(r(0x800).handle_high() && r(0x1000).is_pending() && r(0x2000).is_low());
    assert!(r(0x4000).remote_irr() && r(0x8000).is_level() && r(0x1_0000).is_masked());
    assert!(r(1 << 48).is_remappable());
    assert_eq!(r(0xfffe << 48).handle_low(), 0x7fff);
}
