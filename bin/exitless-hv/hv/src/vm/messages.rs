//! Interrupt messages that the guest programs: the device's (MSI-X), and the I/O APIC's. Policy
//! checks each before the hardware has it.

use eli::defence::Defence;
use eli::hosts::Source;
use eli::policy::{self, Message, Pin};
use eli::{Vector, VectorSet};

use super::Processor;
use crate::io_apic::Redirection;
use crate::machine::chips::Chips;
use crate::machine::mailbox::request;
use crate::msix::{self, Entry};

impl Processor {
    /// Claims `vector`, which the guest uses from now on. Returns which one it is at the real local
    /// APIC, if there is any for it.
    pub(super) fn claim(&mut self, what: &str, vector: Vector) -> Option<Vector> {
        if !self.defends(Defence::Messages) {
            return Some(vector);
        }
        let real = self.interrupts.claim(vector).ok();
        if real.is_none() {
            self.refuse(what, &"no other vector is left for it");
        }
        real
    }

    /// Takes a write of the guest's to its view of the device's table: the device gets what may go
    /// through, of each processor by its own core.
    pub(super) fn messages_written(&mut self) {
        self.put_messages(true);
        self.ask_and_wait(request::MESSAGES, |_| true);
    }

    /// Puts through the entries whose interrupts are this processor's; `all`: and those that send
    /// nothing.
    pub(super) fn put_messages(&mut self, all: bool) {
        let machine = self.machine;
        let Some(table) = machine.msix() else {
            return;
        };
        // From here to the last entry: two processors' writes are each put through whole.
        let mut chips = machine.chips();
        let mut vectors = VectorSet::EMPTY;
        for index in 0..table.len() {
            let entry = table.entry(&machine.pages().messages, index);
            let entry = match self.message(entry, all, &mut vectors) {
                Made::Own(entry) => self.remapped(&mut chips, index, entry),
                Made::Nothing(entry) if all => entry,
                Made::Nothing(_) | Made::Others => continue,
            };
            table.write(index, entry);
        }
        drop(chips);
        if self.interrupts.set_device(vectors) {
            self.assigned_changed();
        }
    }

    /// Returns the entry of the device's table that has the same interrupt by way of the IOMMU, if
    /// there is one.
    fn remapped(&self, chips: &mut Chips, index: usize, entry: Entry) -> Entry {
        if entry[3] & msix::MASKED != 0 {
            return entry;
        }
        let own = self.interrupts.lapic().id();
        match chips.remapped_message(index as u16, own, entry[2] as Vector) {
            Some((address, data)) => [address as u32, (address >> 32) as u32, data, entry[3]],
            None => entry,
        }
    }

    fn message(&mut self, entry: Entry, all: bool, vectors: &mut VectorSet) -> Made {
        let defends = self.defends(Defence::Messages);
        if entry[3] & msix::MASKED != 0 {
            return Made::Nothing(if defends { msix::NONE } else { entry });
        }
        let wanted = policy::message(msix::message(entry), self.machine.processors());
        if !defends {
            let guests = wanted
                .ok()
                .filter(|(index, vector)| *index == self.index && Source::of(*vector).is_none());
            guests
                .into_iter()
                .for_each(|(_, vector)| vectors.insert(vector));
            return Made::Own(entry);
        }
        match wanted {
            Ok((index, _)) if index != self.index => Made::Others,
            Ok((_, vector)) => match self.claim("the device", vector) {
                Some(real) => {
                    let own = self.interrupts.lapic().id();
                    vectors.insert(vector);
                    Made::Own(msix::entry(Message::fixed(own, real)))
                }
                None => Made::Own(msix::NONE),
            },
            Err(why) => {
                if all {
                    self.refuse("a message of the device's", &why);
                }
                Made::Nothing(msix::NONE)
            }
        }
    }

    /// Puts into the scratch page what an access to the I/O APIC reads.
    pub(super) fn show_io_apic(&mut self) {
        let shown = self.machine.chips().io_apic_shown();
        for (offset, value) in shown {
            self.pages.scratch.0[offset as usize..][..4].copy_from_slice(&value.to_le_bytes());
        }
    }

    /// Takes a write of the guest's to it.
    pub(super) fn io_apic_written(&mut self, offset: u64) {
        let at = offset & 0xff0;
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.pages.scratch.0[at as usize..][..4]);
        let value = u32::from_le_bytes(bytes);
        let machine = self.machine;
        let mut chips = machine.chips();
        let Some(written) = chips.io_apic_written(at, value) else {
            return;
        };
        chips.settle(written.pin);
        if let Err(other) = self.redirect(&mut chips, written, true) {
            chips.defer(written.pin);
            drop(chips);
            self.ask_and_wait(request::PINS, |index| index == other);
        }
    }

    /// Puts through entries that others have written for this processor.
    pub(super) fn put_pins(&mut self) {
        let machine = self.machine;
        let mut chips = machine.chips();
        for written in chips.deferred() {
            if self.redirect(&mut chips, written, false).is_ok() {
                chips.settle(written.pin);
            }
        }
    }

    /// Gives the chip an entry for what the guest wrote; `all`: also one that interrupts nothing.
    ///
    /// # Errors
    /// It is another processor's: whose.
    fn redirect(
        &mut self,
        chips: &mut Chips,
        written: Redirection,
        all: bool,
    ) -> Result<(), usize> {
        let own = self.interrupts.lapic().id();
        let real = match Pin::of(written.entry, self.machine.processors()) {
            Ok(None) => None,
            Ok(Some(pin)) if pin.to != self.index => return Err(pin.to),
            Ok(Some(pin)) => match pin.vector {
                Some(vector) => self
                    .claim("the I/O APIC", vector)
                    .map(|real| pin.entry(own, real)),
                None => Some(pin.entry(own, 0)),
            },
            Err(why) => {
                if all {
                    self.refuse("an entry of the I/O APIC", &why);
                }
                None
            }
        };
        let to = chips.remapped_redirection(Redirection {
            pin: written.pin,
            entry: real.unwrap_or(Pin::MASKED),
        });
        chips.redirect(to);
        Ok(())
    }
}

/// Outcome of making an entry of the device's table on this processor.
enum Made {
    /// This processor's interrupt.
    Own(Entry),
    /// Sends nothing.
    Nothing(Entry),
    /// Another processor's, which makes it.
    Others,
}
