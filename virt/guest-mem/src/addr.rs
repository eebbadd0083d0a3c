//! Addresses as types: one per address space, with checked steps and no arithmetic operators.
//!
//! * [`Gpa`]: guest-physical, what the guest's kernel calls a physical address.
//! * [`Iova`]: I/O virtual, what a device emits; equal to a GPA only where no IOMMU stands between.
//! * [`Hva`]: host-virtual, our own pointer, as a number.
//!
//! Crossing from one space to another is a named function of the type that knows how
//! ([`Iommu::translate`](crate::Iommu::translate), [`PhysMem::host`](crate::PhysMem::host)), never `as`.
//! There is no `+`: a step names its overflow ([`Gpa::checked_add`]).

use std::fmt;

/// Size of the smallest page of every table format here, in bytes.
pub const PAGE_SIZE: u64 = 4096;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident, $tag:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// The address with this numeric value.
            #[inline]
            pub const fn new(raw: u64) -> Self {
                Self(raw)
            }

            /// The numeric value, for registers, table entries and messages.
            #[inline]
            pub const fn raw(self) -> u64 {
                self.0
            }

            /// The address `bytes` further on; `None` past the end of the 64-bit space.
            #[inline]
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(raw) => Some(Self(raw)),
                    None => None,
                }
            }

            /// Bytes from `base` to `self`; `None` where `self` lies below `base`.
            #[inline]
            pub const fn offset_from(self, base: Self) -> Option<u64> {
                self.0.checked_sub(base.0)
            }

            /// The start of the `size`-byte block holding this address; `size` is a power of two.
            #[inline]
            pub const fn align_down(self, size: u64) -> Self {
                debug_assert!(size.is_power_of_two());
                Self(self.0 & !(size - 1))
            }

            /// Offset inside its `size`-byte block, in bytes; `size` is a power of two.
            #[inline]
            pub const fn offset_in(self, size: u64) -> u64 {
                debug_assert!(size.is_power_of_two());
                self.0 & (size - 1)
            }

            /// Whether the address is a multiple of `size`, a power of two.
            #[inline]
            pub const fn is_aligned(self, size: u64) -> bool {
                self.offset_in(size) == 0
            }

            /// Bytes from here to the end of its 4 KiB page, 1 to 4096.
            #[inline]
            pub const fn left_in_page(self) -> u64 {
                PAGE_SIZE - self.offset_in(PAGE_SIZE)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($tag, "({:#x})"), self.0)
            }
        }

        impl fmt::LowerHex for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, f)
            }
        }
    };
}

address! {
    /// Guest-physical address.
    Gpa, "Gpa"
}
address! {
    /// I/O virtual address: what a device puts on the bus.
    Iova, "Iova"
}
address! {
    /// Host-virtual address: a pointer of this process, as a number.
    Hva, "Hva"
}

/// PCI requester: bus in bits 15:8, device in 7:3, function in 2:0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct SourceId(pub u16);

impl SourceId {
    /// From bus, device (0 to 31) and function (0 to 7); higher bits are dropped.
    pub const fn new(bus: u8, device: u8, function: u8) -> Self {
        Self((bus as u16) << 8 | ((device & 0x1f) as u16) << 3 | (function & 7) as u16)
    }

    /// Bus number.
    pub const fn bus(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Device and function, the index into a context table.
    pub const fn devfn(self) -> u8 {
        self.0 as u8
    }
}

impl fmt::Debug for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:02x}:{:02x}.{}",
            self.bus(),
            self.devfn() >> 3,
            self.devfn() & 7
        )
    }
}

impl fmt::Display for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
