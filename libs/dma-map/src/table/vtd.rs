//! Second-level entries of Intel VT-d.
//!
//! The document is *Intel Virtualization Technology for Directed I/O, Architecture Specification*, revision 4.1,
//! §9.8. Names are the specification's, in lower case.
//!
//! Left out: SNP (set by nobody: a unit that honours it needs it only for devices that ask for no snoop), TM,
//! first-level and nested tables.

use address::PhysAddr;
use bitfield_struct::bitfield;
use iova::Access;

use super::format::{Format, sealed};

/// Size of a second-level entry, in bytes.
pub const PTE_LEN: u64 = 8;

/// Second-level entry (§9.8): one layout for a leaf of any size and for a pointer to a table.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct SlPte {
    /// R: reads allowed.
    pub r: bool,
    /// W: writes allowed.
    pub w: bool,
    /// Ignored here.
    #[bits(5)]
    pub ign0: u8,
    /// PS: a leaf at level 2 (2 MiB) or 3 (1 GiB); ignored at level 1, reserved at level 4.
    pub ps: bool,
    /// Ignored here.
    #[bits(3)]
    pub ign1: u8,
    /// SNP: snoop; legal in a leaf when `ECAP.SC` is set.
    pub snp: bool,
    /// ADDR: number of the 4 KiB frame of the page or the next table.
    #[bits(40)]
    pub addr: u64,
    /// Ignored: [`VtdSecondLevel`] counts mappings here.
    #[bits(10)]
    pub ign2: u16,
    /// TM: transient mapping; legal in a leaf when `ECAP.DT` is set.
    pub tm: bool,
    /// Ignored.
    pub ign3: bool,
}

/// The second-level format, tables of 3 (39-bit), 4 (48-bit) or 5 (57-bit) levels.
#[derive(Clone, Copy, Debug)]
pub struct VtdSecondLevel;

const R_W: u64 = SlPte::new().with_r(true).with_w(true).into_bits();
const PS: u64 = SlPte::new().with_ps(true).into_bits();
const ADDR: u64 = SlPte::new().with_addr((1 << 40) - 1).into_bits();

impl sealed::Sealed for VtdSecondLevel {}

impl Format for VtdSecondLevel {
    const NAME: &'static str = "VT-d second level";
    const MIN_LEVELS: u32 = if cfg!(loom) { 2 } else { 3 };
    const MAX_LEVELS: u32 = 5;
    const PHYS_BITS: u32 = 52;
    const MAX_COUNT: u32 = 1023;

    #[inline]
    fn leaf(phys: PhysAddr, access: Access, count: u32, level: u32) -> u64 {
        debug_assert!(count <= Self::MAX_COUNT && phys.raw() & !ADDR == 0);
        let ps = if level > 1 { PS } else { 0 };
        // `Access` numbers its values as R and W do; `leaf_words` below holds that.
        phys.raw() | access as u64 | ps | u64::from(count) << SlPte::IGN2_OFFSET
    }

    #[inline]
    fn table(page: PhysAddr, _level: u32) -> u64 {
        page.raw() | R_W
    }

    #[inline]
    fn is_table(entry: u64, _level: u32) -> bool {
        entry & (PS | R_W) == R_W
    }

    #[inline]
    fn phys(entry: u64) -> PhysAddr {
        PhysAddr::new(entry & ADDR)
    }

    #[inline]
    fn count(entry: u64) -> u32 {
        SlPte::from_bits(entry).ign2().into()
    }

    #[inline]
    fn access(entry: u64) -> Access {
        match entry & R_W {
            1 => Access::Read,
            2 => Access::Write,
            _ => Access::ReadWrite,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::format::{Entry, Leaf};
    use super::*;

    #[test]
    fn second_level_entry_fields_lie_where_the_document_puts_them() {
        let e = SlPte::from_bits;
        assert!(e(0x1).r() && !e(0x2).r());
        assert!(e(0x2).w() && !e(0x1).w());
        assert_eq!(e(0x7c).ign0(), 0x1f);
        assert!(e(0x80).ps());
        assert_eq!(e(0x700).ign1(), 7);
        assert!(e(0x800).snp());
        assert_eq!(e(0x1234_5000).addr(), 0x12345);
        assert_eq!(e(0xf_ffff_ffff_f000).addr(), 0xff_ffff_ffff);
        assert_eq!(e(0x3ff0_0000_0000_0000).ign2(), 0x3ff);
        assert!(e(0x4000_0000_0000_0000).tm());
        assert!(e(0x8000_0000_0000_0000).ign3());
    }

    #[test]
    fn leaf_words() {
        let leaf = |phys, access, count, level| {
            VtdSecondLevel::leaf(PhysAddr::new(phys), access, count, level)
        };
        assert_eq!(leaf(0x1234_5000, Access::Read, 0, 1), 0x1234_5001);
        assert_eq!(leaf(0x1234_5000, Access::Write, 0, 1), 0x1234_5002);
        assert_eq!(
            leaf(0x1234_5000, Access::ReadWrite, 1, 1),
            0x0010_0000_1234_5003
        );
        assert_eq!(leaf(0, Access::Read, 1023, 1), 0x3ff0_0000_0000_0001);
        assert_eq!(leaf(0x1220_0000, Access::ReadWrite, 0, 2), 0x1220_0083);
        assert_eq!(
            leaf(0xf_ffff_c000_0000, Access::Write, 0, 3),
            0x000f_ffff_c000_0082
        );
        assert_eq!(
            VtdSecondLevel::table(PhysAddr::new(0xa_bcde_f000), 4),
            0x000a_bcde_f003
        );
    }

    #[test]
    fn words_are_read_as_they_were_meant() {
        let decode = VtdSecondLevel::decode;
        assert_eq!(decode(0, 3), Entry::Empty);
        assert_eq!(
            decode(0x5003, 3),
            Entry::Table(PhysAddr::new(0x5000)),
            "R, W, no PS"
        );
        let leaf = |phys, access, count| {
            Entry::Leaf(Leaf {
                phys: PhysAddr::new(phys),
                access,
                count,
            })
        };
        assert_eq!(decode(0x5003, 1), leaf(0x5000, Access::ReadWrite, 0));
        assert_eq!(decode(0x20_0081, 2), leaf(0x20_0000, Access::Read, 0));
        assert_eq!(
            decode(0x3ff0_0000_0000_5002, 1),
            leaf(0x5000, Access::Write, 1023)
        );
    }
}
