//! A processor of the guest's: entering it, and what each exit comes to.
//!
//! The decisions are those of `eli`; this carries them out, on one core, which alone has the
//! [`Processor`]. What the guest's processors have in common is the [`Machine`]. The state is in
//! parts, each with its own transitions:
//!
//! * [`Interrupts`]: the mode machine, the local APIC's registers, and the event that an entry
//!   begins with;
//! * [`ShadowTable`]: the guest's interrupt descriptor table, shadowed or not;
//! * [`SingleStep`]: an instruction that runs with a protection dropped;
//! * [`Pages`]: control block, registers, nested tables. They are this processor's alone: a
//!   protection that is dropped for its step is dropped for no other.
//!
//! ```text
//!   enter: Interrupts::plan ─▶ control block ─▶ VMRUN
//!     ▲                                          │
//!     └── audit ◀── the exit's file ◀── exit: Interrupts::exited
//! ```
//! One file per concern of exits: `events` (interrupts and faults), `cpuid`, `msrs`, `ports`,
//! `config` (configuration space), `block` (the block function), `instructions` (others),
//! `local_apic`, `tables` (the interrupt descriptor table), `messages` (MSI-X and I/O APIC),
//! `others` (the guest's other processors), `step`, `reports` (lines of JSON). `set_up` is before
//! the first entry, `end` behind the last exit.

mod block;
mod config;
mod cpuid;
mod end;
mod events;
mod instructions;
mod local_apic;
mod messages;
mod msrs;
mod others;
mod ports;
mod reports;
mod set_up;
mod step;
mod tables;

use core::sync::atomic::Ordering;

use self::instructions::exit;
use bare::{apic, processor};
use eli::VectorSet;
use eli::defence::Defence;
use eli::event::Event;
use eli::policy::PROCESSORS_MAX;

use crate::core1::{self, place};
use crate::host::{self, Area};
use crate::interrupt_state::Interrupts;
use crate::log::{self, say};
use crate::machine::Machine;
use crate::pages::{Pages, Registers};
use crate::report::{Cause, Count, Counters, Kind};
use crate::shadow_table::ShadowTable;
use crate::single_step::{Intercepts, SingleStep};
use crate::vmcb::{self, intercept, interrupts};

unsafe extern "C" {
    fn guest_run(vmcb: u64, registers: *mut Registers, host: u64);
}

/// A processor of the guest's.
pub struct Processor {
    machine: &'static Machine,
    /// Its number.
    index: usize,
    /// Records of this core's handlers.
    area: &'static Area,
    /// Pages that the hardware reads.
    pages: &'static mut Pages,
    interrupts: Interrupts,
    table: ShadowTable,
    step: SingleStep,
    /// DR7 as the guest wrote it.
    debug_control: u64,
    counters: &'static Counters,
    /// It waits for a start-up.
    waits: bool,
    /// Pages of other processors' tables, which are protected here, by their numbers.
    protected: [Option<u64>; PROCESSORS_MAX],
    /// Ticks of the watchdog when one was taken last.
    watchdog_ticks: u64,
    /// Cycles at the last read of the clock.
    looked: u64,
}

impl Processor {
    /// Creates processor `index` of `machine`, on this core, which is yet to be set up and entered.
    pub fn new(machine: &'static Machine, index: usize, pages: &'static mut Pages) -> Self {
        let (direct_modes, defend) = (
            machine.options().mode.direct_modes(),
            machine.options().defend,
        );
        let intercepts = Intercepts {
            delivery: direct_modes.delivery,
            priority: defend.has(Defence::Priority),
            modes: defend.has(Defence::Modes),
            recurring: defend.has(Defence::Recurring),
            breakpoints: defend.has(Defence::Recurring) && host::is_emulated(),
        };
        Self {
            machine,
            index,
            area: host::area(index),
            pages,
            interrupts: Interrupts::new(direct_modes),
            table: ShadowTable::default(),
            step: SingleStep::new(intercepts),
            debug_control: vmcb::DR7_RESET,
            counters: machine.counters(index),
            waits: false,
            protected: [None; PROCESSORS_MAX],
            watchdog_ticks: 0,
            looked: 0,
        }
    }

    /// Returns whether a defence is on.
    fn defends(&self, defence: Defence) -> bool {
        self.machine.defends(defence)
    }

    /// Logs what policy refused.
    fn refuse(&mut self, what: &str, why: &dyn core::fmt::Display) {
        self.counters.add(Count::Refused, 1);
        if log::traces() {
            say!("policy: {what}: {why}: not let through");
        }
    }

    /// Enters and exits for ever.
    pub fn run(&mut self) -> ! {
        if self.index == 0 {
            self.machine.enter();
        }
        loop {
            while self.waits {
                self.wait();
            }
            let mut real = self.audit();
            while !self.waits {
                self.enter(real);
                real = self.exit();
            }
        }
    }

