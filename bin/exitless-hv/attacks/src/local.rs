//! Attacks by the local APIC: interprocessor interrupts to the host's processor (e8init, e8nmi,
//! e8memory), and local interrupt sources (e9lint0, e9timer, period).

use bare::{apic, port};

use crate::interrupts::{self, HOST, OWN};
use crate::{Run, WINDOW_MS, time};

/// Destination of the processor that is not the guest's: APIC id 1.
const OTHER: u64 = 1 << 32;
/// Fields of the interrupt command register: delivery modes NMI (also of a local vector table
/// entry) and INIT; level assert; trigger mode level.
const NMI: u64 = 4 << 8;
const INIT: u64 = 5 << 8;
const ASSERT: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
/// Fields of a local vector table entry: masked; periodic timer.
const MASKED: u64 = 1 << 16;
const PERIODIC: u64 = 1 << 17;
/// Command port of the first 8259 (its data port is the next), and data port of channel 0 of the
/// 8254 timer (its command port is 3 higher).
const MASTER: u16 = 0x20;
const CHANNEL: u16 = 0x40;

/// Sends an INIT to the other processor.
pub fn e8init(run: &Run) {
    command(run, INIT | ASSERT | LEVEL, 1, WINDOW_MS);
}

/// Sends an NMI to the other processor, 20 times.
pub fn e8nmi(run: &Run) {
    command(run, NMI | ASSERT, 20, WINDOW_MS / 20);
}

/// Sends the same NMI as an interrupt message: a write to the physical address range of MSIs. Where
/// the processor's own writes to that range are messages too (QEMU), no command register is needed.
pub fn e8memory(run: &Run) {
    const MESSAGE: *mut u32 = 0xfee0_1000 as *mut u32;
    let sent = run.measured(|| {
        (0..20).fold(0, |sent, _| {
            if !run.is_calm {
                // SAFETY: the address is mapped, and is no RAM.
                unsafe { MESSAGE.write_volatile(NMI as u32) }
            }
            time::wait(WINDOW_MS / 20);
            sent + u32::from(!run.is_calm)
        })
    });
    run.result(format_args!("sent={sent} faults=0"));
}

fn command(run: &Run, command: u64, times: u32, pause: u64) {
    let (sent, faults) = run.measured(|| {
        (0..times).fold((0, 0), |(sent, faults), _| {
            let is_sent = !run.is_calm && interrupts::try_write(apic::ICR, OTHER | command);
            time::wait(pause);
            (
                sent + u32::from(is_sent),
                faults + u32::from(!run.is_calm && !is_sent),
            )
        })
    });
    run.result(format_args!("sent={sent} faults={faults}"));
}

/// Routes the 8254 timer through the 8259 to LINT0 as an NMI, about 1000 in a second.
pub fn e9lint0(run: &Run) {
    let (nmis, faults) = run.measured(|| {
        let (before, mut faults) = (interrupts::non_maskable(), 0);
        let mut set_line =
            |value| faults += u32::from(!interrupts::try_write(apic::LVT_LINT0, value));
        // The local vector table entry first: firmware leaves it as ExtINT, and an interrupt taken
        // in that mode would stay in service in the 8259.
        set_line(if run.is_calm { MASKED } else { NMI });
        set_timer_chip(true);
        for _ in 0..WINDOW_MS {
            time::wait(1);
            repeat();
        }
        set_line(MASKED);
        set_timer_chip(false);
        (interrupts::non_maskable() - before, faults)
    });
    run.result(format_args!("nmis={nmis} faults={faults}"));
}

/// Routes the 8254 timer through the 8259 as an external interrupt, with a vector of the 8259 in
/// the host's priority class. The 8259 is in automatic end-of-interrupt mode.
pub fn pic(run: &Run) {
    const EXTERNAL: u64 = 7 << 8;
    const BASES: (u8, u8) = (0xf0, 0x30);
    let base = if run.is_calm { BASES.1 } else { BASES.0 };
    let (ran, faults) = run.measured(|| {
        let before = interrupts::count(base);
        let mut faults = 0;
        let mut set_line =
            |value| faults += u32::from(!interrupts::try_write(apic::LVT_LINT0, value));
        // The four initialization words ICW1 to ICW4: start, vector base, cascade on line 2,
        // automatic end of interrupt.
        for (register, value) in [
            (MASTER, 0x11),
            (MASTER + 1, base),
            (MASTER + 1, 4),
            (MASTER + 1, 3),
        ] {
            // SAFETY: registers of the 8259; all vectors have handlers.
            unsafe { port::out8(register, value) }
        }
        set_line(EXTERNAL);
        set_timer_chip(true);
        time::wait(WINDOW_MS);
        set_line(MASKED);
        set_timer_chip(false);
        (interrupts::count(base) - before, faults)
    });
    run.result(format_args!("ran={ran} faults={faults}"));
}

