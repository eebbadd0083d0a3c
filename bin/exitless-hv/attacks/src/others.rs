//! A guest with two processors: commands at a core that is not the guest's (`ipi_watcher`,
//! `ipi_init`), and between its own (`ipi_other`, and `ipi`, which is honest). The second one runs
//! some instructions of real mode, which count its interrupts.

use bare::apic;

use crate::interrupts::{self, HOST};
use crate::{Run, WINDOW_MS, time};

/// APIC identifiers: the guest's second processor, the core that watches, and one that there is
/// not.
const SECOND: u64 = 1;
const WATCHER: u64 = 2;
const NO_ONE: u64 = 9;
/// Delivery modes of commands; the line is asserted.
const SMI: u64 = 2 << 8;
const NMI: u64 = 4 << 8;
const INIT: u64 = 5 << 8;
const START_UP: u64 = 6 << 8;
const ASSERT: u64 = 1 << 14;

/// Addresses of the second processor's start and of its handlers; a page of low memory that nothing
/// else uses.
const CODE: usize = 0x9000;
const HANDLER: usize = 0x9080;
const NMI_HANDLER: usize = 0x90c0;
/// Address of the second processor's counts, words: interrupts, NMIs, starts.
const COUNTS: usize = 0x7000;

/// Segments and a stack, the local APIC on; counts the start, and halts with interrupts on.
const MAIN: &[u8] = &[
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x6f, // ax, ds, ss: 0; sp: 0x6f00
    0x66, 0xb9, 0x0f, 0x08, 0x00, 0x00, // ecx: 0x80f
    0x66, 0xb8, 0xff, 0x01, 0x00, 0x00, // eax: 0x1ff
    0x66, 0x31, 0xd2, 0x0f, 0x30, // edx: 0; wrmsr
    0xff, 0x06, 0x04, 0x70, // inc word [0x7004]
    0xfb, 0xf4, 0xeb, 0xfd, // sti; hlt; jmp to hlt
];
/// Counts an interrupt, and ends it.
const ON_INTERRUPT: &[u8] = &[
    0x66, 0x60, 0xff, 0x06, 0x00, 0x70, // pushad; inc word [0x7000]
    0x66, 0xb9, 0x0b, 0x08, 0x00, 0x00, // ecx: 0x80b
    0x66, 0x31, 0xc0, 0x66, 0x31, 0xd2, 0x0f, 0x30, // eax, edx: 0; wrmsr
    0x66, 0x61, 0xcf, // popad; iret
];
/// Counts an NMI.
const ON_NMI: &[u8] = &[0xff, 0x06, 0x02, 0x70, 0xcf];

/// The second processor, which halts with interrupts on.
struct Second;

impl Second {
    /// Starts it: INIT, start-up. `None` if it does not come.
    fn start() -> Option<Self> {
        for (at, code) in [(CODE, MAIN), (HANDLER, ON_INTERRUPT), (NMI_HANDLER, ON_NMI)] {
            for (offset, byte) in code.iter().enumerate() {
                // SAFETY: low memory that nothing else uses, mapped.
                unsafe { ((at + offset) as *mut u8).write_volatile(*byte) }
            }
        }
        for (vector, handler) in [(2, NMI_HANDLER), (usize::from(HOST), HANDLER)] {
            // SAFETY: the vector table of real mode, which this processor does not use.
            unsafe { ((vector * 4) as *mut u32).write_volatile(handler as u32) }
        }
        for index in 0..3 {
            // SAFETY: as above.
            unsafe { ((COUNTS + index * 2) as *mut u16).write_volatile(0) }
        }
        send(SECOND, INIT | ASSERT);
        time::wait(10);
        send(SECOND, START_UP | CODE as u64 >> 12);
        time::until(1000, || Self::count(2) == 1).then_some(Self)
    }

    fn count(index: usize) -> u16 {
        // SAFETY: as in `start`.
        unsafe { ((COUNTS + index * 2) as *const u16).read_volatile() }
    }

    /// Interrupts that it took.
    fn interrupts(&self) -> u16 {
        Self::count(0)
    }

    /// Returns the number of non-maskable interrupts that it took.
    fn nmis(&self) -> u16 {
        Self::count(1)
    }
}

fn send(to: u64, command: u64) -> bool {
    interrupts::try_write(apic::ICR, to << 32 | command)
}

/// A fixed interrupt of the host's vector and an NMI, at the core that watches and at none, 20
/// times each.
pub fn ipi_watcher(run: &Run) {
    let sent = run.measured(|| {
        let mut sent = 0;
        for _ in 0..20 {
            // Not at once: the core that watches saves no registers for an NMI within an interrupt.
            for command in [u64::from(HOST) | ASSERT, NMI | ASSERT] {
                for to in [WATCHER, NO_ONE] {
                    sent += u32::from(!run.is_calm && send(to, command));
                }
                time::wait(WINDOW_MS / 40);
            }
        }
        sent
    });
    run.result(format_args!("sent={sent}"));
}

/// INIT at the core that watches, and an SMI at none.
pub fn ipi_init(run: &Run) {
    run.measured(|| {
        if !run.is_calm {
            send(NO_ONE, SMI | ASSERT);
            send(WATCHER, INIT | ASSERT);
        }
        time::wait(WINDOW_MS);
    });
    run.result(format_args!("sent"));
}

/// The host's vector at the guest's second processor, once in a millisecond.
pub fn ipi_other(run: &Run) {
    let Some(second) = Second::start() else {
        return run.result(format_args!("error=no second processor"));
    };
    run.measured(|| {
        time::until(WINDOW_MS, || {
            if !run.is_calm {
                send(SECOND, u64::from(HOST) | ASSERT);
            }
            time::wait(1);
            false
        })
    });
    run.result(format_args!("ran={}", second.interrupts()));
}

/// Interrupts of the host's vector, and NMIs, at the guest's second processor, 100 of each and each
/// waited for.
pub fn ipi(run: &Run) {
    let Some(second) = Second::start() else {
        return run.result(format_args!("error=no second processor"));
    };
    run.measured(|| {
        for count in 1..=100 {
            send(SECOND, u64::from(HOST) | ASSERT);
            time::until(1000, || second.interrupts() == count);
            send(SECOND, NMI | ASSERT);
            time::until(1000, || second.nmis() == count);
        }
    });
    let (ran, nmis) = (second.interrupts(), second.nmis());
    run.result(format_args!("ran={ran} nmis={nmis}"));
}
