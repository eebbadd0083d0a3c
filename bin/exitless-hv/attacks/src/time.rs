//! Durations, by the time-stamp counter; how fast that is, the ACPI timer says.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bare::{port, processor::cycles};

/// The ACPI timer's port, as SeaBIOS puts it on QEMU's q35.
const ACPI_TIMER: u16 = 0x608;
/// Its ticks in 20 ms, at 3.579545 MHz.
const TICKS_20_MS: u32 = 71_591;
/// Its width: 24 bits.
const TICKS_MASK: u32 = 0xff_ffff;
/// The most reads of it: one that stands still is not waited for.
const READS_MAX: u32 = 5_000_000;

/// Cycles in a millisecond; until measured, those of 1 GHz.
static CYCLES_PER_MS: AtomicU64 = AtomicU64::new(1_000_000);

/// Measures the time-stamp counter, three times: a busy machine may stop this one between two
/// reads. Returns its cycles in a millisecond (the median), or `None` if there is no ACPI timer.
pub fn calibrate() -> Option<u64> {
    let mut found = [measure()?, measure()?, measure()?];
    found.sort_unstable();
    CYCLES_PER_MS.store(found[1], Relaxed);
    Some(found[1])
}

fn measure() -> Option<u64> {
    // SAFETY: reading the timer changes nothing.
    let ticks = || unsafe { port::in32(ACPI_TIMER) } & TICKS_MASK;
    let (first, start) = (ticks(), cycles());
    let elapsed = || ticks().wrapping_sub(first) & TICKS_MASK;
    let elapsed = (0..READS_MAX)
        .map(|_| elapsed())
        .find(|elapsed| *elapsed >= TICKS_20_MS)?;
    Some(((cycles() - start) * u64::from(TICKS_20_MS) / u64::from(elapsed) / 20).max(1))
}

/// Waits until it is so, or this many milliseconds. Returns whether it is.
pub fn until(milliseconds: u64, is_so: impl Fn() -> bool) -> bool {
    let (start, len) = (cycles(), milliseconds * CYCLES_PER_MS.load(Relaxed));
    while cycles().wrapping_sub(start) < len {
        if is_so() {
            return true;
        }
        core::hint::spin_loop();
    }
    is_so()
}

/// Waits this many milliseconds.
pub fn wait(milliseconds: u64) {
    until(milliseconds, || false);
}

/// Cycles in a millisecond.
pub fn cycles_per_ms() -> u64 {
    CYCLES_PER_MS.load(Relaxed)
}

/// Returns the milliseconds since the processor started.
pub fn now_ms() -> u64 {
    cycles() / CYCLES_PER_MS.load(Relaxed)
}
