//! What the kernel says of an IOMMU (`vfio::IommuInfo`): any bytes, as the answer to `VFIO_IOMMU_GET_INFO`.
//!
//! A chain of capabilities has to end, and lists must not be longer than what they lie in. Whatever comes out as usable has
//! to have been allowed, byte by byte.
use vfio::{AllowedRange, IommuInfo};

use crate::Script;

/// Runs one input.
///
/// # Panics
/// Something was made up.
pub fn run(data: &[u8]) {
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

/// Answers of kernels: new, old, and with capabilities that are not known.
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
    vec![old.end(), plain.end(), full.end()]
}
