//! Golden words: literals worked out from the document, one per field.

use super::*;

#[test]
fn offsets_are_those_of_the_document() {
    let offsets = [VER, CAP, ECAP, GCMD, GSTS, RTADDR, CCMD, FSTS];
    assert_eq!(offsets, [0x00, 0x08, 0x10, 0x18, 0x1c, 0x20, 0x28, 0x34]);
    assert_eq!([FECTL, FEDATA, FEADDR, FEUADDR], [0x38, 0x3c, 0x40, 0x44]);
    assert_eq!([IQH, IQT, IQA, ICS], [0x80, 0x88, 0x90, 0x9c]);
    assert_eq!([IECTL, IEDATA, IEADDR, IEUADDR], [0xa0, 0xa4, 0xa8, 0xac]);
    assert_eq!([IQER, IRTA], [0xb0, 0xb8]);
}

#[test]
fn version_fields_lie_where_the_document_puts_them() {
    assert_eq!(Version::from_bits(0x0f).min(), 0xf);
    assert_eq!(Version::from_bits(0xf0).max(), 0xf);
}

#[test]
fn capability_fields_lie_where_the_document_puts_them() {
    let c = Capability::from_bits;
    assert_eq!(c(0x7).nd(), 7);
    assert!(c(0x8).afl());
    assert!(c(0x10).rwbf());
    assert!(c(0x20).plmr());
    assert!(c(0x40).phmr());
    assert!(c(0x80).cm());
    assert_eq!(c(0x1f00).sagaw(), 0x1f);
    assert_eq!(c(0x3f_0000).mgaw(), 0x3f);
    assert!(c(0x40_0000).zlr());
    assert_eq!(c(0x3_ff00_0000).fro(), 0x3ff);
    assert_eq!(c(0x3c_0000_0000).sllps(), 0xf);
    assert!(c(0x80_0000_0000).psi());
    assert_eq!(c(0xff00_0000_0000).nfr(), 0xff);
    assert_eq!(c(0x3f_0000_0000_0000).mamv(), 0x3f);
    assert!(c(0x40_0000_0000_0000).dwd());
    assert!(c(0x80_0000_0000_0000).drd());
    assert!(c(0x100_0000_0000_0000).fs1gp());
    assert!(c(0x800_0000_0000_0000).pi());
    assert!(c(0x1000_0000_0000_0000).fs5lp());
    assert!(c(0x2000_0000_0000_0000).ecmds());
    assert!(c(0x4000_0000_0000_0000).esirtps());
    assert!(c(0x8000_0000_0000_0000).esrtps());
}

#[test]
fn capability_of_another_implementation_reads_as_it_was_meant() {
    // QEMU 7.2 with aw-bits=48, as a guest read it.
    let c = Capability::from_bits(0x00d2_008c_222f_0606);
    assert_eq!((c.nd(), c.sagaw(), c.mgaw()), (6, 0b110, 47));
    assert_eq!((c.fro(), c.sllps(), c.nfr(), c.mamv()), (0x22, 3, 0, 18));
    assert!(c.psi() && c.dwd() && c.drd() && !c.zlr() && !c.cm());
    let e = ExtendedCapability::from_bits(0x00f0_0f4a);
    assert!(e.qi() && e.ir() && e.pt() && !e.c() && !e.eim() && !e.sc());
    assert_eq!((e.iro(), e.mhmv()), (0xf, 15));
}

#[test]
fn extended_capability_fields_lie_where_the_document_puts_them() {
    let e = ExtendedCapability::from_bits;
    assert!(e(0x1).c());
    assert!(e(0x2).qi());
    assert!(e(0x4).dt());
    assert!(e(0x8).ir());
    assert!(e(0x10).eim());
    assert!(e(0x40).pt());
    assert!(e(0x80).sc());
    assert_eq!(e(0x3_ff00).iro(), 0x3ff);
    assert_eq!(e(0xf0_0000).mhmv(), 0xf);
    assert!(e(0x800_0000_0000).smts());
}

#[test]
fn global_command_and_status_bits_lie_where_the_document_puts_them() {
    let g = GlobalCommand::from_bits;
    assert!(g(0x8000_0000).te());
    assert!(g(0x4000_0000).srtp());
    assert!(g(0x2000_0000).sfl());
    assert!(g(0x1000_0000).eafl());
    assert!(g(0x0800_0000).wbf());
    assert!(g(0x0400_0000).qie());
    assert!(g(0x0200_0000).ire());
    assert!(g(0x0100_0000).sirtp());
    assert!(g(0x0080_0000).cfi());
    let s = GlobalStatus::from_bits;
    assert!(s(0x8000_0000).tes());
    assert!(s(0x4000_0000).rtps());
    assert!(s(0x2000_0000).fls());
    assert!(s(0x1000_0000).afls());
    assert!(s(0x0800_0000).wbfs());
    assert!(s(0x0400_0000).qies());
    assert!(s(0x0200_0000).ires());
    assert!(s(0x0100_0000).irtps());
    assert!(s(0x0080_0000).cfis());
}

#[test]
fn context_command_fields_lie_where_the_document_puts_them() {
    let c = ContextCommand::from_bits;
    assert_eq!(c(0xffff).did(), 0xffff);
    assert_eq!(c(0xffff_0000).sid(), 0xffff);
    assert_eq!(c(0x3_0000_0000).fm(), 3);
    assert_eq!(c(0x1800_0000_0000_0000).caig(), 3);
    assert_eq!(c(0x6000_0000_0000_0000).cirg(), 3);
    assert!(c(0x8000_0000_0000_0000).icc());
}

#[test]
fn fault_status_and_event_fields_lie_where_the_document_puts_them() {
    let f = FaultStatus::from_bits;
    assert!(f(0x01).pfo());
    assert!(f(0x02).ppf());
    assert!(f(0x10).iqe());
    assert!(f(0x20).ice());
    assert!(f(0x40).ite());
    assert!(f(0x80).pro());
    assert_eq!(f(0xff00).fri(), 0xff);
    assert!(EventControl::from_bits(0x8000_0000).im());
    assert!(EventControl::from_bits(0x4000_0000).ip());
    assert!(CompletionStatus::from_bits(1).iwc());
}

#[test]
fn queue_register_fields_lie_where_the_document_puts_them() {
    let a = QueueAddress::from_bits;
    assert_eq!(a(0x7).qs(), 7);
    assert!(a(0x800).dw());
    assert_eq!(a(0x1234_5000).iqa(), 0x12345);
    let i = InterruptTableAddress::from_bits;
    assert_eq!(i(0xf).s(), 15);
    assert!(i(0x800).eime());
    assert_eq!(i(0x1234_5000).irta(), 0x12345);
}

#[test]
fn iotlb_register_fields_lie_where_the_document_puts_them() {
    let a = InvalidateAddress::from_bits;
    assert_eq!(a(0x3f).am(), 0x3f);
    assert!(a(0x40).ih());
    assert_eq!(a(0x1234_5000).addr(), 0x12345);
    let i = IotlbInvalidate::from_bits;
    assert_eq!(i(0xffff_0000_0000).did(), 0xffff);
    assert!(i(0x1_0000_0000_0000).dw());
    assert!(i(0x2_0000_0000_0000).dr());
    assert_eq!(i(0x0600_0000_0000_0000).iaig(), 3);
    assert_eq!(i(0x3000_0000_0000_0000).iirg(), 3);
    assert!(i(0x8000_0000_0000_0000).ivt());
}
