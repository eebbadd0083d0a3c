//! The guest's other processors: interrupts between them, INIT and start-up, and what one asks of
//! another ([`mailbox`](crate::machine::mailbox)).
//!
//! No command of the guest's reaches hardware as it is. A fixed interrupt to another processor is
//! sent as it is meant where that one has the vector assigned, so it takes it without an exit;
//! others are posted, and a message of the host's has it serve its mailbox. An NMI is injected,
//! INIT and start-up are states here: no core of the host's gets any of them.
//!
//! ```text
//!   runs ── INIT ─▶ waits: the core halts, and serves others ── start-up ─▶ runs, in real mode
//! ```

use core::sync::atomic::Ordering;

use bare::apic;
use eli::defence::Defence;
use eli::hosts::Source;
use eli::policy::{LVT_MASKED, Targets};
use eli::{Acknowledged, Vector};

use super::Processor;
use crate::core1::{self, place};
use crate::host::WINDOW_MAX;
use crate::lapic::LvtEntry;
use crate::log::{self, say};
use crate::machine::mailbox::request;
use crate::report::Cause;
use crate::single_step::Protected;
use crate::vmcb;

impl Processor {
    /// Returns the numbers of the other processors.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.index;
        let len = self.machine.processors().len();
        (0..len).filter(move |index| *index != own)
    }

    /// Returns the APIC identifier of a processor of the guest's.
    fn id_of(&self, index: usize) -> u64 {
        let id = self.machine.processors().id(index);
        u64::from(id.expect("a number of the guest's processors"))
    }

    /// Has a processor serve its mailbox, when its guest takes interrupts.
    fn tell(&self, index: usize) {
        let vector = u64::from(Source::Message.vector());
        // SAFETY: the host's vector, which every core of the guest's has a handler for.
        unsafe { apic::write(apic::ICR, self.id_of(index) << 32 | vector) }
    }

    /// Has a processor exit and serve its mailbox, whatever its guest does.
    fn kick(&self, index: usize) {
        const NMI: u64 = 4 << 8;
        // SAFETY: as in `tell`.
        unsafe { apic::write(apic::ICR, self.id_of(index) << 32 | NMI) }
        // One that waits may take the NMI just before it halts.
        self.tell(index);
    }

    /// Asks a processor for something. Returns the ticket.
    pub(super) fn ask(&self, index: usize, requests: u32) -> u64 {
        let ticket = self.machine.mailbox(index).ask(requests);
        self.kick(index);
        ticket
    }

    /// Asks all others that are meant, and waits until they have done it; others that wait for this
    /// one are served meanwhile. No lock is held.
    pub(super) fn ask_and_wait(&mut self, requests: u32, is_meant: impl Fn(usize) -> bool) {
        /// Seconds, each turn being some cycles.
        const TURNS: u64 = 1_000_000_000;
        const KICK_AGAIN: u64 = 1 << 16;
        for index in self.others().filter(|index| is_meant(*index)) {
            let ticket = self.ask(index, requests);
            let mailbox = self.machine.mailbox(index);
            let mut turns = 0;
            core1::PLACES[self.index].store(place::WAITS, Ordering::Relaxed);
            while !mailbox.is_served(ticket) && !self.machine.is_over() {
                self.serve_looks();
                core::hint::spin_loop();
                turns += 1;
                if turns % KICK_AGAIN == 0 {
                    // QEMU's processor, at an exit, changes its pending interrupts beside the core
                    // that sends one: it may lose it.
                    self.kick(index);
                }
                assert!(turns < TURNS, "processor {index} does not answer");
            }
            core1::PLACES[self.index].store(place::HOST, Ordering::Relaxed);
        }
    }

    /// Serves what may be served within an exit.
    fn serve_looks(&mut self) {
        let mailbox = self.machine.mailbox(self.index);
        if mailbox.has_any() {
            let ticket = mailbox.begin();
            let asked = mailbox.take(request::LOOKS);
            self.look(asked);
            mailbox.finish(ticket);
        }
    }

    fn look(&mut self, asked: u32) {
        if asked & request::MESSAGES != 0 {
            self.put_messages(false);
        }
        if asked & request::PINS != 0 {
            self.put_pins();
        }
        if asked & request::PROTECT != 0 {
            self.protect_others();
        }
        if asked & request::REFRESH != 0 {
            self.show_all();
        }
    }

    /// Serves everything that was asked, and takes what was sent: before an entry.
    pub(super) fn serve(&mut self) {
        let mailbox = self.machine.mailbox(self.index);
        if !mailbox.has_any() {
            return;
        }
        let ticket = mailbox.begin();
        let asked = mailbox.take(u32::MAX);
        self.look(asked);
        if asked & request::WATCHDOG != 0 {
            self.watchdog_ticked();
        }
        if asked & request::END != 0 {
            self.go_on();
        }
        if asked & request::INIT != 0 {
            self.init();
        }
        if asked & request::START_UP != 0 && self.waits {
            self.start_up(mailbox.start_page());
        }
        if asked & request::NMI != 0 && !self.waits {
            self.interrupts.request_nmi();
        }
        let posted = mailbox.take_posted();
        if !self.waits {
            posted
                .iter()
                .for_each(|vector| self.interrupts.request(vector));
        }
        mailbox.finish(ticket);
    }

    /// Sends a fixed interrupt of the guest's, to some of its processors.
    pub(super) fn send_fixed(&mut self, targets: Targets, vector: Vector) {
        let makes = self.defends(Defence::Messages);
        for index in targets.iter() {
            if index == self.index {
                if !makes || self.interrupts.send(vector) {
                    // SAFETY: a fixed interrupt to this processor, with a vector that is no
                    // exception's and not of the host's class.
                    unsafe { apic::write(apic::SELF_IPI, u64::from(vector)) }
                }
                continue;
            }
            let mailbox = self.machine.mailbox(index);
            if !makes || mailbox.is_direct(vector) {
                let command = self.id_of(index) << 32 | u64::from(vector);
                // SAFETY: a fixed interrupt to another of the guest's processors, with a vector
                // that is the guest's there, too.
                unsafe { apic::write(apic::ICR, command) }
            } else {
                mailbox.post(vector);
                self.tell(index);
            }
        }
    }

    /// Sends a non-maskable interrupt of the guest's, to some of its processors.
    pub(super) fn send_nmi(&mut self, targets: Targets) {
        for index in targets.iter() {
            if index == self.index {
                self.interrupts.request_nmi();
            } else {
                self.ask(index, request::NMI);
            }
        }
    }

    /// Sends INIT, to some of the guest's processors, of which the first is none.
    pub(super) fn send_init(&mut self, targets: Targets) {
        for index in targets.iter() {
            if index == self.index {
                self.machine.mailbox(index).ask(request::INIT);
            } else {
                self.ask(index, request::INIT);
            }
        }
    }

    /// Sends a start-up, to some of the guest's processors.
    pub(super) fn send_start_up(&mut self, targets: Targets, page: u8) {
        for index in targets.iter().filter(|index| *index != self.index) {
            self.machine.mailbox(index).ask_start(page);
            self.kick(index);
        }
    }

    /// Has the processor wait for a start-up from here on: nothing is in service or requested, and
    /// its local APIC is as after INIT.
    pub(super) fn init(&mut self) {
        self.finish_step();
        self.waits = true;
        core1::ALIVE[self.index].store(0, Ordering::Relaxed);
        for entry in LvtEntry::all() {
            self.interrupts.lapic_mut().set_lvt(entry, LVT_MASKED);
            // SAFETY: masked, it interrupts nothing.
            unsafe { apic::write(entry.register(), LVT_MASKED.into()) }
        }
        // SAFETY: its timer stands then; every vector has a handler.
        unsafe {
            apic::write(apic::TIMER_INITIAL, 0);
            apic::write(apic::TPR, 0);
        }
        self.complete_all();
        self.interrupts.reset();
        self.assigned_changed();
        self.pages.vmcb.real_mode(0);
        self.pages.registers.words = [0; 16];
        self.debug_control = vmcb::DR7_RESET;
        self.pages
            .vmcb
            .put(vmcb::INTERCEPTS, vmcb::intercept::IRET, false);
        self.mode_changed();
        self.table_loaded();
    }

    fn start_up(&mut self, page: u8) {
        self.complete_all();
        self.interrupts.reset();
        self.assigned_changed();
        self.pages.vmcb.real_mode(page);
        self.pages.vmcb.flush();
        self.table_loaded();
        self.waits = false;
        core1::ALIVE[self.index].store(1, Ordering::Relaxed);
        if log::traces() {
            say!(
                "hv: processor {} begins at {:#x}",
                self.index,
                u64::from(page) << 12
            );
        }
    }

    /// Halts until another core asks for something.
    pub(super) fn wait(&mut self) {
        const NONE: Acknowledged = Acknowledged {
            vector: 0,
            in_service: false,
            level: false,
        };
        let mut buffer = [NONE; WINDOW_MAX];
        if !self.machine.mailbox(self.index).has_any() {
            let (taken, real) = self.area.idle(&mut buffer);
            self.acknowledge(taken, real, false);
        }
        self.let_in();
        self.serve();
    }

    /// Handles the return of the guest's handler of a non-maskable interrupt.
    pub(super) fn started_iret(&mut self) -> Cause {
        self.pages
            .vmcb
            .put(vmcb::INTERCEPTS, vmcb::intercept::IRET, false);
        self.start(Protected::Iret);
        Cause::Guest
    }

    /// Begins the next entry with a non-maskable interrupt, if one is requested and can be taken.
    pub(super) fn inject_nmi(&mut self) {
        if !self.step.is_under_way() && self.interrupts.inject_nmi(&mut self.pages.vmcb) {
            self.pages
                .vmcb
                .put(vmcb::INTERCEPTS, vmcb::intercept::IRET, true);
        }
    }
}
