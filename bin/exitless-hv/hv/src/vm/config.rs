//! Configuration space: the guest's accesses by the ports 0xcf8 to 0xcff, as policy has them
//! ([`eli::policy::config`]). The window in memory is hidden, and not mapped.

use bare::{pci, port};
use eli::policy::config::{Bar, Config, Function, Read, Target, Write};
use eli::policy::ports::ones;

use super::Vm;
use crate::acpi::Tables;
use crate::log::{Hex, say};

/// The address.
const ADDRESS: u16 = 0xcf8;
/// The first byte of the data.
const DATA: u16 = 0xcfc;

/// Whether a port is one of them. The reset register among them, of one byte, is not.
pub(super) const fn is_port(number: u16) -> bool {
    matches!(number, ADDRESS | DATA..=0xcff)
}

impl Vm {
    /// Takes configuration space from the guest but for its own function. Nothing of the guest runs
    /// yet.
    pub fn hide_configuration(&mut self, tables: &Tables) {
        const ISA_BRIDGE: u32 = 0x06_0100;
        const HOST_BRIDGE: u32 = 0x06_0000;
        let bridges = [HOST_BRIDGE, ISA_BRIDGE].map(|class| pci::find(0..256, class));
        let function = self.chips.msix().map(|table| describe(table.function));
        let config = Config::new(function, bridges.into_iter().flatten());
        self.chips.set_config(config);
        for window in tables.windows.iter().flatten() {
            if self.pages.nested.remove(window.clone()).is_err() {
                self.stop("no nested page table is left for configuration space");
            }
            say!(
                "hv: configuration space at {:#x} is hidden, the guest has its device's",
                window.start
            );
        }
        self.pages.vmcb.flush();
    }

    /// Carries out a read of such a port.
    pub(super) fn config_read(&mut self, number: u16, size: u8) -> u32 {
        let config = self.chips.config();
        if number == ADDRESS {
            return match size {
                4 => config.address(),
                _ => ones(size),
            };
        }
        let Some(target) = config.target((number - DATA) as u8, size) else {
            return ones(size);
        };
        let word = match config.read(target) {
            Read::Real => pci::read(target.function, target.register),
            Read::Value(word) => word,
        };
        target.part(word)
    }

    /// Carries out a write to such a port.
    pub(super) fn config_write(&mut self, number: u16, size: u8, value: u32) {
        let config = self.chips.config_mut();
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
        // Reading a register of one that is not the guest's changes nothing, but it is of no use.
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
                    self.restore_addresses();
                }
                write(target, value);
            }
            Write::Dropped => {}
            Write::Refused(what) => {
                let at = u64::from(target.function) << 8 | u64::from(target.register);
                self.refuse(what, &Hex(at));
            }
        }
    }

    /// Writes the device's base addresses again where it has lost them, by a reset or a sleep: at 0
    /// it would answer in the place of memory.
    fn restore_addresses(&self) {
        let Some(function) = self.chips.config().function() else {
            return;
        };
        for (register, bar) in (0x10..).step_by(4).zip(function.bars) {
            if bar.size != 0 && pci::read(function.number, register) != bar.value {
                // SAFETY: where firmware had it.
                unsafe { pci::write(function.number, register, bar.value) }
            }
        }
    }
}

/// Writes the accessed bytes of a register, and no others: some are cleared by being written.
fn write(target: Target, word: u32) {
    let data = DATA + u16::from(target.byte);
    let value = target.part(word);
    let address = 1 << 31 | u32::from(target.function) << 8 | u32::from(target.register);
    // SAFETY: policy has let it through: it is the assigned function's.
    unsafe {
        port::out32(ADDRESS, address);
        match target.size {
            1 => port::out8(data, value as u8),
            2 => port::out16(data, value as u16),
            _ => port::out32(data, value),
        }
    }
}

/// A function as policy has to know it. Its base addresses are sized, with decoding off.
fn describe(number: u16) -> Function {
    const DECODING: u32 = 3;
    const MSI: u8 = 0x05;
    const MSI_ON: u32 = 1 << 16;
    const POWER: u8 = 0x01;
    const EXPRESS: u8 = 0x10;
    let command = pci::read(number, pci::COMMAND) & 0xffff;
    let mut bars = [Bar::default(); 6];
    // SAFETY: the function does nothing yet: no driver runs. Its addresses are as before in the
    // end.
    unsafe {
        pci::write(number, pci::COMMAND, command & !DECODING);
        for (register, bar) in (0x10..).step_by(4).zip(&mut bars) {
            let value = pci::read(number, register);
            pci::write(number, register, u32::MAX);
            let size = pci::read(number, register);
            pci::write(number, register, value);
            *bar = Bar { value, size };
        }
        pci::write(number, pci::COMMAND, command);
        // Firmware's, if it used that: the guest cannot change it.
        if let Some(at) = pci::capability(number, MSI) {
            pci::write(number, at, pci::read(number, at) & !MSI_ON);
        }
    }
    Function {
        number,
        bars,
        msix: pci::capability(number, pci::MSIX),
        power: pci::capability(number, POWER),
        express: pci::capability(number, EXPRESS),
    }
}
