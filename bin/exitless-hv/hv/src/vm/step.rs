//! Exits that a single step answers ([`SingleStep`](crate::single_step::SingleStep)), and its end:
//! the protection of a register or a page is dropped, the guest runs one instruction, and the
//! result is checked.

use eli::defence::Defence;
use eli::event::Event;
use eli::policy;

use super::Processor;
use crate::log::Hex;
use crate::memory::PAGE;
use crate::nested::Access;
use crate::report::{Cause, Kind};
use crate::single_step::Protected;
use crate::vmcb::{self, intercept, interrupts};

impl Processor {
    pub(super) fn start(&mut self, access: Protected) {
        // One that met no trap, since its instruction gave the flag up, ends now.
        self.finish_step();
        self.step.begin(&mut self.pages.vmcb, access);
    }

    /// Ends the step under way, if there is one, however it ended: its page or register is
    /// protected again, and what stands there now is taken for the guest's.
    pub(super) fn finish_step(&mut self) -> Option<Protected> {
        let access = self.step.finish(&mut self.pages.vmcb)?;
        self.protect(access);
        match access {
            Protected::Table(true) => self.table_loaded(),
            Protected::Mode => self.mode_changed(),
            Protected::Dr7 => self.debug_control_written(),
            Protected::Gate(page) => self.gates_written(page),
            Protected::Iret => self.interrupts.nmi_ended(),
            Protected::Message => self.messages_written(),
            Protected::Cr8(true) => {
                let class = self.pages.vmcb.get(vmcb::INTERRUPTS) & interrupts::TPR;
                self.set_task_priority((class << 4) as u8);
            }
            Protected::Table(false)
            | Protected::Cr8(false)
            | Protected::IoApic(..)
            | Protected::Block(..) => {}
        }
        Some(access)
    }

    /// Ends the step: the instruction has run. Its trap is the guest's too, if it steps itself or
    /// has set a breakpoint.
    pub(super) fn end_step(&mut self) -> (Kind, Cause) {
        let own_trap = self.step.own_trap(&self.pages.vmcb);
        // Only then has it written there.
        match self.finish_step() {
            Some(Protected::IoApic(offset, true)) => self.io_apic_written(offset),
            Some(Protected::Block(address, is_write)) => self.end_block(address, is_write),
            _ => {}
        }
        if let Some(status) = own_trap {
            self.pages.vmcb.set(vmcb::DR6, status);
            self.raise(Event::exception(eli::event::DEBUG, None));
        }
        (Kind::Step, Cause::Guest)
    }

    /// Cancels the step: it has met an exception, which is the guest's. The instruction may have
    /// run, and the exception be the next one's.
    pub(super) fn cancel_step(&mut self, code: u64, during: Option<Event>) -> Cause {
        const PAGE_FAULT: u64 = 0x4e;
        self.finish_step();
        if code == PAGE_FAULT {
            let address = self.pages.vmcb.get(vmcb::EXIT_INFO2);
            self.pages.vmcb.set(vmcb::CR2, address);
        }
        self.exception(code, during)
    }

    /// Puts the page back under protection.
    fn protect(&mut self, access: Protected) {
        match access {
            Protected::Gate(page) => self.protect_table(page),
            Protected::Message => {
                let copy = self.machine.pages().messages.address();
                if let Some(page) = self.machine.msix().map(|msix| msix.page) {
                    self.map(page, copy, Access::Read);
                }
            }
            Protected::IoApic(..) => {
                if let Some(page) = self.machine.io_apic_page() {
                    self.map(page, page, Access::Nothing);
                }
            }
            Protected::Table(_)
            | Protected::Cr8(_)
            | Protected::Mode
            | Protected::Dr7
            | Protected::Iret => {}
            Protected::Block(address, _) => self.protect_block(address & !(PAGE - 1)),
        }
    }

    /// Handles LIDT or SIDT.
    pub(super) fn start_table(&mut self, is_load: bool) -> Cause {
        let bit = if is_load {
            intercept::IDTR_WRITE
        } else {
            intercept::IDTR_READ
        };
        self.pages.vmcb.put(vmcb::INTERCEPTS, bit, false);
        if self.interrupts.core().is_engaged() {
            let limit = self.table.limit();
            self.pages.vmcb.set(vmcb::IDTR_LIMIT, limit);
        }
        self.start(Protected::Table(is_load));
        Cause::Guest
    }

