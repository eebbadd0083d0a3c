//! Accesses to the guest's local APIC, which is the real one as far as policy allows.

use bare::apic;
use eli::Vector;
use eli::defence::Defence;
use eli::policy::{self, Command, DenyReason, LVT_MASKED, Lvt};

use super::Processor;
use crate::host;
use crate::lapic::{LvtEntry, SPURIOUS_ON};
use crate::report::{Cause, Kind};

/// Value that a read gives (`None`: #GP), and how the exit is counted.
type Outcome = (Option<u64>, Kind, Cause);

impl Processor {
    /// Sets the guest's task priority.
    pub(super) fn set_task_priority(&mut self, priority: u8) {
        let real = self.interrupts.set_task_priority(priority);
        let real = if self.defends(Defence::Priority) {
            real
        } else {
            priority
        };
        // SAFETY: the host's class stays open; without defences that is what is to be shown.
        unsafe { apic::write(apic::TPR, u64::from(real)) }
    }

    /// Handles a write.
    pub(super) fn apic_write(&mut self, register: u32, value: u64) -> Outcome {
        let other = (Some(0), Kind::Apic, Cause::Guest);
        match register {
            apic::EOI => {
                let real = host::in_service();
                let cause = self.interrupts.guest_eoi(real, self.counters);
                return (Some(0), Kind::Eoi, cause);
            }
            apic::TPR => self.set_task_priority(value as u8),
            apic::SPURIOUS => self.write_spurious(value),
            apic::ICR => {
                self.interrupts.lapic_mut().set_command(value);
                return self.command(value);
            }
            apic::SELF_IPI => {
                let command = value & 0xff | 1 << 18;
                return self.command(command);
            }
            apic::TIMER_INITIAL => {
                self.interrupts.lapic_mut().set_initial_count(value as u32);
                let divide = apic::read(apic::TIMER_DIVIDE) as u32;
                let real = self.interrupts.lapic().real_initial_count(divide);
                // SAFETY: when the timer interrupts is the guest's; with which vector was looked
                // at.
                unsafe { apic::write(apic::TIMER_INITIAL, real.into()) }
                return (Some(0), Kind::Timer, Cause::Timer);
            }
            apic::TIMER_DIVIDE => {
                let divide = value & 0xb;
                self.limit_period(divide as u32);
                // SAFETY: as above.
                unsafe { apic::write(apic::TIMER_DIVIDE, divide) }
                return (Some(0), Kind::Timer, Cause::Timer);
            }
            // Error status: written before it is read.
            0x828 => {
                // SAFETY: it clears what was noted.
                unsafe { apic::write(register, 0) }
            }
            _ => match LvtEntry::of(register) {
                Some(entry) => self.write_lvt(entry, value as u32),
                None => return (None, Kind::Apic, Cause::Guest),
            },
        }
        other
    }

    /// Handles a read.
    pub(super) fn apic_read(&mut self, register: u32) -> Outcome {
        let (core, lapic) = (self.interrupts.core(), self.interrupts.lapic());
        let word =
            |set: eli::VectorSet, first: u32| u64::from(set.word((register - first) as usize));
        let value = match register {
            apic::TPR => u64::from(core.task_priority()),
            apic::SPURIOUS => lapic.spurious(),
            apic::ICR => lapic.command(),
            0x810..=0x817 => word(core.in_service(host::in_service()), apic::ISR),
            0x820..=0x827 => {
                let real = eli::VectorSet::from_words(apic::words(apic::IRR));
                word(core.shown_requested(real), apic::IRR)
            }
            apic::TIMER_CURRENT => {
                return (Some(apic::read(register)), Kind::Timer, Cause::Timer);
            }
            apic::TIMER_INITIAL => {
                let count = lapic.initial_count().into();
                return (Some(count), Kind::Timer, Cause::Timer);
            }
            0x802 | 0x803 | 0x80a | 0x80d | 0x818..=0x81f | 0x828 | apic::TIMER_DIVIDE => {
                apic::read(register)
            }
            _ => match LvtEntry::of(register) {
                Some(entry) => u64::from(lapic.lvt(entry)),
                None => return (None, Kind::Apic, Cause::Guest),
            },
        };
        (Some(value), Kind::Apic, Cause::Guest)
    }

