//! Fault recording registers (§11.4.14) and fault reasons of legacy mode (§7.1.3) and of interrupt
//! remapping (§7.1.4).

use bitfield_struct::bitfield;

/// Size of one fault recording register, in bytes.
pub const FRCD_LEN: u16 = 16;

/// Fault Recording Register (FRO·16 + 16·n, 128-bit; F is RW1C, the rest RO).
#[bitfield(u128)]
#[derive(PartialEq, Eq)]
pub struct FaultRecording {
    #[bits(12)]
    __: u16,
    /// FI: number of the faulting 4 KiB page (for interrupts, the index in bits 63:48 of the
    /// register).
    #[bits(52)]
    pub fi: u64,
    /// SID: source of the request.
    pub sid: u16,
    #[bits(16)]
    __: u16,
    /// FR: reason.
    #[bits(8)]
    pub fr: FaultReason,
    #[bits(22)]
    __: u32,
    /// T: 1 is a read, 0 a write.
    pub t: bool,
    /// F: this register holds a fault (RW1C).
    pub f: bool,
}

/// Reason why a request was refused (FR). Not exhaustive: the constants are those of legacy mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FaultReason(pub u8);

impl FaultReason {
    /// 1: the root entry is not present.
    pub const ROOT_NOT_PRESENT: Self = Self(0x1);
    /// 2: the context entry is not present.
    pub const CONTEXT_NOT_PRESENT: Self = Self(0x2);
    /// 3: the context entry is invalid: unsupported width or type.
    pub const CONTEXT_INVALID: Self = Self(0x3);
    /// 4: the address lies beyond the width of the context, or of the unit.
    pub const BEYOND_WIDTH: Self = Self(0x4);
    /// 5: a write without permission.
    pub const WRITE: Self = Self(0x5);
    /// 6: a read without permission.
    pub const READ: Self = Self(0x6);
    /// 7: a second-level entry could not be read.
    pub const PTE_ACCESS: Self = Self(0x7);
    /// 8: the root entry could not be read.
    pub const ROOT_ACCESS: Self = Self(0x8);
    /// 9: the context entry could not be read.
    pub const CONTEXT_ACCESS: Self = Self(0x9);
    /// A: reserved bits are set in the root entry.
    pub const ROOT_RESERVED: Self = Self(0xa);
    /// B: reserved bits are set in the context entry.
    pub const CONTEXT_RESERVED: Self = Self(0xb);
    /// C: reserved bits are set in a second-level entry.
    pub const PTE_RESERVED: Self = Self(0xc);
    /// D: a translation or translated request that the context's type blocks.
    pub const TRANSLATION_TYPE: Self = Self(0xd);
    /// E: the result lies in the interrupt range 0xfeex_xxxx.
    pub const INTERRUPT_RANGE: Self = Self(0xe);

    /// 20: reserved fields of a message in remappable format are not 0.
    pub const MESSAGE_RESERVED: Self = Self(0x20);
    /// 21: the message's index lies beyond the table.
    pub const INDEX_BEYOND_TABLE: Self = Self(0x21);
    /// 22: the entry is not present.
    pub const INTERRUPT_NOT_PRESENT: Self = Self(0x22);
    /// 23: the table could not be read.
    pub const INTERRUPT_TABLE_ACCESS: Self = Self(0x23);
    /// 24: reserved bits are set in an entry.
    pub const INTERRUPT_RESERVED: Self = Self(0x24);
    /// 25: a message in compatibility format, which is blocked.
    pub const COMPATIBILITY_BLOCKED: Self = Self(0x25);
    /// 26: the source of the message is not the one that the entry names.
    pub const SOURCE_REFUSED: Self = Self(0x26);

    /// From the bits of the field.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// The bits of the field.
    pub const fn into_bits(self) -> u8 {
        self.0
    }

    /// Whether `FPD` of the context entry silences this reason: all but those found before or while
    /// reading the context entry.
    pub const fn is_qualified(self) -> bool {
        !matches!(
            self,
            Self::ROOT_NOT_PRESENT | Self::ROOT_ACCESS | Self::CONTEXT_ACCESS | Self::ROOT_RESERVED
        )
    }
}

#[cfg(test)]
mod tests;
