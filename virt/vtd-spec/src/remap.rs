//! Interrupt remapping: entries of the table (§9.10), and messages that name one (§5.1.2).
//!
//! A message in remappable format carries no vector and no destination: it names an entry, and the
//! entry has both, and the permitted sources.

use bitfield_struct::bitfield;

/// Size of an entry, in bytes.
pub const ENTRY_LEN: u64 = 16;

/// Most entries of a table.
pub const ENTRIES_MAX: u32 = 1 << 16;

/// Validation of a message's source (SVT).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceValidation {
    /// 0: nothing.
    None,
    /// 1: the bits of SID that SQ selects.
    Requester,
    /// 2: the bus is in the range of SID's bytes.
    Bus,
    /// 3: reserved.
    Reserved,
}

impl SourceValidation {
    /// From the two bits of the field.
    pub const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::None,
            1 => Self::Requester,
            2 => Self::Bus,
            _ => Self::Reserved,
        }
    }

    /// The two bits of the field.
    pub const fn into_bits(self) -> u8 {
        self as u8
    }
}

/// Interrupt-remapping entry of a remapped interrupt (§9.10).
#[bitfield(u128)]
#[derive(PartialEq, Eq)]
pub struct InterruptEntry {
    /// P: present.
    pub p: bool,
    /// FPD: do not record this interrupt's faults.
    pub fpd: bool,
    /// DM: the destination is logical.
    pub dm: bool,
    /// RH: redirection hint.
    pub rh: bool,
    /// TM: level-triggered.
    pub tm: bool,
    /// DLM: delivery mode, as in an I/O APIC's entry.
    #[bits(3)]
    pub dlm: u8,
    /// For software's use.
    #[bits(4)]
    pub avail: u8,
    /// Reserved, must be 0.
    #[bits(3)]
    pub rsvd0: u8,
    /// IM: posted, in another layout.
    pub im: bool,
    /// V: vector.
    pub v: u8,
    /// Reserved, must be 0.
    pub rsvd1: u8,
    /// DST: destination, an x2APIC identifier where `IRTA.EIME` is set.
    pub dst: u32,
    /// SID: source.
    pub sid: u16,
    /// SQ: bits of the function to ignore: none, bit 2, bits 2:1, all three.
    #[bits(2)]
    pub sq: u8,
    /// SVT: validation of the source.
    #[bits(2)]
    pub svt: SourceValidation,
    /// Reserved, must be 0.
    #[bits(44)]
    pub rsvd2: u64,
}

/// Address of a message in remappable format (§5.1.2.2), 32 bits; the data are 0, or are added to
/// the handle where SHV is set.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct RemappableAddress {
    #[bits(2)]
    __: u8,
    /// Handle, bit 15.
    pub handle_high: bool,
    /// SHV: the data's lower half is added to the handle.
    pub shv: bool,
    /// 1: remappable format.
    pub is_remappable: bool,
    /// Handle, bits 14:0.
    #[bits(15)]
    pub handle_low: u16,
    /// 0xfee.
    #[bits(12)]
    pub fixed: u16,
}

impl RemappableAddress {
    /// The address that names the entry `handle`, without anything that is added.
    pub const fn of(handle: u16) -> Self {
        Self::new()
            .with_fixed(0xfee)
            .with_is_remappable(true)
            .with_handle_low(handle & 0x7fff)
            .with_handle_high(handle >> 15 != 0)
    }
}

/// Entry of an I/O APIC in remappable format (§5.1.5.1).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct RemappableRedirection {
    /// Vector, the same as in the interrupt-remapping entry: the end of interrupt goes by it.
    pub vector: u8,
    /// 0.
    #[bits(3)]
    pub zero: u8,
    /// Handle, bit 15.
    pub handle_high: bool,
    /// Delivery status (RO).
    pub is_pending: bool,
    /// Polarity: low.
    pub is_low: bool,
    /// Remote IRR (RO).
    pub remote_irr: bool,
    /// Level-triggered, the same as in the interrupt-remapping entry.
    pub is_level: bool,
    /// Masked.
    pub is_masked: bool,
    #[bits(31)]
    __: u32,
    /// 1: remappable format.
    pub is_remappable: bool,
    /// Handle, bits 14:0.
    #[bits(15)]
    pub handle_low: u16,
}

#[cfg(test)]
mod tests;