    fn command(&mut self, value: u64) -> Outcome {
        let done = (Some(0), Kind::Apic, Cause::Guest);
        if !self.defends(Defence::Commands) {
            // SAFETY: it is not; that is what is to be shown.
            unsafe { apic::write(apic::ICR, value) }
            return done;
        }
        match policy::command(value, self.index, self.machine.processors()) {
            Command::Fixed(targets, vector) => self.send_fixed(targets, vector),
            Command::Nmi(targets) => self.send_nmi(targets),
            Command::Init(targets) => self.send_init(targets),
            Command::StartUp(targets, page) => self.send_start_up(targets, page),
            Command::ToNobody => {}
            Command::Refused(why) => self.refuse("an interrupt command", &why),
        }
        done
    }

    fn write_spurious(&mut self, value: u64) {
        self.interrupts.lapic_mut().set_spurious(value);
        let vector = (value as Vector).max(eli::gate::FIRST_INTERRUPT);
        self.interrupts.set_spurious(vector);
        if !self.defends(Defence::Messages) {
            // It stays on: the host's interrupts come this way too.
            // SAFETY: a vector that has a handler.
            unsafe { apic::write(apic::SPURIOUS, SPURIOUS_ON | u64::from(vector)) }
        }
    }

    /// Checks what firmware left like what the guest writes: LINT1 is an NMI, mostly.
    pub(super) fn adopt_lvts(&mut self) {
        for entry in LvtEntry::all() {
            let value = self.interrupts.lapic().lvt(entry);
            self.write_lvt(entry, value);
        }
    }

    /// Returns whether the guest sets its timer without an exit.
    fn sets_timer_itself(&self) -> bool {
        let lapic = self.interrupts.lapic();
        let has_limit = lapic.is_periodic() && self.defends(Defence::Period);
        self.machine.assigns_timer() && lapic.timer_vector().is_some() && !has_limit
    }

    /// Keeps a timer that runs from a shorter period than it may have, before its mode or this
    /// divide configuration is set. One that needs no other count goes on.
    fn limit_period(&mut self, divide: u32) {
        let real = self.interrupts.lapic().real_initial_count(divide);
        if u64::from(real) != apic::read(apic::TIMER_INITIAL) {
            // SAFETY: as for a write of the guest's.
            unsafe { apic::write(apic::TIMER_INITIAL, real.into()) }
        }
    }

    fn write_lvt(&mut self, entry: LvtEntry, value: u32) {
        if entry.kind() == Lvt::Timer && self.sets_timer_itself() {
            let count = apic::read(apic::TIMER_INITIAL) as u32;
            self.interrupts.lapic_mut().set_initial_count(count);
        }
        self.interrupts.lapic_mut().set_lvt(entry, value);
        let (register, entry) = (entry.register(), entry.kind());
        // What no entry has would raise #GP here: vector, mode, polarity and trigger, mask; the
        // timer's has its own.
        let bits = if entry == Lvt::Timer {
            0x3_00ff
        } else {
            0x1_a7ff
        };
        let mut write = policy::lvt(entry, value);
        if !self.defends(Defence::Lvt) {
            write.real = value;
        } else if let Some(reason) = write.reason {
            // LINT1 as NMI is what every kernel writes; there is no such line here.
            if entry != Lvt::Lint1 || reason != DenyReason::DeliveryMode(4) {
                self.refuse("an entry of the local vector table", &reason);
            }
        }
        if let Some(vector) = write.wants {
            write.real = match self.claim("the local vector table", vector) {
                Some(real) => write.real & !0xff | u32::from(real),
                None => LVT_MASKED,
            };
        }
        if entry == Lvt::Timer {
            self.limit_period(apic::read(apic::TIMER_DIVIDE) as u32);
        }
        // SAFETY: masked, or fixed with a vector that is the guest's; ExtINT, whose vectors are
        // checked elsewhere.
        unsafe { apic::write(register, u64::from(write.real & bits)) }
        if entry == Lvt::Timer {
            let through = self.sets_timer_itself();
            for count in [apic::TIMER_INITIAL, apic::TIMER_CURRENT] {
                self.pages.let_through(count, through, false);
            }
            self.assigned_changed();
        }
    }
}
