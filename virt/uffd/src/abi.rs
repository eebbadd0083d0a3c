//! Numbers of `linux/userfaultfd.h`.

use std::ops::BitOr;

pub(crate) const API: u64 = 0xaa;
/// A flag of userfaultfd(2): faults in user mode only.
pub(crate) const USER_MODE_ONLY: i32 = 1;
/// A request of `/dev/userfaultfd`: a new descriptor.
pub(crate) const IOC_NEW: u64 = 0xaa00;
/// Kind of a message: a fault.
pub(crate) const EVENT_PAGEFAULT: u8 = 0x12;
// Flags of such a message.
pub(crate) const FAULT_WRITE: u64 = 1 << 0;
pub(crate) const FAULT_WP: u64 = 1 << 1;
pub(crate) const FAULT_MINOR: u64 = 1 << 2;

/// A request on the descriptor. Bits 31:30: the kernel writes (2) or reads and writes (3) the
/// argument; 29:16: size of the argument in bytes; 15:8: [`API`]; 7:0: number. The arguments are
/// structures of 64-bit words.
#[derive(Clone, Copy)]
pub(crate) struct Request<const WORDS: usize>(pub u64);

const fn read_write<const WORDS: usize>(number: u64) -> Request<WORDS> {
    Request(3 << 30 | (WORDS as u64 * 8) << 16 | API << 8 | number)
}

/// api, features, ioctls.
pub(crate) const HANDSHAKE: Request<3> = read_write(0x3f);
/// start, len, mode, ioctls.
pub(crate) const REGISTER: Request<4> = read_write(0x00);
/// start, len.
pub(crate) const WAKE: Request<2> = Request(0x8010_aa02);
/// dst, src, len, mode, bytes done or an error.
pub(crate) const COPY: Request<5> = read_write(0x03);
/// start, len, mode, bytes done or an error; so is `CONTINUE`.
pub(crate) const ZEROPAGE: Request<4> = read_write(0x04);
/// start, len, mode.
pub(crate) const WRITEPROTECT: Request<3> = read_write(0x06);
pub(crate) const CONTINUE: Request<4> = read_write(0x07);

/// Features that a descriptor is asked to have; the kernel refuses unknown ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features(pub(crate) u64);

impl Features {
    /// Faults at write-protected pages.
    pub const WRITE_PROTECT: Self = Self(1 << 0);
    /// Faults at absent pages of shared memory.
    pub const MISSING_SHARED: Self = Self(1 << 5);
    /// Faults at pages of shared memory that the file has and the mapping has not.
    pub const MINOR_SHARED: Self = Self(1 << 10);
    /// Write protection of shared memory (Linux 5.19).
    pub const WRITE_PROTECT_SHARED: Self = Self(1 << 12);
    /// A store to a write-protected page is no fault, but removes the protection (Linux 6.7).
    pub const WRITE_PROTECT_ASYNC: Self = Self(1 << 15);
}

/// Kinds of faults in a range that become messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes(pub(crate) u64);

impl Modes {
    /// Faults at absent pages.
    pub const MISSING: Self = Self(1 << 0);
    /// Stores to write-protected pages.
    pub const WRITE_PROTECT: Self = Self(1 << 1);
    /// Faults at pages that the file has and the mapping has not.
    pub const MINOR: Self = Self(1 << 2);
}

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOr for Modes {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed from the header by hand.
    #[test]
    fn requests_are_numbered_as_in_the_header() {
        assert_eq!(HANDSHAKE.0, 0xc018_aa3f);
        assert_eq!(REGISTER.0, 0xc020_aa00);
        assert_eq!(COPY.0, 0xc028_aa03);
        assert_eq!(ZEROPAGE.0, 0xc020_aa04);
        assert_eq!(WRITEPROTECT.0, 0xc018_aa06);
        assert_eq!(CONTINUE.0, 0xc020_aa07);
    }
}
