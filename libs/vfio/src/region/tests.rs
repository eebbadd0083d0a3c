#![expect(
    clippy::single_range_in_vec_init,
    reason = "lists of ranges, of which some have one"
)]

use zerocopy::IntoBytes;

use super::*;
use crate::chain::HEADER;
use crate::uapi::Sized32;

/// As a kernel writes it: the structure, then capabilities by id, version and what is behind the
/// header.
fn answer(size: u64, capabilities: &[(u16, u16, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::from(
        RegionInfo {
            flags: REGION_CAN_READ | REGION_CAN_WRITE | REGION_CAN_MMAP | REGION_CAPS,
            index: 2,
            cap_offset: if capabilities.is_empty() { 0 } else { 32 },
            size,
            offset: 2 << 40,
            ..RegionInfo::zeroed()
        }
        .as_bytes(),
    );
    for (index, (id, version, body)) in capabilities.iter().enumerate() {
        let next = bytes.len() + HEADER + body.len();
        let is_last = index + 1 == capabilities.len();
        bytes.extend([id.to_le_bytes(), version.to_le_bytes()].as_flattened());
        bytes.extend(u32::to_le_bytes(if is_last { 0 } else { next as u32 }));
        bytes.extend(body);
    }
    bytes
}

fn sparse(list: &[(u64, u64)]) -> Vec<u8> {
    let mut body = Vec::from(u64::to_le_bytes(list.len() as u64));
    for (offset, size) in list {
        body.extend([offset.to_le_bytes(), size.to_le_bytes()].as_flattened());
    }
    body
}

/// By `linux/vfio.h`: argsz, flags, index, cap_offset, size, offset, then id and version, next, and
/// what the id says.
#[rustfmt::skip]
const GOLDEN: [u32; 20] = [
    80, 0b1111, 4, 32, 0x4000, 0, 0, 0x400, // the structure: BAR 4 at 4 << 40
    0x0001_0003, 40, // MSI-X mappable
    0x0001_0001, 0, 2, 0, 0, 0, 0x1000, 0, 0x3000, 0, // sparse areas: 0, size 0x1000; 0x3000, size cut off below
];

#[test]
fn golden_words_are_read_field_by_field() {
    let mut words = Vec::from(GOLDEN);
    words.extend([0x1000, 0]);
    words[0] = 88;
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    let expected = Region {
        index: 4,
        offset: 4 << 40,
        size: 0x4000,
        can_read: true,
        can_write: true,
        can_mmap: true,
        msix_mappable: true,
        sparse: Some(vec![0..0x1000, 0x3000..0x4000]),
    };
    assert_eq!(Region::parse(&bytes), Ok(expected));
}

/// Each flag for itself: read is bit 0, write bit 1, mmap bit 2.
#[test]
fn each_flag_is_its_own() {
    for flags in 0..8_u32 {
        let mut bytes = answer(0x1000, &[]);
        bytes[4..8].copy_from_slice(&flags.to_le_bytes());
        let region = Region::parse(&bytes).unwrap();
        let found = [region.can_read, region.can_write, region.can_mmap];
        assert_eq!(found, [0, 1, 2].map(|bit| flags >> bit & 1 == 1));
        assert_eq!((region.sparse, region.msix_mappable), (None, false));
    }
    // Without the flag nothing is an offset.
    let mut bytes = answer(0x1000, &[]);
    bytes[4] &= !(REGION_CAPS as u8);
    bytes[12] = 3;
    assert!(Region::parse(&bytes).is_ok());
}

#[test]
fn capability_of_another_version_allows_nothing_new() {
    let region = Region::parse(&answer(
        0x4000,
        &[(1, 2, sparse(&[(0, 0x1000)])), (3, 2, Vec::new())],
    ));
    let region = region.unwrap();
    assert!(!region.msix_mappable);
    assert_eq!(region.mappable(&[]), []);
    // One that is not known says nothing at all.
    let other = Region::parse(&answer(0x4000, &[(2, 1, vec![0xff; 8])])).unwrap();
    assert_eq!(other.mappable(&[]), [0..0x4000]);
}

#[test]
fn answer_that_is_cut_short_is_an_error_and_no_panic() {
    let whole = answer(
        0x4000,
        &[
            (3, 1, Vec::new()),
            (7, 9, vec![1; 24]),
            (1, 1, sparse(&[(0, 0x1000), (0x2000, 0x1000)])),
        ],
    );
    assert!(Region::parse(&whole).is_ok());
    for len in 0..whole.len() {
        let cut = Region::parse(&whole[..len]);
        assert!(
            matches!(cut, Err(InfoError::Short { .. })),
            "{len}: {cut:?}"
        );
    }
}

/// The chain as for an IOMMU: behind itself, into the structure, into its own header, outside.
#[test]
fn chain_that_leads_back_or_outside_ends() {
    let whole = answer(0x4000, &[(3, 1, Vec::new()), (1, 1, sparse(&[(0, 1)]))]);
    for (at, to, from) in [
        (36, 32, 32),
        (36, 1, 32),
        (36, 39, 32),
        (12, 31, 0),
        (44, 40, 40),
    ] {
        let mut bytes = whole.clone();
        bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(to));
        let to = to as usize;
        assert_eq!(
            Region::parse(&bytes),
            Err(InfoError::NotBehind { from, to })
        );
    }
    for at in [12, 36] {
        let mut bytes = whole.clone();
        bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        let parsed = Region::parse(&bytes);
        assert!(matches!(parsed, Err(InfoError::Short { .. })), "{parsed:?}");
    }
}

#[test]
fn areas_that_are_not_there_or_leave_the_region_are_errors() {
    for count in [3_u32, 1 << 20, u32::MAX] {
        let mut body = sparse(&[(0, 0x1000), (0x2000, 0x1000)]);
        body[..4].copy_from_slice(&count.to_le_bytes());
        let parsed = Region::parse(&answer(0x4000, &[(1, 1, body)]));
        assert!(matches!(parsed, Err(InfoError::Short { .. })), "{count}");
    }
    let region = 0x4000;
    for (offset, size) in [
        (0, 0x4001),
        (0x4000, 1),
        (0x3fff, 2),
        (u64::MAX, 1),
        (1, u64::MAX),
        (u64::MAX, u64::MAX),
    ] {
        let parsed = Region::parse(&answer(region, &[(1, 1, sparse(&[(offset, size)]))]));
        let expected = InfoError::PastRegion {
            offset,
            size,
            region,
        };
        assert_eq!(parsed, Err(expected));
    }
    for size in [u64::MAX, (i64::MAX as u64) - (2 << 40) + 1] {
        let parsed = Region::parse(&answer(size, &[]));
        let offset = 2 << 40;
        assert_eq!(parsed, Err(InfoError::PastFile { offset, size }));
    }
    assert!(Region::parse(&answer((i64::MAX as u64) - (2 << 40), &[])).is_ok());
}

fn region(size: u64, sparse: Option<Vec<Range<u64>>>) -> Region {
    let region = Region::parse(&answer(size, &[])).unwrap();
    Region { sparse, ..region }
}

/// The devices of the lab, and layouts that others have.
#[test]
fn msix_pages_are_left_out_and_the_rest_is_mapped() {
    // NVMe: registers, doorbells, the table of 65 vectors, the pending bits.
    let nvme = region(0x4000, None);
    assert_eq!(
        nvme.mappable(&[0x2000..0x2410, 0x3000..0x3010]),
        [0..0x2000]
    );
    // virtio: table and pending bits in one page, all of the region.
    assert_eq!(region(0x1000, None).mappable(&[0..0x40, 0x800..0x808]), []);
    // The table in the middle, its end inside a page that holds other registers.
    let middle = region(0x10_0000, None).mappable(&[0x8000..0x8810]);
    assert_eq!(middle, [0..0x8000, 0x9000..0x10_0000]);
    // An older kernel, which leaves the table out itself.
    let older = region(0x4000, Some(vec![0x3000..0x4000, 0..0x2000]));
    assert_eq!(
        older.mappable(&[0x2000..0x2410]),
        [0..0x2000, 0x3000..0x4000]
    );
    // Areas that share a page are one; a page that is there in part is not mapped.
    let halves = region(
        0x5000,
        Some(vec![0x800..0x1800, 0x1800..0x2400, 0x3001..0x5000]),
    );
    assert_eq!(halves.mappable(&[]), [0x1000..0x2000, 0x4000..0x5000]);
    let small = region(0x800, None);
    assert_eq!(small.mappable(&[]), [], "less than a page");
    let mut fixed = region(0x4000, None);
    fixed.can_mmap = false;
    assert_eq!(fixed.mappable(&[]), []);
    // Odd ranges to leave out: empty, reversed, past the end, all of it.
    #[expect(clippy::reversed_empty_ranges, reason = "it is the case")]
    let odd = [0x1000..0x1000, 0x3000..0x1000, 0x9000..u64::MAX];
    assert_eq!(region(0x4000, None).mappable(&odd), [0..0x4000]);
    assert_eq!(region(0x4000, None).mappable(&[0..u64::MAX]), []);
}

/// Page by page against the definition: a page is mapped if and only if all its bytes may be and
/// none is to be left out.
#[test]
fn mappable_pages_are_those_of_the_definition() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for round in 0..600 {
        let size = random(10) * 4096 + random(3) * 100;
        let mut ranges = |most: u64| -> Vec<Range<u64>> {
            let count = random(most);
            let range = |_| {
                let start = random(size + 1);
                // On pages as often as not.
                let start = if random(2) == 0 {
                    start & !0xfff
                } else {
                    start
                };
                let len = random(size - start + 1);
                let end = start + if random(2) == 0 { len & !0xfff } else { len };
                start..end
            };
            (0..count).map(range).collect()
        };
        let sparse = (round % 3 > 0).then(|| ranges(5));
        let except = ranges(4);
        let region = region(size, sparse.clone());
        let found = region.mappable(&except);
        let is_in = |ranges: &[Range<u64>], byte| ranges.iter().any(|range| range.contains(&byte));
        for page in 0..size.div_ceil(4096) {
            let bytes = page << 12..(page + 1) << 12;
            let allowed = bytes
                .clone()
                .all(|byte| byte < size && sparse.as_ref().is_none_or(|areas| is_in(areas, byte)));
            let expected = allowed && !bytes.clone().any(|byte| is_in(&except, byte));
            let is_found = is_in(&found, bytes.start);
            assert_eq!(is_found, expected, "{page}: {region:?} {except:x?}");
        }
        for pair in found.windows(2) {
            assert!(pair[0].end <= pair[1].start, "{found:x?}");
        }
        for range in &found {
            assert!(!range.is_empty() && range.start % 4096 == 0 && range.end % 4096 == 0);
        }
    }
}
