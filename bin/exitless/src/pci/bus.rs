//! Bus 0: slots, configuration accesses by ECAM and CF8/CFC, and decoding of BAR addresses.
//!
//! Functions are added while the machine is built; [`PciBus::place_bars`] gives each BAR an address before
//! the first vCPU runs, and a guest may move them. The bus follows every write to a BAR or command
//! register with a [`Bars`] of its own per function, so decoding never asks a function's owner.
//!
//! Three [`BusDevice`]s serve vCPU threads: [`Ecam`], [`ConfigPorts`] and [`PciWindow`]. The bus's locks
//! are never held while a function is called.
//! Bound: 32 slots, one function each, six BARs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::bars::{BARS, Bars, FIRST_BAR};
use super::config::CONFIG_SIZE;
use super::port::FunctionPort;
use crate::vm::bus::BusDevice;
use crate::vm::exits::ExitCause;
use crate::vm::layout;

/// Slots of a bus.
pub const SLOTS: usize = 32;

struct Slot {
    port: Arc<dyn FunctionPort>,
    /// Follows the function's BARs; serialises configuration writes to them.
    bars: Mutex<Bars>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Decoded {
    first: u64,
    len: u64,
    slot: u8,
    bar: u8,
}

/// What can go wrong while functions are added or placed: errors of the configuration.
#[derive(Debug, thiserror::Error)]
pub enum PciError {
    /// More functions than slots.
    #[error("all {SLOTS} PCI slots are taken")]
    NoSlot,
    /// The BARs do not fit the window.
    #[error("the PCI memory window has no room for {bytes:#x} bytes of slot {slot}")]
    NoWindow {
        /// The function's slot.
        slot: usize,
        /// Bytes of the BAR.
        bytes: u64,
    },
}

/// The bus. See the module's head.
pub struct PciBus {
    slots: Vec<Slot>,
    /// Ranges that answer now. Written on configuration writes, read on BAR accesses.
    decoded: RwLock<Vec<Decoded>>,
}

impl PciBus {
    /// A bus with `bridge` in slot 0.
    pub fn new(bridge: Arc<dyn FunctionPort>) -> Self {
        let mut bus = Self {
            slots: Vec::new(),
            decoded: RwLock::new(Vec::new()),
        };
        bus.push(bridge);
        bus
    }

    fn push(&mut self, port: Arc<dyn FunctionPort>) {
        let bars = Mutex::new(Bars::new(port.bar_kinds()));
        self.slots.push(Slot { port, bars });
    }

    /// Puts a function into the next slot and returns its number: the device of its source-id 00:nn.0.
    pub fn add(&mut self, port: Arc<dyn FunctionPort>) -> Result<u8, PciError> {
        if self.slots.len() == SLOTS {
            return Err(PciError::NoSlot);
        }
        self.push(port);
        Ok((self.slots.len() - 1) as u8)
    }

    /// Gives every BAR an address in the window, naturally aligned, by writing it as firmware would.
    /// Decoding stays off. Whoever owns the functions must already answer.
    pub fn place_bars(&self) -> Result<(), PciError> {
        let mut next = layout::PCI_WINDOW;
        for (number, slot) in self.slots.iter().enumerate() {
            for bar in 0..BARS {
                let Some(bytes) = lock(&slot.bars).size(bar) else {
                    continue;
                };
                let at = next.next_multiple_of(bytes);
                next = at + bytes;
                if next > layout::PCI_WINDOW_END {
                    return Err(PciError::NoWindow {
                        slot: number,
                        bytes,
                    });
                }
                self.config_write(number, FIRST_BAR + 4 * bar as u16, 4, at as u32);
            }
        }
        Ok(())
    }

    /// A read of configuration space; all ones where no function is.
    fn config_read(&self, slot: usize, reg: u16, len: u8) -> u32 {
        match self.slots.get(slot) {
            Some(slot) => slot.port.config_read(reg, len),
            None => u32::MAX,
        }
    }

    fn config_write(&self, number: usize, reg: u16, len: u8, value: u32) {
        let Some(slot) = self.slots.get(number) else {
            return;
        };
        // What the guest turns off must not be reached after the function knows: decode first.
        // Two vCPUs writing one function's BARs at once get one of the two orders here and perhaps the
        // other in the function; the guest's own kernel serialises such writes.
        let mut bars = lock(&slot.bars);
        if bars.write(reg, len, value) {
            self.redecode(number as u8, &bars);
        }
        drop(bars);
        slot.port.config_write(reg, len, value);
    }

    fn redecode(&self, slot: u8, bars: &Bars) {
        let mut decoded = self.decoded.write().unwrap_or_else(PoisonError::into_inner);
        decoded.retain(|range| range.slot != slot);
        for bar in 0..BARS {
            if let (Some(first), Some(len)) = (bars.decoded(bar), bars.size(bar)) {
                decoded.push(Decoded {
                    first,
                    len,
                    slot,
                    bar: bar as u8,
                });
            }
        }
    }

