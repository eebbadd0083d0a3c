//! Interrupt messages that the guest programs: the device's (MSI-X), and the I/O APIC's (82093AA, §3).

use eli::hosts::Source;
use eli::policy::{self, Message};
use eli::{Vector, VectorSet};

use crate::log::say;
use crate::memory;
use crate::msix::{self, Entry};
use crate::vm::Vm;

/// A number for people.
pub struct Hex(pub u64);

impl core::fmt::Display for Hex {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

const PINS: usize = 24;
const SELECT: u64 = 0;
const WINDOW: u64 = 0x10;
const EOI: u64 = 0x40;
const FIRST_ENTRY: u32 = 0x10;
const ENTRY_MASKED: u64 = 1 << 16;

/// An I/O APIC.
pub struct IoApic {
    /// Its registers.
    pub page: u64,
    select: u32,
    /// What the guest wrote.
    entries: [u64; PINS],
}

impl IoApic {
    /// That of this page.
    ///
    /// # Safety
    /// One is there (ACPI says so).
    pub unsafe fn new(page: u64) -> Self {
        Self {
            page,
            select: 0,
            entries: [ENTRY_MASKED; PINS],
        }
    }

    fn read(&self, register: u32) -> u32 {
        // SAFETY: `new`'s caller: it is the chip, and the guest reaches it only through us.
        unsafe {
            memory::write32(self.page + SELECT, register);
            memory::read32(self.page + WINDOW)
        }
    }

    fn write(&self, register: u32, value: u32) {
        // SAFETY: as above; what may be written has been looked at.
        unsafe {
            memory::write32(self.page + SELECT, register);
            memory::write32(self.page + WINDOW, value);
        }
    }
}

impl Vm {
    /// The host's tick leaves `vector` to the guest, if it has it. Whether the guest may have it.
    pub fn claim(&mut self, what: &str, vector: Vector) -> bool {
        if !self.options.defend {
            return true;
        }
        match self.core.claim(vector) {
            Ok(None) => true,
            Ok(Some(moved)) => {
                if moved.source == Source::Tick
                    && let Some(hpet) = &mut self.hpet
                {
                    hpet.move_tick(moved.to);
                }
                say!(
                    "vectors: {what} wants {vector:#x}, which was the host's: that is {:#x} now",
                    moved.to
                );
                true
            }
            Err(_) => {
                self.refuse(what, &"no other vector is left for the host");
                false
            }
        }
    }

    /// The guest wrote to its view of the device's table: the device gets what may go through.
    pub fn messages_written(&mut self) {
        let Some(table) = self.msix.take() else {
            return;
        };
        let mut vectors = VectorSet::EMPTY;
        for index in 0..table.len() {
            let entry = table.entry(&self.pages.messages, index);
            let real = self.message(entry, &mut vectors);
            table.write(index, real);
        }
        self.msix = Some(table);
        if vectors != self.device {
            self.device = vectors;
            self.assigned_changed();
        }
    }

    fn message(&mut self, entry: Entry, vectors: &mut VectorSet) -> Entry {
        if entry[3] & msix::MASKED != 0 {
            return entry;
        }
        let message = msix::message(entry);
        match policy::message(message, self.lapic.id) {
            Ok(vector) if self.claim("the device", vector) => {
                if self.core.hosts.source(vector).is_none() {
                    vectors.insert(vector);
                }
                entry
            }
            Ok(_) => [entry[0], entry[1], entry[2], entry[3] | msix::MASKED],
            Err(_) if !self.options.defend => entry,
            Err(why) => {
                self.refuse("a message of the device's", &why);
                [0, 0, 0, msix::MASKED]
            }
        }
    }

    /// What an access to the I/O APIC is to meet.
    pub fn io_apic_shown(&mut self) {
        let Some(chip) = &self.io_apic else {
            return;
        };
        let window = chip.read(chip.select);
        for (offset, value) in [(SELECT, chip.select), (WINDOW, window)] {
            self.pages.scratch.0[offset as usize..][..4].copy_from_slice(&value.to_le_bytes());
        }
    }

    /// The guest wrote to it.
    pub fn io_apic_written(&mut self, offset: u64) {
        let Some(mut chip) = self.io_apic.take() else {
            return;
        };
        let at = (offset & 0xff0) as usize;
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.pages.scratch.0[at..at + 4]);
        let value = u32::from_le_bytes(bytes);
        match at as u64 {
            SELECT => chip.select = value & 0xff,
            WINDOW if chip.select >= FIRST_ENTRY && chip.select < FIRST_ENTRY + 2 * PINS as u32 => {
                let (pin, half) = ((chip.select - FIRST_ENTRY) / 2, chip.select % 2 * 32);
                let entry = &mut chip.entries[pin as usize];
                *entry = *entry & !(0xffff_ffff << half) | u64::from(value) << half;
                let entry = *entry;
                let real = self.redirection(entry);
                let low = FIRST_ENTRY + pin * 2;
                chip.write(low, real as u32 | ENTRY_MASKED as u32);
                chip.write(low + 1, (real >> 32) as u32);
                chip.write(low, real as u32);
            }
            // Identifier and arbitration; there are no others that are written.
            WINDOW if chip.select < FIRST_ENTRY => chip.write(chip.select, value),
            // SAFETY: an end of interrupt for a pin; at worst the pin interrupts again.
            EOI => unsafe { memory::write32(chip.page + EOI, value) },
            _ => {}
        }
        self.io_apic = Some(chip);
    }

    fn redirection(&mut self, entry: u64) -> u64 {
        const EXT_INT: u32 = 7;
        if entry & ENTRY_MASKED != 0 || !self.options.defend {
            return entry;
        }
        let low = entry as u32;
        // The 8259s' line by this way: their vectors are looked at where they are set, so only its destination is here.
        let is_external = low >> 8 & 7 == EXT_INT;
        let data = if is_external { 0x20 } else { low & 0x7ff };
        let is_logical = u64::from(low >> 11 & 1);
        let address = 0xfee0_0000 | entry >> 56 << 12 | is_logical << 2;
        match policy::message(Message { address, data }, self.lapic.id) {
            Ok(_) if is_external => entry,
            Ok(vector) if self.claim("the I/O APIC", vector) => entry,
            Ok(_) => entry | ENTRY_MASKED,
            Err(why) => {
                self.refuse("an entry of the I/O APIC", &why);
                entry | ENTRY_MASKED
            }
        }
    }
}
