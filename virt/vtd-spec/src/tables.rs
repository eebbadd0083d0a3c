//! Root, context and second-level entries of legacy mode (VT-d 4.1, §9.1, §9.3, §9.8).

use bitfield_struct::bitfield;

/// Size of a root or context entry, in bytes.
pub const ENTRY_LEN: u64 = 16;

/// Size of a second-level entry, in bytes.
pub const PTE_LEN: u64 = 8;

/// Root entry (§9.1), one per bus.
#[bitfield(u128)]
#[derive(PartialEq, Eq)]
pub struct RootEntry {
    /// P: present.
    pub p: bool,
    /// Reserved, must be 0.
    #[bits(11)]
    pub rsvd0: u16,
    /// CTP: number of the context table's 4 KiB frame.
    #[bits(52)]
    pub ctp: u64,
    /// Reserved, must be 0.
    pub rsvd1: u64,
}

/// Translation type (TT) of a context entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TranslationType {
    /// 0: untranslated requests go through the second-level tables.
    SecondLevel,
    /// 1: as 0, and the device may request translations (device TLB).
    SecondLevelWithAts,
    /// 2: untranslated requests pass through without translation.
    PassThrough,
    /// 3: reserved.
    Reserved,
}

impl TranslationType {
    /// Converts from the two bits of the field.
    pub const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::SecondLevel,
            1 => Self::SecondLevelWithAts,
            2 => Self::PassThrough,
            _ => Self::Reserved,
        }
    }

    /// Converts to the two bits of the field.
    pub const fn into_bits(self) -> u8 {
        self as u8
    }
}

/// Context entry (§9.3), one per function of a bus.
#[bitfield(u128)]
#[derive(PartialEq, Eq)]
pub struct ContextEntry {
    /// P: present.
    pub p: bool,
    /// FPD: do not record this device's faults. Valid also in an entry that is not present.
    pub fpd: bool,
    /// TT: translation type.
    #[bits(2)]
    pub tt: TranslationType,
    /// Reserved, must be 0.
    #[bits(8)]
    pub rsvd0: u8,
    /// SLPTPTR: number of the second-level table's 4 KiB frame.
    #[bits(52)]
    pub slptptr: u64,
    /// AW: address width code; 1 is 39-bit, 2 is 48-bit, 3 is 57-bit.
    #[bits(3)]
    pub aw: u8,
    /// For software's use.
    #[bits(4)]
    pub avail: u8,
    /// Reserved, must be 0.
    pub rsvd1: bool,
    /// DID: domain.
    pub did: u16,
    /// Reserved, must be 0.
    #[bits(40)]
    pub rsvd2: u64,
}

/// Second-level entry (§9.8): one layout for a leaf of any size and for a pointer to a table.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct SlPte {
    /// R: reads are allowed.
    pub r: bool,
    /// W: writes are allowed.
    pub w: bool,
    /// Ignored.
    #[bits(5)]
    pub ign0: u8,
    /// PS: the entry is a leaf. Defined at level 2 (2 MiB) and 3 (1 GiB); ignored at level 1,
    /// reserved at level 4.
    pub ps: bool,
    /// Ignored.
    #[bits(3)]
    pub ign1: u8,
    /// SNP: snoop. Reserved where `ECAP.SC` is clear, and in a pointer to a table.
    pub snp: bool,
    /// ADDR: number of the 4 KiB frame of the page or of the next table.
    #[bits(40)]
    pub addr: u64,
    /// Ignored.
    #[bits(10)]
    pub ign2: u16,
    /// TM: transient mapping. Reserved where `ECAP.DT` is clear.
    pub tm: bool,
    /// Ignored.
    pub ign3: bool,
}

#[cfg(test)]
mod tests;