    /// The function and place behind a memory access, if one BAR holds all of it.
    fn decode(&self, address: u64, len: usize) -> Option<(&Arc<dyn FunctionPort>, u8, u64)> {
        let decoded = self.decoded.read().unwrap_or_else(PoisonError::into_inner);
        let range = decoded.iter().find(|range| {
            address
                .checked_sub(range.first)
                .is_some_and(|offset| offset < range.len && len as u64 <= range.len - offset)
        })?;
        let port = &self.slots[usize::from(range.slot)].port;
        Some((port, range.bar, address - range.first))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The guarded values are plain registers: no panic leaves them unusable.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn to_u32(data: &[u8]) -> u32 {
    let mut bytes = [0; 4];
    bytes[..data.len()].copy_from_slice(data);
    u32::from_le_bytes(bytes)
}

/// Enhanced configuration access of bus 0: address bits 19:15 device, 14:12 function, 11:0 register.
pub struct Ecam(pub Arc<PciBus>);

impl Ecam {
    /// Slot and register, where the access addresses function 0 and is legal.
    fn decode(offset: u64, len: usize) -> Option<(usize, u16)> {
        let reg = (offset & 0xfff) as u16;
        let is_function_0 = offset >> 12 & 7 == 0;
        (is_function_0
            && matches!(len, 1 | 2 | 4)
            && usize::from(reg) + len <= usize::from(CONFIG_SIZE))
        .then_some(((offset >> 15) as usize, reg))
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) -> ExitCause {
        if let Some((slot, reg)) = Self::decode(offset, data.len()) {
            let value = self.0.config_read(slot, reg, data.len() as u8);
            data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
        }
        ExitCause::PciConfig
    }

    fn write(&self, offset: u64, data: &[u8]) -> ExitCause {
        if let Some((slot, reg)) = Self::decode(offset, data.len()) {
            self.0
                .config_write(slot, reg, data.len() as u8, to_u32(data));
        }
        ExitCause::PciConfig
    }
}

/// Configuration mechanism #1: ports CF8 (address) and CFC to CFF (data), offset 0 being CF8.
pub struct ConfigPorts {
    bus: Arc<PciBus>,
    /// Enable 31, bus 23:16, device 15:11, function 10:8, register 7:2.
    address: Mutex<u32>,
}

impl ConfigPorts {
    /// First of the eight ports.
    pub const BASE: u16 = layout::PCI_CONFIG_ADDRESS;
    /// Number of ports.
    pub const LEN: u16 = 8;

    /// Ports onto `bus`.
    pub fn new(bus: Arc<PciBus>) -> Self {
        Self {
            bus,
            address: Mutex::new(0),
        }
    }

    /// Slot and register for `len` bytes at data port CFC + `byte`.
    fn decode(&self, byte: u64, len: usize) -> Option<(usize, u16)> {
        let address = *lock(&self.address);
        let enabled = address >> 31 == 1;
        let bus_and_function = address & 0x00ff_0700;
        let fits = matches!(len, 1 | 2 | 4) && byte as usize + len <= 4;
        (enabled && bus_and_function == 0 && fits).then_some((
            (address >> 11 & 0x1f) as usize,
            (address & 0xfc) as u16 + byte as u16,
        ))
    }
}

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) -> ExitCause {
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&lock(&self.address).to_le_bytes());
        } else if let Some(byte) = offset.checked_sub(4)
            && let Some((slot, reg)) = self.decode(byte, data.len())
        {
            let value = self.bus.config_read(slot, reg, data.len() as u8);
            data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
        }
        ExitCause::PciConfig
    }

    fn write(&self, offset: u64, data: &[u8]) -> ExitCause {
        if offset == 0 && data.len() == 4 {
            *lock(&self.address) = to_u32(data);
        } else if let Some(byte) = offset.checked_sub(4)
            && let Some((slot, reg)) = self.decode(byte, data.len())
        {
            self.bus
                .config_write(slot, reg, data.len() as u8, to_u32(data));
        }
        ExitCause::PciConfig
    }
}

/// The PCI memory window: BARs wherever the guest has put them.
pub struct PciWindow(pub Arc<PciBus>);

impl BusDevice for PciWindow {
    fn read(&self, offset: u64, data: &mut [u8]) -> ExitCause {
        match self.0.decode(layout::PCI_WINDOW + offset, data.len()) {
            Some((port, bar, offset)) => {
                port.bar_read(bar, offset, data);
                port.bar_cause(bar, offset)
            }
            None => ExitCause::Unclaimed,
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> ExitCause {
        match self.0.decode(layout::PCI_WINDOW + offset, data.len()) {
            Some((port, bar, offset)) => {
                port.bar_write(bar, offset, data);
                port.bar_cause(bar, offset)
            }
            None => ExitCause::Unclaimed,
        }
    }
}

#[cfg(test)]
mod tests;
