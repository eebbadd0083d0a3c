//! Instructions that are let through one at a time, instead of being decoded: what protects a register or a page is dropped, the guest
//! runs one instruction with interrupts masked, and what came of it is looked at.

use eli::event::{Event, Kind as EventKind};

use crate::memory::PAGE;
use crate::messages;
use crate::nested::Access;
use crate::report::{Cause, Kind};
use crate::vm::Vm;
use crate::vmcb::{self, FLAG_INTERRUPTS, FLAG_TRAP, intercept, interrupts};

/// What is let through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// SIDT, or LIDT.
    Table(bool),
    /// A write to the page of the interrupt descriptor table.
    Gate(u64),
    /// A write to the guest's view of the message table.
    Message,
    /// An access to the I/O APIC: the offset, and whether it is a write.
    IoApic(u64, bool),
    /// An access to CR8.
    Cr8(bool),
    /// A write to CR0: the guest may leave long mode, in which gates have 16 bytes.
    Cr0,
}

/// An instruction under way.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    what: What,
    flags: u64,
}

const ALL: u32 = u32::MAX;
const DEBUG_STATUS_STEP: u64 = 1 << 14;

impl Vm {
    fn start(&mut self, what: What) {
        // One that met no trap, since its instruction gave the flag up, ends now.
        if let Some(step) = self.restore() {
            self.protect(step.what);
        }
        let vmcb = &mut self.pages.vmcb;
        let flags = vmcb.get(vmcb::RFLAGS);
        self.step = Some(Step { what, flags });
        vmcb.set(vmcb::RFLAGS, flags & !FLAG_INTERRUPTS | FLAG_TRAP);
        // Behind a load of SS the trap would come one instruction later.
        vmcb.set(vmcb::SHADOW, 0);
        // Any other exception means that the instruction did not run: nothing must see it with these flags.
        vmcb.set(vmcb::EXCEPTIONS, ALL);
    }

    /// Exceptions that exit otherwise. #GP in every mode, for what QEMU raises by mistake (`run.s`).
    pub fn exceptions(&self) -> u32 {
        const NOT_PRESENT: u32 = 1 << 11;
        const PROTECTION: u32 = 1 << 13;
        let delivery = self.options.mode.ways().delivery;
        PROTECTION | if delivery { NOT_PRESENT } else { 0 }
    }

    fn restore(&mut self) -> Option<Step> {
        let step = self.step.take()?;
        let exceptions = self.exceptions();
        let vmcb = &mut self.pages.vmcb;
        let kept = FLAG_INTERRUPTS | FLAG_TRAP;
        let flags = vmcb.get(vmcb::RFLAGS) & !kept | step.flags & kept;
        vmcb.set(vmcb::RFLAGS, flags);
        vmcb.set(vmcb::EXCEPTIONS, exceptions);
        let status = vmcb.get(vmcb::DR6) & !DEBUG_STATUS_STEP;
        vmcb.set(vmcb::DR6, status);
        self.pages.vmcb.put(
            vmcb::INTERCEPTS,
            intercept::IDTR_READ | intercept::IDTR_WRITE,
            self.options.mode.ways().delivery,
        );
        let delivery = self.options.mode.ways().delivery;
        self.pages
            .vmcb
            .put(vmcb::INTERCEPTS, intercept::CR0_WRITE, delivery);
        self.pages
            .vmcb
            .put(vmcb::CR, intercept::CR8, self.options.defend);
        Some(step)
    }

    /// The instruction has run.
    pub fn end_step(&mut self) -> (Kind, Cause) {
        if let Some(step) = self.restore() {
            self.protect(step.what);
            match step.what {
                What::Table(true) => self.table_loaded(),
                What::Cr0 => self.engage(),
                What::Gate(_) => self.show_all(),
                What::Message => self.messages_written(),
                What::IoApic(offset, true) => self.io_apic_written(offset),
                What::Cr8(true) => {
                    let class = self.pages.vmcb.get(vmcb::INTERRUPTS) & interrupts::TPR;
                    self.set_task_priority((class << 4) as u8);
                }
                What::Table(false) | What::Cr8(false) | What::IoApic(_, false) => {}
            }
        }
        (Kind::Step, Cause::Guest)
    }

