//! A guest that attacks its hypervisor.
#![no_std]
#![no_main]

use core::fmt::Write;

use bare::text::{COM1, Output};

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    let _ = writeln!(Output::Serial(COM1), "attacks: {info}");
    bare::processor::stop()
}

/// The start.
#[unsafe(no_mangle)]
extern "C" fn bare_main(_magic: u32, information: u32) -> ! {
    let mut out = Output::serial(COM1);
    // SAFETY: it is the loader's.
    let information = unsafe { bare::multiboot::Information::new(information) };
    let _ = writeln!(out, "attacks: {}", information.command_line());
    bare::processor::stop()
}
