//! `exitless-hv`: a bare-metal AMD SVM micro-hypervisor that shows ELI on a stock kernel, and nine
//! attacks on it.
//!
//! **What.** One guest on one core, with the machine's memory, ports and devices as they are, and an NVMe controller whose interrupts are
//! delivered to the guest and completed by it without an exit. `eli` decides; this carries it out. Under QEMU it is
//! started by `exitless eli`; on a machine, by GRUB (docs/eli.md).
//!
//! **Flow.** `boot.s` (in `bare`) → [`bare_main`]: the machine is looked at, the guest is put into
//! memory ([`loader`]), its control block is set up, and [`Vm::run`](vm::Vm::run) enters and exits
//! for ever. The thesis's sections: shadow table §3.5.1, injection mode §3.5.1, vectors §3.5.3,
//! completion §3.5.4, protection §3.7.2, timers and interrupts to oneself §3.9.
//!
//! **Trust.** A hostile guest is *not* contained: docs/eli.md lists the attacks that are stopped
//! and the ways that are known to work. Firmware and *devices* are trusted: without an IOMMU the
//! guest reaches this memory by any DMA that it programs, and a device can forge any message. It
//! says both at start.
//!
//! **Left out.** More than one processor for the guest (a second one is parked, and watches); devices other than NVMe; Intel's VMX.
#![no_std]
#![no_main]

mod acpi;
mod core1;
mod host;
mod hpet;
mod instructions;
mod interrupts;
mod lapic;
mod loader;
mod log;
mod memory;
mod messages;
mod msix;
mod nested;
mod options;
mod power;
mod report;
mod step;
mod tables;
mod vm;
mod vmcb;
mod window;

use core::arch::{asm, global_asm};

use bare::multiboot::{Information, MAGIC};
use bare::{apic, processor};

use crate::acpi::Tables;
use crate::hpet::Hpet;
use crate::log::say;
use crate::memory::{Guest, OWN, PAGE};
use crate::messages::IoApic;
use crate::msix::Msix;
use crate::nested::Access;
use crate::options::Options;
use crate::vm::{MARKERS, Pages, RBX, RSI, Vm};
use crate::vmcb::intercept;

global_asm!(
    include_str!("../../bare/src/stubs.s"),
    include_str!("run.s"),
    options(att_syntax)
);

/// Where interrupts are written to, and where a local APIC has its registers in memory.
const LOCAL_APIC: core::ops::Range<u64> = 0xfee0_0000..0xfef0_0000;

static mut PAGES: Pages = Pages::ZERO;

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    say!("hv: {info}");
    power::off()
}

/// Says why, and ends.
fn refuse(why: &dyn core::fmt::Display) -> ! {
    say!("hv: cannot start: {why}");
    power::off()
}

/// The start, in 64-bit mode.
#[unsafe(no_mangle)]
extern "C" fn bare_main(magic: u32, information: u32) -> ! {
    if magic != MAGIC {
        refuse(&"no multiboot loader");
    }
    // First of all, so that whatever is refused ends the machine.
    let own = processor::cpuid(1, 0)[1] >> 24;
    // SAFETY: the guest does not run yet.
    let tables = unsafe { Tables::find_and_hide(own) };
    power::set_ports(tables.power);
    // SAFETY: the loader left it; nothing is changed there.
    let information = unsafe { Information::new(information) };
    let options = Options::parse(information.command_line()).unwrap_or_else(|word| {
        say!("hv: {word:?} is not understood\n{}", options::HELP);
        refuse(&"the command line")
    });
    say!(
        "hv: mode {}, defences {}",
        options.mode.name(),
        if options.defend { "on" } else { "off" }
    );
    say!(
        "hv: contained_dma=false: there is no IOMMU between devices and this memory: device trusted"
    );
    say!(
        "hv: a hostile guest is NOT contained, nor is its device: run none that may not have the whole machine"
    );
    check_processor();
    // SAFETY: interrupts are off, and stay so until there are handlers.
    unsafe { bare::pic::quiet(0x20) }
    let pages = &raw mut PAGES;
    // SAFETY: here alone, once.
    let pages = unsafe { &mut *pages };
    host::load_handlers(&mut pages.handlers);
    // SAFETY: the processor has it, and its interrupts have handlers.
    unsafe {
        apic::enable();
        apic::write(apic::SPURIOUS, 0x1ff);
    }
    let mut vm = Vm::new(pages, options, Guest::new(information.memory()));
    if vm.pages.nested.init().is_err() {
        refuse(&"nested page tables");
    }
    start_timers(&mut vm, &tables);
    let start = load(&vm, information);
    assign(&mut vm, &tables);
    set_up(&mut vm, start);
    say!("hv: entering the guest");
    vm.run()
}

