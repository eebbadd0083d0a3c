//! A guest that attacks its hypervisor, or is only demanding: one payload in each run, named on the command line.
//!
//! **What.** `NAME [calm]`: with `calm`, the same without the step that attacks. Text goes to the first serial line:
//! `attack NAME: key=value ...`, and in the end `attack NAME: done`; then the machine is switched off. What was measured is
//! between two writes to port 0xe0, of 1 and of 2. Without a hypervisor all but e2 end, too.
//!
//! **Who.** `exitless-hv`'s tests. The hypervisor delivers the vectors 0x31, 0x41 and 0x61 directly, and has class 0xf.
//!
//! **Left out.** A second processor, and any defence: what goes wrong unexpectedly is printed, and is the end.
#![no_std]
#![no_main]

mod device;
mod gates;
mod interrupts;
mod ipi;
mod local;
mod mask;
mod nvme;
mod tables;
mod time;

use core::fmt::{Arguments, Write};

use bare::port;
use bare::text::{COM1, Output};

/// A payload.
type Payload = fn(&Run);

/// All of them, by name.
const ATTACKS: [(&str, Payload); 18] = [
    ("e1", ipi::e1),
    ("e2", mask::e2),
    ("e2shadow", mask::e2shadow),
    ("e3", gates::e3),
    ("e4", mask::e4),
    ("e5", ipi::e5),
    ("e6", ipi::e6),
    ("e7", mask::e7),
    ("e7tpr", mask::e7tpr),
    ("gate", gates::gate),
    ("e8init", local::e8init),
    ("e8nmi", local::e8nmi),
    ("e8memory", local::e8memory),
    ("e9lint0", local::e9lint0),
    ("e9timer", local::e9timer),
    ("e10vector", device::e10vector),
    ("e10cpu", device::e10cpu),
    ("moved", ipi::moved),
];

/// Where the measured window is marked.
const MARK: u16 = 0xe0;
/// Where QEMU's q35 is switched off, and by what.
const POWER: u16 = 0x604;
const POWER_OFF: u16 = 0x2000;

/// What is run.
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
    // SAFETY: it is the loader's, in low memory that nobody writes.
    let information = unsafe { bare::multiboot::Information::new(information) };
    let mut words = information.command_line().split_ascii_whitespace().skip(1);
    let name = words.next().unwrap_or("");
    let Some((name, payload)) = ATTACKS.iter().find(|(known, _)| *known == name) else {
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
    if time::calibrate().is_none() {
        run.result(format_args!("no ACPI timer; 1 GHz assumed"));
    }
    interrupts::set_enabled(true);
    payload(&run);
    run.result(format_args!("done"));
    end()
}
