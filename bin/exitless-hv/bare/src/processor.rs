//! Model-specific registers, CPUID, time, and the end.

use core::arch::asm;

/// Reads a model-specific register.
///
/// # Safety
/// The processor has it.
#[must_use]
pub unsafe fn rdmsr(register: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the caller's.
    unsafe {
        asm!("rdmsr", in("ecx") register, out("eax") low, out("edx") high, options(nostack, preserves_flags))
    };
    u64::from(high) << 32 | u64::from(low)
}

/// Writes a model-specific register.
///
/// # Safety
/// The processor has it, and the value does nothing to what the compiler relies on.
pub unsafe fn wrmsr(register: u32, value: u64) {
    // SAFETY: the caller's.
    unsafe {
        asm!("wrmsr", in("ecx") register, in("eax") value as u32, in("edx") (value >> 32) as u32, options(nostack, preserves_flags));
    }
}

/// Returns the time-stamp counter, cycles.
#[must_use]
pub fn cycles() -> u64 {
    // SAFETY: every x86-64 processor has it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Returns eax, ebx, ecx and edx of CPUID.
#[must_use]
pub fn cpuid(leaf: u32, sub: u32) -> [u32; 4] {
    let r = core::arch::x86_64::__cpuid_count(leaf, sub);
    [r.eax, r.ebx, r.ecx, r.edx]
}

/// Stops this processor for good.
pub fn stop() -> ! {
    loop {
        // SAFETY: interrupts are off, and there is nothing behind it.
        unsafe { asm!("cli", "hlt", options(nomem, nostack)) }
    }
}
