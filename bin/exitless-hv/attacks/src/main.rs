//! A guest that attacks its hypervisor, or is only demanding: one payload in each run, named on the
//! command line.
//!
//! **What.** `NAME [calm]`: with `calm`, the same without the step that attacks. Text goes to the
//! first serial line: `attack NAME: key=value ...`, and in the end `attack NAME: done`; then the
//! machine is switched off. What was measured is between two writes to port 0xe0, of 1 and of 2.
//! Windows are longer than a second.
//!
//! **Who.** `exitless-hv`'s tests. The hypervisor delivers the vectors 0x31, 0x41 and 0x61
//! directly, and has class 0xf.
//!
//! **Left out.** More of a second processor than some instructions of real mode, and any defence:
//! what goes wrong unexpectedly is printed, and is the end.
#![no_std]
#![no_main]

mod block;
mod config;
mod delivery;
mod device;
mod dma;
mod gates;
mod instructions;
mod interrupts;
mod ipi;
mod local;
mod mask;
mod modes;
mod nvme;
mod others;
mod pins;
mod ports;
mod ring;
mod service;
mod tables;
mod time;

use core::fmt::{Arguments, Write};

use bare::port;
use bare::text::{COM1, Output};

/// A payload.
type Payload = fn(&Run);

/// All of them, by name.
const PAYLOADS: &[(&str, Payload)] = &[
    ("e1", ipi::e1),
    ("e1stack", delivery::e1stack),
    ("e1gate", delivery::e1gate),
    ("e1tables", delivery::e1tables),
    ("e2", mask::e2),
    ("e2shadow", mask::e2shadow),
    ("e2halt", mask::e2halt),
    ("e2turns", mask::e2turns),
    ("e2phase", mask::e2phase),
    ("e3", gates::e3),
    ("e4", service::e4),
    ("e4turns", service::e4turns),
    ("e5", ipi::e5),
    ("e6", ipi::e6),
    ("e7", mask::e7),
    ("e7tpr", mask::e7tpr),
    ("gate", gates::gate),
    ("level_pin", pins::level_pin),
    ("level_message", device::level_message),
    ("broadcast_pin", pins::broadcast_pin),
    ("broadcast_message", device::broadcast_message),
    ("broadcast_beat", pins::broadcast_beat),
    ("e8init", local::e8init),
    ("e8nmi", local::e8nmi),
    ("e8memory", local::e8memory),
    ("ipi_watcher", others::ipi_watcher),
    ("ipi_init", others::ipi_init),
    ("ipi_other", others::ipi_other),
    ("ipi", others::ipi),
    ("e9lint0", local::e9lint0),
    ("e9timer", local::e9timer),
    ("pic", local::pic),
    ("period", local::period),
    ("period_chip", local::period_chip),
    ("e10vector", device::e10vector),
    ("e10cpu", device::e10cpu),
    ("e11", dma::e11),
    ("e12", dma::e12),
    ("class_self", service::class_self),
    ("class_lvt", service::class_lvt),
    ("smi", ports::smi),
    ("fastreset", ports::fastreset),
    ("resetport", ports::resetport),
    ("a20", ports::a20),
    ("kbd", ports::kbd),
    ("fwcfg", ports::fwcfg),
    ("poweroff", ports::poweroff),
    ("ecam", config::ecam),
    ("bar", device::bar),
    ("powerbase", config::powerbase),
    ("otherdevice", config::otherdevice),
    ("db", instructions::db),
    ("fixed", instructions::fixed),
    ("halts", instructions::halts),
    ("invd", instructions::invd),
    ("mwait", instructions::mwait),
    ("msr_debugctl", instructions::msr_debugctl),
    ("msr_syscfg", instructions::msr_syscfg),
    ("msr_mtrr", instructions::msr_mtrr),
    ("msr_tsc", instructions::msr_tsc),
    ("modes_efer", modes::modes_efer),
    ("modes_compat", modes::modes_compat),
    ("legacy", modes::legacy),
    ("triple", delivery::triple),
    ("longhandler", service::longhandler),
    ("busyhandler", service::busyhandler),
    ("moved", ipi::moved),
    ("ring_memory", ring::ring_memory),
    ("ring_bounds", ring::ring_bounds),
];

/// The shortest window, milliseconds.
pub const WINDOW_MS: u64 = 1100;
/// Port at which the measured window is marked.
const MARK: u16 = 0xe0;
/// Port at which QEMU's q35 is switched off, and the value that does it.
pub const POWER: u16 = 0x604;
/// See [`POWER`].
pub const POWER_OFF: u16 = 0x2000;

/// The payload that runs.
pub struct Run {
    name: &'static str,
    is_calm: bool,
}

impl Run {
    /// Prints a line of it.
    pub fn result(&self, text: Arguments<'_>) {
        print(format_args!("attack {}: {text}", self.name));
    }

    /// Runs what is to be measured.
    pub fn measured<T>(&self, body: impl FnOnce() -> T) -> T {
        // SAFETY: nothing but a hypervisor that counts is at this port.
        let mark = |value| unsafe { port::out8(MARK, value) };
        mark(1);
        let value = body();
        mark(2);
        value
    }
}

/// Prints a line. The serial line was set up first of all.
pub fn print(text: Arguments<'_>) {
    let _ = writeln!(Output::Serial(COM1), "{text}");
}

/// Switches the machine off.
pub fn end() -> ! {
    // SAFETY: that is what the register does; where there is none, the processor stops.
    unsafe { port::out16(POWER, POWER_OFF) }
    bare::processor::stop()
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    print(format_args!("attacks: {info}"));
    end()
}

/// The start.
#[unsafe(no_mangle)]
extern "C" fn bare_main(magic: u32, information: u32) -> ! {
    let _ = Output::serial(COM1);
    if magic != bare::multiboot::MAGIC {
        print(format_args!("attacks: no multiboot loader, {magic:#x}"));
        end()
    }
    // SAFETY: it is the loader's, in low memory that nothing writes.
    let information = unsafe { bare::multiboot::Information::new(information) };
    let mut words = information.command_line().split_ascii_whitespace().skip(1);
    let name = words.next().unwrap_or("");
    let Some((name, payload)) = PAYLOADS.iter().find(|(known, _)| *known == name) else {
        print(format_args!("attacks: no payload \"{name}\""));
        end()
    };
    let run = Run {
        name,
        is_calm: words.next() == Some("calm"),
    };

    // SAFETY: here, once, with interrupts off, first the tables.
    let has_apic = unsafe {
        tables::init();
        interrupts::init()
    };
    if !has_apic {
        run.result(format_args!("error=no x2APIC"));
        end()
    }
    // On from now: a guest that masks them for long is held for one that attacks.
    interrupts::set_enabled(true);
    if time::calibrate().is_none() {
        run.result(format_args!("no ACPI timer; 1 GHz assumed"));
    }
    payload(&run);
    run.result(format_args!("done"));
    end()
}
