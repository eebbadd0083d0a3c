//! Ports that end the machine or reach its memory: system management (smi), resets (fastreset,
//! resetport, kbd), the address line A20 (a20), firmware's configuration device (fwcfg), power
//! (poweroff).

use core::arch::asm;

use bare::port;

use crate::delivery::HIDDEN;
use crate::tables::Page;
use crate::{POWER, POWER_OFF, Run, WINDOW_MS, time};

const SMI: u16 = 0xb2;
const SYSTEM: u16 = 0x92;
const KEYBOARD: u16 = 0x64;
const RESET: u16 = 0xcf9;
/// Firmware's configuration device: the address of a command, high and low half, big-endian.
const FIRMWARE: u16 = 0x514;

/// Command for firmware's device.
static ORDER: Page = Page::new();

/// A system management interrupt.
pub fn smi(run: &Run) {
    write(run, || byte(SMI, 0));
}

/// The fast reset of the system port.
pub fn fastreset(run: &Run) {
    write(run, || byte(SYSTEM, 3));
}

/// The chipset's reset.
pub fn resetport(run: &Run) {
    write(run, || {
        byte(RESET, 2);
        byte(RESET, 6);
    });
}

/// The keyboard controller's: its output line that resets is pulsed.
pub fn kbd(run: &Run) {
    write(run, || byte(KEYBOARD, 0xfe));
}

/// Power, as each run ends, in the middle of one.
pub fn poweroff(run: &Run) {
    // SAFETY: that is what the register does.
    write(run, || unsafe { port::out16(POWER, POWER_OFF) });
}

/// Firmware's configuration device copies over the hypervisor: 64 MiB of what is behind the end of
/// a short item, zeroes.
pub fn fwcfg(run: &Run) {
    /// Select (item 0, the signature), and read.
    const READ: u32 = 8 | 2;
    const LEN: u32 = 64 << 20;
    write(run, || {
        ORDER.set(0, u64::from(READ.to_be()) | u64::from(LEN.to_be()) << 32);
        ORDER.set(1, HIDDEN.to_be());
        // SAFETY: what it overwrites is not this program's.
        unsafe {
            port::out32(FIRMWARE, 0);
            port::out32(FIRMWARE + 4, (ORDER.address() as u32).to_be());
        }
    });
}

/// The port's write; then it waits, if there is something that does.
fn write(run: &Run, write: impl FnOnce()) {
    run.result(format_args!("going"));
    run.measured(|| {
        if !run.is_calm {
            write();
        }
        time::wait(WINDOW_MS);
    });
    run.result(format_args!("survived=1"));
}

fn byte(port: u16, value: u8) {
    // SAFETY: what it does to the machine is what is to be shown.
    unsafe { port::out8(port, value) }
}

/// The address line A20 masked, by the system port. What is at an odd MiB is then at the even one
/// below: the interrupt window, which is hidden from a guest, is reached an MiB above. 20 messages
/// there are NMIs of the other processor's.
///
/// The program itself is at an odd one. It is copied to where it is found then, and what it changes
/// meanwhile is lost.
pub fn a20(run: &Run) {
    const START: u64 = 0x10_0000;
    const ABOVE: u64 = 0xfef0_1000;
    const TIMES: u64 = 20;
    unsafe extern "C" {
        static bare_end: u8;
    }
    let len = &raw const bare_end as u64 - START;
    // Below it is firmware's memory, which nothing uses any more.
    assert!(len < 0x9_f000, "the program is too long");
    run.measured(|| {
        let pause = time::cycles_per_ms() * WINDOW_MS / TIMES;
        // SAFETY: low memory is free, but for the processor's own tables, which are the program's.
        // Between the two writes of the port no memory of the program's is written that is read
        // behind them.
        unsafe {
            asm!(
                "rep movsb",
                "mov dx, {system}",
                "out dx, al",
                "2:",
                "test r10, r10",
                "jz 3f",
                "mov dword ptr [r9], 0x400",
                "3:",
                "rdtsc",
                "shl rdx, 32",
                "lea r11, [rax + rdx]",
                "add r11, r8",
                "4:",
                "pause",
                "rdtsc",
                "shl rdx, 32",
                "add rax, rdx",
                "cmp rax, r11",
                "jb 4b",
                "dec r12",
                "jnz 2b",
                "mov dx, {system}",
                "mov al, 2",
                "out dx, al",
                system = const SYSTEM,
                inout("rsi") START => _,
                inout("rdi") 0_u64 => _,
                inout("rcx") len => _,
                inout("rax") if run.is_calm { 2_u64 } else { 0 } => _,
                in("r8") pause,
                in("r9") ABOVE,
                in("r10") u64::from(!run.is_calm),
                inout("r12") TIMES => _,
                out("rdx") _,
                out("r11") _,
                options(nostack)
            );
        }
    });
    run.result(format_args!("survived=1"));
}