/// Starts the 8254 timer at 1 kHz and unmasks its line in the first 8259, or stops both.
fn set_timer_chip(is_on: bool) {
    let (mode, divisor) = (0x34, 1193_u16.to_le_bytes());
    // SAFETY: registers of the 8254 and the 8259. The line reaches LINT0 of the local APIC, in the
    // mode of its local vector table entry.
    unsafe {
        if is_on {
            port::out8(CHANNEL + 3, mode);
            port::out8(CHANNEL, divisor[0]);
            port::out8(CHANNEL, divisor[1]);
            port::out8(MASTER + 1, 0xfe);
        } else {
            port::out8(MASTER + 1, 0xff);
            // Mode 0 without a count: the timer stands still.
            port::out8(CHANNEL + 3, 0x30);
        }
    }
}

/// Ends the interrupt in service in the first 8259, and masks and unmasks the timer's line so that
/// its request is made anew: an NMI is not acknowledged at the 8259, whose output would stay
/// asserted.
fn repeat() {
    for (register, value) in [(MASTER + 1, 0xff), (MASTER, 0x20), (MASTER + 1, 0xfe)] {
        // SAFETY: registers of the 8259.
        unsafe { port::out8(register, value) }
    }
}

/// Programs the local APIC's timer with a period of 600 counts, far shorter than an exit.
pub fn period(run: &Run) {
    const COUNT: u64 = 600;
    let ran = run.measured(|| {
        let before = interrupts::count(OWN);
        for (register, value) in [
            (apic::LVT_TIMER, PERIODIC | u64::from(OWN)),
            (apic::TIMER_DIVIDE, 0xb),
            (
                apic::TIMER_INITIAL,
                if run.is_calm { 1_000_000 } else { COUNT },
            ),
        ] {
            interrupts::try_write(register, value);
        }
        time::wait(WINDOW_MS);
        interrupts::try_write(apic::LVT_TIMER, MASKED);
        interrupts::try_write(apic::TIMER_INITIAL, 0);
        interrupts::count(OWN) - before
    });
    run.result(format_args!("ran={ran}"));
}

/// Programs channel 0 of the 8254 timer with a period of about 2 µs; its line is masked everywhere.
pub fn period_chip(run: &Run) {
    let count: u16 = if run.is_calm { 11_932 } else { 2 };
    let load = |count: u16| {
        let [low, high] = count.to_le_bytes();
        // SAFETY: registers of the 8254; its line interrupts no processor.
        unsafe {
            port::out8(CHANNEL + 3, 0x34);
            port::out8(CHANNEL, low);
            port::out8(CHANNEL, high);
        }
    };
    run.measured(|| {
        load(count);
        time::wait(WINDOW_MS);
        load(0);
    });
    run.result(format_args!("survived=1"));
}

/// Programs the local APIC's timer to about 1000 interrupts in a second on the host's vector. The
/// host must have moved its tick to another vector.
pub fn e9timer(run: &Run) {
    let vector = if run.is_calm { OWN } else { HOST };
    let (ran, faults) = run.measured(|| {
        let mut faults = 0;
        let mut set =
            |register, value| faults += u32::from(!interrupts::try_write(register, value));
        // Counts of the timer in a millisecond, at a divisor of 1.
        set(apic::LVT_TIMER, MASKED);
        set(apic::TIMER_DIVIDE, 0xb);
        set(apic::TIMER_INITIAL, 0xffff_ffff);
        time::wait(20);
        let counts = (0xffff_ffff - apic::read(apic::TIMER_CURRENT).min(0xffff_ffff)) / 20;
        set(apic::TIMER_INITIAL, 0);

        let before = interrupts::count(vector);
        set(apic::LVT_TIMER, PERIODIC | u64::from(vector));
        set(apic::TIMER_INITIAL, counts.clamp(10_000, 0xffff_ffff));
        time::wait(WINDOW_MS);
        set(apic::LVT_TIMER, MASKED);
        set(apic::TIMER_INITIAL, 0);
        (interrupts::count(vector) - before, faults)
    });
    run.result(format_args!("ran={ran} faults={faults}"));
}
