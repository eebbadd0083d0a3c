//! Preparations of a processor, on its own core, before the first entry: what of the machine is
//! withheld, timers, the control block.

use core::arch::asm;
use core::sync::atomic::Ordering;

use bare::processor;
use eli::defence::Defence;
use eli::policy::msrs::{self, Access, Rule};

use super::Processor;
use crate::loader::Start;
use crate::log::say;
use crate::nested::Access as PageAccess;
use crate::pages::{RBX, RSI};
use crate::vmcb::{self, intercept};
use crate::{core1, refuse};

impl Processor {
    /// Takes from the guest, as this processor shows it to it, what is not its own, or not as it
    /// is.
    pub fn withhold(&mut self) {
        let machine = self.machine;
        if self.pages.nested.init().is_err() {
            refuse(&"nested page tables");
        }
        for range in machine.removed() {
            if self.pages.nested.remove(range).is_err() {
                self.stop("no nested page table is left for configuration space");
            }
        }
        let nothing = machine.pages().nothing.address();
        for page in machine.nothing() {
            self.map(page, nothing, PageAccess::All);
        }
        if let Some(msix) = machine.msix() {
            let copy = machine.pages().messages.address();
            self.map(msix.page, copy, PageAccess::Read);
        }
        if let Some(page) = machine.io_apic_page() {
            self.map(page, page, PageAccess::Nothing);
        }
        self.show_block();
    }

    /// Limits the period of the local APIC's timer, and sets the host's tick.
    pub fn start_timers(&mut self) {
        if let Some(clock) = self.machine.clock()
            && self.defends(Defence::Period)
        {
            self.interrupts.lapic_mut().limit_period(clock);
        }
        if let Some(tick_us) = self.machine.tick_us().filter(|_| self.index == 0) {
            let watchdog_us = u64::from(self.machine.options().watchdog) * 1000;
            self.interrupts.set_tick(0, tick_us, watchdog_us);
        }
    }

    /// Sees the watchdog tick: that its registers were written says nothing. The control block has
    /// been set up.
    pub fn see_watchdog(&mut self) {
        /// Ticks that are waited for.
        const TICKS: u64 = 2;
        let ms = self.machine.options().watchdog;
        let Some(clock) = self.machine.clock().filter(|_| ms != 0) else {
            return;
        };
        let limit = clock.period().counts(1000 + 4 * ms);
        let (start, mut seen) = (clock.now(), 0);
        while seen < TICKS && clock.now() - start <= limit {
            seen += self.area.window_nmi();
        }
        if seen < TICKS {
            refuse(
                &"the watchdog does not tick: the HPET's messages do not come as non-maskable \
                     interrupts",
            );
        }
        core1::IS_GUARDED.store(true, Ordering::Relaxed);
        say!("hv: watchdog every {ms} ms, seen to tick");
    }

    /// Sets up the map of model-specific registers.
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

    /// Sets up the control block: of a processor that begins so, or waits for a start-up.
    pub fn set_up(&mut self, start: Option<Start>) {
        const VM_HSAVE: u32 = 0xc001_0117;
        const EFER: u32 = 0xc000_0080;
        const SVME: u64 = 1 << 12;
        self.list_msrs();
        self.adopt_lvts();
        let (io_map, msr_map) = (
            self.machine.pages().io_map[0].address(),
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
        match &start {
            Some(start) => vmcb.protected_mode(start.entry),
            None => vmcb.real_mode(0),
        }
        vmcb.set(vmcb::INTERCEPTS, intercepts);
        self.step.intercepts().restore(vmcb);
        vmcb.set(vmcb::INTERCEPTS_SVM, intercepts_svm);
        vmcb.set(vmcb::IO_MAP, io_map);
        vmcb.set(vmcb::MSR_MAP, msr_map);
        vmcb.set(vmcb::ASID, 1);
        vmcb.set(vmcb::NESTED, 1);
        vmcb.set(vmcb::NESTED_CR3, nested);
        vmcb.flush();
        self.waits = start.is_none();
        if let Some(Start { registers, .. }) = start {
            let [eax, ebx, esi] = registers;
            vmcb.set(vmcb::RAX, eax);
            self.pages.registers.words[RBX] = ebx;
            self.pages.registers.words[RSI] = esi;
        }
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
