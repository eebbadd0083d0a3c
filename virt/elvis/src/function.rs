//! Configuration space of the function (PCI 3.0, §6; virtio 1.2, §4.1.2 to §4.1.4).
//!
//! Its base address is fixed by the hypervisor: sizing is answered, moving is refused, since the
//! hypervisor's page tables map the pages behind it. There is no interrupt pin.

use virtqueue::split;

use crate::messages::{Control, ENTRIES};

/// Bytes of the base address' range.
pub const BAR_LEN: u32 = 0x8000;
/// Bytes of a page, in which each structure is alone.
pub const PAGE: u32 = 0x1000;
/// Offset of the common configuration: every access has to exit.
pub const COMMON: u32 = 0;
/// Offset of the ISR status, which is 0: writes have no effect.
pub const ISR: u32 = PAGE;
/// Offset of the device's own configuration: writes have no effect.
pub const DEVICE: u32 = 2 * PAGE;
/// Offset of the doorbell: plain memory, so that it may be rung without an exit.
pub const NOTIFY: u32 = 3 * PAGE;
/// Offset of the MSI-X table: writes have to exit.
pub const TABLE: u32 = 4 * PAGE;
/// Offset of the pending bits: writes have no effect.
pub const PENDING: u32 = 5 * PAGE;

const _: () = assert!(split::RING == 4, "the layout of virtio 1.2");

const VENDOR: u32 = 0x1af4;
/// Modern devices add their type, a block device's 2, to 0x1040.
const DEVICE_ID: u32 = 0x1042;
/// Mass storage, other; revision 1.
const CLASS: u32 = 0x0180_0001;
/// There is a list of capabilities.
const STATUS: u32 = 0x10 << 16;

/// Memory, bus master, no interrupt pin.
const COMMAND_WRITABLE: u32 = 0x0406;
const MASTER: u32 = 1 << 2;

const VENDOR_CAPABILITY: u32 = 0x09;
const MSIX_CAPABILITY: u32 = 0x11;
const MSIX_AT: u8 = 0x40;
const COMMON_AT: u8 = 0x50;
const ISR_AT: u8 = 0x60;
const DEVICE_AT: u8 = 0x70;
const NOTIFY_AT: u8 = 0x80;
const NOTIFY_LEN: u32 = 20;
const OTHER_LEN: u32 = 16;

/// Effect of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// Nothing beyond the register.
    Nothing,
    /// Messages are on, off or masked, or the function may use memory, or not any more.
    Changed,
    /// It had no effect; the reason is logged.
    Refused(&'static str),
}

/// The function.
#[derive(Clone, Debug)]
pub struct Function {
    bar: u32,
    command: u32,
    is_sizing: bool,
    control: Control,
    cache_line: u32,
    line: u32,
}

impl Function {
    /// Creates a function whose base address is `bar`, a multiple of [`BAR_LEN`] below 4 GiB.
    #[must_use]
    pub fn new(bar: u32) -> Self {
        Self {
            bar: bar & !(BAR_LEN - 1),
            command: 0,
            is_sizing: false,
            control: Control::default(),
            cache_line: 0,
            line: 0,
        }
    }

    /// Returns its base address.
    #[must_use]
    pub const fn bar(&self) -> u32 {
        self.bar
    }

    /// Whether it may read and write memory, and send messages.
    #[must_use]
    pub const fn is_master(&self) -> bool {
        self.command & MASTER != 0
    }

    /// Whether its messages are on, and masked.
    #[must_use]
    pub const fn control(&self) -> Control {
        self.control
    }

    /// Four bytes at `register`, a multiple of 4.
    #[must_use]
    pub fn read(&self, register: u8) -> u32 {
        let capability = |kind: u32, next: u8, len: u32| {
            VENDOR_CAPABILITY | u32::from(next) << 8 | len << 16 | kind << 24
        };
        match register {
            0x00 => VENDOR | DEVICE_ID << 16,
            0x04 => self.command | STATUS,
            0x08 => CLASS,
            0x0c => self.cache_line,
            0x10 if self.is_sizing => !(BAR_LEN - 1),
            0x10 => self.bar,
            0x2c => VENDOR | DEVICE_ID << 16,
            0x34 => MSIX_AT.into(),
            0x3c => self.line,
            MSIX_AT => {
                let entries = (ENTRIES as u32 - 1) << 16;
                MSIX_CAPABILITY | u32::from(COMMON_AT) << 8 | entries | self.control.bits()
            }
            0x44 => TABLE,
            0x48 => PENDING,
            COMMON_AT => capability(1, ISR_AT, OTHER_LEN),
            0x58 => COMMON,
            ISR_AT => capability(3, DEVICE_AT, OTHER_LEN),
            0x68 => ISR,
            DEVICE_AT => capability(4, NOTIFY_AT, OTHER_LEN),
            0x78 => DEVICE,
            NOTIFY_AT => capability(2, 0, NOTIFY_LEN),
            0x88 => NOTIFY,
            // The length of each.
            0x5c | 0x6c | 0x7c | 0x8c => PAGE,
            // One queue, and so one doorbell: no distance between them.
            _ => 0,
        }
    }

    /// A write of the bytes in `lanes` of `value` to `register`.
    pub fn write(&mut self, register: u8, lanes: u32, value: u32) -> Written {
        let merge = |old: u32, writable: u32| {
            let bits = lanes & writable;
            old & !bits | value & bits
        };
        match register {
            0x04 => {
                let was_master = self.is_master();
                self.command = merge(self.command, COMMAND_WRITABLE);
                changed(was_master != self.is_master())
            }
            0x0c => {
                self.cache_line = merge(self.cache_line, 0xff);
                Written::Nothing
            }
            0x3c => {
                self.line = merge(self.line, 0xff);
                Written::Nothing
            }
            0x10 if lanes != u32::MAX => Written::Refused("part of a base address"),
            0x10 => {
                let address = value & !(BAR_LEN - 1);
                self.is_sizing = address == !(BAR_LEN - 1);
                if self.is_sizing || address == self.bar {
                    Written::Nothing
                } else {
                    Written::Refused("a base address moved")
                }
            }
            MSIX_AT => {
                let control = Control::from_bits(merge(self.control.bits(), Control::BITS));
                let old = core::mem::replace(&mut self.control, control);
                changed(old != control)
            }
            _ => Written::Nothing,
        }
    }
}

const fn changed(is_so: bool) -> Written {
    if is_so {
        Written::Changed
    } else {
        Written::Nothing
    }
}

#[cfg(test)]
mod tests;
