//! PCI configuration space: a function by its class, a capability, memory behind a BAR. Functions
//! are bus << 8 | device << 3 | function.

use crate::port::{in32, out32};

/// Command.
pub const COMMAND: u8 = 4;
/// The capability of MSI-X.
pub const MSIX: u8 = 0x11;

const CLASS: u8 = 8;
const HEADER: u8 = 12;
const BAR: u8 = 0x10;
const CAPABILITIES: u8 = 0x34;
/// End of the memory that boot.s maps.
const MAPPED_END: u64 = 512 << 30;

fn select(function: u16, register: u8) {
    // SAFETY: the address port only says what the next access of the data port is to.
    unsafe {
        out32(
            0xcf8,
            1 << 31 | u32::from(function) << 8 | u32::from(register & !3),
        )
    }
}

/// Reads a register; of a function that is not there, all ones.
#[must_use]
pub fn read(function: u16, register: u8) -> u32 {
    select(function, register);
    // SAFETY: reading configuration space changes nothing. One processor runs these programs, so
    // the address port still has what `select` wrote.
    unsafe { in32(0xcfc) }
}

/// Writes a register.
///
/// # Safety
/// The function must not do with it what memory safety forbids.
pub unsafe fn write(function: u16, register: u8, value: u32) {
    select(function, register);
    // SAFETY: the caller's.
    unsafe { out32(0xcfc, value) }
}

/// Returns the first of `functions` that has this class: class, subclass, interface.
pub fn find(mut functions: impl Iterator<Item = u16>, class: u32) -> Option<u16> {
    functions.find(|function| read(*function, CLASS) >> 8 == class)
}

/// Returns the offset of a capability. The list has 48 at most.
#[must_use]
pub fn capability(function: u16, wanted: u8) -> Option<u8> {
    let mut at = read(function, CAPABILITIES) as u8 & !3;
    for _ in 0..48 {
        if at == 0 {
            return None;
        }
        let word = read(function, at);
        if word as u8 == wanted {
            return Some(at);
        }
        at = (word >> 8) as u8 & !3;
    }
    None
}

/// Returns the address in a BAR that is memory, and mapped.
#[must_use]
pub fn memory(function: u16, index: u8) -> Option<u64> {
    if read(function, HEADER) >> 16 & 0x7f != 0 || index > 5 {
        return None;
    }
    let low = read(function, BAR + 4 * index);
    let is_wide = low >> 1 & 3 == 2 && index < 5;
    let high = if is_wide {
        read(function, BAR + 4 * index + 4)
    } else {
        0
    };
    let address = u64::from(high) << 32 | u64::from(low & !0xf);
    (low & 1 == 0 && address != 0 && address < MAPPED_END).then_some(address)
}
