//! Ports of the machine as they are: those that exit whatever the list says, and accesses that
//! policy has allowed.

use bare::port;
use eli::policy::pit;

use crate::log;

/// The port of markers, one byte each: 1 begins a window, 2 ends it.
pub const MARKERS: u16 = 0xe0;
/// Registers of the two 8259s.
pub const PICS: [u16; 4] = [0x20, 0x21, 0xa0, 0xa1];
/// Configuration space: the address.
pub const CONFIG_ADDRESS: u16 = 0xcf8;
/// There: the first byte of the data.
pub const CONFIG_DATA: u16 = 0xcfc;

/// Returns whether a port is one of configuration space. The reset register among them, of one
/// byte, is not.
pub const fn is_config(number: u16) -> bool {
    matches!(number, CONFIG_ADDRESS | CONFIG_DATA..=0xcff)
}

/// Starts the first counter of the 8254 at its longest period: what its next byte is, is known
/// then.
pub fn start_timer() {
    for (number, value) in [
        (pit::CONTROL, pit::START),
        (pit::COUNTER, 0),
        (pit::COUNTER, 0),
    ] {
        through_write(number, 1, u32::from(value));
    }
}

/// Returns whether accesses to a port exit whatever the list says: they are the hypervisor's, or an
/// 8259's.
pub fn exits_always(number: u16) -> bool {
    is_own(number) || PICS.contains(&number)
}

/// Markers, and the log: the guest writes no line of it.
pub fn is_own(number: u16) -> bool {
    number == MARKERS || log::output().ports().contains(&number)
}

/// Reads a port of the machine's.
pub fn through_read(number: u16, size: u8) -> u32 {
    // SAFETY: policy has allowed it: reading it does the host no harm.
    unsafe {
        match size {
            1 => u32::from(port::in8(number)),
            2 => u32::from(port::in16(number)),
            _ => port::in32(number),
        }
    }
}

/// Writes one.
pub fn through_write(number: u16, size: u8, value: u32) {
    // SAFETY: policy has allowed it, with this value.
    unsafe {
        match size {
            1 => port::out8(number, value as u8),
            2 => port::out16(number, value as u16),
            _ => port::out32(number, value),
        }
    }
}
