//! The local APIC in its x2APIC mode: registers as model-specific ones (APM 2, §16.11).

use crate::processor::{rdmsr, wrmsr};

/// APIC base and its mode.
pub const BASE: u32 = 0x1b;
/// In [`BASE`]: on, and in x2APIC mode.
pub const BASE_X2APIC: u64 = 3 << 10;
/// Identifier.
pub const ID: u32 = 0x802;
/// Task priority.
pub const TPR: u32 = 0x808;
/// End of interrupt.
pub const EOI: u32 = 0x80b;
/// Spurious vector, and the software's switch.
pub const SPURIOUS: u32 = 0x80f;
/// Vectors in service, the first of eight registers.
pub const ISR: u32 = 0x810;
/// Trigger mode, the first of eight.
pub const TMR: u32 = 0x818;
/// Requested, the first of eight.
pub const IRR: u32 = 0x820;
/// Interrupt command.
pub const ICR: u32 = 0x830;
/// Local vector table: timer, thermal, performance, LINT0, LINT1, error.
pub const LVT_TIMER: u32 = 0x832;
/// Thermal sensor.
pub const LVT_THERMAL: u32 = 0x833;
/// Performance counters.
pub const LVT_PERFORMANCE: u32 = 0x834;
/// Line 0: the 8259s.
pub const LVT_LINT0: u32 = 0x835;
/// Line 1: NMI.
pub const LVT_LINT1: u32 = 0x836;
/// Errors.
pub const LVT_ERROR: u32 = 0x837;
/// Timer: initial count.
pub const TIMER_INITIAL: u32 = 0x838;
/// Timer: current count.
pub const TIMER_CURRENT: u32 = 0x839;
/// Timer: divisor.
pub const TIMER_DIVIDE: u32 = 0x83e;
/// An interrupt to oneself.
pub const SELF_IPI: u32 = 0x83f;

/// Turns x2APIC mode on.
///
/// # Safety
/// The processor has it (CPUID 1, ecx bit 21); the local APIC is the caller's.
pub unsafe fn enable() {
    // SAFETY: the caller's.
    unsafe { wrmsr(BASE, rdmsr(BASE) | BASE_X2APIC) }
}

/// Reads a register.
#[must_use]
pub fn read(register: u32) -> u64 {
    // SAFETY: reading one has no effect; all that are named here exist in x2APIC mode, which is on.
    unsafe { rdmsr(register) }
}

/// Writes a register.
///
/// # Safety
/// An interrupt that follows from it must have a handler.
pub unsafe fn write(register: u32, value: u64) {
    // SAFETY: the caller's.
    unsafe { wrmsr(register, value) }
}

/// Ends the highest interrupt in service.
pub fn eoi() {
    // SAFETY: at worst another interrupt comes, which is what handlers are for.
    unsafe { wrmsr(EOI, 0) }
}

/// Returns eight registers from `first` on, as they are.
#[must_use]
pub fn words(first: u32) -> [u32; 8] {
    [0, 1, 2, 3, 4, 5, 6, 7].map(|index| read(first + index) as u32)
}
