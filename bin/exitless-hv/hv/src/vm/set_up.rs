//! Preparations before the first entry: timers and the second core, the assigned device, the
//! control block.

use core::arch::asm;
use core::sync::atomic::Ordering;

use bare::{port, processor};
use eli::defence::Defence;
use eli::policy::msrs::{self, Access, Rule};
use eli::policy::ports::Ports;

use super::Vm;
use crate::acpi::Tables;
use crate::hpet::Hpet;
use crate::io_apic::IoApic;
use crate::loader::Start;
use crate::log::say;
use crate::memory::PAGE;
use crate::msix::Msix;
use crate::nested::Access as PageAccess;
use crate::options::Critical;
use crate::pages::{RBX, RSI};
use crate::remapping::{self, Remapping, Unfit};
use crate::vmcb::{self, intercept};
use crate::{core1, host, hpet, refuse};

/// Where interrupts are written to, and where a local APIC has its registers in memory.
const LOCAL_APIC: core::ops::Range<u64> = 0xfee0_0000..0xfef0_0000;

impl Vm {
    /// Watchdog, tick, and the second core.
    pub fn start_timers(&mut self, tables: &Tables) {
        let (mut watchdog, tick) = (self.options.watchdog, self.options.tick);
        let critical = self.options.critical;
        let (to, is_nmi) = match (critical, tables.other) {
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
            say!("hv: there is no HPET: no watchdog, no tick, no second core");
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
        let (clock, tick_us) = (hpet.clock(), hpet.tick_us());
        self.measurement.set_clock(clock);
        self.chips.add_hpet(hpet);
        if let Some(id) = tables.other {
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
        if self.defends(Defence::Period) {
            self.interrupts.lapic_mut().limit_period(clock);
        }
        if critical == Critical::Limit
            && let Some(tick_us) = tick_us
        {
            self.interrupts
                .set_tick(0, tick_us, u64::from(watchdog) * 1000);
        }
        let nothing = self.pages.nothing.address();
        self.map(base & !(PAGE - 1), nothing, PageAccess::All);
    }

    /// Sees the watchdog tick: that its registers were written says nothing. The control block has
    /// been set up.
    pub fn see_watchdog(&mut self) {
        /// Ticks that are waited for.
        const TICKS: u64 = 2;
        let ms = self.options.watchdog;
        let Some(clock) = self.chips.clock().filter(|_| ms != 0) else {
            return;
        };
        let limit = clock.period().counts(1000 + 4 * ms);
        let (start, mut seen) = (clock.now(), 0);
        while seen < TICKS && clock.now() - start <= limit {
            seen += host::window_nmi();
        }
        if seen < TICKS {
            refuse(
                &"the watchdog does not tick: the HPET's messages do not come as non-maskable interrupts",
            );
        }
        core1::IS_GUARDED.store(true, Ordering::Relaxed);
        say!("hv: watchdog every {ms} ms, seen to tick");
    }

    /// The list of ports. ACPI is turned on, since that takes one of firmware's that the guest has
    /// not.
    pub fn list_ports(&mut self, tables: &Tables) {
        const IS_ON: u16 = 1;
        const READS_MAX: u32 = 1_000_000;
        let control = tables.ports.control[0];
        self.chips.set_ports(Ports::new(&tables.ports));
        self.start_timer();
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

    /// The device, the I/O APIC, and the IOMMU, which is given `pages`.
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
                let page = table.page;
                table.copy(&mut self.pages.messages);
                self.chips.add_msix(table);
                let copy = self.pages.messages.address();
                self.map(page, copy, PageAccess::Read);
            }
            Err(why) => say!("hv: no device is assigned: {why}"),
        }
        self.contain_dma(tables, pages);
        self.assigned_changed();
        // Registers of the local APIC in memory, and what a write there sends: not the guest's. It
        // has the model-specific ones.
        let nothing = self.pages.nothing.address();
        let hides = self.defends(Defence::Pages);
        for page in LOCAL_APIC.step_by(PAGE as usize).filter(|_| hides) {
            self.map(page, nothing, PageAccess::All);
        }
        if let Some(page) = tables.io_apic.filter(|_| self.defends(Defence::Messages)) {
            // SAFETY: ACPI says so.
            let chip = unsafe { IoApic::new(page) };
            self.chips.add_io_apic(chip);
            self.map(page, page, PageAccess::Nothing);
        }
    }

