//! Firmware's table of remapping units (DMAR; VT-d 4.1, §8).

use bare::pci;

use crate::acpi_words::{ITEMS_MAX, length, read32, read64};
use crate::memory::OWN;

/// Contents of the table.
#[derive(Clone, Copy, Debug, Default)]
pub struct Firmware {
    /// The registers of the last unit of segment 0.
    pub unit: Option<u64>,
    /// Units in all.
    pub units: u32,
    /// Requester of the I/O APIC's messages: bus << 8 | device << 3 | function.
    pub io_apic: Option<u16>,
    /// Memory that a function must reach at any time, for firmware's sake, touches the
    /// hypervisor's.
    pub is_reserved_here: bool,
    /// The unit covers what no other one does.
    covers_rest: bool,
    /// Where its list of devices is.
    devices: (u64, u64),
}

impl Firmware {
    /// Reads the table at this address.
    pub fn read(table: u64) -> Self {
        const UNIT: u16 = 0;
        const RESERVED: u16 = 1;
        const ALL_FUNCTIONS: u8 = 1;
        const IO_APIC: u8 = 3;
        let mut found = Self::default();
        let (mut at, end) = (table + 48, table + u64::from(length(table)));
        for _ in 0..ITEMS_MAX {
            if at + 16 > end {
                break;
            }
            let word = read32(at);
            let (kind, len) = (word as u16, u64::from(word >> 16));
            let [flags, _, segment, _] = read32(at + 4).to_le_bytes();
            match kind {
                UNIT => {
                    found.units += 1;
                    if segment == 0 {
                        found.unit = Some(read64(at + 8));
                        found.covers_rest = flags & ALL_FUNCTIONS != 0;
                        found.devices = (at + 16, (at + len).min(end));
                    }
                }
                RESERVED if len >= 24 => {
                    let (first, last) = (read64(at + 8), read64(at + 16));
                    found.is_reserved_here |= first < OWN.end && OWN.start <= last;
                }
                _ => {}
            }
            at += len.max(4);
        }
        let io_apic = found.devices().find(|(kind, _)| *kind == IO_APIC);
        found.io_apic = io_apic.map(|(_, source)| source);
        found
    }

    /// Returns the unit's list of devices: kind, and bus << 8 | device << 3 | function. Those
    /// behind a bridge of the list are left out.
    fn devices(&self) -> impl Iterator<Item = (u8, u16)> {
        let (mut at, end) = self.devices;
        core::iter::from_fn(move || {
            if at + 8 > end {
                return None;
            }
            let [kind, len, ..] = read32(at).to_le_bytes();
            let [_, bus, device, function] = read32(at + 4).to_le_bytes();
            at += u64::from(len.max(2));
            let slot = device << 3 | function & 7;
            // A path of more steps leads behind a bridge.
            let kind = if len == 8 { kind } else { 0 };
            Some((kind, u16::from_be_bytes([bus, slot])))
        })
        .take(ITEMS_MAX)
    }

    /// Returns a function of bus 0 that does DMA past the unit.
    pub fn uncovered(&self) -> Option<u16> {
        const FUNCTION: u8 = 1;
        const HOST_BRIDGE: u32 = 0x0600;
        if self.covers_rest {
            return None;
        }
        let is_there = |function: &u16| pci::read(*function, 0) as u16 != 0xffff;
        let is_bridge = |function: u16| pci::read(function, 8) >> 16 == HOST_BRIDGE;
        let is_covered =
            |function: u16| self.devices().any(|device| device == (FUNCTION, function));
        let mut present = (0..256).filter(is_there);
        present.find(|function| !is_bridge(*function) && !is_covered(*function))
    }
}
