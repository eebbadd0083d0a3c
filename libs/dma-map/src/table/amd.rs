//! Entries of the AMD IOMMU's own page tables (version 1).
//!
//! The document is *AMD I/O Virtualization Technology (IOMMU) Specification*, publication 48882, revision 3.07,
//! §2.2.3. The mode of a device table entry is the number of levels.
//!
//! Left out: next-level code 7 (pages of other sizes), tables that skip levels, mode 1 and 6, and counted
//! mappings: the bits of a leaf that hardware ignores are too few.

use address::PhysAddr;
use bitfield_struct::bitfield;
use iova::Access;

use super::format::{Format, sealed};

/// Entry of a table of any level (§2.2.3): a leaf where the next level is 0.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct AmdPte {
    /// PR: present.
    pub pr: bool,
    /// Ignored.
    #[bits(4)]
    pub ign0: u8,
    /// A: accessed, where the unit says so.
    pub a: bool,
    /// D: dirty, where the unit says so.
    pub d: bool,
    /// Ignored.
    #[bits(2)]
    pub ign1: u8,
    /// Next level: 0 in a leaf, the level of the table that the entry leads to otherwise.
    #[bits(3)]
    pub next_level: u8,
    /// Number of the 4 KiB frame of the page or the next table.
    #[bits(40)]
    pub addr: u64,
    /// Reserved, must be 0.
    #[bits(7)]
    pub rsvd: u8,
    /// U: attribute that a translation request is answered with.
    pub u: bool,
    /// FC: force coherent, in a leaf: accesses snoop, whatever the device says.
    pub fc: bool,
    /// IR: reads allowed.
    pub ir: bool,
    /// IW: writes allowed.
    pub iw: bool,
    /// Ignored.
    pub ign2: bool,
}

/// The version 1 format: tables of 2 (30-bit) to 5 (57-bit) levels, leaves of 4 KiB, 2 MiB and 1 GiB.
#[derive(Clone, Copy, Debug)]
pub struct AmdV1;

const ADDR: u64 = AmdPte::new().with_addr((1 << 40) - 1).into_bits();
const LEAF: u64 = AmdPte::new().with_pr(true).with_fc(true).into_bits();
const TABLE: u64 = AmdPte::new()
    .with_pr(true)
    .with_ir(true)
    .with_iw(true)
    .into_bits();
const NEXT_LEVEL: u64 = AmdPte::new().with_next_level(7).into_bits();

impl sealed::Sealed for AmdV1 {}

impl Format for AmdV1 {
    const NAME: &'static str = "AMD version 1";
    const MIN_LEVELS: u32 = 2;
    const MAX_LEVELS: u32 = 5;
    const PHYS_BITS: u32 = 52;
    const MAX_COUNT: u32 = 0;

    #[inline]
    fn leaf(phys: PhysAddr, access: Access, count: u32, _level: u32) -> u64 {
        debug_assert!(count == 0 && phys.raw() & !ADDR == 0);
        // `Access` numbers its values as IR and IW do. Masked: the bits of the next level lie below the address.
        phys.raw() & ADDR | LEAF | (access as u64) << AmdPte::IR_OFFSET
    }

    #[inline]
    fn table(page: PhysAddr, level: u32) -> u64 {
        page.raw() | TABLE | u64::from(level - 1) << AmdPte::NEXT_LEVEL_OFFSET
    }

    #[inline]
    fn is_table(entry: u64, _level: u32) -> bool {
        entry & NEXT_LEVEL != 0
    }

    #[inline]
    fn phys(entry: u64) -> PhysAddr {
        PhysAddr::new(entry & ADDR)
    }

    #[inline]
    fn count(_entry: u64) -> u32 {
        0
    }

    #[inline]
    fn access(entry: u64) -> Access {
        match (entry >> AmdPte::IR_OFFSET) & 3 {
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
    fn fields_lie_where_the_document_puts_them() {
        let e = AmdPte::from_bits;
        assert!(e(0x1).pr() && !e(0x2).pr());
        assert!(e(0x20).a() && e(0x40).d());
        assert_eq!(e(0xe00).next_level(), 7);
        assert_eq!(e(0x200).next_level(), 1);
        assert_eq!(e(0x1234_5000).addr(), 0x12345);
        assert_eq!(e(0xf_ffff_ffff_f000).addr(), 0xff_ffff_ffff);
        assert_eq!(e(0x07f0_0000_0000_0000).rsvd(), 0x7f);
        assert!(e(0x0800_0000_0000_0000).u());
        assert!(e(0x1000_0000_0000_0000).fc());
        assert!(e(0x2000_0000_0000_0000).ir());
        assert!(e(0x4000_0000_0000_0000).iw());
        assert!(e(0x8000_0000_0000_0000).ign2());
    }

    #[test]
    fn words() {
        let leaf = |phys, access, level| AmdV1::leaf(PhysAddr::new(phys), access, 0, level);
        assert_eq!(leaf(0x1234_5000, Access::Read, 1), 0x3000_0000_1234_5001);
        assert_eq!(leaf(0x1234_5000, Access::Write, 1), 0x5000_0000_1234_5001);
        assert_eq!(
            leaf(0x1220_0000, Access::ReadWrite, 2),
            0x7000_0000_1220_0001
        );
        let table = |page, level| AmdV1::table(PhysAddr::new(page), level);
        assert_eq!(table(0x1234_5000, 2), 0x6000_0000_1234_5201);
        assert_eq!(table(0x1234_5000, 4), 0x6000_0000_1234_5601);
    }

    #[test]
    fn words_are_read_as_they_were_meant() {
        assert_eq!(AmdV1::decode(0, 2), Entry::Empty);
        assert_eq!(
            AmdV1::decode(0x6000_0000_0000_5201, 2),
            Entry::Table(PhysAddr::new(0x5000))
        );
        let leaf = Leaf {
            phys: PhysAddr::new(0x20_0000),
            access: Access::Write,
            count: 0,
        };
        assert_eq!(AmdV1::decode(0x5000_0000_0020_0001, 2), Entry::Leaf(leaf));
    }
}
