//! The host's side of interrupts, on each core of the guest's: its descriptor table, what its
//! handlers noted ([`Area`]), and the one window in which they run.

use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use bare::{apic, processor};
use eli::policy::PROCESSORS_MAX;
use eli::{Acknowledged, VectorSet};

use crate::log::say;
use crate::memory::Page;

unsafe extern "C" {
    static host_stubs: u8;
    static core1_stubs: u8;
    fn host_window();
    fn host_window_nmi();
    fn host_idle();
    fn host_rdmsr(register: u32, is_there: *mut u8) -> u64;
}

/// Records of a core's handlers (`run.s` has the offsets). They run on that core alone; others
/// read.
#[repr(C)]
pub struct Area {
    /// Vectors in the order in which they were acknowledged.
    taken: [AtomicU8; 256],
    /// Number of vectors ever acknowledged.
    taken_len: AtomicU64,
    /// Non-maskable interrupts that the core took.
    nmis: AtomicU64,
}

/// One for each of the guest's processors.
static AREAS: [Area; PROCESSORS_MAX] = [const {
    Area {
        taken: [const { AtomicU8::new(0) }; 256],
        taken_len: AtomicU64::new(0),
        nmis: AtomicU64::new(0),
    }
}; PROCESSORS_MAX];
/// Interrupts of QEMU's that were gone when they were taken; counted by `run.s`.
#[unsafe(no_mangle)]
pub static HOST_SPURIOUS: AtomicU64 = AtomicU64::new(0);

/// The most that one window can take: fifteen priority classes nest, and as many lines of 8259s.
pub const WINDOW_MAX: usize = 32;

/// Handles an exception of the hypervisor's own.
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
    // SAFETY: the table has a handler for every vector, and stays where it is: it is one of the
    // statics of `main.rs`.
    unsafe { core::arch::asm!("lidt [{}]", in(reg) &raw const pointer, options(nostack)) };
}

/// Loads those of this core, which is that of the guest's processor `index`.
pub fn load_handlers(table: &mut Page, index: usize) {
    const GS_BASE: u32 = 0xc000_0101;
    // SAFETY: nothing else uses the segment: code of the compiler's has no use for it here.
    unsafe { processor::wrmsr(GS_BASE, &raw const AREAS[index] as u64) }
    load(table, &raw const host_stubs as u64);
}

/// Loads those of the core that watches.
pub fn load_handlers_core1(table: &mut Page) {
    load(table, &raw const core1_stubs as u64);
}

/// Returns whether QEMU's emulation is the processor (its leaf of CPUID says so).
pub fn is_emulated() -> bool {
    processor::cpuid(0x4000_0000, 0)[1].to_le_bytes() == *b"TCGT"
}

/// Returns the vectors in service at the local APIC.
pub fn in_service() -> VectorSet {
    VectorSet::from_words(apic::words(apic::ISR))
}

/// Returns the vectors that are level-triggered.
fn levels() -> VectorSet {
    VectorSet::from_words(apic::words(apic::TMR))
}

/// Returns a vector that the processor acknowledged, as seen at the local APIC, and the vectors in
/// service there.
pub fn taken(vector: u8) -> (Acknowledged, VectorSet) {
    let service = in_service();
    let taken = Acknowledged {
        vector,
        in_service: service.contains(vector),
        level: levels().contains(vector),
    };
    (taken, service)
}

/// Returns the records of the handlers of the guest's processor `index`.
pub fn area(index: usize) -> &'static Area {
    &AREAS[index]
}

impl Area {
    /// Returns the number of non-maskable interrupts that the core took so far.
    pub fn nmis(&self) -> u64 {
        self.nmis.load(Ordering::Relaxed)
    }

    /// Lets pending interrupts in, on this area's core; which they were, in order, and what is in
    /// service then.
    pub fn window<'a>(
        &self,
        taken: &'a mut [Acknowledged; WINDOW_MAX],
    ) -> (&'a [Acknowledged], VectorSet) {
        // SAFETY: interrupts come here and nowhere else, and have handlers.
        self.noted(taken, || unsafe { host_window() })
    }

    /// Takes interrupts likewise, and waits for one if none is pending. Returns for a non-maskable
    /// one, too.
    pub fn idle<'a>(
        &self,
        taken: &'a mut [Acknowledged; WINDOW_MAX],
    ) -> (&'a [Acknowledged], VectorSet) {
        // SAFETY: as in `window`.
        self.noted(taken, || unsafe { host_idle() })
    }

    fn noted<'a>(
        &self,
        taken: &'a mut [Acknowledged; WINDOW_MAX],
        window: impl FnOnce(),
    ) -> (&'a [Acknowledged], VectorSet) {
        // Relaxed: the handlers run on this core, inside the call.
        let before = self.taken_len.load(Ordering::Relaxed);
        window();
        let len = self.taken_len.load(Ordering::Relaxed) - before;
        let (service, levels) = (in_service(), levels());
        let len = (len as usize).min(WINDOW_MAX);
        for (slot, at) in taken.iter_mut().zip(before..).take(len) {
            let vector = self.taken[(at & 255) as usize].load(Ordering::Relaxed);
            *slot = Acknowledged {
                vector,
                in_service: service.contains(vector),
                level: levels.contains(vector),
            };
        }
        (&taken[..len], service)
    }

    /// Lets a pending non-maskable interrupt in, on this area's core; how many came.
    pub fn window_nmi(&self) -> u64 {
        let before = self.nmis();
        // SAFETY: it has a handler.
        unsafe { host_window_nmi() };
        self.nmis() - before
    }
}

/// Reads a model-specific register that the processor may not have.
pub fn read_register(register: u32) -> Option<u64> {
    let mut is_there = 0;
    // SAFETY: where there is none the handler of #GP goes on behind the instruction (`run.s`).
    // Reading one changes nothing.
    let value = unsafe { host_rdmsr(register, &raw mut is_there) };
    (is_there != 0).then_some(value)
}
