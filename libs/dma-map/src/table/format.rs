//! What an entry looks like: the part of a table that differs between IOMMUs.
//!
//! All formats here share the shape of x86: tables of 4 KiB with 512 entries of 8 bytes, 4 KiB pages at level 1,
//! 512 times as much per entry at each level above.

use address::PhysAddr;
use iova::Access;

/// Index bits of one level: 9, so that a table is a page. Loom explores every order of every access, so its
/// tables have 2 entries.
pub const INDEX_BITS: u32 = if cfg!(loom) { 1 } else { 9 };
/// Entries of a table.
pub const ENTRIES: usize = 1 << INDEX_BITS;
/// Most levels of any format.
pub const MAX_LEVELS: u32 = 5;

/// Pages of 4 KiB that one entry of a table at `level` (1 is the leaf table) stands for.
#[inline]
pub const fn entry_pages(level: u32) -> u64 {
    1 << (INDEX_BITS * (level - 1))
}

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing: requests fault.
    Empty,
    /// Requests go to a page of the level's size.
    Leaf(Leaf),
    /// Requests go on in the table at this address.
    Table(PhysAddr),
}

/// A page of some size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// First byte of the page.
    pub phys: PhysAddr,
    /// What the device may do there.
    pub access: Access,
}

/// The layout of entries. Sealed: that a word written as a leaf is never read as a table is what makes following
/// a table entry sound, so every format lies in this crate, beside its tests.
///
/// An entry of 0 is empty in every format.
pub trait Format: sealed::Sealed + Send + Sync + 'static {
    /// Name for messages.
    const NAME: &'static str;
    /// Fewest levels of a table.
    const MIN_LEVELS: u32;
    /// Most levels of a table, at most [`MAX_LEVELS`].
    const MAX_LEVELS: u32;
    /// Bits of a physical address in an entry.
    const PHYS_BITS: u32;

    /// The entry of a page. `phys` is aligned to the size of the level's page and has at most
    /// [`Self::PHYS_BITS`] bits.
    fn leaf(phys: PhysAddr, access: Access, level: u32) -> u64;

    /// The entry, in a table at `level`, 2 or above, that leads to the table at `page`.
    fn table(page: PhysAddr, level: u32) -> u64;

    /// Whether an entry of a table at `level`, 2 or above, leads to a table.
    fn is_table(entry: u64, level: u32) -> bool;

    /// The address in an entry that is not empty.
    fn phys(entry: u64) -> PhysAddr;

    /// What the device may do with a leaf's page.
    fn access(entry: u64) -> Access;

    /// What an entry of a table at `level` says.
    #[inline]
    fn decode(entry: u64, level: u32) -> Entry {
        if entry == 0 {
            Entry::Empty
        } else if level > 1 && Self::is_table(entry, level) {
            Entry::Table(Self::phys(entry))
        } else {
            Entry::Leaf(Leaf {
                phys: Self::phys(entry),
                access: Self::access(entry),
            })
        }
    }
}

pub(super) mod sealed {
    /// Only the formats of this crate.
    pub trait Sealed {}
}
