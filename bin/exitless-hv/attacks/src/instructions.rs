//! Instructions and registers: data breakpoints on the stack of their own delivery (db), caches
//! dropped (invd) or written back (halts), MONITOR and MWAIT (mwait), model-specific registers that
//! are the host's too (msr_*), and what no guest has (fixed).

use core::arch::asm;

use bare::{apic, processor};

use crate::interrupts::{self, OWN, attempt};
use crate::{Run, WINDOW_MS, tables, time};

/// Repetitions in a window.
const TIMES: u64 = 100;

/// A data breakpoint in the frame that its own exception writes.
pub fn db(run: &Run) {
    /// Local, exact; eight bytes, written.
    const ON: u64 = 1 | 1 << 8 | 0b1001 << 16;
    run.result(format_args!("going"));
    let is_hit = run.measured(|| {
        let at = tables::exceptions_stack() - 16;
        let switch = if run.is_calm { 0 } else { ON };
        let is_hit = attempt(|| {
            // SAFETY: the word is of the exceptions' stack, which is not in use; the exception has
            // a handler.
            unsafe {
                asm!("mov dr0, {}", "mov dr7, {}", in(reg) at, in(reg) switch, options(nostack));
                asm!("mov qword ptr [{}], 0", "nop", in(reg) at, options(nostack));
            }
        })
        .is_err();
        time::wait(WINDOW_MS);
        is_hit
    });
    run.result(format_args!("survived=1 hit={}", u8::from(is_hit)));
}

/// INVD: what the caches hold that memory does not is gone, the hypervisor's too.
pub fn invd(run: &Run) {
    repeated(run, || {
        // SAFETY: where it would drop something, it is not run as it is.
        unsafe { asm!("invd", options(nostack)) }
    });
}

/// WBINVD, and HLT with interrupts on, until an interrupt of its own timer's.
pub fn halts(run: &Run) {
    const PERIODIC: u64 = 1 << 17;
    const MASKED: u64 = 1 << 16;
    let times = run.measured(|| {
        for (register, value) in [
            (apic::LVT_TIMER, PERIODIC | u64::from(OWN)),
            (apic::TIMER_DIVIDE, 0xb),
            (apic::TIMER_INITIAL, 1_000_000),
        ] {
            interrupts::try_write(register, value);
        }
        let start = time::now_ms();
        let mut times = 0;
        while time::now_ms() - start < WINDOW_MS {
            if run.is_calm {
                core::hint::spin_loop();
            } else {
                // SAFETY: nothing is lost, and an interrupt ends it.
                unsafe { asm!("wbinvd", "sti", "hlt", options(nostack)) }
            }
            times += 1;
        }
        interrupts::try_write(apic::LVT_TIMER, MASKED);
        times
    });
    run.result(format_args!("turns={times}"));
}

/// MONITOR and MWAIT: the processor stops in a state that the guest chooses. CPUID says that there
/// is none.
pub fn mwait(run: &Run) {
    repeated(run, || {
        // SAFETY: interrupts are on, so it goes on.
        unsafe {
            asm!("monitor", in("rax") tables::own_table(), in("ecx") 0, in("edx") 0, options(nostack));
            asm!("mwait", in("eax") 0, in("ecx") 0, options(nostack));
        }
    });
}

/// Instructions and registers that no guest has, whatever its hypervisor's defences are: SVM's, and
/// RSM; and its own APIC base stays as it is.
pub fn fixed(run: &Run) {
    const UNDEFINED: Result<(), u8> = Err(6);
    const HSAVE: u32 = 0xc001_0117;
    const EFER: u32 = 0xc000_0080;
    const SVM: u64 = 1 << 12;
    let wrong = run.measured(|| {
        macro_rules! is_undefined {
            ($text:literal) => {
                // SAFETY: each is refused; a handler goes on behind the attempt. Where one were
                // not, nothing of this program's is at address 0.
                attempt(|| unsafe { asm!($text, in("rax") 0_u64, in("ecx") 0_u32, options(nostack)) }) == UNDEFINED
            };
        }
        // SAFETY: both are there.
        let (base, efer) = unsafe { (processor::rdmsr(apic::BASE), processor::rdmsr(EFER)) };
        interrupts::try_write(apic::BASE, 0);
        // SAFETY: as above.
        let is_kept = unsafe { processor::rdmsr(apic::BASE) } == base;
        let all = [
            is_undefined!("rsm"),
            is_undefined!("vmrun rax"),
            is_undefined!("vmmcall"),
            is_undefined!("vmload rax"),
            is_undefined!("vmsave rax"),
            is_undefined!("stgi"),
            is_undefined!("clgi"),
            is_undefined!("invlpga rax, ecx"),
            !interrupts::try_write(HSAVE, 0),
            !interrupts::try_write(EFER, efer | SVM),
            is_kept,
            interrupts::send_and_count(OWN, 1) == 1,
        ];
        time::wait(WINDOW_MS);
        all.iter().fold(0, |wrong, is_right| wrong << 1 | u32::from(!is_right))
    });
    run.result(format_args!("wrong={wrong:#b}"));
}

/// Debug control: branch records and what they trace are the host's too.
pub fn msr_debugctl(run: &Run) {
    written(run, 0x1d9, 1);
}

/// The system's configuration: what memory is, for the host too.
pub fn msr_syscfg(run: &Run) {
    written(run, 0xc001_0010, 1 << 18);
}

/// A range of memory types.
pub fn msr_mtrr(run: &Run) {
    written(run, 0x201, 0x800);
}

/// The time-stamp counter.
pub fn msr_tsc(run: &Run) {
    written(run, 0x10, processor::cycles() + (1 << 32));
}

fn written(run: &Run, register: u32, value: u64) {
    repeated(run, || {
        if !interrupts::try_write(register, value) {
            // SAFETY: a handler; it says that the write was refused.
            unsafe { asm!("ud2", options(nomem, nostack)) }
        }
    });
}

/// Repeats an instruction, and reports the number of times that it was refused.
fn repeated(run: &Run, instruction: impl Fn()) {
    let refused = run.measured(|| {
        (0..TIMES).fold(0, |refused, _| {
            let is_refused = !run.is_calm && attempt(&instruction).is_err();
            time::wait(WINDOW_MS / TIMES);
            refused + u64::from(is_refused)
        })
    });
    let times = if run.is_calm { 0 } else { TIMES };
    run.result(format_args!("times={times} refused={refused}"));
}
