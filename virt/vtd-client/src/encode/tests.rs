use super::*;
use iova::IovaPfn;
use proptest::prelude::*;

fn encoder(psi: bool, mamv: u8) -> Encoder {
    let capability = Capability::new()
        .with_psi(psi)
        .with_mamv(mamv)
        .with_drd(true)
        .with_dwd(true);
    Encoder::new(capability)
}

fn range(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).expect("in the space")
}

fn pages(encoder: Encoder, range: IovaRange) -> Vec<IotlbDescriptor> {
    let mut out = Vec::new();
    encoder.pages(5, range, true, &mut out);
    out.into_iter().map(IotlbDescriptor::from_bits).collect()
}

#[test]
fn descriptors_are_those_a_driver_would_write() {
    let mut out = Vec::new();
    let encoder = encoder(true, 18);
    // Four pages at 0x8000: G 3, DR, DW, DID 5; ADDR, IH, AM 2.
    encoder.batch(5, &[Command::Pages(range(8, 4))], &mut out);
    assert_eq!(out, [0x8042 << 64 | 0x5_00f2]);
    out.clear();
    encoder.pages(5, range(8, 4), false, &mut out);
    assert_eq!(out, [0x8002 << 64 | 0x5_00f2]);
    out.clear();
    encoder.batch(5, &[Command::Pages(range(8, 4)), Command::Domain], &mut out);
    assert_eq!(out, [0x5_00e2]);
    out.clear();
    encoder.batch(5, &[Command::Domain, Command::Global], &mut out);
    assert_eq!(out, [0xd2]);
    out.clear();
    encoder.all(&mut out);
    assert_eq!(out, [0x11, 0xd2]);
    assert_eq!(Encoder::wait(0x4004, 7), 0x4004 << 64 | 0x7_0000_0025);
}

#[test]
fn a_unit_without_page_selective_invalidation_is_told_by_domain() {
    let descriptors = pages(encoder(false, 0), range(8, 4));
    assert_eq!(descriptors[0].g(), Granularity::DOMAIN);
    // A unit that supports only single pages gets four of them, and five as a domain.
    assert_eq!(pages(encoder(true, 0), range(8, 4)).len(), 4);
    let descriptors = pages(encoder(true, 0), range(8, 5));
    assert_eq!(
        (descriptors.len(), descriptors[0].g()),
        (1, Granularity::DOMAIN)
    );
}

#[test]
fn long_batches_become_one_domain_descriptor() {
    let ranges: Vec<_> = (0..200).map(|i| Command::Pages(range(i * 16, 1))).collect();
    let mut out = Vec::new();
    encoder(true, 18).batch(5, &ranges, &mut out);
    assert_eq!(out, [0x5_00e2]);
    out.clear();
    encoder(true, 18).batch(5, &ranges[..100], &mut out);
    assert_eq!(out.len(), 100);
}

proptest! {
    /// Every page of the range is covered, and no address has a bit set that its mask ignores.
    #[test]
    fn pieces_cover_the_range(
        first in prop_oneof![0..0x1_0000u64, 0..IovaPfn::MAX.raw(), Just(IovaPfn::MAX.raw())],
        wanted in prop_oneof![1..64u64, 1..0x10_0000u64, Just(1u64 << 52)],
        mamv in 0..=18u8,
    ) {
        let range = range(first, wanted.min(IovaPfn::MAX.raw() - first + 1));
        let pieces = pages(encoder(true, mamv), range);
        prop_assert!((1..=PIECES).contains(&pieces.len()));
        let mut next = range.first().raw();
        for piece in pieces {
            prop_assert_eq!(piece.did(), 5);
            if piece.g() == Granularity::DOMAIN {
                return Ok(());
            }
            prop_assert!(piece.am() <= mamv && piece.ih());
            let len = 1u64 << piece.am();
            prop_assert_eq!(piece.addr() % len, 0);
            prop_assert!(piece.addr() <= next);
            next = piece.addr() + len;
        }
        prop_assert!(next > range.last().raw());
    }
}
