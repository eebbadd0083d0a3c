//! The host's side of interrupts: its descriptor table, what its handlers noted, and the one window in which they run.

use core::sync::atomic::{AtomicU64, Ordering};

use bare::apic;
use eli::{Taken, VectorSet};

use crate::log::say;
use crate::memory::Page;

unsafe extern "C" {
    static host_stubs: u8;
    static core1_stubs: u8;
    fn host_window();
    fn host_window_nmi();
    fn host_rdmsr(register: u32, is_there: *mut u8) -> u64;
}

/// Non-maskable interrupts that the host took; counted by `run.s`.
#[unsafe(no_mangle)]
pub static HOST_NMIS: AtomicU64 = AtomicU64::new(0);
/// Interrupts of QEMU's that were gone when they were taken; counted by `run.s`.
#[unsafe(no_mangle)]
pub static HOST_SPURIOUS: AtomicU64 = AtomicU64::new(0);
/// Vectors in the order in which they were acknowledged; written by `run.s`.
#[unsafe(no_mangle)]
static mut HOST_TAKEN: [u8; 256] = [0; 256];
/// How many ever were.
#[unsafe(no_mangle)]
static HOST_TAKEN_LEN: AtomicU64 = AtomicU64::new(0);

/// The most that one window can take: fifteen priority classes nest, and as many lines of 8259s.
pub const WINDOW_MAX: usize = 32;

/// An exception of the hypervisor's own.
#[unsafe(no_mangle)]
extern "C" fn host_fault(vector: u64, code: u64, address: u64) -> ! {
    say!("hv: fault {vector} in the hypervisor, code {code:#x}, at {address:#x}");
    crate::power::off()
}

/// Loads a descriptor table whose gates lead to `stubs`, which are 16 bytes apart.
fn load(table: &mut Page, stubs: u64) {
    const CODE: u16 = 8;
    for vector in 0..256 {
        let gate = eli::gate::Gate::interrupt(stubs + vector * 16, CODE, 0);
        for (half, word) in gate.0.into_iter().enumerate() {
            table.0[vector as usize * 16 + half * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
    }
    #[repr(C, packed)]
    struct Pointer(u16, u64);
    let pointer = Pointer(4095, table.address());
    // SAFETY: the table has a handler for every vector, and stays where it is: it is one of the statics of `main.rs`.
    unsafe { core::arch::asm!("lidt [{}]", in(reg) &raw const pointer, options(nostack)) };
}

/// The first core's.
pub fn load_handlers(table: &mut Page) {
    load(table, &raw const host_stubs as u64);
}

/// The second core's.
pub fn load_handlers_core1(table: &mut Page) {
    load(table, &raw const core1_stubs as u64);
}

/// Whether QEMU's emulation is the processor (its leaf of CPUID says so).
pub fn is_emulated() -> bool {
    bare::processor::cpuid(0x4000_0000, 0)[1].to_le_bytes() == *b"TCGT"
}

/// What is in service at the local APIC.
pub fn in_service() -> VectorSet {
    VectorSet::from_words(apic::words(apic::ISR))
}

/// What is level-triggered.
fn levels() -> VectorSet {
    VectorSet::from_words(apic::words(apic::TMR))
}

/// A vector that the processor acknowledged, seen at the local APIC, and what is in service there.
pub fn taken(vector: u8) -> (Taken, VectorSet) {
    let service = in_service();
    let taken = Taken {
        vector,
        in_service: service.contains(vector),
        level: levels().contains(vector),
    };
    (taken, service)
}

/// Lets pending interrupts in; which they were, in order, and what is in service then.
pub fn window(taken: &mut [Taken; WINDOW_MAX]) -> (&[Taken], VectorSet) {
    // Relaxed: the handlers run on this core, inside the call.
    let before = HOST_TAKEN_LEN.load(Ordering::Relaxed);
    // SAFETY: interrupts come here and nowhere else, and have handlers.
    unsafe { host_window() };
    let len = HOST_TAKEN_LEN.load(Ordering::Relaxed) - before;
    let (service, levels) = (in_service(), levels());
    let len = (len as usize).min(WINDOW_MAX);
    for (slot, at) in taken.iter_mut().zip(before..).take(len) {
        // SAFETY: no handler runs now.
        let vector = unsafe { HOST_TAKEN[(at & 255) as usize] };
        *slot = Taken {
            vector,
            in_service: service.contains(vector),
            level: levels.contains(vector),
        };
    }
    (&taken[..len], service)
}

/// Lets a pending non-maskable interrupt in; how many came.
pub fn window_nmi() -> u64 {
    let before = HOST_NMIS.load(Ordering::Relaxed);
    // SAFETY: it has a handler.
    unsafe { host_window_nmi() };
    HOST_NMIS.load(Ordering::Relaxed) - before
}

/// A model-specific register that the processor may not have.
pub fn read_register(register: u32) -> Option<u64> {
    let mut is_there = 0;
    // SAFETY: where there is none the handler of #GP goes on behind the instruction (`run.s`).
    // Reading one changes nothing.
    let value = unsafe { host_rdmsr(register, &raw mut is_there) };
    (is_there != 0).then_some(value)
}
