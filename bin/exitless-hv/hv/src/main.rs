//! `exitless-hv`: a bare-metal AMD SVM micro-hypervisor that shows ELI on a stock kernel, and nine
//! attacks on it.
//!
//! **What.** One guest, with the machine's memory as it is, those of its ports and
//! registers that a list allows, and an NVMe controller whose interrupts are delivered to the guest
//! and completed by it without an exit. `eli` decides; this carries it out. Under QEMU it is
//! started by `exitless-lab eli`; on a machine, by GRUB (docs/eli.md).
//!
//! **Flow.** `boot.s` (in `bare`) → [`bare_main`]: the machine is probed ([`machine`]), the guest
//! is put into memory ([`loader`]), its processor is set up ([`vm`]), and
//! [`Processor::run`](vm::Processor::run) enters and exits for ever. The thesis's sections: shadow
//! table §3.5.1, injection mode §3.5.1, vectors §3.5.3, completion §3.5.4, protection §3.7.2,
//! timers and interrupts to oneself §3.9.
//!
//! **Trust.** What a guest can use, and what contains it, is a table ([`eli::surface`],
//! docs/eli.md); rows without a test are counted at the start. Firmware is trusted. The assigned
//! device is kept to the guest's memory by the machine's IOMMU ([`remapping`]); without one it
//! reaches all memory, which a line at the start reports (`contained_dma=false`).
//!
//! **Cores.** Each of the guest's processors has one, from the first on (`cpus=`); the next one is
//! parked, and watches ([`core1`]). The state that they share, and the locks that guard it, are
//! documented at [`machine`].
//!
//! **Left out.** Devices other than NVMe; Intel's VMX.
#![no_std]
#![no_main]

mod acpi;
mod acpi_words;
mod block_pages;
mod core1;
mod cores;
mod host;
mod hpet;
mod interrupt_state;
mod io_apic;
mod io_core;
mod lapic;
mod loader;
mod lock;
mod log;
mod machine;
mod memory;
mod msix;
mod nested;
mod options;
mod pages;
mod power;
mod raw_ports;
mod remapping;
mod report;
mod shadow_table;
mod single_step;
mod vm;
mod vmcb;

use core::arch::global_asm;
use core::sync::atomic::{AtomicUsize, Ordering};

use bare::multiboot::{Information, MAGIC, Module};
use bare::{apic, processor};
use eli::defence::{Defence, Defences};
use eli::policy::{PROCESSORS_MAX, Processors};
use eli::surface;

use crate::acpi::Tables;
use crate::cores::Stack;
use crate::io_core::Completion;
use crate::log::say;
use crate::machine::Machine;
use crate::memory::{Canary, Guest, OWN, PAGE};
use crate::options::Options;
use crate::pages::{Pages, Shared};
use crate::vm::Processor;

global_asm!(bare::stubs!(), include_str!("run.s"), options(att_syntax));

/// One for each of the guest's processors.
static mut PAGES: [Pages; PROCESSORS_MAX] = [Pages::ZERO; PROCESSORS_MAX];
/// Stacks of the cores of the guest's processors but the first.
static mut STACKS: [Stack; PROCESSORS_MAX] = [const { Stack::EMPTY }; PROCESSORS_MAX];
/// The number of the processor whose core is being started.
static STARTING: AtomicUsize = AtomicUsize::new(0);
static mut SHARED: Shared = Shared::ZERO;
/// Written once, before another core, or a guest, runs.
static mut MACHINE: Option<Machine> = None;
static mut REMAPPING: remapping::Pages = remapping::Pages::ZERO;

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

/// The defences, for people.
struct Missing(Defences);

impl core::fmt::Display for Missing {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.0 {
            Defences::ALL => f.write_str("on"),
            Defences::NONE => f.write_str("off"),
            some => {
                f.write_str("on but for")?;
                some.missing()
                    .try_for_each(|defence| write!(f, " {}", defence.name()))
            }
        }
    }
}

