use super::*;

#[test]
fn fault_recording_fields_lie_where_the_document_puts_them() {
    let r = FaultRecording::from_bits;
    assert_eq!(r(0x1234_5000).fi(), 0x12345);
    assert_eq!(r(0x00ab << 64).sid(), 0xab);
    // FR is bits 7:0 of the highest dword.
    assert_eq!(r(0x5 << 96).fr(), FaultReason::WRITE);
    assert_eq!(r(0xff << 96).fr(), FaultReason(0xff));
    assert!(r(0x4000_0000 << 96).t() && !r(0x8000_0000 << 96).t());
    assert!(r(0x8000_0000 << 96).f() && !r(0x4000_0000 << 96).f());
}

#[test]
fn fault_reasons_have_the_numbers_of_the_document() {
    let reasons = [
        (FaultReason::ROOT_NOT_PRESENT, 1),
        (FaultReason::CONTEXT_NOT_PRESENT, 2),
        (FaultReason::CONTEXT_INVALID, 3),
        (FaultReason::BEYOND_WIDTH, 4),
        (FaultReason::WRITE, 5),
        (FaultReason::READ, 6),
        (FaultReason::PTE_ACCESS, 7),
        (FaultReason::ROOT_ACCESS, 8),
        (FaultReason::CONTEXT_ACCESS, 9),
        (FaultReason::ROOT_RESERVED, 10),
        (FaultReason::CONTEXT_RESERVED, 11),
        (FaultReason::PTE_RESERVED, 12),
        (FaultReason::TRANSLATION_TYPE, 13),
        (FaultReason::INTERRUPT_RANGE, 14),
        (FaultReason::MESSAGE_RESERVED, 0x20),
        (FaultReason::INDEX_BEYOND_TABLE, 0x21),
        (FaultReason::INTERRUPT_NOT_PRESENT, 0x22),
        (FaultReason::INTERRUPT_TABLE_ACCESS, 0x23),
        (FaultReason::INTERRUPT_RESERVED, 0x24),
        (FaultReason::COMPATIBILITY_BLOCKED, 0x25),
        (FaultReason::SOURCE_REFUSED, 0x26),
    ];
    for (reason, number) in reasons {
        assert_eq!(reason.0, number);
    }
}

#[test]
fn fpd_silences_only_what_comes_after_the_context_entry() {
    assert!(FaultReason::WRITE.is_qualified());
    assert!(FaultReason::CONTEXT_NOT_PRESENT.is_qualified());
    assert!(!FaultReason::ROOT_NOT_PRESENT.is_qualified());
    assert!(!FaultReason::CONTEXT_ACCESS.is_qualified());
}
