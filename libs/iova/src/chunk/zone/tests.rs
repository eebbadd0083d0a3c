use super::*;
use crate::IovaPfn;

#[test]
fn zones_end_at_address_limits_and_the_tree_has_the_rest() {
    let aperture = Aperture::of_bits(48).expect("valid");
    let (zones, rest) = cut(&aperture, 1024, false);
    let ends: Vec<u64> = zones.iter().map(|zone| zone.last() + 1).collect();
    // Below the interrupt window, not above it: the larger piece.
    assert_eq!(ends, [1 << 36, 1 << 27, 1 << 24, 0xfee00]);
    let covered: u64 = zones.iter().map(|zone| zone.range().pages()).sum();
    let usable = |ranges: &[IovaRange]| ranges.iter().map(|r| r.pages()).sum::<u64>();
    assert_eq!(covered, 4 * 1024 * 512);
    assert_eq!(covered + usable(&rest), usable(aperture.usable()));
}

#[test]
fn an_aperture_smaller_than_a_chunk_has_no_zone() {
    let aperture = Aperture::new(IovaPfn::new(100), IovaPfn::new(600), &[]).expect("valid");
    let (zones, rest) = cut(&aperture, 1024, false);
    assert!(zones.is_empty());
    assert_eq!(rest, aperture.usable());
}
