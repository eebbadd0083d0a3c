//! Answers of the kernel about an IOMMU (`vfio::IommuInfo`) and a device's region (`vfio::Region`):
//! any bytes, as the answer to `VFIO_IOMMU_GET_INFO` and to `VFIO_DEVICE_GET_REGION_INFO`.
//!
//! A chain of capabilities has to end, and lists must not be longer than what they lie in. Each
//! byte that comes out as usable has to have been allowed, and no page with a byte that is left out
//! may come out as mappable.
use std::ops::Range;

use vfio::{AllowedRange, IommuInfo, Region};

use crate::Script;

/// Runs one input.
///
/// # Panics
/// Something was made up.
pub fn run(data: &[u8]) {
    run_iommu(data);
    run_region(data);
}

/// The last 32 bytes serve as the two ranges to leave out as well.
fn run_region(data: &[u8]) {
    let Ok(region) = Region::parse(data) else {
        return;
    };
    let sparse = region.sparse.as_deref();
    assert!(sparse.is_none_or(|areas| areas.len() <= data.len() / 16));
    let words = data.last_chunk::<32>().map(|bytes| bytes.as_chunks().0);
    let except: Vec<Range<u64>> = words.map_or(Vec::new(), |words: &[[u8; 8]]| {
        let words = Vec::from_iter(words.iter().map(|word| u64::from_le_bytes(*word)));
        vec![words[0]..words[1], words[2]..words[3]]
    });
    let mut end = 0;
    for range in region.mappable(&except) {
        assert!(region.can_mmap && range.start < range.end && range.end <= region.size);
        assert!(range.start % 4096 == 0 && range.end % 4096 == 0);
        assert!(
            end <= range.start,
            "not ascending: {range:x?} of {region:x?}"
        );
        end = range.end;
        for left_out in except.iter().filter(|range| !range.is_empty()) {
            let page = left_out.start & !4095;
            assert!(
                left_out.end <= range.start || range.end <= page,
                "{range:x?} has a page of {left_out:x?}"
            );
        }
        let Some(areas) = sparse else {
            continue;
        };
        let mut next = range.start;
        while next < range.end {
            let area = areas.iter().find(|area| Range::contains(area, &next));
            let area = area.unwrap_or_else(|| panic!("{next:#x} was not allowed: {region:x?}"));
            next = area.end;
        }
    }
}

fn run_iommu(data: &[u8]) {
    let Ok(info) = IommuInfo::parse(data) else {
        return;
    };
    let allowed = info.allowed.as_deref().unwrap_or_default();
    assert!(allowed.len() <= data.len() / 16);
    let Ok(aperture) = info.aperture() else {
        return;
    };
    for range in aperture.usable() {
        assert!(range.first().raw() > 0, "page 0");
        let end = u128::from(range.start().raw()) + (u128::from(range.pages()) << 12);
        let mut next = u128::from(range.start().raw());
        while next < end {
            let holds = |one: &&AllowedRange| {
                (u128::from(one.start)..=u128::from(one.last)).contains(&next)
            };
            let one = allowed.iter().find(holds);
            let one = one.unwrap_or_else(|| panic!("{next:#x} was not allowed: {info:x?}"));
            next = u128::from(one.last) + 1;
        }
    }
}

/// Answers of kernels: new, old, and with capabilities that are not known; then regions.
pub fn seeds() -> Vec<Vec<u8>> {
    let head = |script: &mut Script, flags, first| {
        script.u32(24).u32(flags).u64(0x4020_1000);
        script.u32(first).u32(0);
    };
    let ranges = |script: &mut Script, next| {
        script.u16(1).u16(1).u32(next).u32(2).u32(0);
        script.u64(0).u64(0xfedf_ffff);
        script.u64(0xfef0_0000).u64(0x7f_ffff_ffff);
    };
    let mut old = Script::new();
    head(&mut old, 1, 0);
    let mut plain = Script::new();
    head(&mut plain, 3, 24);
    ranges(&mut plain, 0);
    let mut full = Script::new();
    head(&mut full, 3, 24);
    full.u16(2).u16(1).u32(40).u64(0x1000);
    ranges(&mut full, 88);
    full.u16(3).u16(1).u32(0).u32(65_535);
    let mut seeds = vec![old.end(), plain.end(), full.end()];
    seeds.extend(region_seeds());
    seeds
}

/// A BAR that can be mapped whole, one with sparse areas around an MSI-X table, and one that cannot
/// be mapped. Behind each are the ranges of the table and the pending bits.
fn region_seeds() -> [Vec<u8>; 3] {
    let head = |script: &mut Script, flags, first| {
        script.u32(32).u32(flags).u32(0).u32(first);
        script.u64(0x10_0000).u64(0);
    };
    let left_out = |script: &mut Script| {
        script.u64(0x2000).u64(0x2410).u64(0x3000).u64(0x3010);
        script.end()
    };
    let mut whole = Script::new();
    head(&mut whole, 0b1111, 32);
    whole.u16(3).u16(1).u32(0);
    let mut sparse = Script::new();
    head(&mut sparse, 0b1111, 32);
    sparse.u16(3).u16(1).u32(48).u64(0);
    sparse.u16(1).u16(1).u32(0).u32(2).u32(0);
    sparse.u64(0).u64(0x2000).u64(0x2800).u64(0xd_0000);
    let mut config = Script::new();
    head(&mut config, 0b0011, 0);
    [whole, sparse, config].map(|mut script| left_out(&mut script))
}