    /// It did not: it met an exception, which is the guest's.
    pub fn cancel_step(&mut self, code: u64, during: Option<Event>) -> Cause {
        const PAGE_FAULT: u64 = 0x4e;
        let number = (code - 0x40) as u8;
        if let Some(step) = self.restore() {
            self.protect(step.what);
            // The instruction may have run, and the exception be the next one's.
            match step.what {
                What::Table(true) => self.table_loaded(),
                What::Cr0 => self.engage(),
                _ => {}
            }
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
    fn protect(&mut self, what: What) {
        match what {
            What::Gate(page) => {
                let shadow = self.pages.shadow.address();
                if self.table.page == Some(page) {
                    self.map(page, shadow, Access::Read);
                }
            }
            What::Message => {
                let copy = self.pages.messages.address();
                if let Some(page) = self.msix.as_ref().map(|msix| msix.page) {
                    self.map(page, copy, Access::Read);
                }
            }
            What::IoApic(..) => {
                if let Some(page) = self.io_apic.as_ref().map(|chip| chip.page) {
                    self.map(page, page, Access::Nothing);
                }
            }
            What::Table(_) | What::Cr8(_) | What::Cr0 => {}
        }
    }

    /// LIDT or SIDT.
    pub fn start_table(&mut self, is_load: bool) -> Cause {
        let bit = if is_load {
            intercept::IDTR_WRITE
        } else {
            intercept::IDTR_READ
        };
        self.pages.vmcb.put(vmcb::INTERCEPTS, bit, false);
        if self.core.is_engaged() {
            let limit = self.table.limit;
            self.pages.vmcb.set(vmcb::IDTR_LIMIT, limit);
        }
        self.start(What::Table(is_load));
        Cause::Guest
    }

    /// A write to CR0.
    pub fn start_cr0(&mut self) -> Cause {
        self.pages
            .vmcb
            .put(vmcb::INTERCEPTS, intercept::CR0_WRITE, false);
        self.start(What::Cr0);
        Cause::Guest
    }

    /// MOV to or from CR8: with interrupts that exit it is the virtual one's.
    pub fn start_cr8(&mut self) -> Cause {
        let is_write = self.pages.vmcb.get(vmcb::EXIT) == 0x18;
        let class = u32::from(self.core.task_priority() >> 4);
        self.pages
            .vmcb
            .put(vmcb::INTERRUPTS, interrupts::TPR, false);
        self.pages.vmcb.put(vmcb::INTERRUPTS, class, true);
        self.pages.vmcb.put(vmcb::CR, intercept::CR8, false);
        self.start(What::Cr8(is_write));
        Cause::Guest
    }

    /// A page that is protected, or not there.
    pub fn nested_fault(&mut self) -> Cause {
        const WRITE: u64 = 1 << 1;
        let address = self.pages.vmcb.get(vmcb::EXIT_INFO2);
        let is_write = self.pages.vmcb.get(vmcb::EXIT_INFO1) & WRITE != 0;
        let page = address & !(PAGE - 1);
        if self.pages.vmcb.has_event() {
            // An event whose frame, or whose gate, lies in a protected page: no instruction of the guest's runs first.
            self.refuse("a stack in a protected page", &"general protection");
            self.raise(Event::exception(eli::event::PROTECTION, Some(0)));
            return Cause::Guest;
        }
        if self.step.is_some() {
            // One instruction that touches two of them. None of a guest's that means well does.
            if let Some(step) = self.restore() {
                self.protect(step.what);
            }
            self.refuse(
                "an instruction that touches two protected pages",
                &"general protection",
            );
            self.raise(Event::exception(eli::event::PROTECTION, Some(0)));
            return Cause::Guest;
        }
        if self.table.page == Some(page) {
            self.map(page, page, Access::All);
            self.start(What::Gate(page));
        } else if self.msix.as_ref().is_some_and(|msix| msix.page == page) {
            let copy = self.pages.messages.address();
            self.map(page, copy, Access::All);
            self.start(What::Message);
        } else if self.io_apic.as_ref().is_some_and(|chip| chip.page == page) {
            let offset = address - page;
            self.io_apic_shown();
            let scratch = self.pages.scratch.address();
            self.map(page, scratch, Access::All);
            self.start(What::IoApic(offset, is_write));
        } else {
            // The hypervisor's own memory. There is nothing for the guest.
            self.refuse(
                "an access outside of the guest's memory",
                &messages::Hex(address),
            );
            self.raise(Event::exception(eli::event::PROTECTION, Some(0)));
        }
        Cause::Guest
    }
}
