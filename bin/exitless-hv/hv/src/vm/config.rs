//! PCI configuration space: the guest's accesses by the ports 0xcf8 to 0xcff, filtered by policy
//! ([`eli::policy::config`]). The memory-mapped window (ECAM) is not mapped for the guest.

use bare::{pci, port};
use eli::policy::config::{Config, Read, Target, Write};
use eli::policy::ports::ones;

use super::Processor;
use crate::log::Hex;
use crate::raw_ports::{CONFIG_ADDRESS as ADDRESS, CONFIG_DATA as DATA};

impl Processor {
    /// Emulates a read of one of these ports.
    pub(super) fn config_read(&mut self, number: u16, size: u8) -> u32 {
        let mut chips = self.machine.chips();
        let config = chips.config_mut();
        if number == ADDRESS {
            return match size {
                4 => config.address(),
                _ => ones(size),
            };
        }
        let Some(target) = config.target((number - DATA) as u8, size) else {
            return ones(size);
        };
        drop(chips);
        if let Some(word) = self.block_read(target) {
            return target.part(word);
        }
        let mut chips = self.machine.chips();
        let config = chips.config_mut();
        let word = match config.read(target) {
            Read::Real => pci::read(target.function, target.register),
            Read::Value(word) => word,
        };
        target.part(word)
    }

    /// Emulates a write to one of these ports.
    pub(super) fn config_write(&mut self, number: u16, size: u8, value: u32) {
        let mut chips = self.machine.chips();
        let config = chips.config_mut();
        if number == ADDRESS {
            if size == 4 {
                config.set_address(value);
            }
            return;
        }
        let Some(target) = config.target((number - DATA) as u8, size) else {
            return;
        };
        let value = value << (target.byte * 8);
        drop(chips);
        if self.block_write(target, value) {
            return;
        }
        let mut chips = self.machine.chips();
        let config = chips.config_mut();
        // A register of another device could be read without harm, but its value is not needed.
        let is_own = config
            .function()
            .is_some_and(|own| own.number == target.function);
        let old = if is_own {
            pci::read(target.function, target.register)
        } else {
            0
        };
        match config.write(target, value, old) {
            Write::Real(value) => {
                if target.is_command() {
                    restore_addresses(config);
                }
                write(target, value);
            }
            Write::Dropped => {}
            Write::Refused(what) => {
                drop(chips);
                let at = u64::from(target.function) << 8 | u64::from(target.register);
                self.refuse(what, &Hex(at));
            }
        }
    }
}

/// Restores the device's BARs if it has lost them by a reset or a sleep state: at address 0 it
/// would answer in the place of RAM.
fn restore_addresses(config: &Config) {
    let Some(function) = config.function() else {
        return;
    };
    for (register, bar) in (0x10..).step_by(4).zip(function.bars) {
        if bar.size != 0 && pci::read(function.number, register) != bar.value {
            // SAFETY: the value that firmware had set.
            unsafe { pci::write(function.number, register, bar.value) }
        }
    }
}

/// Writes the accessed bytes of a register only: other bytes may have bits that a write clears.
fn write(target: Target, word: u32) {
    let data = DATA + u16::from(target.byte);
    let value = target.part(word);
    let address = 1 << 31 | u32::from(target.function) << 8 | u32::from(target.register);
    // SAFETY: policy has allowed this write; the register is the assigned function's.
    unsafe {
        port::out32(ADDRESS, address);
        match target.size {
            1 => port::out8(data, value as u8),
            2 => port::out16(data, value as u16),
            _ => port::out32(data, value),
        }
    }
}
