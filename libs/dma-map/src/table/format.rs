//! Layout of entries: the part of a table that differs between IOMMUs.
//!
//! All formats here share the shape of x86: tables of 4 KiB with 512 entries of 8 bytes, 4 KiB
//! pages at level 1, 512 times as much per entry at each level above, the frame number in bits 12
//! to 51. An entry of 0 is empty. What differs is data:
//!
//! * [`VtdSecondLevel`]: *Intel Virtualization Technology for Directed I/O, Architecture
//!   Specification*, revision 4.1, §9.8. Left out: SNP (a unit that honours it needs it only for
//!   devices that ask for no snoop), TM, first-level and nested tables.
//! * [`AmdV1`]: *AMD I/O Virtualization Technology (IOMMU) Specification*, publication 48882,
//!   revision 3.07, §2.2.3. The mode of a device table entry is the number of levels. Left out:
//!   next-level code 7 (pages of other sizes), tables that skip levels, modes 1 and 6.

use address::PhysAddr;
use iova::Access;

/// Index bits of one level: 9, so that a table is a page. Loom explores every order of every
/// access, so its tables have 2 entries.
pub const INDEX_BITS: u32 = if cfg!(loom) { 1 } else { 9 };
/// Entries of a table.
pub const ENTRIES: usize = 1 << INDEX_BITS;
/// Most levels of a table.
pub const MAX_LEVELS: u32 = 5;
/// Bits of a physical address in an entry.
pub const PHYS_BITS: u32 = 52;
/// The address in an entry.
const ADDR: u64 = (1 << PHYS_BITS) - (1 << 12);

/// Pages of 4 KiB that one entry of a table at `level` (1 is the leaf table) stands for.
#[inline]
pub const fn entry_pages(level: u32) -> u64 {
    1 << (INDEX_BITS * (level - 1))
}

/// Meaning of an entry; `T` stands for a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry<T = PhysAddr> {
    /// Nothing: requests fault.
    Empty,
    /// Requests go to a page of the level's size.
    Leaf(Leaf),
    /// Requests go on in this table.
    Table(T),
}

/// A page of some size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// First byte of the page.
    pub phys: PhysAddr,
    /// Accesses that the device may make there.
    pub access: Access,
}

/// The layout of entries, in words as they are in memory. Sealed: that a word written as a leaf is
/// never read as a table is what makes following a table entry sound.
pub trait Format: sealed::Sealed + Send + Sync + 'static {
    /// Name for messages.
    const NAME: &'static str;
    /// Fewest levels of a table.
    const MIN_LEVELS: u32;
    /// Set in every leaf.
    const LEAF: u64;
    /// Set in a leaf above level 1 as well.
    const LARGE: u64;
    /// Position of the permission in a leaf: two bits, reads and then writes.
    const ACCESS_SHIFT: u32;
    /// Set in an entry that leads to a table.
    const TABLE: u64;
    /// Position of the level of that table in the entry, if it has one.
    const NEXT_LEVEL_SHIFT: Option<u32>;
    /// The bits that tell a table from a leaf.
    const KIND: u64;

    /// The entry of a page. `phys` is aligned to the size of the level's page and has at most
    /// [`PHYS_BITS`] bits.
    #[inline]
    fn leaf(phys: PhysAddr, access: Access, level: u32) -> u64 {
        debug_assert!(phys.raw() & !ADDR == 0);
        let large = if level > 1 { Self::LARGE } else { 0 };
        // `Access` numbers its values as the two bits do. Masked: some of `KIND` may lie below the
        // address.
        phys.raw() & ADDR | Self::LEAF | large | (access as u64) << Self::ACCESS_SHIFT
    }

    /// The entry, in a table at `level`, 2 or above, that leads to the table at `page`.
    #[inline]
    fn table(page: PhysAddr, level: u32) -> u64 {
        let next_level = Self::NEXT_LEVEL_SHIFT.map_or(0, |shift| u64::from(level - 1) << shift);
        page.raw() | Self::TABLE | next_level
    }

    /// Whether an entry of a table at `level`, 2 or above, leads to a table.
    #[inline]
    fn is_table(entry: u64, level: u32) -> bool {
        (entry ^ Self::table(PhysAddr::new(0), level)) & Self::KIND == 0
    }

    /// The address in an entry that is not empty.
    #[inline]
    fn phys(entry: u64) -> PhysAddr {
        PhysAddr::new(entry & ADDR)
    }

    /// Decodes an entry of a table at `level`.
    #[inline]
    fn decode(entry: u64, level: u32) -> Entry {
        if entry == 0 {
            return Entry::Empty;
        }
        let phys = Self::phys(entry);
        if level > 1 && Self::is_table(entry, level) {
            return Entry::Table(phys);
        }
        let access = match entry >> Self::ACCESS_SHIFT & 3 {
            1 => Access::Read,
            2 => Access::Write,
            _ => Access::ReadWrite,
        };
        Entry::Leaf(Leaf { phys, access })
    }
}

/// Intel's second-level format, tables of 3 (39-bit), 4 (48-bit) or 5 (57-bit) levels.
#[derive(Clone, Copy, Debug)]
pub struct VtdSecondLevel;

impl Format for VtdSecondLevel {
    const NAME: &'static str = "VT-d second level";
    const MIN_LEVELS: u32 = if cfg!(loom) { 2 } else { 3 };
    const LEAF: u64 = 0;
    /// PS.
    const LARGE: u64 = 1 << 7;
    /// R is bit 0, W bit 1.
    const ACCESS_SHIFT: u32 = 0;
    /// R and W.
    const TABLE: u64 = 3;
    const NEXT_LEVEL_SHIFT: Option<u32> = None;
    const KIND: u64 = Self::LARGE | Self::TABLE;
}

/// AMD's version 1 format, tables of 2 (30-bit) to 5 (57-bit) levels.
#[derive(Clone, Copy, Debug)]
pub struct AmdV1;

impl Format for AmdV1 {
    const NAME: &'static str = "AMD version 1";
    const MIN_LEVELS: u32 = 2;
    /// PR and FC: accesses snoop, whatever the device says.
    const LEAF: u64 = 1 | 1 << 60;
    const LARGE: u64 = 0;
    /// IR is bit 61, IW bit 62.
    const ACCESS_SHIFT: u32 = 61;
    /// PR, IR and IW.
    const TABLE: u64 = 1 | 3 << 61;
    /// Bits 9 to 11, 0 in a leaf.
    const NEXT_LEVEL_SHIFT: Option<u32> = Some(9);
    const KIND: u64 = 7 << 9;
}

mod sealed {
    /// Only the formats of this crate.
    pub trait Sealed {}
    impl Sealed for super::VtdSecondLevel {}
    impl Sealed for super::AmdV1 {}
}

#[cfg(test)]
mod tests;
