//! Interrupt messages that the guest programs: the device's (MSI-X), and the I/O APIC's. Policy
//! looks at each before the hardware has it.

use eli::defence::Defence;
use eli::hosts::Source;
use eli::policy::{self, Message};
use eli::{Vector, VectorSet};

use super::Vm;
use crate::io_apic::{ENTRY_MASKED, Redirection};
use crate::log::say;
use crate::msix::{self, Entry};

impl Vm {
    /// The host's tick leaves `vector` to the guest, if it has it. Whether the guest may have it.
    pub(super) fn claim(&mut self, what: &str, vector: Vector) -> bool {
        if !self.defends(Defence::Messages) {
            return true;
        }
        match self.interrupts.claim(vector) {
            Ok(None) => true,
            Ok(Some(moved)) => {
                if moved.source == Source::Tick {
                    self.chips.move_tick(moved.to);
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
    pub(super) fn messages_written(&mut self) {
        let Some(table) = self.chips.msix() else {
            return;
        };
        let mut vectors = VectorSet::EMPTY;
        for index in 0..table.len() {
            let entry = table.entry(&self.pages.messages, index);
            let real = self.message(entry, &mut vectors);
            let real = self.remapped(index, real);
            table.write(index, real);
        }
        if self.interrupts.set_device(vectors) {
            self.assigned_changed();
        }
    }

    /// The entry of the device's table that has the same interrupt by way of the IOMMU, if there is one.
    fn remapped(&mut self, index: usize, entry: Entry) -> Entry {
        if entry[3] & msix::MASKED != 0 {
            return entry;
        }
        match self
            .chips
            .remapped_message(index as u16, entry[2] as Vector)
        {
            Some((address, data)) => [address as u32, (address >> 32) as u32, data, entry[3]],
            None => entry,
        }
    }

    fn message(&mut self, entry: Entry, vectors: &mut VectorSet) -> Entry {
        if entry[3] & msix::MASKED != 0 {
            return entry;
        }
        let message = msix::message(entry);
        match policy::message(message, self.interrupts.lapic().id()) {
            Ok(vector) if self.claim("the device", vector) => {
                if self.interrupts.source(vector).is_none() {
                    vectors.insert(vector);
                }
                entry
            }
            Ok(_) => [entry[0], entry[1], entry[2], entry[3] | msix::MASKED],
            Err(_) if !self.defends(Defence::Messages) => entry,
            Err(why) => {
                self.refuse("a message of the device's", &why);
                [0, 0, 0, msix::MASKED]
            }
        }
    }

    /// Puts into the scratch page what an access to the I/O APIC reads.
    pub(super) fn show_io_apic(&mut self) {
        for (offset, value) in self.chips.io_apic_shown() {
            self.pages.scratch.0[offset as usize..][..4].copy_from_slice(&value.to_le_bytes());
        }
    }

    /// The guest wrote to it.
    pub(super) fn io_apic_written(&mut self, offset: u64) {
        let at = offset & 0xff0;
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.pages.scratch.0[at as usize..][..4]);
        let value = u32::from_le_bytes(bytes);
        if let Some(Redirection { pin, entry }) = self.chips.io_apic_written(at, value) {
            let entry = self.redirection(entry);
            let to = self.chips.remapped_redirection(Redirection { pin, entry });
            self.chips.redirect(to);
        }
    }

    fn redirection(&mut self, entry: u64) -> u64 {
        const EXT_INT: u32 = 7;
        if entry & ENTRY_MASKED != 0 || !self.defends(Defence::Messages) {
            return entry;
        }
        let low = entry as u32;
        // The 8259s' line by this way: their vectors are looked at where they are set, so only its
        // destination is here.
        let is_external = low >> 8 & 7 == EXT_INT;
        let data = if is_external { 0x20 } else { low & 0x7ff };
        let is_logical = u64::from(low >> 11 & 1);
        let address = 0xfee0_0000 | entry >> 56 << 12 | is_logical << 2;
        match policy::message(Message { address, data }, self.interrupts.lapic().id()) {
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
