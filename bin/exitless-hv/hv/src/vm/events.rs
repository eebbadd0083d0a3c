//! Interrupts of every kind, and the faults that may be some: what the processor acknowledged is
//! handed to the mode machine, and what that says is carried out.

use core::sync::atomic::Ordering;

use bare::{apic, processor};
use eli::defence::Defence;
use eli::event::{self, Event, Kind as EventKind};
use eli::hosts::{self, Source};
use eli::{Acknowledged, Fault, Reflection, Vector, VectorSet};

use super::Processor;
use crate::host::{self, WINDOW_MAX};
use crate::log::{self, say};
use crate::machine::mailbox::request;
use crate::options::Critical;
use crate::report::{Cause, Count, Kind};
use crate::vmcb;

impl Processor {
    /// Handles physical interrupts: those that wait. They were found to wait for a guest that masks
    /// them, or not.
    pub(super) fn interrupt(&mut self, were_found: bool) -> Cause {
        const NONE: Acknowledged = Acknowledged {
            vector: 0,
            in_service: false,
            level: false,
        };
        let mut buffer = [NONE; WINDOW_MAX];
        let (taken, real) = self.area.window(&mut buffer);
        let first = taken.last().map(|one| one.vector);
        let cause = self.interrupts.cause_of_real(first);
        self.acknowledge(taken, real, were_found);
        cause
    }

    pub(super) fn acknowledge(
        &mut self,
        taken: &[Acknowledged],
        real: VectorSet,
        were_found: bool,
    ) {
        let counts = self.counters;
        if !self.interrupts.acknowledge(taken, real, counts) || !self.defends(Defence::Masking) {
            return;
        }
        let Some(now) = self.machine.us() else {
            return;
        };
        if let Some(late) = self.interrupts.took_tick(now, were_found)
            && log::traces()
        {
            say!(
                "mode: injection for a second: the guest masks too much of the time, now at {:#x}, \
                 and the host's tick for {late} us",
                self.pages.vmcb.get(vmcb::RIP)
            );
        }
    }

    /// Watches a guest that is entered in direct mode: the next moment at which it is sampled is
    /// set, if there is none.
    pub(super) fn watch_masking(&mut self) {
        if self.interrupts.wants_sample()
            && self.defends(Defence::Masking)
            && let Some(now) = self.machine.us()
            && let Some(at) = self.interrupts.next_sample(now, processor::cycles())
        {
            self.machine.sample(at);
        }
    }

    /// Handles a non-maskable interrupt, the watchdog's or another processor's. It is taken with
    /// what else waits.
    pub(super) fn nmi(&mut self) -> Cause {
        let is_guests = self.machine.mailbox(self.index).has_guests();
        if !self.defends(Defence::Window) {
            let came = self.let_in_nmis();
            if self.interrupts.was_direct() && self.is_hosts_requested() {
                self.interrupt(came && self.masks());
            }
        }
        if is_guests {
            Cause::Guest
        } else {
            Cause::Watchdog
        }
    }

    /// Lets in what waits for the host, at every exit: no row of exits, whatever makes the guest
    /// exit, keeps it waiting.
    pub(super) fn let_in(&mut self) {
        if self.defends(Defence::Window) {
            let came = self.let_in_nmis();
            if self.is_hosts_requested() {
                self.interrupt(came && self.interrupts.was_direct() && self.masks());
            }
        }
    }

    /// Returns whether the guest masks interrupts.
    fn masks(&self) -> bool {
        // With IF set only in the shadow of STI no interrupt is ever taken.
        let shadow = self.pages.vmcb.get(vmcb::SHADOW) & 1 != 0;
        shadow || !self.step.guest_interrupts(&self.pages.vmcb)
    }

    /// Lets non-maskable interrupts in: the watchdog's ticks, samples, and what others ask. Returns
    /// whether there were any.
    pub(super) fn let_in_nmis(&mut self) -> bool {
        let came = self.area.window_nmi();
        for _ in 0..came {
            self.took_nmi();
        }
        if came != 0 && self.index == 0 {
            self.look_at_dma();
        }
        came != 0
    }

    /// Takes a non-maskable interrupt. The timers' come to the first processor; those of others
    /// come from cores, which say what they are.
    fn took_nmi(&mut self) {
        if self.index != 0 {
            return;
        }
        let machine = self.machine;
        let mut source = self.interrupts.take_nmi(|| machine.us().unwrap_or(0));
        if machine.processors().len() > 1 {
            // It may be another processor's, or both.
            source.watchdog = self.is_watchdog_due();
        }
        self.counters.add(Count::Samples, source.sample.into());
        if source.watchdog {
            self.watchdog_ticked();
            // The timer has this core alone: from here to the others.
            for index in self.others() {
                self.ask(index, request::WATCHDOG);
            }
        }
    }

    /// Returns whether the watchdog has ticked since it was found so last, by its clock.
    fn is_watchdog_due(&mut self) -> bool {
        let ticks = self.machine.watchdog_ticks().unwrap_or(0);
        let before = core::mem::replace(&mut self.watchdog_ticks, ticks);
        before != ticks
    }

    /// Handles a tick of the watchdog's.
    pub(super) fn watchdog_ticked(&mut self) {
        let count = if self.index == 0 {
            Count::Nmis
        } else {
            Count::NmisSent
        };
        self.counters.add(count, 1);
        if self.machine.options().critical == Critical::Nmi && self.index == 0 {
            self.counters.add(Count::Ticks, 1);
        }
        if self.defends(Defence::Service)
            && !self.waits
            && let Some(eois) = self.interrupts.watchdog(host::in_service())
        {
            (0..eois).for_each(|_| apic::eoi());
            if log::traces() {
                say!(
                    "mode: injection until the guest has ended what it held in service; {eois} \
                     ended for it"
                );
            }
        }
    }

