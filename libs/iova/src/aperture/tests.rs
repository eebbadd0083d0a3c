use super::*;

fn range(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).expect("fits")
}

#[test]
fn reserved_regions_cut_the_aperture_and_may_overlap() {
    let a = Aperture::new(
        IovaPfn::new(10),
        IovaPfn::new(99),
        &[range(40, 10), range(5, 10), range(45, 10), range(95, 50)],
    )
    .expect("pages remain");
    assert_eq!(a.usable(), [range(15, 25), range(55, 40)]);
    assert!(a.allows(range(15, 25)) && !a.allows(range(39, 2)) && !a.allows(range(14, 2)));
    assert!(!a.allows(range(1, 1)) && !a.allows(range(99, 1)));
}

#[test]
fn nested_reserved_regions_give_nothing_back() {
    let a = Aperture::new(
        IovaPfn::new(0),
        IovaPfn::new(99),
        &[range(10, 50), range(20, 5)],
    )
    .expect("pages remain");
    assert_eq!(a.usable(), [range(0, 10), range(60, 40)]);
}

#[test]
fn the_last_page_of_the_space_may_be_reserved() {
    let top = range(IovaPfn::MAX.raw(), 1);
    let a = Aperture::new(IovaPfn::new(1), IovaPfn::MAX, &[top]).expect("pages remain");
    assert_eq!(a.usable()[0].last().raw(), IovaPfn::MAX.raw() - 1);
}

#[test]
fn nothing_left_is_an_error() {
    assert!(Aperture::new(IovaPfn::new(5), IovaPfn::new(4), &[]).is_err());
    assert!(Aperture::new(IovaPfn::new(5), IovaPfn::new(9), &[range(0, 10)]).is_err());
    for bits in [0, 1, 12, 65, 99, u32::MAX] {
        let error = Aperture::of_bits(bits).expect_err("no such space");
        let says = format!("an address space of {bits} bits: there must be 13 to 64");
        assert_eq!(error.to_string(), says);
    }
    assert!(Aperture::of_bits(13).is_ok() && Aperture::of_bits(64).is_ok());
}

#[test]
fn a_32_bit_aperture_lacks_page_0_and_the_interrupt_window() {
    let a = Aperture::of_bits(32).expect("valid");
    assert_eq!(a.usable(), [range(1, 0xfedff), range(0xfef00, 0x1100)]);
}
