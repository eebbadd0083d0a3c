//! Exits that a single step answers ([`SingleStep`](crate::single_step::SingleStep)), and its end:
//! what protects a register or a page is dropped, the guest runs one instruction, and what came of
//! it is looked at.

use eli::event::{Event, Kind as EventKind};

use super::Vm;
use crate::log::Hex;
use crate::memory::PAGE;
use crate::nested::Access;
use crate::report::{Cause, Kind};
use crate::single_step::Protected;
use crate::vmcb::{self, intercept, interrupts};

impl Vm {
    fn start(&mut self, access: Protected) {
        // One that met no trap, since its instruction gave the flag up, ends now.
        self.finish_step();
        self.step.begin(&mut self.pages.vmcb, access);
    }

    /// Ends the step under way, if there is one: its page is protected again.
    fn finish_step(&mut self) -> Option<Protected> {
        let access = self.step.finish(&mut self.pages.vmcb)?;
        self.protect(access);
        Some(access)
    }

    /// The instruction has run.
    pub(super) fn end_step(&mut self) -> (Kind, Cause) {
        match self.finish_step() {
            Some(Protected::Table(true)) => self.table_loaded(),
            Some(Protected::Cr0) => self.engage(),
            Some(Protected::Gate(_)) => self.show_all(),
            Some(Protected::Message) => self.messages_written(),
            Some(Protected::IoApic(offset, true)) => self.io_apic_written(offset),
            Some(Protected::Cr8(true)) => {
                let class = self.pages.vmcb.get(vmcb::INTERRUPTS) & interrupts::TPR;
                self.set_task_priority((class << 4) as u8);
            }
            Some(Protected::Table(false) | Protected::Cr8(false) | Protected::IoApic(_, false))
            | None => {}
        }
        (Kind::Step, Cause::Guest)
    }

    /// It did not: it met an exception, which is the guest's.
    pub(super) fn cancel_step(&mut self, code: u64, during: Option<Event>) -> Cause {
        const PAGE_FAULT: u64 = 0x4e;
        let number = (code - 0x40) as u8;
        // The instruction may have run, and the exception be the next one's.
        match self.finish_step() {
            Some(Protected::Table(true)) => self.table_loaded(),
            Some(Protected::Cr0) => self.engage(),
            _ => {}
        }
        let has_code = matches!(number, 8 | 10..=14 | 17 | 21 | 29 | 30);
        let word = self.pages.vmcb.get(vmcb::EXIT_INFO1) as u32;
        if code == PAGE_FAULT {
            let address = self.pages.vmcb.get(vmcb::EXIT_INFO2);
            self.pages.vmcb.set(vmcb::CR2, address);
        }
        let fault = Event {
            vector: number,
            kind: EventKind::Exception,
            code: has_code.then_some(word),
        };
        match during.map_or(Some(fault), |first| first.then(fault)) {
            Some(event) => self.raise(event),
            None => self.stop("the guest shut down (triple fault)"),
        }
        Cause::Guest
    }

    /// Puts the page back under protection.
    fn protect(&mut self, access: Protected) {
        match access {
            Protected::Gate(page) => {
                let shadow = self.pages.shadow.address();
                if self.table.is_at(page) {
                    self.map(page, shadow, Access::Read);
                }
            }
            Protected::Message => {
                let copy = self.pages.messages.address();
                if let Some(page) = self.chips.msix().map(|msix| msix.page) {
                    self.map(page, copy, Access::Read);
                }
            }
            Protected::IoApic(..) => {
                if let Some(page) = self.chips.io_apic_page() {
                    self.map(page, page, Access::Nothing);
                }
            }
            Protected::Table(_) | Protected::Cr8(_) | Protected::Cr0 => {}
        }
    }

    /// LIDT or SIDT.
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

    /// A write to CR0.
    pub(super) fn start_cr0(&mut self) -> Cause {
        self.pages
            .vmcb
            .put(vmcb::INTERCEPTS, intercept::CR0_WRITE, false);
        self.start(Protected::Cr0);
        Cause::Guest
    }

    /// MOV to or from CR8: with interrupts that exit it is the virtual one's.
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

    /// A page that is protected, or not there.
    pub(super) fn nested_fault(&mut self) -> Cause {
        const WRITE: u64 = 1 << 1;
        let address = self.pages.vmcb.get(vmcb::EXIT_INFO2);
        let is_write = self.pages.vmcb.get(vmcb::EXIT_INFO1) & WRITE != 0;
        let page = address & !(PAGE - 1);
        if self.pages.vmcb.has_event() {
            // An event whose frame, or whose gate, lies in a protected page: no instruction of the
            // guest's runs first.
            self.refuse("a stack in a protected page", &"general protection");
            self.raise(Event::exception(eli::event::PROTECTION, Some(0)));
            return Cause::Guest;
        }
        if self.step.is_under_way() {
            // One instruction that touches two of them. None of a guest's that means well does.
            self.finish_step();
            self.refuse(
                "an instruction that touches two protected pages",
                &"general protection",
            );
            self.raise(Event::exception(eli::event::PROTECTION, Some(0)));
            return Cause::Guest;
        }
        if self.table.is_at(page) {
            self.map(page, page, Access::All);
            self.start(Protected::Gate(page));
        } else if self.chips.msix().is_some_and(|msix| msix.page == page) {
            let copy = self.pages.messages.address();
            self.map(page, copy, Access::All);
            self.start(Protected::Message);
        } else if self.chips.io_apic_page() == Some(page) {
            let offset = address - page;
            self.show_io_apic();
            let scratch = self.pages.scratch.address();
            self.map(page, scratch, Access::All);
            self.start(Protected::IoApic(offset, is_write));
        } else {
            // The hypervisor's own memory. There is nothing for the guest.
            self.refuse("an access outside of the guest's memory", &Hex(address));
            self.raise(Event::exception(eli::event::PROTECTION, Some(0)));
        }
        Cause::Guest
    }
}
