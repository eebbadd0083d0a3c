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
    /// Ignored.
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

    #[inline]
    fn leaf(phys: PhysAddr, access: Access, level: u32) -> u64 {
        debug_assert!(phys.raw() & !ADDR == 0);
        let ps = if level > 1 { PS } else { 0 };
        // `Access` numbers its values as R and W do; `leaf_words` below holds that.
        phys.raw() | access as u64 | ps
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
    fn access(entry: u64) -> Access {
        match entry & R_W {
            1 => Access::Read,
            2 => Access::Write,
            _ => Access::ReadWrite,
        }
    }
}

#[cfg(test)]
mod tests;
