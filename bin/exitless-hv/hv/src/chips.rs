//! Devices beside the local APIC that the guest does not reach as they are: the assigned one's
//! messages, the I/O APIC, the 8259s, the host's timers and the IOMMU. Each is found once, at start,
//! and then stays.

use eli::policy::config::Config;
use eli::policy::pit::Pit;
use eli::policy::ports::Ports;
use eli::policy::{PicWrites, Pics, Pin, Why};

use crate::hpet::{Clock, Hpet};
use crate::io_apic::{IoApic, Redirection};
use crate::measurement::Time;
use crate::msix::Msix;
use crate::remapping::{Fault, Remapping};

/// The devices.
#[derive(Default)]
pub struct Chips {
    msix: Option<Msix>,
    io_apic: Option<IoApic>,
    pics: Pics,
    ports: Ports,
    config: Config,
    pit: Pit,
    hpet: Option<Hpet>,
    remapping: Option<Remapping>,
}

impl Chips {
    /// Adds the assigned device's messages.
    pub fn add_msix(&mut self, table: Msix) {
        self.msix = Some(table);
    }

    /// Adds the I/O APIC.
    pub fn add_io_apic(&mut self, chip: IoApic) {
        self.io_apic = Some(chip);
    }

    /// Adds the IOMMU, which is on.
    pub fn add_remapping(&mut self, unit: Remapping) {
        self.remapping = Some(unit);
    }

    /// Whether the assigned device reaches the guest's memory alone.
    pub fn contains_dma(&self) -> bool {
        self.remapping.is_some()
    }

    /// Has the device's message `index` be the interrupt `vector`: its address and data, if there is
    /// an IOMMU.
    pub fn remapped_message(&mut self, index: u16, vector: u8) -> Option<(u64, u32)> {
        Some(self.remapping.as_mut()?.message(index, vector))
    }

    /// Has an entry of the I/O APIC, which policy has looked at, name an interrupt of the IOMMU; as it
    /// is where there is none.
    pub fn remapped_redirection(&mut self, to: Redirection) -> Redirection {
        let Some(unit) = &mut self.remapping else {
            return to;
        };
        if to.entry & Pin::MASKED != 0 {
            return to;
        }
        let entry = unit.redirection(to.pin as u8, to.entry as u32);
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

    /// Adds the host's timers, which run.
    pub fn add_hpet(&mut self, hpet: Hpet) {
        self.hpet = Some(hpet);
    }

    /// Sets the list of ports.
    pub fn set_ports(&mut self, ports: Ports) {
        self.ports = ports;
    }

    /// The list of ports.
    pub fn ports(&self) -> &Ports {
        &self.ports
    }

    /// The 8254 timer, to write to it.
    pub fn pit_mut(&mut self) -> &mut Pit {
        &mut self.pit
    }

    /// Sets configuration space.
    pub fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// Configuration space.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Configuration space, to access it.
    pub fn config_mut(&mut self) -> &mut Config {
        &mut self.config
    }

    /// The assigned device's messages.
    pub fn msix(&self) -> Option<Msix> {
        self.msix
    }

    /// The page of the I/O APIC.
    pub fn io_apic_page(&self) -> Option<u64> {
        self.io_apic.as_ref().map(IoApic::page)
    }

    /// Offsets and values that an access to the I/O APIC reads.
    pub fn io_apic_shown(&self) -> [(u64, u32); 2] {
        self.io_apic.as_ref().map_or([(0, 0); 2], IoApic::shown)
    }

    /// The guest wrote to the I/O APIC: an entry that policy has to look at.
    pub fn io_apic_written(&mut self, offset: u64, value: u32) -> Option<Redirection> {
        self.io_apic.as_mut()?.written(offset, value)
    }

    /// Gives the I/O APIC an entry that policy has looked at.
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

    /// The guest wrote to an 8259: what the chips are to be written.
    ///
    /// # Errors
    /// Policy's.
    pub fn pic_written(&mut self, port: u16, value: u8) -> Result<PicWrites, Why> {
        self.pics.write(port, value)
    }

    /// The host's clock, if it has one.
    pub fn clock(&self) -> Option<Clock> {
        self.hpet.map(|hpet| hpet.clock())
    }

    /// Microseconds of the host's clock, if it has one.
    pub fn us(&self) -> Option<u64> {
        self.clock().map(Clock::microseconds)
    }

    /// A non-maskable interrupt at this time of the host's clock.
    pub fn sample(&self, at_us: u64) {
        if let Some(hpet) = &self.hpet {
            hpet.sample(at_us);
        }
    }

    /// Milliseconds of the host's clock, if it has one.
    pub fn ms(&self) -> Option<u64> {
        self.clock().map(Clock::milliseconds)
    }

    /// The host's time, if it has a clock.
    pub fn time(&self) -> Option<Time> {
        self.hpet.map(|hpet| Time {
            ms: hpet.clock().milliseconds(),
            ticks: hpet.ticks(),
        })
    }
}
