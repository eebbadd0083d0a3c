use super::*;

#[test]
fn context_descriptor_fields_lie_where_the_document_puts_them() {
    let d = |word: u128| ContextDescriptor::from_bits(word);
    assert_eq!(d(0x1).kind(), 1);
    assert_eq!(d(0x30).g(), Granularity::SELECTIVE);
    assert_eq!(d(0x10).g(), Granularity::GLOBAL);
    assert_eq!(d(0xffc0).rsvd0(), 0x3ff);
    assert_eq!(d(0xabcd_0000).did(), 0xabcd);
    assert_eq!(d(0x1234_0000_0000).sid(), 0x1234);
    assert_eq!(d(0x3_0000_0000_0000).fm(), 3);
    assert_eq!(d(0xfffc_0000_0000_0000).rsvd1(), 0x3fff);
    assert_eq!(d(1 << 64).rsvd2(), 1);
}

#[test]
fn iotlb_descriptor_fields_lie_where_the_document_puts_them() {
    let d = |word: u128| IotlbDescriptor::from_bits(word);
    assert_eq!(d(0x2).kind(), 2);
    assert_eq!(d(0x20).g(), Granularity::DOMAIN);
    assert!(d(0x40).dw() && !d(0x80).dw());
    assert!(d(0x80).dr() && !d(0x40).dr());
    assert_eq!(d(0xff00).rsvd0(), 0xff);
    assert_eq!(d(0xabcd_0000).did(), 0xabcd);
    assert_eq!(d(0xffff_ffff_0000_0000).rsvd1(), 0xffff_ffff);
    assert_eq!(d(0x3f << 64).am(), 0x3f);
    assert!(d(0x40 << 64).ih());
    assert_eq!(d(0xf80 << 64).rsvd2(), 0x1f);
    assert_eq!(d(0x1234_5678_9000 << 64).addr(), 0x1_2345_6789);
}

#[test]
fn wait_descriptor_fields_lie_where_the_document_puts_them() {
    let d = |word: u128| WaitDescriptor::from_bits(word);
    assert_eq!(d(0x5).kind(), 5);
    assert!(d(0x10).iflag() && !d(0x20).iflag());
    assert!(d(0x20).sw() && !d(0x10).sw());
    assert!(d(0x40).fence());
    assert_eq!(d(0xffff_ff80).rsvd0(), 0x1ff_ffff);
    assert_eq!(d(0xdead_beef_0000_0000).data(), 0xdead_beef);
    assert_eq!(d(0x3 << 64).rsvd1(), 3);
    assert_eq!(d(0x1000 << 64).addr(), 0x400);
}

#[test]
fn descriptor_type_has_its_high_part_in_bits_11_to_9() {
    assert_eq!(DescriptorType::of(0x5), DescriptorType::WAIT);
    assert_eq!(DescriptorType::of(0xe05), DescriptorType(0x75));
    assert_eq!(DescriptorType::of(0x1f5), DescriptorType::WAIT);
}

#[test]
fn interrupt_entry_descriptor_fields_lie_where_the_document_puts_them() {
    let d = |word: u128| InterruptEntryDescriptor::from_bits(word);
    assert_eq!(d(0x4).kind(), 4);
    assert!(d(0x10).is_selective());
    assert_eq!(d(0x07ff_ffe0).rsvd0(), 0x3f_ffff);
    assert_eq!(d(0xf800_0000).im(), 0x1f);
    assert_eq!(d(0xabcd_0000_0000).iidx(), 0xabcd);
    assert_eq!(d(0xffff_0000_0000_0000).rsvd1(), 0xffff);
}