    /// Enters, with `real` in service at the local APIC.
    fn enter(&mut self, real: VectorSet) {
        let was_direct = self.interrupts.was_direct();
        let is_stepping = self.step.is_under_way();
        self.inject_nmi();
        let machine = self.machine;
        self.interrupts.resume(|| machine.us().unwrap_or(u64::MAX));
        let plan = self.interrupts.plan(&self.pages.vmcb, is_stepping, real);
        let turns = plan.direct && !was_direct;
        self.counters.add(Count::TurnsDirect, turns.into());
        if plan.direct {
            self.watch_masking();
        }
        for vector in plan.hide.iter() {
            self.show_gate(vector);
        }
        if let Some(injection) = plan.inject {
            if injection.opens {
                self.show_gate(injection.event.vector);
            }
            let (vmcb, counts) = (&mut self.pages.vmcb, self.counters);
            self.interrupts.inject(vmcb, injection.event, counts);
        }
        let mut masking = 0;
        if !plan.direct {
            masking |= interrupts::MASKING;
        }
        if plan.window {
            masking |= interrupts::IRQ | interrupts::PRIORITY | interrupts::IGNORE_TPR;
        }
        let limits = self.defends(Defence::Limit);
        let vmcb = &mut self.pages.vmcb;
        vmcb.put(vmcb::INTERCEPTS, intercept::INTR, !plan.direct);
        vmcb.put(vmcb::INTERCEPTS, intercept::VINTR, plan.window);
        let kept = vmcb.get(vmcb::INTERRUPTS) & interrupts::TPR;
        vmcb.set(vmcb::INTERRUPTS, kept | masking);
        if self.interrupts.core().is_engaged() {
            let limit = if limits {
                plan.limit
            } else {
                self.table.limit()
            };
            vmcb.set(vmcb::IDTR_LIMIT, limit);
        }
        self.pages.let_through(apic::EOI, !plan.eoi_exits, true);
        self.counters.add(Count::Runs, 1);
        core1::PLACES[self.index].store(place::GUEST, Ordering::Relaxed);
        let start = processor::cycles();
        // SAFETY: the block describes a guest whose memory, ports and registers are its own
        // (`main.rs`); the pages stay.
        unsafe {
            guest_run(
                self.pages.vmcb.0.address(),
                &raw mut self.pages.registers,
                self.pages.host.0.address(),
            );
        }
        let cycles = processor::cycles() - start;
        core1::PLACES[self.index].store(place::HOST, Ordering::Relaxed);
        self.counters.add(Count::GuestCycles, cycles);
        self.pages.vmcb.set(vmcb::TLB, 0);
    }

    /// Answers an exit. Returns what is in service then.
    fn exit(&mut self) -> VectorSet {
        core1::ALIVE[self.index].fetch_add(1, Ordering::Relaxed);
        let vmcb = &mut self.pages.vmcb;
        let code = vmcb.get(vmcb::EXIT);
        let during = Event::from_field(vmcb.get(vmcb::EXIT_DURING));
        let was_direct = self.interrupts.was_direct();
        let is_exception = matches!(code, 0x40..=0x5f);
        self.interrupts.exited(vmcb, during, is_exception);
        if self.step.has_lapsed(vmcb) {
            self.finish_step();
        }
        let vmcb = &self.pages.vmcb;
        let (kind, cause) = match code {
            0x60 => (Kind::Intr, self.interrupt(false)),
            0x61 => (Kind::Nmi, self.nmi()),
            0x64 => {
                let requested = self.interrupts.core().requested();
                (Kind::Vintr, self.interrupts.cause(requested.highest()))
            }
            0x41 if self.step.has_ended(vmcb) => self.end_step(),
            0x40..=0x5f if self.step.is_under_way() => (Kind::Step, self.cancel_step(code, during)),
            0x4b | 0x4d => self.fault(code, during),
            0x40..=0x5f => (Kind::Other, self.exception(code, during)),
            0x14 | 0x65 => (Kind::Table, self.start_mode()),
            0x66 => (Kind::Table, self.start_table(false)),
            0x6a => (Kind::Table, self.start_table(true)),
            exit::IRET => (Kind::Other, self.started_iret()),
            0x72 => (Kind::Cpuid, self.cpuid()),
            0x7b => (Kind::Io, self.io()),
            0x7c => self.msr(),
            0x08 | 0x18 => (Kind::Cr8, self.start_cr8()),
            0x27 | 0x37 => (Kind::Other, self.start_dr7()),
            0x400 => (Kind::NestedFault, self.nested_fault(during)),
            0x80..=0x86 => {
                self.raise(Event::exception(6, None));
                (Kind::Other, Cause::Guest)
            }
            exit::SMI
            | exit::INIT
            | exit::RSM
            | exit::INVD
            | exit::INVLPGA
            | exit::TASK_SWITCH
            | exit::MONITOR..=exit::MWAIT_ARMED => (Kind::Other, self.intercepted(code)),
            0x7f => self.shut_down(),
            _ => self.stop("an exit that nothing is done about"),
        };
        self.counters.exit(kind, cause);
        // Where completion exits on purpose its exits are none of these.
        let is_wanted = kind == Kind::Eoi && !self.machine.options().mode.direct_modes().completion;
        let is_direct =
            was_direct && matches!(cause, Cause::Device | Cause::Paravirtual) && !is_wanted;
        self.counters
            .add(Count::DeviceExitsDirect, is_direct.into());
        self.let_in();
        self.serve();
        self.look_at_the_clock();
        self.counters.set_totals(self.interrupts.core());
        self.audit()
    }

    /// Handles the guest's third fault in a row.
    fn shut_down(&mut self) -> ! {
        self.stop("the guest shut down (triple fault)")
    }

    /// Has the next entry begin with this exception.
    fn raise(&mut self, event: Event) {
        self.interrupts.raise(&mut self.pages.vmcb, event);
    }

    /// Has the next entry begin with the event that results from this exception, met while `first`
    /// was delivered or by an instruction.
    fn raise_during(&mut self, event: Event, first: Option<Event>) {
        match event.met_during(first) {
            Some(event) => self.raise(event),
            None => self.shut_down(),
        }
    }
}