    /// The map of model-specific registers.
    fn list_msrs(&mut self) {
        let lists = self.defends(Defence::Msrs);
        // The three ranges of the map; all others exit.
        let mapped = (0..0x2000)
            .chain(0xc000_0000..0xc000_2000)
            .chain(0xc001_0000..0xc001_2000);
        for register in mapped {
            // Without a list: the local APIC's, its base, EFER, and SVM's own.
            let is_own =
                msrs::rule(register) == Rule::Own || matches!(register, 0xc001_0114..=0xc001_0117);
            let is_direct = |access| !is_own && (!lists || msrs::is_direct(register, access));
            self.pages
                .let_through(register, is_direct(Access::Read), false);
            self.pages
                .let_through(register, is_direct(Access::Write), true);
        }
    }

    /// The IOMMU, if it is to be used, and can be.
    fn contain_dma(&mut self, tables: &Tables, pages: &'static mut remapping::Pages) {
        if let Some(page) = tables.remapping.unit {
            // Whatever becomes of it, it is not the guest's.
            let nothing = self.pages.nothing.address();
            self.map(page & !(PAGE - 1), nothing, PageAccess::All);
        }
        let device = self.chips.msix().map(|msix| msix.function);
        let own = self.interrupts.lapic().id();
        let started = if self.defends(Defence::Dma) {
            let memory = &self.memory;
            // SAFETY: ACPI says so, and its table and its page are hidden from the guest.
            unsafe { Remapping::start(&tables.remapping, pages, memory, device, own) }
        } else {
            Err(Unfit::NotAsked)
        };
        match started {
            Ok(unit) => {
                say!(
                    "hv: contained_dma=true: the device reaches the guest's memory and nothing else"
                );
                self.chips.add_remapping(unit);
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

    /// The control block.
    pub fn set_up(&mut self, start: Start) {
        const VM_HSAVE: u32 = 0xc001_0117;
        const EFER: u32 = 0xc000_0080;
        const SVME: u64 = 1 << 12;
        for port in 0..=u16::MAX {
            if self.exits_port(port) {
                let at = usize::from(port) / 8;
                self.pages.io_map[at / 4096].0[at % 4096] |= 1 << (port % 8);
            }
        }
        // Behind the last port: of an access that goes round.
        self.pages.io_map[2].0.fill(0xff);
        self.list_msrs();
        self.adopt_lvts();
        let (io_map, msr_map) = (
            self.pages.io_map[0].address(),
            self.pages.msr_map[0].address(),
        );
        let nested = self.pages.nested.address();
        let mut intercepts = intercept::NMI
            | intercept::CPUID
            | intercept::INVLPGA
            | intercept::IO
            | intercept::MSR
            | intercept::SHUTDOWN;
        let mut intercepts_svm = intercept::SVM;
        if self.defends(Defence::Instructions) {
            intercepts |= intercept::SMI
                | intercept::INIT
                | intercept::RSM
                | intercept::INVD
                | intercept::TASK_SWITCH;
            intercepts_svm |= intercept::MONITOR;
        }
        let vmcb = &mut self.pages.vmcb;
        vmcb.protected_mode(start.entry);
        vmcb.set(vmcb::INTERCEPTS, intercepts);
        self.step.intercepts().restore(vmcb);
        vmcb.set(vmcb::INTERCEPTS_SVM, intercepts_svm);
        vmcb.set(vmcb::IO_MAP, io_map);
        vmcb.set(vmcb::MSR_MAP, msr_map);
        vmcb.set(vmcb::ASID, 1);
        vmcb.set(vmcb::NESTED, 1);
        vmcb.set(vmcb::NESTED_CR3, nested);
        vmcb.flush();
        let [eax, ebx, esi] = start.registers;
        vmcb.set(vmcb::RAX, eax);
        self.pages.registers.words[RBX] = ebx;
        self.pages.registers.words[RSI] = esi;
        let (save, host) = (self.pages.save.address(), self.pages.host.0.address());
        // SAFETY: SVM is there (`check_processor`); the pages are the hardware's from now on, and
        // the SSE area is large enough.
        unsafe {
            processor::wrmsr(EFER, processor::rdmsr(EFER) | SVME);
            processor::wrmsr(VM_HSAVE, save);
            asm!("clgi", "vmsave rax", in("rax") host, options(nostack));
            asm!("fxsave64 [{}]", in(reg) self.pages.registers.sse.as_mut_ptr(), options(nostack));
        }
    }
}