/// What there must be: SVM that firmware has not locked, nested paging, x2APIC, and pages of 1 GiB.
fn check_processor() {
    const VM_CR: u32 = 0xc001_0114;
    const SVM_DISABLED: u64 = 1 << 4;
    let [.., c, _] = processor::cpuid(0x8000_0001, 0);
    if c & 1 << 2 == 0 {
        refuse(&"the processor has no SVM (AMD-V); this is AMD's only");
    }
    // SAFETY: with SVM it is there.
    if unsafe { processor::rdmsr(VM_CR) } & SVM_DISABLED != 0 {
        refuse(&"firmware has disabled SVM: enable it in its setup");
    }
    let [.., d] = processor::cpuid(0x8000_000a, 0);
    if d & 1 == 0 {
        refuse(&"the processor has no nested paging");
    }
    if processor::cpuid(1, 0)[2] & 1 << 21 == 0 {
        refuse(&"the processor has no x2APIC (QEMU: -cpu EPYC,+x2apic, version 10 or later)");
    }
    if processor::cpuid(0x8000_0001, 0)[3] & 1 << 26 == 0 {
        refuse(&"the processor has no pages of 1 GiB");
    }
}

/// Watchdog, tick, and the second core.
fn start_timers(vm: &mut Vm, tables: &Tables) {
    let Some(base) = tables.hpet else {
        say!("hv: there is no HPET: no watchdog, no tick, no second core");
        return;
    };
    // SAFETY: ACPI says so, and its table is hidden from the guest.
    let mut hpet = match unsafe { Hpet::new(base) } {
        Ok(hpet) => hpet,
        Err(why) => return say!("hv: the HPET is of no use: {why}"),
    };
    let (watchdog, tick) = (vm.options.watchdog, vm.options.tick);
    let vector = vm.core.hosts.of(eli::hosts::Source::Tick);
    if watchdog != 0 {
        match hpet.start_watchdog(watchdog) {
            Ok(()) => say!("hv: watchdog every {watchdog} ms"),
            Err(why) => say!("hv: no watchdog: {why}"),
        }
    }
    if tick != 0 {
        match hpet.start_tick(tick, vector) {
            Ok(()) => say!("hv: tick every {tick} ms, vector {vector:#x}"),
            Err(why) => say!("hv: no tick: {why}"),
        }
    }
    if let Some(id) = tables.other {
        // SAFETY: firmware says that it is there; page 8 is low memory, which nothing is in yet.
        let came = unsafe { core1::start(id, &hpet) };
        say!(
            "hv: core {id} is {}",
            if came {
                "parked, and watches"
            } else {
                "not to be had"
            }
        );
    }
    vm.hpet = Some(hpet);
    let nothing = vm.pages.nothing.address();
    vm.map(base & !(PAGE - 1), nothing, Access::All);
}

fn load(vm: &Vm, information: Information) -> loader::Start {
    let mut modules = information.modules();
    let Some(kernel) = modules.next() else {
        say!("{}", options::HELP);
        refuse(&"no kernel: a multiboot module")
    };
    let initrd = modules.next();
    let last = initrd
        .map_or(kernel.end, |initrd| initrd.end)
        .max(kernel.end);
    if last > OWN.end {
        refuse(&loader::Unfit::Initrd);
    }
    say!(
        "hv: kernel of {} bytes, {:?}",
        kernel.end - kernel.start,
        kernel.text
    );
    // SAFETY: they are where the loader says, behind this image.
    unsafe { loader::load(&vm.memory, kernel, initrd) }.unwrap_or_else(|why| refuse(&why))
}

