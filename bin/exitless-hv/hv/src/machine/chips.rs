//! Devices beside the local APIC that the guest does not reach as they are, and that have a state:
//! the I/O APIC, the 8259s, the 8254, configuration space and the IOMMU. Each is found once, at
//! start, and then stays.

use eli::policy::config::Config;
use eli::policy::pit::Pit;
use eli::policy::{DenyReason, PicWrites, Pics, Pin};

use crate::io_apic::{IoApic, Redirection};
use crate::remapping::{Fault, Remapping};

/// The devices.
#[derive(Default)]
pub struct Chips {
    io_apic: Option<IoApic>,
    pics: Pics,
    config: Config,
    pit: Pit,
    remapping: Option<Remapping>,
    /// Pins whose entries are yet to be put through by the processor that they are for: a bit each.
    deferred: u32,
}

impl Chips {
    /// Adds the I/O APIC.
    pub fn add_io_apic(&mut self, chip: IoApic) {
        self.io_apic = Some(chip);
    }

    /// Adds the IOMMU, which is on.
    pub fn add_remapping(&mut self, unit: Remapping) {
        self.remapping = Some(unit);
    }

    /// Has the device's message `index` be the interrupt `vector` at processor `to`: its address
    /// and data, if there is an IOMMU.
    pub fn remapped_message(&mut self, index: u16, to: u32, vector: u8) -> Option<(u64, u32)> {
        Some(self.remapping.as_mut()?.message(index, to, vector))
    }

    /// Has an entry of the I/O APIC, which policy has checked, name an interrupt of the IOMMU; as
    /// it is where there is none.
    pub fn remapped_redirection(&mut self, to: Redirection) -> Redirection {
        let Some(unit) = &mut self.remapping else {
            return to;
        };
        if to.entry & Pin::MASKED != 0 {
            return to;
        }
        let entry = unit.redirection(to.pin as u8, to.entry);
        Redirection {
            entry: entry.unwrap_or(Pin::MASKED),
            ..to
        }
    }

    /// Takes the faults that the IOMMU has recorded. Returns whether some were lost.
    pub fn dma_faults(&mut self, each: impl FnMut(Fault)) -> bool {
        self.remapping
            .as_mut()
            .is_some_and(|unit| unit.faults(each))
    }

    /// Returns the 8254 timer, to write to it.
    pub fn pit_mut(&mut self) -> &mut Pit {
        &mut self.pit
    }

    /// Sets configuration space.
    pub fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// Returns configuration space, to access it.
    pub fn config_mut(&mut self) -> &mut Config {
        &mut self.config
    }

    /// Offsets and values that an access to the I/O APIC reads.
    pub fn io_apic_shown(&self) -> [(u64, u32); 2] {
        self.io_apic.as_ref().map_or([(0, 0); 2], IoApic::shown)
    }

    /// Takes a write of the guest's to the I/O APIC. Returns an entry that policy has to check.
    pub fn io_apic_written(&mut self, offset: u64, value: u32) -> Option<Redirection> {
        self.io_apic.as_mut()?.written(offset, value)
    }

    /// Leaves a pin's entry to the processor that it is for.
    pub fn defer(&mut self, pin: u32) {
        self.deferred |= 1 << pin;
    }

    /// Returns the pins that were left, with their entries as the guest wrote them.
    pub fn deferred(&self) -> impl Iterator<Item = Redirection> + use<> {
        let (deferred, chip) = (self.deferred, self.io_apic.as_ref());
        let entries = chip.map(|chip| *chip.entries()).unwrap_or_default();
        let pins = (0..)
            .zip(entries)
            .filter(move |(pin, _)| deferred >> pin & 1 != 0);
        pins.map(|(pin, entry)| Redirection { pin, entry })
    }

    /// Removes a pin from those that were left: its entry is put through, or is another than was
    /// left.
    pub fn settle(&mut self, pin: u32) {
        self.deferred &= !(1 << pin);
    }

    /// Gives the I/O APIC an entry that policy has checked.
    pub fn redirect(&self, to: Redirection) {
        if let Some(chip) = &self.io_apic {
            chip.redirect(to);
        }
    }

    /// Masks every pin of the I/O APIC, and the 8259s.
    pub fn mask_all(&self) {
        if let Some(chip) = &self.io_apic {
            chip.mask_all();
        }
        for data in [0x21, 0xa1] {
            // SAFETY: their masks.
            unsafe { bare::port::out8(data, 0xff) }
        }
    }

    /// Takes a write of the guest's to an 8259. Returns the writes that the chips must get.
    ///
    /// # Errors
    /// Policy's.
    pub fn pic_written(&mut self, port: u16, value: u8) -> Result<PicWrites, DenyReason> {
        self.pics.write(port, value)
    }
}