/// Starts the program, in 64-bit mode.
#[unsafe(no_mangle)]
extern "C" fn bare_main(magic: u32, information: u32) -> ! {
    if magic != MAGIC {
        refuse(&"no multiboot loader");
    }
    // First of all, so that whatever is refused ends the machine.
    let own = processor::cpuid(1, 0)[1] >> 24;
    // SAFETY: the guest does not run yet.
    let mut tables = unsafe { Tables::find_and_hide(own) };
    power::set_ports(tables.ports.control);
    // SAFETY: the loader left it; nothing is changed there.
    let information = unsafe { Information::new(information) };
    let options = Options::parse(information.command_line()).unwrap_or_else(|word| {
        say!("hv: {word:?} is not understood\n{}", options::HELP);
        refuse(&"the command line")
    });
    log::set_trace(options.trace);
    // SAFETY: as above.
    let processors = unsafe { tables.divide(own, options.cpus) }.unwrap_or_else(|found| {
        say!(
            "hv: cpus={}: one core more than that has to watch",
            options.cpus
        );
        refuse(&format_args!(
            "there are {found} processors in all, too few for a guest with {}",
            options.cpus
        ))
    });
    say!(
        "hv: mode {}, defences {}",
        options.mode.name(),
        Missing(options.defend)
    );
    say!(
        "hv: {} of {} rows of the guest's surface are not contained, or not tested (docs/eli.md)",
        surface::ROWS.len() - surface::tested(),
        surface::ROWS.len()
    );
    check_processor();
    // SAFETY: interrupts are off, and stay so until there are handlers.
    unsafe { bare::pic::quiet(0x20) }
    let pages = pages_of(0);
    host::load_handlers(&mut pages.handlers, 0);
    // SAFETY: the processor has it, and its interrupts have handlers.
    unsafe {
        apic::enable();
        apic::write(apic::SPURIOUS, 0x1ff);
    }
    let (machine, start) = set_up(&tables, options, information, processors);
    let mut processor = Processor::new(machine, 0, pages);
    processor.withhold();
    processor.start_timers();
    processor.set_up(Some(start));
    processor.see_watchdog();
    start_others(machine);
    say!("hv: entering the guest");
    processor.run()
}

/// Returns the pages of the guest's processor `index`.
fn pages_of(index: usize) -> &'static mut Pages {
    let pages = &raw mut PAGES;
    // SAFETY: once for each number, by its core.
    unsafe { &mut (*pages)[index] }
}

/// Starts the cores of the guest's other processors, which wait for the guest to start them.
fn start_others(machine: &Machine) {
    for index in 1..machine.processors().len() {
        let (Some(id), Some(clock)) = (machine.processors().id(index), machine.clock()) else {
            refuse(&"a guest with several processors needs a clock: the HPET");
        };
        STARTING.store(index, Ordering::Relaxed);
        let stacks = &raw mut STACKS;
        // SAFETY: firmware says that the core is there; nothing of the guest's runs yet, so page 8
        // is free; the stack is its own.
        let came = unsafe { cores::start(id, clock, other_main, &raw mut (*stacks)[index]) };
        if !came {
            refuse(&format_args!("core {id} does not start"));
        }
        say!("hv: core {id} has the guest's processor {index}");
    }
}

/// Starts a core that has another of the guest's processors.
extern "C" fn other_main() {
    let index = STARTING.load(Ordering::Relaxed);
    let pages = pages_of(index);
    host::load_handlers(&mut pages.handlers, index);
    // SAFETY: the processor has it (as the first has), and its interrupts have handlers.
    unsafe {
        apic::enable();
        apic::write(apic::SPURIOUS, 0x1ff);
    }
    let place = &raw const MACHINE;
    // SAFETY: written before this core was started; only read since then.
    let Some(machine) = (unsafe { (*place).as_ref() }) else {
        refuse(&"no machine");
    };
    let mut processor = Processor::new(machine, index, pages);
    processor.withhold();
    processor.start_timers();
    processor.set_up(None);
    cores::came();
    processor.run()
}

