//! The guest's end: it runs no more, its device and its interrupts are quiet, and what else runs on
//! the machine goes on for a while (`linger=`): the host's ticks here, and the other core.
//!
//! ```text
//!   runs ── power-off, reset, triple fault, an exit that is not handled ─▶ report «end»
//!        ── quiet, for `linger=` milliseconds ─▶ report «after», of that time ─▶ machine off
//! ```
//! Without the defence the guest's end is the machine's.

use core::sync::atomic::Ordering;

use bare::{apic, pci};
use eli::defence::Defence;
use elvis::poller::Settings;

use super::Processor;
use crate::lapic::LvtEntry;
use crate::log::say;
use crate::machine::mailbox::request;
use crate::{core1, host, io_core, power, raw_ports, vmcb};

/// Kind of a guest's own end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It switches power off, or sleeps.
    Power,
    /// It resets the machine.
    Reset,
}

impl End {
    const fn name(self) -> &'static str {
        match self {
            Self::Power => "power-off",
            Self::Reset => "reset",
        }
    }
}

impl Processor {
    /// Ends the run: the guest's own end.
    pub(super) fn end(&mut self, end: End) -> ! {
        if !self.machine.end() {
            self.go_on();
        }
        self.report_because("end", &self.machine.total(), end.name());
        if self.defends(Defence::End) {
            self.end_others();
            self.go_on();
        }
        power::off()
    }

    /// Ends the run because of something with which it cannot go on.
    pub(super) fn stop(&mut self, why: &str) -> ! {
        if !self.machine.end() {
            self.go_on();
        }
        let vmcb = &self.pages.vmcb;
        say!(
            "hv: {why}: exit {:#x} {:#x} {:#x} during {:#x}, rip {:#x} flags {:#x} rsp {:#x} cr0 \
             {:#x} cr3 {:#x} cr4 {:#x}, direct {}",
            vmcb.get(vmcb::EXIT),
            vmcb.get(vmcb::EXIT_INFO1),
            vmcb.get(vmcb::EXIT_INFO2),
            vmcb.get(vmcb::EXIT_DURING),
            vmcb.get(vmcb::RIP),
            vmcb.get(vmcb::RFLAGS),
            vmcb.get(vmcb::RSP),
            vmcb.get(vmcb::CR0),
            vmcb.get(vmcb::CR3),
            vmcb.get(vmcb::CR4),
            self.interrupts.was_direct()
        );
        self.counters.set_totals(self.interrupts.core());
        if !self.defends(Defence::End) {
            self.report("stopped", &self.machine.total());
            power::off()
        }
        self.report_because("end", &self.machine.total(), why);
        self.end_others();
        self.go_on()
    }

    /// Ends the guest at the other processors, too.
    fn end_others(&self) {
        for index in self.others() {
            self.ask(index, request::END);
        }
    }

    /// Goes on without the guest. The first processor's core, where the host's ticks are, says how,
    /// and switches power off.
    pub(super) fn go_on(&mut self) -> ! {
        self.counters.set_totals(self.interrupts.core());
        if self.index != 0 {
            self.silence();
            loop {
                core1::ALIVE[self.index].fetch_add(1, Ordering::Relaxed);
                self.let_in_nmis();
                if self.is_hosts_requested() {
                    self.interrupt(false);
                }
                self.complete_all();
                core::hint::spin_loop();
            }
        }
        self.silence();
        self.machine.begin_window();
        if let Some(clock) = self.machine.clock() {
            let (start, len) = (
                clock.now(),
                clock.period().counts(self.machine.options().linger),
            );
            while clock.now() - start < len {
                core1::ALIVE[self.index].fetch_add(1, Ordering::Relaxed);
                // These first, and the rest only if there is any: one taken among interrupts is not
                // counted.
                self.let_in_nmis();
                if self.is_hosts_requested() {
                    self.interrupt(false);
                }
                self.complete_all();
                core::hint::spin_loop();
            }
        }
        let account = self.machine.end_window();
        self.report("after", &account);
        // Whatever kind of sleep it asks for: from any other than the last, firmware would go on
        // without us.
        power::off()
    }

    /// Takes everything of the guest's that could interrupt, or uses its memory.
    fn silence(&mut self) {
        const BUS_MASTER: u32 = 1 << 2;
        const INTX_DISABLED: u32 = 1 << 10;
        if let Some(clock) = self.machine.clock()
            && self.machine.block_place().is_some()
        {
            // An I/O core that does not answer has nothing to say here either.
            io_core::ask(Settings::NONE, clock);
        }
        if let Some(device) = self.machine.msix() {
            let command = pci::read(device.function, pci::COMMAND) & 0xffff;
            // SAFETY: it reads and writes memory no more, and sends nothing.
            unsafe {
                pci::write(
                    device.function,
                    pci::COMMAND,
                    command & !BUS_MASTER | INTX_DISABLED,
                );
            }
        }
        self.machine.chips().mask_all();
        raw_ports::start_timer();
        for entry in LvtEntry::all() {
            // SAFETY: masked, it interrupts nothing.
            unsafe { apic::write(entry.register(), u64::from(eli::policy::LVT_MASKED)) }
        }
        // SAFETY: its timer stands then; every vector has a handler.
        unsafe {
            apic::write(apic::TIMER_INITIAL, 0);
            apic::write(apic::TPR, 0);
        }
        self.complete_all();
    }

    /// Ends all that is in service: nothing waits for the guest any more.
    pub(super) fn complete_all(&mut self) {
        // Fifteen classes nest, one of each at most.
        for _ in 0..16 {
            if host::in_service().is_empty() {
                break;
            }
            apic::eoi();
        }
    }
}
