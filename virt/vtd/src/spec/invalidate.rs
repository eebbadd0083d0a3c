//! Invalidation descriptors (§6.5.2), 128 bits each, in the legacy layout.
//!
//! Codes that a guest writes are open: [`DescriptorType`] and [`Granularity`] have a value for every bit
//! pattern, so that decoding never fails; the engine decides what is an error.

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

/// Device-TLB invalidate descriptor (§6.5.2.5). Laid out for its place; `ECAP.DT` is 0.
#[bitfield(u128)]
#[derive(PartialEq, Eq)]
pub struct DeviceTlbDescriptor {
    /// Type, 3.
    #[bits(4)]
    pub kind: u8,
    #[bits(12)]
    __: u16,
    #[bits(16)]
    __: u16,
    /// SID: source.
    pub sid: u16,
    #[bits(16)]
    __: u16,
    /// S: the address encodes a size.
    pub s: bool,
    #[bits(11)]
    __: u16,
    /// ADDR: first page.
    #[bits(52)]
    pub addr: u64,
}

/// Interrupt entry cache invalidate descriptor (§6.5.2.7). For its place; `ECAP.IR` is 0.
#[bitfield(u128)]
#[derive(PartialEq, Eq)]
pub struct InterruptEntryDescriptor {
    /// Type, 4.
    #[bits(4)]
    pub kind: u8,
    /// G: 0 is global, 1 is by index.
    pub g: bool,
    #[bits(22)]
    __: u32,
    /// IM: 2^IM entries.
    #[bits(5)]
    pub im: u8,
    /// IIDX: first index.
    pub iidx: u16,
    #[bits(16)]
    __: u16,
    __: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_descriptor_fields_lie_where_the_document_puts_them() {
        let d = |word: u128| ContextDescriptor::from_bits(word);
        assert_eq!(d(0x1).kind(), 1);
        assert_eq!(d(0x30).g(), Granularity::SELECTIVE);
        assert_eq!(d(0x10).g(), Granularity::GLOBAL);
        assert_eq!(d(0xffc0).rsvd0(), 0x3ff);
        assert_eq!(d(0xabcd_0000).did(), 0xabcd);
        assert_eq!(d(0x1234_0000_0000).sid(), 0x1234);
        assert_eq!(d(0x3_0000_0000_0000).fm(), 3);
        assert_eq!(d(0xfffc_0000_0000_0000).rsvd1(), 0x3fff);
        assert_eq!(d(1 << 64).rsvd2(), 1);
    }

    #[test]
    fn iotlb_descriptor_fields_lie_where_the_document_puts_them() {
        let d = |word: u128| IotlbDescriptor::from_bits(word);
        assert_eq!(d(0x2).kind(), 2);
        assert_eq!(d(0x20).g(), Granularity::DOMAIN);
        assert!(d(0x40).dw() && !d(0x80).dw());
        assert!(d(0x80).dr() && !d(0x40).dr());
        assert_eq!(d(0xff00).rsvd0(), 0xff);
        assert_eq!(d(0xabcd_0000).did(), 0xabcd);
        assert_eq!(d(0xffff_ffff_0000_0000).rsvd1(), 0xffff_ffff);
        assert_eq!(d(0x3f << 64).am(), 0x3f);
        assert!(d(0x40 << 64).ih());
        assert_eq!(d(0xf80 << 64).rsvd2(), 0x1f);
        assert_eq!(d(0x1234_5678_9000 << 64).addr(), 0x1_2345_6789);
    }

    #[test]
    fn wait_descriptor_fields_lie_where_the_document_puts_them() {
        let d = |word: u128| WaitDescriptor::from_bits(word);
        assert_eq!(d(0x5).kind(), 5);
        assert!(d(0x10).iflag() && !d(0x20).iflag());
        assert!(d(0x20).sw() && !d(0x10).sw());
        assert!(d(0x40).fence());
        assert_eq!(d(0xffff_ff80).rsvd0(), 0x1ff_ffff);
        assert_eq!(d(0xdead_beef_0000_0000).data(), 0xdead_beef);
        assert_eq!(d(0x3 << 64).rsvd1(), 3);
        assert_eq!(d(0x1000 << 64).addr(), 0x400);
    }

    #[test]
    fn unoffered_descriptors_keep_their_layout() {
        let tlb = DeviceTlbDescriptor::from_bits;
        assert_eq!(tlb(0x3).kind(), 3);
        assert_eq!(tlb(0x1234_0000_0000).sid(), 0x1234);
        assert!(tlb(1 << 64).s());
        assert_eq!(tlb(0x7000 << 64).addr(), 7);
        let iec = InterruptEntryDescriptor::from_bits;
        assert_eq!(iec(0x4).kind(), 4);
        assert!(iec(0x10).g());
        assert_eq!(iec(0xf800_0000).im(), 0x1f);
        assert_eq!(iec(0x4321_0000_0000).iidx(), 0x4321);
    }

    #[test]
    fn descriptor_type_has_its_high_part_in_bits_11_to_9() {
        assert_eq!(DescriptorType::of(0x5), DescriptorType::WAIT);
        assert_eq!(DescriptorType::of(0xe05), DescriptorType(0x75));
        assert_eq!(DescriptorType::of(0x1f5), DescriptorType::WAIT);
    }
}
