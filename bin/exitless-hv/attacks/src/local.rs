//! The local APIC: commands to another processor (e8init, e8nmi, e8memory), and sources of its own
//! (e9lint0, e9timer, period).

use bare::{apic, port};

use crate::interrupts::{self, HOST, OWN};
use crate::{Run, WINDOW_MS, time};

/// The processor that is not the guest's.
const OTHER: u64 = 1 << 32;
/// In a command: NMI (in a line of the vector table, too), INIT, the line is asserted, it is a
/// level.
const NMI: u64 = 4 << 8;
const INIT: u64 = 5 << 8;
const ASSERT: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
/// In a line of the vector table: masked; periodic (the timer's).
const MASKED: u64 = 1 << 16;
const PERIODIC: u64 = 1 << 17;
/// The first 8259's data and command, the timer chip's channel 0 and command.
const MASTER: u16 = 0x20;
const CHANNEL: u16 = 0x40;

/// INIT to another processor.
pub fn e8init(run: &Run) {
    command(run, INIT | ASSERT | LEVEL, 1, WINDOW_MS);
}

/// NMI to another processor, 20 times.
pub fn e8nmi(run: &Run) {
    command(run, NMI | ASSERT, 20, WINDOW_MS / 20);
}

/// The same as an interrupt message, written to where a local APIC has its registers in memory:
/// where the processor's own writes there are messages too (QEMU), it needs no command register.
pub fn e8memory(run: &Run) {
    const MESSAGE: *mut u32 = 0xfee0_1000 as *mut u32;
    let sent = run.measured(|| {
        (0..20).fold(0, |sent, _| {
            if !run.is_calm {
                // SAFETY: mapped, and no memory.
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

/// The timer chip through the 8259 as NMI, about 1000 of them in a second.
pub fn e9lint0(run: &Run) {
    let (nmis, faults) = run.measured(|| {
        let (before, mut faults) = (interrupts::non_maskable(), 0);
        let mut set_line =
            |value| faults += u32::from(!interrupts::try_write(apic::LVT_LINT0, value));
        // The line first: firmware leaves it as ExtINT, and an interrupt taken so would stay in
        // service in the 8259.
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

/// The timer chip through the 8259 as an interrupt of the 8259's own vector, which is of the host's
/// class; it ends each by itself.
pub fn pic(run: &Run) {
    const EXTERNAL: u64 = 7 << 8;
    const BASES: (u8, u8) = (0xf0, 0x30);
    let base = if run.is_calm { BASES.1 } else { BASES.0 };
    let (ran, faults) = run.measured(|| {
        let before = interrupts::count(base);
        let mut faults = 0;
        let mut set_line =
            |value| faults += u32::from(!interrupts::try_write(apic::LVT_LINT0, value));
        // Four words: start, vectors, where the other chip is, and that interrupts end by
        // themselves.
        for (register, value) in [
            (MASTER, 0x11),
            (MASTER + 1, base),
            (MASTER + 1, 4),
            (MASTER + 1, 3),
        ] {
            // SAFETY: the chip's own registers; all vectors have handlers.
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

/// Starts the timer chip at 1 kHz and lets its line through the first 8259, or stops both.
fn set_timer_chip(is_on: bool) {
    let (mode, divisor) = (0x34, 1193_u16.to_le_bytes());
    // SAFETY: the chips' own registers. The line reaches the local APIC's LINT0, as what that is
    // set to.
    unsafe {
        if is_on {
            port::out8(CHANNEL + 3, mode);
            port::out8(CHANNEL, divisor[0]);
            port::out8(CHANNEL, divisor[1]);
            port::out8(MASTER + 1, 0xfe);
        } else {
            port::out8(MASTER + 1, 0xff);
            // Mode 0 without a count: it stands.
            port::out8(CHANNEL + 3, 0x30);
        }
    }
}

/// Ends what the first 8259 has in service, takes its request back, and lets it be made again: as
/// an NMI, no processor acknowledges it, and its line would stay up.
fn repeat() {
    for (register, value) in [(MASTER + 1, 0xff), (MASTER, 0x20), (MASTER + 1, 0xfe)] {
        // SAFETY: as above.
        unsafe { port::out8(register, value) }
    }
}

/// The local APIC's timer with a period of next to nothing.
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

/// The timer chip's first counter with a period of next to nothing; its line is masked everywhere.
pub fn period_chip(run: &Run) {
    let count: u16 = if run.is_calm { 11_932 } else { 2 };
    let load = |count: u16| {
        let [low, high] = count.to_le_bytes();
        // SAFETY: the chip's own registers; its line interrupts nothing.
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

/// The local APIC's timer, about 1000 times in a second, on the host's vector. The host must have
/// moved its tick away.
pub fn e9timer(run: &Run) {
    let vector = if run.is_calm { OWN } else { HOST };
    let (ran, faults) = run.measured(|| {
        let mut faults = 0;
        let mut set =
            |register, value| faults += u32::from(!interrupts::try_write(register, value));
        // How many counts a millisecond has, at a divisor of 1.
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
