//! Invalidation descriptors (§6.5.2), 128 bits each, in the legacy layout.
//!
//! Codes that a guest writes are open: [`DescriptorType`] and [`Granularity`] have a value for
//! every bit pattern, so that decoding never fails; the engine decides what is an error.

use bitfield_struct::bitfield;

/// Size of one descriptor, in bytes.
pub const DESCRIPTOR_LEN: u64 = 16;

/// Type of a descriptor: bits 3:0, and bits 11:9 as the code's high part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorType(pub u8);

impl DescriptorType {
    /// Context-cache invalidate.
    pub const CONTEXT: Self = Self(1);
    /// IOTLB invalidate.
    pub const IOTLB: Self = Self(2);
    /// Device-TLB invalidate.
    pub const DEVICE_TLB: Self = Self(3);
    /// Interrupt entry cache invalidate.
    pub const INTERRUPT_ENTRY: Self = Self(4);
    /// Invalidation wait.
    pub const WAIT: Self = Self(5);

    /// The type of a descriptor.
    pub const fn of(descriptor: u128) -> Self {
        Self((descriptor & 0xf) as u8 | ((descriptor >> 9 & 7) << 4) as u8)
    }
}

/// Granularity of an invalidation, in descriptors (G) and registers (CIRG, CAIG, IIRG, IAIG) alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granularity(pub u8);

impl Granularity {
    /// Reserved in a request; "refused" in an answer.
    pub const RESERVED: Self = Self(0);
    /// Everything.
    pub const GLOBAL: Self = Self(1);
    /// One domain.
    pub const DOMAIN: Self = Self(2);
    /// One device (context cache), or pages of one domain (IOTLB).
    pub const SELECTIVE: Self = Self(3);

    /// From the two bits of a field.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & 3)
    }

    /// The two bits of the field.
    pub const fn into_bits(self) -> u8 {
        self.0
    }
}

/// Context-cache invalidate descriptor (§6.5.2.1).
#[bitfield(u128)]
#[derive(PartialEq, Eq)]
pub struct ContextDescriptor {
    /// Type, 1.
    #[bits(4)]
    pub kind: u8,
    /// G: granularity.
    #[bits(2)]
    pub g: Granularity,
    /// Reserved, must be 0.
    #[bits(10)]
    pub rsvd0: u16,
    /// DID: domain.
    pub did: u16,
    /// SID: source.
    pub sid: u16,
    /// FM: function bits of SID to ignore.
    #[bits(2)]
    pub fm: u8,
    /// Reserved, must be 0.
    #[bits(14)]
    pub rsvd1: u16,
    /// Reserved, must be 0.
    pub rsvd2: u64,
}

/// IOTLB invalidate descriptor (§6.5.2.3).
#[bitfield(u128)]
#[derive(PartialEq, Eq)]
pub struct IotlbDescriptor {
    /// Type, 2.
    #[bits(4)]
    pub kind: u8,
    /// G: granularity.
    #[bits(2)]
    pub g: Granularity,
    /// DW: drain writes.
    pub dw: bool,
    /// DR: drain reads.
    pub dr: bool,
    /// Reserved, must be 0.
    pub rsvd0: u8,
    /// DID: domain.
    pub did: u16,
    /// Reserved, must be 0.
    pub rsvd1: u32,
    /// AM: 2^AM pages.
    #[bits(6)]
    pub am: u8,
    /// IH: only leaf entries changed.
    pub ih: bool,
    /// Reserved, must be 0.
    #[bits(5)]
    pub rsvd2: u8,
    /// ADDR: first page.
    #[bits(52)]
    pub addr: u64,
}

/// Interrupt entry cache invalidate descriptor (§6.5.2.7).
#[bitfield(u128)]
#[derive(PartialEq, Eq)]
pub struct InterruptEntryDescriptor {
    /// Type, 4.
    #[bits(4)]
    pub kind: u8,
    /// G: the entries from IIDX on; otherwise all.
    pub is_selective: bool,
    /// Reserved, must be 0.
    #[bits(22)]
    pub rsvd0: u32,
    /// IM: 2^IM entries.
    #[bits(5)]
    pub im: u8,
    /// IIDX: the first entry.
    pub iidx: u16,
    /// Reserved, must be 0.
    pub rsvd1: u16,
    /// Reserved, must be 0.
    pub rsvd2: u64,
}

/// Invalidation wait descriptor (§6.5.2.8).
#[bitfield(u128)]
#[derive(PartialEq, Eq)]
pub struct WaitDescriptor {
    /// Type, 5.
    #[bits(4)]
    pub kind: u8,
    /// IF: raise the invalidation completion event.
    pub iflag: bool,
    /// SW: write the status data.
    pub sw: bool,
    /// FN: fence; later descriptors start after this one.
    pub fence: bool,
    /// Reserved, must be 0 (bit 7 is PD, for page requests, which are not offered).
    #[bits(25)]
    pub rsvd0: u32,
    /// Status data.
    pub data: u32,
    /// Reserved, must be 0.
    #[bits(2)]
    pub rsvd1: u8,
    /// Status address, in units of 4 bytes.
    #[bits(62)]
    pub addr: u64,
}

#[cfg(test)]
mod tests;
