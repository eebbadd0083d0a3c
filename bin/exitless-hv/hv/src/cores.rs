//! Starting another core: from real mode to a function on a stack of its own.
//!
//! One after the other, by the first core. The way goes by a page of low memory, in which nothing
//! of the guest's is yet; it is free again when the core says that it has come ([`came`]).

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bare::apic;

use crate::hpet::Clock;

unsafe extern "C" {
    static core_begin: u8;
    static core_end: u8;
}

/// Address at which real mode begins: page 8.
const TRAMPOLINE: u64 = 0x8000;
/// Bytes of a core's stack.
const STACK_LEN: usize = 32 << 10;

/// A core's stack.
#[repr(C, align(16))]
pub struct Stack([u8; STACK_LEN]);

impl Stack {
    /// Empty.
    pub const EMPTY: Self = Self([0; STACK_LEN]);
}

/// The end of the next core's stack; read by `run.s`.
#[unsafe(no_mangle)]
static CORE_STACK: AtomicU64 = AtomicU64::new(0);
/// The next core's function; read by `run.s`.
#[unsafe(no_mangle)]
static CORE_MAIN: AtomicU64 = AtomicU64::new(0);
/// Cores that have come.
static CAME: AtomicU32 = AtomicU32::new(0);

/// Starts core `id` (INIT, start-up) in `main`; whether it came.
///
/// # Safety
/// `id` is another processor, which runs nothing; page 8 is free; `stack` is its own, and stays.
/// `main` calls [`came`].
pub unsafe fn start(id: u32, clock: Clock, main: extern "C" fn(), stack: *mut Stack) -> bool {
    let code = &raw const core_begin as u64;
    let len = &raw const core_end as u64 - code;
    // SAFETY: the caller's; the code is ours, and both are mapped.
    unsafe {
        core::ptr::copy_nonoverlapping(code as *const u8, TRAMPOLINE as *mut u8, len as usize)
    };
    CORE_STACK.store(stack as u64 + STACK_LEN as u64, Ordering::Relaxed);
    CORE_MAIN.store(main as *const () as u64, Ordering::Relaxed);
    // Acquire: what the core wrote before it came is seen here.
    let before = CAME.load(Ordering::Acquire);
    let has_come = || CAME.load(Ordering::Acquire) != before;
    let to = u64::from(id) << 32;
    for (command, ms) in [
        (0x4500, 10),
        (0x4600 | TRAMPOLINE >> 12, 1),
        (0x4600 | TRAMPOLINE >> 12, 500),
    ] {
        if !has_come() {
            // SAFETY: the caller's.
            unsafe { apic::write(apic::ICR, to | command) };
            let (start, counts) = (clock.now(), clock.period().counts(ms));
            while clock.now() - start < counts && !(ms > 10 && has_come()) {}
        }
    }
    has_come()
}

/// Records that this core has come.
pub fn came() {
    // Release: pairs with `start`'s Acquire.
    CAME.fetch_add(1, Ordering::Release);
}
