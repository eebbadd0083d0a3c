//! The guest's processor: entering it, and what each exit comes to.
//!
//! What is decided here is decided by `eli`; the rest carries it out. One file per concern: [`interrupts`](crate::interrupts),
//! [`instructions`](crate::instructions), [`window`](crate::window) (what is told), [`lapic`](crate::lapic), [`tables`](crate::tables) (the interrupt descriptor table), [`messages`](crate::messages) (MSI-X and I/O APIC),
//! [`step`](crate::step) (instructions that are let through one at a time).

use core::sync::atomic::Ordering;

use bare::{apic, processor};
use eli::event::{Event, Kind as EventKind};
use eli::watchdog::Watchdog;
use eli::{Core, Cpu, VectorSet};

use crate::core1;
use crate::host;
use crate::hpet::Hpet;
use crate::lapic::Lapic;
use crate::log::say;
use crate::memory::{Guest, Page};
use crate::messages::IoApic;
use crate::msix::Msix;
use crate::nested::Nested;
use crate::options::{Mode, Options};
use crate::report::{Cause, Counts, Kind};
use crate::step::Step;
use crate::tables::Table;
use crate::vmcb::{self, Vmcb, intercept, interrupts};

/// The port of markers, one byte each: 1 begins a window, 2 ends it.
pub const MARKERS: u16 = 0xe0;

/// Registers of the guest that are not in its control block, by number, and its SSE state.
#[repr(C, align(16))]
pub struct Registers {
    /// rcx is 1, rdx 2, rbx 3, rbp 5, rsi 6, rdi 7; rax (0) and rsp (4) are in the block.
    pub words: [u64; 16],
    /// FXSAVE's area.
    pub sse: [u8; 512],
}

pub const RCX: usize = 1;
pub const RDX: usize = 2;
pub const RBX: usize = 3;
pub const RSI: usize = 6;

/// Pages that the hardware reads, and copies that the guest sees. They stay where they are.
pub struct Pages {
    /// The guest's control block.
    pub vmcb: Vmcb,
    /// The host's, for VMSAVE and VMLOAD.
    pub host: Vmcb,
    /// VMRUN's own.
    pub save: Page,
    /// A bit per port.
    pub io_map: [Page; 3],
    /// Two bits per model-specific register.
    pub msr_map: [Page; 2],
    /// The host's interrupt descriptor table.
    pub handlers: Page,
    /// The shadow of the guest's.
    pub shadow: Page,
    /// The guest's view of the device's message table.
    pub messages: Page,
    /// What an instruction meets that is let through to no device.
    pub scratch: Page,
    /// What the guest sees where the HPET is, and the local APIC's registers in memory.
    pub nothing: Page,
    /// Nested page tables.
    pub nested: Nested,
    /// The guest's registers.
    pub registers: Registers,
}

impl Pages {
    /// All zero.
    pub const ZERO: Self = Self {
        vmcb: Vmcb(Page::ZERO),
        host: Vmcb(Page::ZERO),
        save: Page::ZERO,
        io_map: [Page::ZERO; 3],
        msr_map: [Page::ZERO; 2],
        handlers: Page::ZERO,
        shadow: Page::ZERO,
        messages: Page::ZERO,
        scratch: Page::ZERO,
        nothing: Page::ZERO,
        nested: Nested::EMPTY,
        registers: Registers {
            words: [0; 16],
            sse: [0; 512],
        },
    };
}

unsafe extern "C" {
    fn guest_run(vmcb: u64, registers: *mut Registers, host: u64);
}