/// Sets up the guest's machine. Returns it, and the state in which the guest begins.
fn set_up(
    tables: &Tables,
    options: Options,
    information: Information,
    processors: Processors,
) -> (&'static Machine, loader::Start) {
    let (shared, remapping) = (&raw mut SHARED, &raw mut REMAPPING);
    // SAFETY: here alone, once.
    let (shared, remapping) = unsafe { (&mut *shared, &mut *remapping) };
    let mut machine = Machine::new(
        shared,
        options,
        Guest::new(information.memory()),
        processors,
    );
    machine.list_ports(tables);
    machine.start_timers(tables);
    let start = load(machine.memory(), information);
    machine.assign(tables, remapping);
    let block = add_block(&mut machine, tables, options, information);
    if options.defend.has(Defence::Config) {
        // SAFETY: the guest does not run yet.
        unsafe { tables.hide_windows() }
        machine.hide_configuration(tables);
    }
    let place = &raw mut MACHINE;
    // SAFETY: here alone, once; from here on it is only read.
    let machine = unsafe { &*(*place).insert(machine) };
    if let Some((disk, completion)) = block {
        let (memory, own) = (machine.memory(), apic::read(apic::ID) as u32);
        let is_checked = options.defend.has(Defence::Ring);
        // SAFETY: here alone, once, with the module's bytes, which are behind this image.
        unsafe { io_core::begin(memory, is_checked, disk, own, completion) }
    }
    (machine, start)
}

/// Adds the block function, if there is to be one. Returns its disk, and the way in which it
/// completes.
fn add_block(
    machine: &mut Machine,
    tables: &Tables,
    options: Options,
    information: Information,
) -> Option<(&'static mut [u8], Completion)> {
    let Some(completion) = options.mode.completion() else {
        if information.modules().any(|module| is_disk(&module)) {
            say!("hv: the disk is not used: mode=elvis and mode=poll have the block function");
        }
        return None;
    };
    let Some(disk) = information.modules().find(is_disk) else {
        refuse(&"no disk for the block function: a multiboot module with the word `disk`")
    };
    if options.cpus != 1 {
        refuse(&"the block function's messages go to one processor: cpus=1");
    }
    if core1::BEATS.load(Ordering::Acquire) == 0 {
        refuse(&"there is no second core to poll the block function's ring")
    }
    if !options.defend.has(Defence::Config) {
        refuse(&"without the defence `config` there is no place for the block function");
    }
    let memory = information
        .memory()
        .map(|range| (range.start, range.start.saturating_add(range.len)));
    let len = disk.end.saturating_sub(disk.start) as usize;
    machine.add_block(tables, memory, len);
    // SAFETY: the loader's module, of which nothing else is made.
    Some((unsafe { memory::bytes_mut(disk.start, len) }, completion))
}

/// Returns whether a module is the block function's disk: by the first word behind its name.
fn is_disk(module: &Module) -> bool {
    module.text.split_ascii_whitespace().nth(1) == Some("disk")
}

/// Checks the processor: it must have SVM that firmware has not locked, nested paging, x2APIC, and
/// pages of 1 GiB.
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

fn load(memory: &Guest, information: Information) -> loader::Start {
    let mut modules = information.modules().filter(|module| !is_disk(module));
    let Some(kernel) = modules.next() else {
        say!("{}", options::HELP);
        refuse(&"no kernel: a multiboot module")
    };
    let initrd = modules.next();
    let last = information.modules().map(|module| module.end).max();
    if last > Some(OWN.end - PAGE) {
        refuse(&loader::Unfit::Initrd);
    }
    // SAFETY: the modules end before it.
    unsafe { Canary::plant() }
    say!(
        "hv: kernel of {} bytes, {:?}",
        kernel.end - kernel.start,
        kernel.text
    );
    // SAFETY: they are where the loader says, behind this image.
    unsafe { loader::load(memory, kernel, initrd) }.unwrap_or_else(|why| refuse(&why))
}
