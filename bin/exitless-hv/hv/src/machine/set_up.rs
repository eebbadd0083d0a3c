//! Preparations of the machine, before another core has it: timers and the watching core, ports,
//! the assigned device and its IOMMU, configuration space.

use bare::{pci, port};
use eli::defence::Defence;
use eli::policy::config::{Bar, Config, Function};
use eli::policy::ports::{Ports, Rule};
use eli::policy::{PROCESSORS_MAX, Processors};

use super::block::{Block, BlockAddress};
use super::chips::Chips;
use super::mailbox::Mailbox;
use super::measurement::Measurement;
use super::{Machine, WITHHELD_MAX};
use crate::acpi::Tables;
use crate::hpet::Hpet;
use crate::io_apic::IoApic;
use crate::lock::Lock;
use crate::log::say;
use crate::memory::{Guest, PAGE};
use crate::msix::Msix;
use crate::options::{Critical, Options};
use crate::pages::Shared;
use crate::remapping::{self, Remapping, Unfit};
use crate::report::Counters;
use crate::{core1, hpet, raw_ports, refuse};

/// Address to which interrupts are written, and at which a local APIC has its registers in memory.
const LOCAL_APIC: core::ops::Range<u64> = 0xfee0_0000..0xfef0_0000;

impl Machine {
    /// Creates a machine that is yet to be set up.
    pub fn new(
        pages: &'static mut Shared,
        options: Options,
        memory: Guest,
        processors: Processors,
    ) -> Self {
        Self {
            options,
            memory,
            processors,
            ports: Ports::default(),
            hpet: None,
            msix: None,
            io_apic: None,
            contains_dma: false,
            nothing: [const { None }; WITHHELD_MAX],
            removed: [const { None }; WITHHELD_MAX],
            pages,
            block_place: None,
            chips: Lock::new(Chips::default()),
            block: Lock::new(None),
            measurement: Lock::new(Measurement::new()),
            counters: [const { Counters::new() }; PROCESSORS_MAX],
            mailboxes: [const { Mailbox::new() }; PROCESSORS_MAX],
            is_over: core::sync::atomic::AtomicBool::new(false),
        }
    }

    /// Shows the guest nothing in the place of these pages.
    fn show_nothing(&mut self, range: core::ops::Range<u64>) {
        Self::put(&mut self.nothing, range);
    }

