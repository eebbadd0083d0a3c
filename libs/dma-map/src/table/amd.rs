//! Entries of the AMD IOMMU's own page tables (version 1).
//!
//! The document is *AMD I/O Virtualization Technology (IOMMU) Specification*, publication 48882, revision 3.07,
//! §2.2.3. The mode of a device table entry is the number of levels.
//!
//! Left out: next-level code 7 (pages of other sizes), tables that skip levels, mode 1 and 6.

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

    #[inline]
    fn leaf(phys: PhysAddr, access: Access, _level: u32) -> u64 {
        debug_assert!(phys.raw() & !ADDR == 0);
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
    fn access(entry: u64) -> Access {
        match (entry >> AmdPte::IR_OFFSET) & 3 {
            1 => Access::Read,
            2 => Access::Write,
            _ => Access::ReadWrite,
        }
    }
}

#[cfg(test)]
mod tests;
