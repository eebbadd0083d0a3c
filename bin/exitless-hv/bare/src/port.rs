//! Access to I/O ports by the instructions `in` and `out`.

use core::arch::asm;

/// Writes a byte to a port.
///
/// # Safety
/// The device's reaction to the write must not violate memory safety.
pub unsafe fn out8(port: u16, value: u8) {
    // SAFETY: the caller's promise.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nostack, preserves_flags)) }
}

/// Writes two bytes to a port.
///
/// # Safety
/// As [`out8`].
pub unsafe fn out16(port: u16, value: u16) {
    // SAFETY: the caller's promise.
    unsafe { asm!("out dx, ax", in("dx") port, in("ax") value, options(nostack, preserves_flags)) }
}

/// Writes four bytes to a port.
///
/// # Safety
/// As [`out8`].
pub unsafe fn out32(port: u16, value: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("out dx, eax", in("dx") port, in("eax") value, options(nostack, preserves_flags))
    }
}

/// Reads a byte from a port.
///
/// # Safety
/// As [`out8`].
#[must_use]
pub unsafe fn in8(port: u16) -> u8 {
    let value;
    // SAFETY: the caller's promise.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nostack, preserves_flags)) }
    value
}

/// Reads two bytes from a port.
///
/// # Safety
/// As [`out8`].
#[must_use]
pub unsafe fn in16(port: u16) -> u16 {
    let value;
    // SAFETY: the caller's promise.
    unsafe { asm!("in ax, dx", in("dx") port, out("ax") value, options(nostack, preserves_flags)) }
    value
}

/// Reads four bytes from a port.
///
/// # Safety
/// As [`out8`].
#[must_use]
pub unsafe fn in32(port: u16) -> u32 {
    let value;
    // SAFETY: the caller's promise.
    unsafe {
        asm!("in eax, dx", in("dx") port, out("eax") value, options(nostack, preserves_flags))
    }
    value
}