/// The guest.
pub struct Vm {
    /// Pages that stay where they are.
    pub pages: &'static mut Pages,
    /// The command line.
    pub options: Options,
    /// Decisions.
    pub core: Core,
    /// The guest's memory.
    pub memory: Guest,
    /// Its table.
    pub table: Table,
    /// Its view of the local APIC.
    pub lapic: Lapic,
    /// The assigned device's messages.
    pub msix: Option<Msix>,
    /// Vectors of it.
    pub device: VectorSet,
    /// The I/O APIC.
    pub io_apic: Option<IoApic>,
    /// The 8259s.
    pub pics: eli::policy::Pics,
    /// The host's timers.
    pub hpet: Option<Hpet>,
    /// An instruction that is let through.
    pub step: Option<Step>,
    /// What its ticks found.
    pub watchdog: Watchdog,
    /// The entry began with an INT instruction's event.
    pub software: bool,
    /// Counts.
    pub counts: Counts,
    /// They, when the window began.
    pub window: Counts,
    /// Then: milliseconds, and the host's ticks made.
    pub window_start: (u64, u64),
    /// Then: the time-stamp counter.
    pub window_cycles: u64,
    /// How many have ended.
    pub windows: u32,
    /// Interrupts that met the guest's own absent gate, without defences.
    pub own_gates: u32,
}

impl Vm {
    /// A guest that is yet to be entered.
    pub fn new(pages: &'static mut Pages, options: Options, memory: Guest) -> Self {
        Self {
            pages,
            options,
            core: Core::new(options.mode.ways()),
            memory,
            table: Table::default(),
            lapic: Lapic::new(),
            msix: None,
            device: VectorSet::EMPTY,
            io_apic: None,
            pics: eli::policy::Pics::default(),
            hpet: None,
            step: None,
            watchdog: Watchdog::default(),
            software: false,
            counts: Counts::ZERO,
            window: Counts::ZERO,
            window_start: (0, 0),
            window_cycles: 0,
            windows: 0,
            own_gates: 0,
        }
    }

    /// Whether another event may be logged.
    pub fn traces(&mut self) -> bool {
        let left = self.options.trace;
        self.options.trace = left.saturating_sub(1);
        left > 0
    }

    /// Logs what policy did not let through.
    pub fn refuse(&mut self, what: &str, why: &dyn core::fmt::Display) {
        self.counts.refused += 1;
        if self.traces() {
            say!("policy: {what}: {why}: not let through");
        }
    }

    /// Enters and exits for ever.
    pub fn run(&mut self) -> ! {
        let mut real = host::in_service();
        loop {
            self.enter(real);
            real = self.exit();
        }
    }

    /// Enters, with `real` in service at the local APIC.
    fn enter(&mut self, real: VectorSet) {
        let vmcb = &mut self.pages.vmcb;
        let cpu = Cpu {
            interrupts: vmcb.interrupts(),
            shadow: vmcb.get(vmcb::SHADOW) & 1 != 0,
            event: vmcb.has_event(),
            stepping: self.step.is_some(),
        };
        let was_direct = self.core.last().direct;
        let plan = self.core.plan(cpu, real);
        self.counts.turns_direct += u64::from(plan.direct && !was_direct);
        for vector in plan.hide.iter() {
            self.show_gate(vector);
        }
        if let Some(injection) = plan.inject {
            if injection.opens {
                self.show_gate(injection.event.vector);
            }
            self.counts.device_injected += u64::from(self.device.contains(injection.event.vector));
            self.pages.vmcb.set(vmcb::EVENT, injection.event.field());
        }
        let mut masking = 0;
        if !plan.direct {
            masking |= interrupts::MASKING;
        }
        if plan.window {
            masking |= interrupts::IRQ | interrupts::PRIORITY | interrupts::IGNORE_TPR;
        }
        let vmcb = &mut self.pages.vmcb;
        vmcb.put(vmcb::INTERCEPTS, intercept::INTR, !plan.direct);
        vmcb.put(vmcb::INTERCEPTS, intercept::VINTR, plan.window);
        let kept = vmcb.get(vmcb::INTERRUPTS) & interrupts::TPR;
        vmcb.set(vmcb::INTERRUPTS, kept | masking);
        if self.core.is_engaged() {
            let limit = if self.options.defend {
                plan.limit
            } else {
                self.table.limit
            };
            vmcb.set(vmcb::IDTR_LIMIT, limit);
        }
        self.let_through(apic::EOI, !plan.eoi_exits, true);
        self.counts.runs += 1;
        let start = processor::cycles();
        // SAFETY: the block describes a guest whose memory, ports and registers are its own (`main.rs`); the pages stay.
        unsafe {
            guest_run(
                self.pages.vmcb.0.address(),
                &raw mut self.pages.registers,
                self.pages.host.0.address(),
            );
        }
        self.counts.guest_cycles += processor::cycles() - start;
        self.pages.vmcb.set(vmcb::TLB, 0);
    }

