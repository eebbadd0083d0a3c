//! Durations by the time-stamp counter, whose frequency is measured by the ACPI PM timer.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bare::{port, processor::cycles};

/// Port of the ACPI PM timer, as SeaBIOS sets it on QEMU's q35.
const ACPI_TIMER: u16 = 0x608;
/// Its ticks in 20 ms, at 3.579545 MHz.
const TICKS_20_MS: u32 = 71_591;
/// Its width: 24 bits.
const TICKS_MASK: u32 = 0xff_ffff;
/// Greatest number of reads: a timer that does not advance is not waited for any longer.
const READS_MAX: u32 = 5_000_000;

/// TSC cycles in a millisecond; until measured, those of 1 GHz.
static CYCLES_PER_MS: AtomicU64 = AtomicU64::new(1_000_000);

/// Measures the frequency of the time-stamp counter three times, since a busy host may preempt this
/// vCPU between two reads. Returns the median in cycles per millisecond, or `None` if there is no
/// PM timer.
pub fn calibrate() -> Option<u64> {
    let mut found = [measure()?, measure()?, measure()?];
    found.sort_unstable();
    CYCLES_PER_MS.store(found[1], Relaxed);
    Some(found[1])
}

fn measure() -> Option<u64> {
    // SAFETY: reading the timer has no side effect.
    let ticks = || unsafe { port::in32(ACPI_TIMER) } & TICKS_MASK;
    let (first, start) = (ticks(), cycles());
    let elapsed = || ticks().wrapping_sub(first) & TICKS_MASK;
    let elapsed = (0..READS_MAX)
        .map(|_| elapsed())
        .find(|elapsed| *elapsed >= TICKS_20_MS)?;
    Some(((cycles() - start) * u64::from(TICKS_20_MS) / u64::from(elapsed) / 20).max(1))
}

/// Waits until `is_so` returns true, at most this many milliseconds. Returns its last result.
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

/// Returns the TSC cycles in a millisecond.
pub fn cycles_per_ms() -> u64 {
    CYCLES_PER_MS.load(Relaxed)
}

/// Returns the milliseconds since the processor's reset.
pub fn now_ms() -> u64 {
    cycles() / CYCLES_PER_MS.load(Relaxed)
}