    /// Handles a write to CR0 or CR4.
    pub(super) fn start_mode(&mut self) -> Cause {
        let vmcb = &mut self.pages.vmcb;
        vmcb.put(vmcb::INTERCEPTS, intercept::CR0_WRITE, false);
        vmcb.put(vmcb::CR, intercept::CR4_WRITE, false);
        self.start(Protected::Mode);
        Cause::Guest
    }

    /// Handles MOV to or from DR7, which shows what the guest wrote.
    pub(super) fn start_dr7(&mut self) -> Cause {
        self.pages.vmcb.put(vmcb::DR, intercept::DR7, false);
        self.pages.vmcb.set(vmcb::DR7, self.debug_control);
        self.start(Protected::Dr7);
        Cause::Guest
    }

    /// Takes notice that DR7 has been accessed: the processor gets what it may have.
    fn debug_control_written(&mut self) {
        self.debug_control = self.pages.vmcb.get(vmcb::DR7);
        let real = policy::control::without_data_breakpoints(self.debug_control);
        self.pages.vmcb.set(vmcb::DR7, real);
    }

    /// Handles MOV to or from CR8: with interrupts that exit it is the virtual one's.
    pub(super) fn start_cr8(&mut self) -> Cause {
        let is_write = self.pages.vmcb.get(vmcb::EXIT) == 0x18;
        let class = u32::from(self.interrupts.core().task_priority() >> 4);
        self.pages
            .vmcb
            .put(vmcb::INTERRUPTS, interrupts::TPR, false);
        self.pages.vmcb.put(vmcb::INTERRUPTS, class, true);
        self.pages.vmcb.put(vmcb::CR, intercept::CR8, false);
        self.start(Protected::Cr8(is_write));
        Cause::Guest
    }

    /// Handles an access to a page that is protected, or not there.
    pub(super) fn nested_fault(&mut self, during: Option<Event>) -> Cause {
        const WRITE: u64 = 1 << 1;
        let address = self.pages.vmcb.get(vmcb::EXIT_INFO2);
        let is_write = self.pages.vmcb.get(vmcb::EXIT_INFO1) & WRITE != 0;
        let page = address & !(PAGE - 1);
        let protection = Event::exception(eli::event::PROTECTION, Some(0));
        if let Some(first) = during {
            // A stack, a table or a page table that lies in a protected page, or in none. #GP is
            // delivered by the same, so it combines with what was delivered.
            self.finish_step();
            self.refuse("a delivery through a protected page", &"general protection");
            let combines = self.defends(Defence::Combine);
            self.raise_during(protection, Some(first).filter(|_| combines));
            return Cause::Guest;
        }
        if self.step.is_under_way() {
            // One instruction that touches two of them. None of a guest's that means well does.
            self.finish_step();
            self.refuse(
                "an instruction that touches two protected pages",
                &"general protection",
            );
            self.raise(protection);
            return Cause::Guest;
        }
        if self.is_table(page) {
            self.map(page, page, Access::All);
            self.start(Protected::Gate(page));
        } else if self.machine.msix().is_some_and(|msix| msix.page == page) {
            let copy = self.machine.pages().messages.address();
            self.map(page, copy, Access::All);
            self.start(Protected::Message);
        } else if self.machine.io_apic_page() == Some(page) {
            let offset = address - page;
            self.show_io_apic();
            let scratch = self.pages.scratch.address();
            self.map(page, scratch, Access::All);
            self.start(Protected::IoApic(offset, is_write));
        } else if let Some(real) = self.block_shown(address) {
            self.map(page, real, Access::All);
            self.start(Protected::Block(address, is_write));
        } else {
            // The hypervisor's own memory. There is nothing for the guest.
            self.refuse("an access outside of the guest's memory", &Hex(address));
            self.raise(protection);
        }
        Cause::Guest
    }
}