    /// Whether writes (and reads) of a local APIC's register reach the real one.
    pub fn let_through(&mut self, register: u32, through: bool, writes_only: bool) {
        let (byte, shift) = (register as usize / 4, register % 4 * 2);
        let bits = if writes_only { 2 } else { 3 } << shift;
        let map = &mut self.pages.msr_map[0].0[byte];
        *map = if through { *map & !bits } else { *map | bits };
    }

    /// What an exit comes to; what is in service then.
    fn exit(&mut self) -> VectorSet {
        core1::ALIVE.fetch_add(1, Ordering::Relaxed);
        let vmcb = &mut self.pages.vmcb;
        let code = vmcb.get(vmcb::EXIT);
        let during = Event::from_field(vmcb.get(vmcb::EXIT_DURING));
        let was_direct = self.core.last().direct;
        let was_software = core::mem::take(&mut self.software);
        vmcb.set(vmcb::EVENT, 0);
        let is_fault = matches!(code, 0x4b | 0x4d);
        // What was cut off begins the next entry again. A fault tells of it itself.
        if !is_fault
            && !matches!(code, 0x40..=0x5f)
            && let Some(event) = self.core.again(during, was_software)
        {
            self.software = event.kind == EventKind::Software;
            self.pages.vmcb.set(vmcb::EVENT, event.field());
        }
        let (kind, cause) = match code {
            0x60 => (Kind::Intr, self.interrupt()),
            0x61 => (Kind::Nmi, self.nmi()),
            0x64 => (Kind::Vintr, self.cause(self.core.requested().highest())),
            0x41 if self.step.is_some() => self.end_step(),
            0x40..=0x5f if self.step.is_some() => (Kind::Step, self.cancel_step(code, during)),
            0x4b | 0x4d => self.fault(code, during),
            0x65 => (Kind::Table, self.start_cr0()),
            0x66 => (Kind::Table, self.start_table(false)),
            0x6a => (Kind::Table, self.start_table(true)),
            0x72 => (Kind::Cpuid, self.cpuid()),
            0x7b => (Kind::Io, self.io()),
            0x7c => self.msr(),
            0x08 | 0x18 => (Kind::Cr8, self.start_cr8()),
            0x400 => (Kind::NestedFault, self.nested_fault()),
            0x80..=0x86 => {
                self.raise(Event::exception(6, None));
                (Kind::Other, Cause::Guest)
            }
            0x7f => self.stop("the guest shut down (triple fault)"),
            _ => self.stop("an exit that nothing is done about"),
        };
        self.counts.add(kind, cause);
        // Where completion exits on purpose its exits are none of these.
        let is_wanted = kind == Kind::Eoi && !self.options.mode.ways().completion;
        self.counts.device_exits_direct +=
            u64::from(was_direct && cause == Cause::Device && !is_wanted);
        self.look_at_the_clock();
        self.audit()
    }

    /// The next entry begins with this exception.
    pub fn raise(&mut self, event: Event) {
        self.software = false;
        self.pages.vmcb.set(vmcb::EVENT, event.field());
    }

    /// Whether the timer is the guest's own.
    pub fn assigns_timer(&self) -> bool {
        self.options.mode == Mode::EliTimer
    }
}