/// The device, and the I/O APIC.
fn assign(vm: &mut Vm, tables: &Tables) {
    match Msix::find() {
        Ok(table) => {
            say!(
                "hv: assigned: {:02x}.{}, {} messages, table in page {:#x}",
                table.function >> 3,
                table.function & 7,
                table.len(),
                table.page
            );
            let page = table.page;
            table.copy(&mut vm.pages.messages);
            vm.msix = Some(table);
            let copy = vm.pages.messages.address();
            vm.map(page, copy, Access::Read);
        }
        Err(why) => say!("hv: no device is assigned: {why}"),
    }
    vm.assigned_changed();
    // Registers of the local APIC in memory, and what a write there sends: not the guest's. It has the model-specific ones.
    let nothing = vm.pages.nothing.address();
    let hides = vm.options.defend;
    for page in LOCAL_APIC.step_by(PAGE as usize).filter(|_| hides) {
        vm.map(page, nothing, Access::All);
    }
    if let Some(page) = tables.io_apic.filter(|_| vm.options.defend) {
        // SAFETY: ACPI says so.
        vm.io_apic = Some(unsafe { IoApic::new(page) });
        vm.map(page, page, Access::Nothing);
    }
}

/// The control block.
fn set_up(vm: &mut Vm, start: loader::Start) {
    const VM_HSAVE: u32 = 0xc001_0117;
    const EFER: u32 = 0xc000_0080;
    const SVME: u64 = 1 << 12;
    let powers = power::ports().into_iter().filter(|port| *port != 0);
    let powers = powers.flat_map(|port| [port, port + 1]);
    let fixed = [MARKERS, 0x20, 0x21, 0xa0, 0xa1];
    for port in fixed.into_iter().chain(powers).chain(log::output().ports()) {
        let at = usize::from(port) / 8;
        vm.pages.io_map[at / 4096].0[at % 4096] |= 1 << (port % 8);
    }
    for register in 0x800..0x900 {
        vm.let_through(register, false, false);
    }
    vm.let_through(apic::BASE, false, false);
    vm.adopt_lvts();
    // EFER, and SVM's own, 0xc001_0114 to 0xc001_0117: in the second and third 2 KiB of the map.
    for (base, register) in [
        (0x800, 0x80),
        (0x1000, 0x114),
        (0x1000, 0x115),
        (0x1000, 0x116),
        (0x1000, 0x117),
    ] {
        let at = base + register / 4;
        vm.pages.msr_map[at / 4096].0[at % 4096] |= 3 << (register % 4 * 2);
    }
    let (io_map, msr_map) = (vm.pages.io_map[0].address(), vm.pages.msr_map[0].address());
    let nested = vm.pages.nested.address();
    let exceptions = vm.exceptions();
    let intercepts =
        intercept::NMI | intercept::CPUID | intercept::IO | intercept::MSR | intercept::SHUTDOWN;
    let vmcb = &mut vm.pages.vmcb;
    vmcb.protected_mode(start.entry);
    vmcb.set(vmcb::INTERCEPTS, intercepts);
    vmcb.put(
        vmcb::INTERCEPTS,
        intercept::IDTR_READ | intercept::IDTR_WRITE,
        vm.options.mode.ways().delivery,
    );
    vmcb.put(
        vmcb::INTERCEPTS,
        intercept::CR0_WRITE,
        vm.options.mode.ways().delivery,
    );
    vmcb.put(vmcb::CR, intercept::CR8, vm.options.defend);
    vmcb.set(vmcb::INTERCEPTS_SVM, intercept::SVM);
    vmcb.set(vmcb::EXCEPTIONS, exceptions);
    vmcb.set(vmcb::IO_MAP, io_map);
    vmcb.set(vmcb::MSR_MAP, msr_map);
    vmcb.set(vmcb::ASID, 1);
    vmcb.set(vmcb::NESTED, 1);
    vmcb.set(vmcb::NESTED_CR3, nested);
    vmcb.flush();
    let [eax, ebx, esi] = start.registers;
    vmcb.set(vmcb::RAX, eax);
    vm.pages.registers.words[RBX] = ebx;
    vm.pages.registers.words[RSI] = esi;
    let (save, host) = (vm.pages.save.address(), vm.pages.host.0.address());
    // SAFETY: SVM is there (`check_processor`); the pages are the hardware's from now on, and the SSE area is large enough.
    unsafe {
        processor::wrmsr(EFER, processor::rdmsr(EFER) | SVME);
        processor::wrmsr(VM_HSAVE, save);
        asm!("clgi", "vmsave rax", in("rax") host, options(nostack));
        asm!("fxsave64 [{}]", in(reg) vm.pages.registers.sse.as_mut_ptr(), options(nostack));
    }
}
