//! The guest's processor: entering it, and what each exit comes to.
//!
//! What is decided here is decided by `eli`; the rest carries it out. One file per concern: [`lapic`](crate::lapic),
//! [`tables`](crate::tables) (the interrupt descriptor table), [`messages`](crate::messages) (MSI-X and I/O APIC),
//! [`step`](crate::step) (instructions that are let through one at a time).

use core::sync::atomic::Ordering;

use bare::{apic, port, processor};
use eli::event::{self, Event, Kind as EventKind};
use eli::hosts::Source;
use eli::watchdog::{Verdict, Watchdog};
use eli::{Core, Cpu, Fault, Handed, Reflection, Taken, Vector, VectorSet};

use crate::core1;
use crate::host::{self, WINDOW_MAX};
use crate::hpet::Hpet;
use crate::lapic::Lapic;
use crate::log::say;
use crate::memory::{Guest, Page};
use crate::messages::IoApic;
use crate::msix::Msix;
use crate::nested::Nested;
use crate::options::{Mode, Options};
use crate::power;
use crate::report::{Cause, Counts, Kind};
use crate::step::Step;
use crate::tables::Table;
use crate::vmcb::{self, Vmcb, intercept, interrupts};

/// The port of markers, one byte each: 1 begins a window, 2 ends it.
pub const MARKERS: u16 = 0xe0;
const EVENT_VALID: u64 = 1 << 31;

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
    watchdog: Watchdog,
    /// The entry began with an INT instruction's event.
    software: bool,
    /// Counts.
    pub counts: Counts,
    window: Counts,
    window_start: (u64, u64),
    window_cycles: u64,
    windows: u32,
    own_gates: u32,
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
        loop {
            self.enter();
            self.exit();
        }
    }

    fn enter(&mut self) {
        let vmcb = &mut self.pages.vmcb;
        let cpu = Cpu {
            interrupts: vmcb.interrupts(),
            shadow: vmcb.get(vmcb::SHADOW) & 1 != 0,
            event: vmcb.get(vmcb::EVENT) & EVENT_VALID != 0,
            stepping: self.step.is_some(),
        };
        let was_direct = self.core.last().direct;
        let plan = self.core.plan(cpu, host::in_service());
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

    fn exit(&mut self) {
        core1::ALIVE.fetch_add(1, Ordering::Relaxed);
        let vmcb = &mut self.pages.vmcb;
        let code = vmcb.get(vmcb::EXIT);
        let during = Event::from_field(vmcb.get(vmcb::EXIT_DURING));
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
        self.audit();
        self.look_at_the_clock();
    }

    /// On whose account a vector's exits are.
    pub fn cause(&self, vector: Option<Vector>) -> Cause {
        match vector {
            Some(vector) if self.device.contains(vector) => Cause::Device,
            Some(vector) if self.lapic.timer_vector() == Some(vector) => Cause::Timer,
            Some(vector) if self.core.hosts.source(vector).is_some() => Cause::Host,
            _ => Cause::Guest,
        }
    }

    /// The next entry begins with this exception.
    pub fn raise(&mut self, event: Event) {
        self.software = false;
        self.pages.vmcb.set(vmcb::EVENT, event.field());
    }

    /// Physical interrupts while all exit.
    fn interrupt(&mut self) -> Cause {
        const NONE: Taken = Taken {
            vector: 0,
            in_service: false,
            level: false,
        };
        let mut buffer = [NONE; WINDOW_MAX];
        let mut real = VectorSet::EMPTY;
        let taken = host::window(&mut buffer);
        for one in taken.iter().filter(|one| one.in_service) {
            real.insert(one.vector);
        }
        let first = taken.last().map(|one| one.vector);
        let cause = self.cause(first);
        let real = real.union(host::in_service());
        self.took(taken, real);
        cause
    }

    fn took(&mut self, taken: &[Taken], real: VectorSet) {
        let (device, timer) = (self.device, self.lapic.timer_vector());
        let counts = &mut self.counts;
        self.core.took(taken, real, |vector, Handed { eois, to }| {
            (0..eois).for_each(|_| apic::eoi());
            match to {
                Some(Source::Tick) => counts.ticks += 1,
                Some(Source::Message) => {}
                None => {
                    counts.device_caught += u64::from(device.contains(vector));
                    counts.timer_caught += u64::from(timer == Some(vector));
                }
            }
        });
    }

    fn nmi(&mut self) -> Cause {
        self.counts.nmis += host::window_nmi();
        let is_direct = self.core.last().direct;
        // With IF set only in the shadow of STI no interrupt is ever taken.
        let shadow = self.pages.vmcb.get(vmcb::SHADOW) & 1 != 0;
        let masked = is_direct && (shadow || !self.pages.vmcb.interrupts());
        let held = if is_direct {
            host::in_service().highest()
        } else {
            None
        };
        match self.watchdog.tick(masked, held) {
            Verdict::Fine => {}
            Verdict::Inject => {
                self.core.suspend();
                if self.traces() {
                    say!(
                        "mode: injection while the guest masks interrupts, at {:#x}",
                        self.pages.vmcb.get(vmcb::RIP)
                    );
                }
            }
            Verdict::ForceEoi(vector) => {
                let eois = self.core.fall_back(host::in_service());
                (0..eois).for_each(|_| apic::eoi());
                say!(
                    "mode: injection for good: the guest held vector {vector:#x} in service; {eois} ended for it"
                );
            }
        }
        // The host's do not wait for the guest longer than to the next tick.
        let requested = VectorSet::from_words(apic::words(apic::IRR));
        if is_direct
            && requested
                .iter()
                .any(|vector| self.core.hosts.source(vector).is_some())
        {
            self.interrupt();
        }
        Cause::Watchdog
    }

    /// #NP or #GP: an interrupt in disguise, an INT instruction, or the guest's own.
    fn fault(&mut self, code: u64, during: Option<Event>) -> (Kind, Cause) {
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
        let mut reflection = self.core.reflect(fault);
        if !self.options.defend {
            match self.undefended(fault, reflection) {
                Some(other) => reflection = other,
                None => return (kind, Cause::Guest),
            }
        }
        match reflection {
            Reflection::Interrupt(vector) => {
                let cause = self.cause(Some(vector));
                self.counts.device_exits_direct += u64::from(
                    self.core.last().direct
                        && self.core.assigned().contains(vector)
                        && self.device.contains(vector),
                );
                let taken = host::taken(vector);
                self.took(&[taken], host::in_service());
                (kind, cause)
            }
            Reflection::Software(injection) => {
                if let Some(len) = self.software_len() {
                    if injection.opens {
                        self.show_gate(injection.event.vector);
                    }
                    self.pages.vmcb.skip(len);
                    let next = self.pages.vmcb.get(vmcb::RIP);
                    self.pages.vmcb.set(vmcb::NEXT_RIP, next);
                    self.raise(injection.event);
                    self.software = true;
                } else {
                    // No INT instruction stands there any more: another processor of the guest's would have changed it.
                    self.raise(fault.fault);
                }
                (kind, Cause::Guest)
            }
            Reflection::Guest(event) => {
                self.raise(event);
                (kind, Cause::Guest)
            }
            Reflection::Shutdown => self.stop("the guest shut down (triple fault)"),
        }
    }

    /// What was done before the defences were there (`defend=off`): INT instructions and the guest's own absent gates taken for
    /// interrupts.
    fn undefended(&mut self, fault: Fault, reflection: Reflection) -> Option<Reflection> {
        const LOOP: u32 = 100_000;
        let Some(during) = fault.during else {
            return Some(reflection);
        };
        Some(match (during.kind, reflection) {
            (EventKind::Software, Reflection::Software(injection)) => {
                if self.core.hosts.source(during.vector) == Some(Source::Tick) {
                    // Counted as the host's, and the guest goes on behind it.
                    self.counts.ticks += 1;
                    let len = self.software_len().unwrap_or(0);
                    self.pages.vmcb.skip(len);
                    return None;
                }
                Reflection::Software(injection)
            }
            (EventKind::External, _) if !fault.gate.is_present() => {
                self.own_gates += 1;
                if self.own_gates == LOOP {
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

    /// The length of the INT instruction at the guest's instruction pointer.
    fn software_len(&self) -> Option<u64> {
        let address = self.pages.vmcb.get(vmcb::RIP);
        let mut code = [0; 15];
        let mut len = 0;
        for slot in &mut code {
            let Some(byte) = self
                .translate(address + len as u64)
                .and_then(|at| self.memory.read8(at))
            else {
                break;
            };
            *slot = byte;
            len += 1;
        }
        event::software_len(&code[..len]).map(u64::from)
    }

    /// The end of a run that has a time (`until=`).
    fn look_at_the_clock(&mut self) {
        if self.options.until != 0
            && let Some(hpet) = self.hpet
            && hpet.milliseconds() >= u64::from(self.options.until)
        {
            say!("hv: {} ms are over", self.options.until);
            self.report("time", &self.counts.clone(), (0, 0));
            power::off();
        }
    }

    /// What is really in service must be the guest's, or owed.
    fn audit(&mut self) {
        if !self.options.defend {
            return;
        }
        let real = host::in_service();
        if !real.is_empty()
            && let Some(vector) = self.core.audit(real)
        {
            self.counts.ticks += u64::from(self.core.hosts.source(vector) == Some(Source::Tick));
            say!("audit: the guest has the host's vector {vector:#x} in service");
            apic::eoi();
        }
    }

    fn cpuid(&mut self) -> Cause {
        let vmcb = &mut self.pages.vmcb;
        let words = &mut self.pages.registers.words;
        let leaf = vmcb.get(vmcb::RAX) as u32;
        let [mut a, mut b, mut c, mut d] = processor::cpuid(leaf, words[RCX] as u32);
        let cr4 = vmcb.get(vmcb::CR4);
        let mirror = |word: u32, bit: u32, on: bool| word & !(1 << bit) | u32::from(on) << bit;
        match leaf {
            // A hypervisor is there; no MONITOR, no deadline timer, and OSXSAVE is the guest's.
            1 => c = mirror(c & !(1 << 3 | 1 << 24) | 1 << 31, 27, cr4 & 1 << 18 != 0),
            // No five levels of paging, and OSPKE is the guest's.
            7 => c = mirror(c & !(1 << 16), 4, cr4 & 1 << 22 != 0),
            // No virtualization inside, nor its leaf.
            0x8000_0001 => c &= !(1 << 2),
            0x8000_000a => [a, b, c, d] = [0; 4],
            // A hypervisor vouches for x2APIC, without which Linux turns it off where there is no interrupt remapping. It has
            // KVM's name and none of its features.
            0x4000_0000 => [a, b, c, d] = [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d],
            0x4000_0001 => [a, b, c, d] = [0; 4],
            _ => {}
        }
        vmcb.set(vmcb::RAX, u64::from(a));
        words[RBX] = u64::from(b);
        words[RCX] = u64::from(c);
        words[RDX] = u64::from(d);
        vmcb.skip(2);
        Cause::Guest
    }

    fn msr(&mut self) -> (Kind, Cause) {
        const EFER: u32 = 0xc000_0080;
        const SVME: u64 = 1 << 12;
        let register = self.pages.registers.words[RCX] as u32;
        let is_write = self.pages.vmcb.get(vmcb::EXIT_INFO1) & 1 != 0;
        let low = self.pages.vmcb.get(vmcb::RAX) & 0xffff_ffff;
        let value = self.pages.registers.words[RDX] << 32 | low;
        let (read, kind, cause) = match (register, is_write) {
            // SCE, LME, LMA, NXE, FFXSR, TCE: another bit would end the next entry.
            (EFER, true) if value & !0xcd01 != 0 => (None, Kind::Msr, Cause::Guest),
            (EFER, true) => {
                self.pages.vmcb.set(vmcb::EFER, value | SVME);
                (Some(0), Kind::Msr, Cause::Guest)
            }
            (EFER, false) => (
                Some(self.pages.vmcb.get(vmcb::EFER) & !SVME),
                Kind::Msr,
                Cause::Guest,
            ),
            // It stays as it is: on, and in x2APIC mode.
            (apic::BASE, true) => (Some(0), Kind::Msr, Cause::Guest),
            (apic::BASE, false) => (Some(apic::read(apic::BASE)), Kind::Msr, Cause::Guest),
            (0x800..=0x8ff, true) => self.apic_write(register, value),
            (0x800..=0x8ff, false) => self.apic_read(register),
            _ => (None, Kind::Msr, Cause::Guest),
        };
        match read {
            None => self.raise(Event::exception(event::PROTECTION, Some(0))),
            Some(read) => {
                if !is_write {
                    self.pages.vmcb.set(vmcb::RAX, read & 0xffff_ffff);
                    self.pages.registers.words[RDX] = read >> 32;
                }
                self.pages.vmcb.skip(2);
            }
        }
        (kind, cause)
    }

    fn io(&mut self) -> Cause {
        let info = self.pages.vmcb.get(vmcb::EXIT_INFO1);
        let number = (info >> 16) as u16;
        let (is_in, is_string) = (info & 1 != 0, info & 4 != 0);
        let size = (info >> 4 & 7) as u32;
        let next = self.pages.vmcb.get(vmcb::EXIT_INFO2);
        let rax = self.pages.vmcb.get(vmcb::RAX);
        // Whole accesses of one of our ports: anything else would reach its neighbour unseen.
        let is_power = number != 0 && power::ports().contains(&number);
        let is_pic = matches!(number, 0x20 | 0x21 | 0xa0 | 0xa1);
        let fits = match number {
            MARKERS => size == 1,
            _ if is_pic => size == 1,
            _ if is_power => size == 2,
            _ => true,
        };
        if is_string || !fits {
            self.refuse(
                "an access to a port of the hypervisor's",
                &crate::messages::Hex(u64::from(number)),
            );
            self.raise(Event::exception(event::PROTECTION, Some(0)));
            return Cause::Guest;
        }
        self.pages.vmcb.set(vmcb::RIP, next);
        self.pages.vmcb.set(vmcb::SHADOW, 0);
        if is_in {
            let (value, mask) = match size {
                // SAFETY: the 8259s' registers: reading them does no harm.
                1 if is_pic => (u64::from(unsafe { port::in8(number) }), 0xff),
                // SAFETY: power's: as above.
                2 if is_power => (u64::from(unsafe { port::in16(number) }), 0xffff),
                1 => (0xff, 0xff),
                2 => (0xffff, 0xffff),
                _ => (0xffff_ffff, u64::MAX),
            };
            self.pages.vmcb.set(vmcb::RAX, rax & !mask | value);
            return Cause::Guest;
        }
        match number {
            MARKERS => self.marker(rax as u8),
            _ if is_pic => match self.pics.write(number, rax as u8) {
                Ok(writes) => {
                    for (port, byte) in [(number & !1, writes.first), (number, writes.then)] {
                        if let Some(byte) = byte {
                            // SAFETY: the 8259s' vectors stay above the exceptions'.
                            unsafe { port::out8(port, byte) }
                        }
                    }
                }
                Err(why) => self.refuse("the setting of an 8259", &why),
            },
            _ if is_power => {
                if rax as u16 & power::SLEEP != 0 {
                    self.report("end", &self.counts.clone(), (0, 0));
                    // Whatever kind of sleep it asks for: from any other than the last, firmware would go on without us.
                    power::off()
                }
                // SAFETY: no sleep.
                unsafe { port::out16(number, rax as u16) }
            }
            // The log's: the guest writes no line of it.
            _ => {}
        }
        Cause::Guest
    }

    fn marker(&mut self, marker: u8) {
        let now = self
            .hpet
            .map_or((0, 0), |hpet| (hpet.milliseconds(), hpet.ticks()));
        match marker {
            1 => {
                self.window = self.counts;
                self.window_start = now;
                self.window_cycles = processor::cycles();
            }
            2 => {
                let counts = self.counts.since(&self.window);
                self.report("window", &counts, self.window_start);
                self.windows += 1;
            }
            _ => {
                if self.traces() {
                    say!("marker {marker}");
                }
            }
        }
    }

    /// A line of JSON.
    fn report(&self, what: &str, counts: &Counts, since: (u64, u64)) {
        use core::fmt::Write;
        let mut out = crate::log::output();
        let (ms, ticks) = self
            .hpet
            .map_or((0, 0), |hpet| (hpet.milliseconds(), hpet.ticks()));
        let core = self.core.counts();
        let _ = write!(
            out,
            "{{\"report\":\"{what}\",\"mode\":\"{}\",\"windows\":{},",
            self.options.mode.name(),
            self.windows
        );
        let _ = write!(
            out,
            "\"ms\":{},\"host_ticks_made\":{},",
            ms.wrapping_sub(since.0),
            ticks.wrapping_sub(since.1)
        );
        let cycles = processor::cycles() - self.window_cycles;
        let _ = write!(out, "\"cycles\":{cycles},");
        let _ = counts.keys(&mut out);
        for (key, value) in [
            ("total_injected", core.injected),
            ("total_reflected", core.reflected),
            ("total_software", core.software),
            ("total_own_gates", core.own_gates),
            ("total_stolen", core.stolen),
            ("total_forced", core.forced),
            ("total_suspended", core.suspended),
            ("total_relocated", core.relocated),
            ("qemu_spurious", host::HOST_SPURIOUS.load(Ordering::Relaxed)),
            ("core1_beats", core1::BEATS.load(Ordering::Relaxed)),
            ("core1_foreign", core1::FOREIGN.load(Ordering::Relaxed)),
            ("core1_nmis", core1::NMIS.load(Ordering::Relaxed)),
        ] {
            let _ = write!(out, "\"{key}\":{value},");
        }
        let _ = writeln!(out, "\"contained_dma\":false}}");
    }

    /// The end, and why.
    pub fn stop(&mut self, why: &str) -> ! {
        let vmcb = &self.pages.vmcb;
        say!(
            "hv: {why}: exit {:#x} {:#x} {:#x} during {:#x}, rip {:#x} flags {:#x} rsp {:#x} cr0 {:#x} cr3 {:#x} cr4 {:#x}, direct {}",
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
            self.core.last().direct
        );
        self.report("stopped", &self.counts.clone(), (0, 0));
        power::off()
    }

    /// Whether the timer is the guest's own.
    pub fn assigns_timer(&self) -> bool {
        self.options.mode == Mode::EliTimer
    }
}
