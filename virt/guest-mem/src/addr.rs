//! Addresses as types: one per address space, with checked steps and no arithmetic operators.
//!
//! * [`Gpa`]: guest-physical, a physical address for the guest's kernel.
//! * [`Iova`]: I/O virtual, an address that a device emits; equal to a GPA only without an IOMMU.
//! * [`Hva`]: host-virtual, our own pointer, as a number.
//!
//! Crossing from one space to another is a named function of the type that knows how
//! ([`Iommu::translate`](crate::Iommu::translate), [`PhysMem::host`](crate::PhysMem::host)), never
//! `as`. There is no `+`: a step names its overflow ([`Gpa::checked_add`]).

use std::fmt;

use address::address_space;
pub use address::{Iova, PAGE_SIZE};

address_space! {
    /// Guest-physical address.
    Gpa, "Gpa"
}
address_space! {
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
