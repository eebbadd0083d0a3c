use super::*;
use guest_mem::Iova;

#[test]
fn any_reserved_bit_makes_a_descriptor_wrong() {
    let good: [(u128, u128); 3] = [
        // Bits that may be set: type, G, DID, SID, FM.
        (0x31, 0x3_ffff_ffff_003f),
        // type, G, DW, DR, DID; AM, IH, ADDR.
        (0x32, 0xffff_ffff_ffff_f07f << 64 | 0xffff_00ff),
        // type, IF, SW, FN, data; address.
        (0x25, 0xffff_ffff_ffff_fffc << 64 | 0xffff_ffff_0000_007f),
    ];
    for (descriptor, allowed) in good {
        assert!(check(descriptor).is_some(), "{descriptor:#x}");
        for bit in 0..128 {
            if allowed & 1 << bit == 0 {
                assert_eq!(
                    check(descriptor | 1 << bit),
                    None,
                    "{descriptor:#x} bit {bit}"
                );
            }
        }
    }
}

#[test]
fn types_that_are_not_advertised_are_wrong() {
    for kind in [0u128, 3, 4, 6, 7, 8, 9, 10, 15] {
        assert_eq!(check(kind | 0x10), None, "type {kind}");
    }
}

#[test]
fn reserved_granularity_and_masks_past_mamv_are_wrong() {
    assert_eq!(check(0x01), None);
    assert_eq!(check(0x02), None);
    assert_eq!(check(19 << 64 | 0x32), None);
    // The mask means nothing to a domain flush.
    assert!(check(19 << 64 | 0x22).is_some());
    // Address bits under the mask are ignored.
    assert_eq!(
        check((0x7000 | 1) << 64 | 0x5_0032),
        Some(Checked::Invalidate(Scope::IotlbPages {
            did: 5,
            iova: Iova::new(0x6000),
            pages: 2
        }))
    );
}