    /// Returns whether an interrupt of the host's waits at the local APIC. Its class is the
    /// highest, so nothing keeps it there.
    pub(super) fn is_hosts_requested(&self) -> bool {
        hosts::is_requested(apic::read(apic::IRR + 7) as u32)
    }

    /// #NP or #GP: an interrupt in disguise, an INT instruction, or the guest's own.
    pub(super) fn fault(&mut self, code: u64, during: Option<Event>) -> (Kind, Cause) {
        // See `run.s`: an interrupt of QEMU's that was gone when it was taken, met by the guest.
        const GONE: u32 = 0xffff_fffa;
        let number = (code - 0x40) as Vector;
        if number == event::PROTECTION && self.pages.vmcb.get(vmcb::EXIT_INFO1) as u32 == GONE {
            host::HOST_SPURIOUS.fetch_add(1, Ordering::Relaxed);
            return (Kind::Protection, Cause::Host);
        }
        let kind = if number == event::NOT_PRESENT {
            Kind::NotPresent
        } else {
            Kind::Protection
        };
        let vmcb = &self.pages.vmcb;
        let fault = Fault {
            fault: Event::exception(number, Some(vmcb.get(vmcb::EXIT_INFO1) as u32)),
            during,
            gate: during.map_or_else(Default::default, |event| self.guests_gate(event.vector)),
            privilege: vmcb.get(vmcb::CPL),
        };
        let mut reflection = self.interrupts.reflect(fault);
        if !self.defends(Defence::Reflection) {
            match self.undefended(fault, reflection) {
                Some(other) => reflection = other,
                None => return (kind, Cause::Guest),
            }
        }
        match reflection {
            Reflection::Interrupt(vector) => {
                let cause = self.interrupts.cause_of_real(Some(vector));
                let (taken, real) = host::taken(vector);
                self.acknowledge(&[taken], real, false);
                (kind, cause)
            }
            Reflection::Software(injection) => {
                if let Some(len) = self.software_len() {
                    if injection.opens {
                        self.show_gate(injection.event.vector);
                    }
                    let vmcb = &mut self.pages.vmcb;
                    self.interrupts.raise_software(vmcb, injection.event, len);
                } else {
                    // No INT instruction stands there any more: another processor of the guest's
                    // would have changed it.
                    self.raise(fault.fault);
                }
                (kind, Cause::Guest)
            }
            Reflection::Guest(event) => {
                self.raise(event);
                let interrupt = during.filter(|during| during.kind == EventKind::External);
                let vector = interrupt.map(|during| during.vector);
                let cause = if self.interrupts.was_direct() {
                    self.interrupts.cause_of_real(vector)
                } else {
                    self.interrupts.cause(vector)
                };
                (kind, cause)
            }
            Reflection::Shutdown => self.shut_down(),
        }
    }

    /// Handles another exception, which exits so that its delivery cannot repeat itself in the
    /// processor: it is the guest's.
    pub(super) fn exception(&mut self, code: u64, during: Option<Event>) -> Cause {
        let vector = (code - 0x40) as Vector;
        let word = self.pages.vmcb.get(vmcb::EXIT_INFO1) as u32;
        let event = Event::exception(vector, Event::has_code(vector).then_some(word));
        self.raise_during(event, during);
        Cause::Guest
    }

    /// Takes INT instructions and the guest's own absent gates for interrupts, as was done before
    /// the defences were there (`defend=off`).
    pub(super) fn undefended(
        &mut self,
        fault: Fault,
        reflection: Reflection,
    ) -> Option<Reflection> {
        const LOOP: u32 = 100_000;
        let Some(during) = fault.during else {
            return Some(reflection);
        };
        Some(match (during.kind, reflection) {
            (EventKind::Software, Reflection::Software(injection)) => {
                if Source::of(during.vector) == Some(Source::Tick) {
                    // Counted as the host's, and the guest goes on behind it.
                    self.counters.add(Count::Ticks, 1);
                    let len = self.software_len().unwrap_or(0);
                    self.pages.vmcb.skip(len);
                    return None;
                }
                Reflection::Software(injection)
            }
            (EventKind::External, _) if !fault.gate.is_present() => {
                if self.interrupts.met_own_gate() == LOOP {
                    self.stop(
                        "the guest's own absent gate: the same interrupt met it 100000 times",
                    );
                }
                if host::in_service().contains(during.vector) {
                    Reflection::Interrupt(during.vector)
                } else {
                    Reflection::Guest(during)
                }
            }
            _ => reflection,
        })
    }

    /// Returns the length of the INT instruction at the guest's instruction pointer.
    pub(super) fn software_len(&self) -> Option<u64> {
        let address = self.instruction();
        let mut code = [0; 15];
        let mut len = 0;
        for slot in &mut code {
            let Some(byte) = self
                .translate(address + len as u64)
                .and_then(|at| self.machine.memory().read8(at))
            else {
                break;
            };
            *slot = byte;
            len += 1;
        }
        event::software_len(&code[..len]).map(u64::from)
    }

    /// Checks that the vectors really in service are the guest's, or owed, and returns them as they
    /// are when the guest is entered next.
    pub(super) fn audit(&mut self) -> VectorSet {
        let real = host::in_service();
        if !self.defends(Defence::Limit) || real.is_empty() {
            return real;
        }
        let Some(vector) = self.interrupts.audit(real) else {
            return real;
        };
        let is_tick = Source::of(vector) == Some(Source::Tick);
        self.counters.add(Count::Ticks, is_tick.into());
        if log::traces() {
            say!("audit: the guest has the host's vector {vector:#x} in service");
        }
        apic::eoi();
        host::in_service()
    }
}