    fn put(list: &mut [Option<core::ops::Range<u64>>], range: core::ops::Range<u64>) {
        match list.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(range),
            None => refuse(&"too many ranges of addresses are withheld from the guest"),
        }
    }

    /// Returns the pages in whose place the guest sees nothing.
    pub fn nothing(&self) -> impl Iterator<Item = u64> {
        let ranges = self.nothing.iter().flatten().cloned();
        ranges.flat_map(|range| range.step_by(PAGE as usize))
    }

    /// Returns the memory that the guest does not reach, beside the hypervisor's own.
    pub fn removed(&self) -> impl Iterator<Item = core::ops::Range<u64>> {
        self.removed.iter().flatten().cloned()
    }

    /// Starts watchdog, tick, and the watching core.
    pub fn start_timers(&mut self, tables: &Tables) {
        let (mut watchdog, tick) = (self.options.watchdog, self.options.tick);
        let critical = self.options.critical;
        let (to, is_nmi) = match (critical, tables.watcher) {
            (Critical::Limit, _) => (hpet::OWN, false),
            (Critical::Nmi, _) => (hpet::OWN, tick != 0),
            (Critical::Core, Some(id)) => (id as u8, false),
            (Critical::Core, None) => refuse(&"critical=core: there is no other core"),
        };
        if is_nmi {
            watchdog = tick;
            self.options.watchdog = tick;
        }
        let Some(base) = tables.hpet else {
            if watchdog != 0 {
                refuse(&"there is no HPET, and so no watchdog (watchdog=0: without)");
            }
            say!("hv: there is no HPET: no watchdog, no tick, no core that watches");
            return;
        };
        // SAFETY: ACPI says so, and its table is hidden from the guest.
        let mut hpet = match unsafe { Hpet::new(base) } {
            Ok(hpet) => hpet,
            Err(why) if watchdog != 0 => refuse(&why),
            Err(why) => return say!("hv: the HPET is of no use: {why}"),
        };
        let vector = eli::hosts::Source::Tick.vector();
        if watchdog != 0
            && let Err(why) = hpet.set_watchdog(watchdog, is_nmi)
        {
            refuse(&why);
        }
        if tick != 0 && !is_nmi {
            match hpet.set_tick(tick, vector, to) {
                Ok(()) => say!("hv: tick every {tick} ms, vector {vector:#x}"),
                Err(why) => say!("hv: no tick: {why}"),
            }
        }
        if let Err(why) = hpet.start() {
            refuse(&why);
        }
        let clock = hpet.clock();
        self.measurement.get_mut().set_clock(clock);
        for counters in &mut self.counters {
            counters.set_clock(clock);
        }
        self.hpet = Some(hpet);
        if let Some(id) = tables.watcher {
            // SAFETY: firmware says that it is there; page 8 is low memory, which nothing is in
            // yet; here alone, once.
            let came = unsafe { core1::start(id, clock, critical == Critical::Core) };
            say!(
                "hv: core {id} is {}",
                if came {
                    "parked, and watches"
                } else {
                    "not to be had"
                }
            );
        }
        let page = base & !(PAGE - 1);
        self.show_nothing(page..page + PAGE);
    }

    /// Returns the time between the host's ticks at the guest's first processor, µs, if it has any
    /// there.
    pub fn tick_us(&self) -> Option<u64> {
        let is_there = self.options.critical == Critical::Limit;
        self.hpet.as_ref().filter(|_| is_there)?.tick_us()
    }

    /// Sets up the list of ports. ACPI is turned on, since that takes one of firmware's that the
    /// guest has not.
    pub fn list_ports(&mut self, tables: &Tables) {
        const IS_ON: u16 = 1;
        const READS_MAX: u32 = 1_000_000;
        let control = tables.ports.control[0];
        self.ports = Ports::new(&tables.ports);
        raw_ports::start_timer();
        for port in 0..=u16::MAX {
            if self.exits_port(port) {
                let at = usize::from(port) / 8;
                self.pages.io_map[at / 4096].0[at % 4096] |= 1 << (port % 8);
            }
        }
        // Behind the last port: of an access that goes round.
        self.pages.io_map[2].0.fill(0xff);
        let Some((command, value)) = tables.turn_on.filter(|_| control != 0) else {
            return;
        };
        // SAFETY: firmware's tables name the two ports, and this use of them (ACPI 6.5, §4.8.2.5);
        // the guest does not run yet.
        let is_on = |_: &u32| unsafe { port::in16(control) } & IS_ON != 0;
        if !is_on(&0) {
            // SAFETY: as above.
            unsafe { port::out8(command, value) }
            if (0..READS_MAX).find(is_on).is_none() {
                say!("hv: firmware does not turn ACPI on");
            }
        }
    }

    /// Returns whether accesses to a port exit.
    fn exits_port(&self, number: u16) -> bool {
        let is_withheld = if self.defends(Defence::Ports) {
            !self.ports.is_direct(number)
        } else {
            self.ports.rule(number) == Rule::Pm1Control
        };
        let is_config = self.defends(Defence::Config) && raw_ports::is_config(number);
        let is_timer = self.defends(Defence::Period) && self.ports.rule(number) == Rule::Timer;
        raw_ports::exits_always(number) || is_withheld || is_config || is_timer
    }

    /// Assigns the device, the I/O APIC, and the IOMMU, which is given `pages`.
    pub fn assign(&mut self, tables: &Tables, pages: &'static mut remapping::Pages) {
        match Msix::find() {
            Ok(table) => {
                say!(
                    "hv: assigned: {:02x}.{}, {} messages, table in page {:#x}",
                    table.function >> 3,
                    table.function & 7,
                    table.len(),
                    table.page
                );
                table.copy(&mut self.pages.messages);
                self.msix = Some(table);
            }
            Err(why) => say!("hv: no device is assigned: {why}"),
        }
        self.contain_dma(tables, pages);
        // Registers of the local APIC in memory, and what a write there sends: not the guest's. It
        // has the model-specific ones.
        if self.defends(Defence::Pages) {
            self.show_nothing(LOCAL_APIC);
        }
        if let Some(page) = tables.io_apic.filter(|_| self.defends(Defence::Messages)) {
            // SAFETY: ACPI says so.
            let chip = unsafe { IoApic::new(page) };
            self.chips.get_mut().add_io_apic(chip);
            self.io_apic = Some(page);
        }
    }

    /// Adds the block function, in an empty slot, with a disk of so many bytes. `memory` is the
    /// loader's map, ranges of any kind.
    pub fn add_block(
        &mut self,
        tables: &Tables,
        memory: impl Iterator<Item = (u64, u64)>,
        disk_len: usize,
    ) -> BlockAddress {
        let windows = tables.windows.iter().flatten();
        let windows = windows.map(|window| (window.start, window.end));
        let Some(place) = BlockAddress::find(memory.chain(windows)) else {
            refuse(&"there is no slot or no address for the block function")
        };
        let disk_kib = disk_len >> 10;
        say!(
            "hv: block function: {:02x}.{} at {:#x}, disk of {disk_kib} KiB in memory",
            place.number >> 3,
            place.number & 7,
            place.base
        );
        self.pages.block.init(disk_len);
        *self.block.get_mut() = Some(Block::new(place));
        self.block_place = Some(place);
        place
    }

    /// Turns the IOMMU on, if it is to be used, and can be.
    fn contain_dma(&mut self, tables: &Tables, pages: &'static mut remapping::Pages) {
        if let Some(page) = tables.remapping.unit {
            // Whether it can be used or not, it is not the guest's.
            let page = page & !(PAGE - 1);
            self.show_nothing(page..page + PAGE);
        }
        let device = self.msix.map(|msix| msix.function);
        let started = if self.defends(Defence::Dma) {
            let memory = &self.memory;
            // SAFETY: ACPI says so, and its table and its page are hidden from the guest.
            unsafe { Remapping::start(&tables.remapping, pages, memory, device) }
        } else {
            Err(Unfit::NotAsked)
        };
        match started {
            Ok(unit) => {
                say!(
                    "hv: contained_dma=true: the device reaches the guest's memory and nothing else"
                );
                self.chips.get_mut().add_remapping(unit);
                self.contains_dma = true;
            }
            Err(why) if self.options.requires_iommu => refuse(&why),
            Err(why) => {
                say!("hv: contained_dma=false: {why}");
                say!(
                    "hv: the device reaches all memory, this too: a hostile guest is NOT contained"
                );
            }
        }
    }

    /// Takes configuration space from the guest but for its own function. Nothing of the guest runs
    /// yet.
    pub fn hide_configuration(&mut self, tables: &Tables) {
        const ISA_BRIDGE: u32 = 0x06_0100;
        const HOST_BRIDGE: u32 = 0x06_0000;
        let bridges = [HOST_BRIDGE, ISA_BRIDGE].map(|class| pci::find(0..256, class));
        let function = self.msix.map(|table| describe(table.function));
        let config = Config::new(function, bridges.into_iter().flatten());
        self.chips.get_mut().set_config(config);
        for window in tables.windows.iter().flatten() {
            Self::put(&mut self.removed, window.clone());
            say!(
                "hv: configuration space at {:#x} is hidden, the guest has its device's",
                window.start
            );
        }
    }
}

/// Describes a function as policy has to know it. Its base addresses are sized, with decoding off.
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
