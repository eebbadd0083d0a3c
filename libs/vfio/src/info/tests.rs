use super::*;
use crate::chain::HEADER;
use crate::uapi::Sized32;
use zerocopy::IntoBytes;

/// Information as a kernel writes it: the structure, then capabilities of the given id, version and
/// body (without the header).
fn info(capabilities: &[(u16, u16, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::from(
        IommuType1Info {
            flags: INFO_PGSIZES | INFO_CAPS,
            iova_pgsizes: 0x4020_1000,
            cap_offset: if capabilities.is_empty() { 0 } else { 24 },
            ..IommuType1Info::zeroed()
        }
        .as_bytes(),
    );
    for (index, (id, version, body)) in capabilities.iter().enumerate() {
        let next = bytes.len() + HEADER + body.len();
        let next = if index + 1 < capabilities.len() {
            next as u32
        } else {
            0
        };
        bytes.extend([id.to_le_bytes(), version.to_le_bytes()].as_flattened());
        bytes.extend(next.to_le_bytes());
        bytes.extend(body);
    }
    bytes
}

fn ranges(list: &[(u64, u64)]) -> Vec<u8> {
    let mut body = Vec::from(u64::to_le_bytes(list.len() as u64));
    for (start, last) in list {
        body.extend([start.to_le_bytes(), last.to_le_bytes()].as_flattened());
    }
    body
}

const ALLOWED: [(u64, u64); 2] = [(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)];

fn all() -> Vec<(u16, u16, Vec<u8>)> {
    vec![
        (CAP_DMA_AVAIL, 1, Vec::from(65_535_u32.to_le_bytes())),
        // Migration: page sizes of dirty bitmaps and the like.
        (2, 1, vec![0xff; 24]),
        (CAP_IOVA_RANGE, 1, ranges(&ALLOWED)),
    ]
}

/// As Linux 6.1 reports QEMU's VT-d, 48 bits wide: migration, mappings left, IOVA ranges.
#[rustfmt::skip]
const RECORDED: [u32; 29] = [
    0x74, 3, 0x4020_1000, 0, 0x18, 0, // the structure
    0x0001_0002, 0x38, 0, 0, 0x1000, 0, 0x1000_0000, 0, // migration
    0x0001_0003, 0x44, 65_535, // mappings left
    0x0001_0001, 0, 2, 0, 0, 0, 0xfedf_ffff, 0, 0xfef0_0000, 0, 0xffff_ffff, 0xffff, // ranges
];

#[test]
fn recorded_kernel_information_is_parsed() {
    let bytes = RECORDED.map(u32::to_le_bytes);
    let info = IommuInfo::parse(bytes.as_flattened()).expect("a kernel's");
    assert_eq!(info.page_sizes, 0x4020_1000);
    assert_eq!(info.mappings_left, Some(65_535));
    assert_eq!(info.aperture(), Ok(Aperture::of_bits(48).expect("48 bits")));
}

#[test]
fn ranges_become_an_aperture_without_page_0_and_what_is_reserved() {
    let info = IommuInfo::parse(&info(&all())).expect("what a kernel writes");
    assert_eq!(info.page_sizes, 0x4020_1000);
    assert_eq!(info.mappings_left, Some(65_535));
    assert_eq!(info.aperture(), Ok(Aperture::of_bits(39).expect("39 bits")));
}

#[test]
fn a_kernel_that_says_nothing_of_reserved_iovas_is_refused() {
    let mut old = info(&[]);
    let parsed = IommuInfo::parse(&old).expect("old, not wrong");
    assert_eq!(parsed.aperture(), Err(InfoError::NoRanges));
    assert_eq!(parsed.mappings_left, None);
    // Without the flag, `cap_offset` has no meaning.
    old[4] &= !(INFO_CAPS as u8);
    old[16] = 3;
    assert!(IommuInfo::parse(&old).is_ok());
    // Another version may mean something else.
    let newer = info(&[(CAP_IOVA_RANGE, 2, ranges(&ALLOWED))]);
    let parsed = IommuInfo::parse(&newer).expect("newer, not wrong");
    assert_eq!(parsed.aperture(), Err(InfoError::NoRanges));
}

#[test]
fn an_iommu_without_4_kib_pages_is_refused() {
    let mut large = info(&all());
    large[8..16].copy_from_slice(&0x4001_0000_u64.to_le_bytes());
    let parsed = IommuInfo::parse(&large).expect("large pages");
    let page_sizes = 0x4001_0000;
    assert_eq!(parsed.aperture(), Err(InfoError::PageSize { page_sizes }));
    // A kernel that does not report page sizes.
    large[4] &= !(INFO_PGSIZES as u8);
    let parsed = IommuInfo::parse(&large).expect("no page sizes");
    assert_eq!(
        parsed.aperture(),
        Err(InfoError::PageSize { page_sizes: 0 })
    );
}

#[test]
fn truncated_information_is_an_error_without_panic() {
    let whole = info(&all());
    for len in 0..whole.len() {
        let cut = IommuInfo::parse(&whole[..len]);
        assert!(
            matches!(cut, Err(InfoError::Short { .. })),
            "{len}: {cut:?}"
        );
    }
}

#[test]
fn a_chain_that_leads_back_or_outside_ends() {
    let whole = info(&all());
    for (to, expected) in [
        // Itself, the structure, and the middle of its own header.
        (24, InfoError::NotBehind { from: 24, to: 24 }),
        (1, InfoError::NotBehind { from: 24, to: 1 }),
        (31, InfoError::NotBehind { from: 24, to: 31 }),
    ] {
        let mut circular = whole.clone();
        circular[28..32].copy_from_slice(&u32::to_le_bytes(to));
        assert_eq!(IommuInfo::parse(&circular), Err(expected));
    }
    let mut outside = whole.clone();
    outside[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(
        IommuInfo::parse(&outside),
        Err(InfoError::Short {
            at: 0xffff_ffff,
            ..
        })
    ));
    let mut inside = whole;
    inside[16..20].copy_from_slice(&u32::to_le_bytes(20));
    assert_eq!(
        IommuInfo::parse(&inside),
        Err(InfoError::NotBehind { from: 0, to: 20 })
    );
}

#[test]
fn a_list_longer_than_the_answer_allocates_nothing() {
    for count in [3_u32, 1 << 20, u32::MAX] {
        let mut body = ranges(&ALLOWED);
        body[..4].copy_from_slice(&count.to_le_bytes());
        let parsed = IommuInfo::parse(&info(&[(CAP_IOVA_RANGE, 1, body)]));
        assert!(matches!(parsed, Err(InfoError::Short { .. })), "{count}");
    }
}

#[test]
fn ranges_that_end_before_they_begin_or_overlap_or_hold_no_page() {
    let inverted = info(&[(CAP_IOVA_RANGE, 1, ranges(&[(0x2000, 0x1fff)]))]);
    let (start, last) = (0x2000, 0x1fff);
    assert_eq!(
        IommuInfo::parse(&inverted),
        Err(InfoError::Inverted { start, last })
    );
    let of = |list: &[(u64, u64)]| {
        aperture_of(
            &list
                .iter()
                .map(|&(start, last)| AllowedRange { start, last })
                .collect::<Vec<_>>(),
        )
    };
    // Page 0 alone, and halves of two pages.
    for nothing in [&[][..], &[(0, 0xfff)], &[(0x1800, 0x27ff)]] {
        assert!(of(nothing).is_err(), "{nothing:x?}");
    }
    // In any order, overlapping, one inside another, up to the last byte.
    let usable = of(&[
        (0x9000, u64::MAX),
        (0x1000, 0x4fff),
        (0x2000, 0x2fff),
        (0x4000, 0x5fff),
    ])
    .expect("pages")
    .usable()
    .to_vec();
    let range = |first, pages| IovaRange::new(IovaPfn::new(first), pages).expect("a range");
    assert_eq!(usable, [range(1, 5), range(9, (1 << 52) - 9)]);
}

/// Page sizes, ranges and width with which those of a guest's IOMMU are compared.
#[test]
fn allowed_ranges_and_page_sizes_are_distinguished_page_by_page() {
    let info = IommuInfo::parse(&info(&all())).expect("what a kernel writes");
    let has = |bytes| info.has_page_size(bytes);
    assert!(has(4 << 10) && has(2 << 20) && has(1 << 30));
    assert!(!has(8 << 10) && !has(0) && !has(0x4020_1000));
    let range = |first, pages| IovaRange::new(IovaPfn::new(first), pages).expect("a range");
    for (first, pages, is_allowed) in [
        (0, 1, true), // an allocator's aperture leaves it out
        (0, 0xfee00, true),
        (0xfedff, 1, true),
        (0xfedff, 2, false),
        (0xfee00, 1, false),
        (0xfeeff, 2, false),
        (0xfef00, 1, true),
        (0x7ff_ffff, 1, true),
        (0x7ff_ffff, 2, false),
        (0, 1 << 52, false),
    ] {
        assert_eq!(info.allows(range(first, pages)), is_allowed, "{first:x}");
    }
    assert_eq!(info.address_bits(), 39);
    let neighbours = [(0x1000, 0x1fff), (0x2000, u64::MAX)];
    let info = IommuInfo {
        allowed: Some(Vec::from(
            neighbours.map(|(start, last)| AllowedRange { start, last }),
        )),
        ..info
    };
    assert!(info.allows(range(1, (1 << 52) - 1)), "across two");
    assert_eq!(info.address_bits(), 64);
    let unknown = IommuInfo {
        allowed: None,
        ..info
    };
    assert!(!unknown.allows(range(1, 1)));
    assert_eq!(unknown.address_bits(), 0);
}
