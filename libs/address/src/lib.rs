//! Address types, one per address space, with checked addition and no arithmetic operators.
//!
//! * [`Iova`]: I/O virtual address, which a device emits.
//! * [`PhysAddr`]: address to which an IO page table translates. It is host-physical on a bare
//!   machine, and guest-physical in the tables of a guest; the owner of a table knows which, and
//!   converts by a named function.
//!
//! A crate with address spaces of its own defines types of the same shape with [`address_space!`].
//! Code that knows a mapping converts from one space to another by a named function, never by `as`.
//! There is no `+`: addition reports overflow ([`Iova::checked_add`]).
//!
//! ```
//! use address::{Iova, PAGE_SIZE};
//! let iova = Iova::new(0x1fff);
//! assert_eq!(iova.align_down(PAGE_SIZE), Iova::new(0x1000));
//! assert_eq!(iova.left_in_page(), 1);
//! assert_eq!(Iova::new(u64::MAX).checked_add(1), None);
//! ```
#![no_std]
#![forbid(unsafe_code)]

/// Size of the smallest page of every table format here, in bytes.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;
/// Bits of an address below its page number.
pub const PAGE_SHIFT: u32 = 12;

#[doc(hidden)]
pub use core as __core;

/// Defines an address type: `address_space! { /// Its documentation. Name, "Name" }`. The string is
/// the name in debug output.
#[macro_export]
macro_rules! address_space {
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
                $crate::PAGE_SIZE - self.offset_in($crate::PAGE_SIZE)
            }
        }

        impl $crate::__core::fmt::Debug for $name {
            fn fmt(&self, f: &mut $crate::__core::fmt::Formatter<'_>) -> $crate::__core::fmt::Result {
                $crate::__core::write!(f, $crate::__core::concat!($tag, "({:#x})"), self.0)
            }
        }

        impl $crate::__core::fmt::LowerHex for $name {
            fn fmt(&self, f: &mut $crate::__core::fmt::Formatter<'_>) -> $crate::__core::fmt::Result {
                $crate::__core::fmt::LowerHex::fmt(&self.0, f)
            }
        }
    };
}

address_space! {
    /// I/O virtual address: the address that a device puts on the bus.
    Iova, "Iova"
}
address_space! {
    /// Address to which an IO page table translates. The owner of the table knows whether it is
    /// host-physical or guest-physical.
    PhysAddr, "PhysAddr"
}
