//! A second core: parked, hidden from the guest, counting its own beats.
//!
//! It shows that a guest reaches no processor that is not its own, and it watches the first core: when that one has not exited for
//! two seconds, nothing else could say so.

use core::sync::atomic::{AtomicU64, Ordering};

use bare::apic;

use crate::host;
use crate::log::say;
use crate::memory::Page;

unsafe extern "C" {
    static core1_begin: u8;
    static core1_end: u8;
}

/// Where real mode begins: page 8.
const TRAMPOLINE: u64 = 0x8000;
const BEAT: u64 = 0x40;
/// Between beats. 1 ms is enough for anybody, and 10 are for an emulator.
const BEAT_MS: u64 = 10;
/// Beats without an exit of the first core's: two seconds.
const LOST: u64 = 200;

/// Beats so far.
pub static BEATS: AtomicU64 = AtomicU64::new(0);
/// Interrupts that were not the beat.
pub static FOREIGN: AtomicU64 = AtomicU64::new(0);
/// Non-maskable ones.
pub static NMIS: AtomicU64 = AtomicU64::new(0);
/// The first core says that it is alive, by counting exits.
pub static ALIVE: AtomicU64 = AtomicU64::new(0);
/// When `ALIVE` changed, in beats.
static SEEN: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
/// Counts of the timer between beats.
static COUNTS: AtomicU64 = AtomicU64::new(0);

static mut TABLE: Page = Page::ZERO;

/// Starts it (INIT, start-up); whether it came.
///
/// # Safety
/// `id` is another processor, which runs nothing; page 8 is free until it has come.
pub unsafe fn start(id: u32, hpet: &crate::hpet::Hpet) -> bool {
    let code = &raw const core1_begin as u64;
    let len = &raw const core1_end as u64 - code;
    // SAFETY: the caller's; the code is ours, and both are mapped.
    unsafe {
        core::ptr::copy_nonoverlapping(code as *const u8, TRAMPOLINE as *mut u8, len as usize)
    };
    COUNTS.store(timer_counts(hpet), Ordering::Relaxed);
    let to = u64::from(id) << 32;
    let wait = |ms: u64| {
        let start = hpet.milliseconds();
        while hpet.milliseconds().wrapping_sub(start) < ms {}
    };
    for (command, ms) in [
        (0x4500, 10),
        (0x4600 | TRAMPOLINE >> 12, 1),
        (0x4600 | TRAMPOLINE >> 12, 100),
    ] {
        if BEATS.load(Ordering::Acquire) == 0 {
            // SAFETY: the caller's.
            unsafe { apic::write(apic::ICR, to | command) };
            wait(ms);
        }
    }
    BEATS.load(Ordering::Acquire) != 0
}

/// What the local APIC's timer counts in a beat; all cores' count alike.
fn timer_counts(hpet: &crate::hpet::Hpet) -> u64 {
    const DIVIDE_BY_1: u64 = 0xb;
    // SAFETY: masked, it interrupts nobody.
    unsafe {
        apic::write(apic::LVT_TIMER, 1 << 16);
        apic::write(apic::TIMER_DIVIDE, DIVIDE_BY_1);
        apic::write(apic::TIMER_INITIAL, 0xffff_ffff);
    }
    let start = hpet.milliseconds();
    while hpet.milliseconds().wrapping_sub(start) < BEAT_MS {}
    let counts = 0xffff_ffff - apic::read(apic::TIMER_CURRENT);
    // SAFETY: as above.
    unsafe { apic::write(apic::TIMER_INITIAL, 0) };
    counts.max(1)
}

/// The second core's start.
#[unsafe(no_mangle)]
extern "C" fn core1_main() {
    let table = &raw mut TABLE;
    // SAFETY: only this core uses it, and only here.
    host::load_handlers_core1(unsafe { &mut *table });
    // SAFETY: its handlers are there.
    unsafe {
        apic::enable();
        apic::write(apic::SPURIOUS, 0x1ff);
        apic::write(apic::TIMER_DIVIDE, 0xb);
        apic::write(apic::LVT_TIMER, BEAT | 1 << 17);
        apic::write(apic::TIMER_INITIAL, COUNTS.load(Ordering::Relaxed));
    }
}

/// Its interrupts.
#[unsafe(no_mangle)]
extern "C" fn core1_interrupt(vector: u64) {
    match vector {
        BEAT => {
            // Release: with the first beat the trampoline is free again.
            BEATS.fetch_add(1, Ordering::Release);
            apic::eoi();
            watch();
        }
        2 => {
            NMIS.fetch_add(1, Ordering::Relaxed);
        }
        // An exception: nothing here raises one (but see `run.s` on QEMU's).
        0..32 => {}
        _ => {
            FOREIGN.fetch_add(1, Ordering::Relaxed);
            apic::eoi();
        }
    }
}

/// Whether the first core still exits.
fn watch() {
    let beats = BEATS.load(Ordering::Relaxed);
    let alive = ALIVE.load(Ordering::Relaxed);
    if alive == 0 || alive != SEEN[0].swap(alive, Ordering::Relaxed) {
        SEEN[1].store(beats, Ordering::Relaxed);
    } else if beats - SEEN[1].load(Ordering::Relaxed) == LOST {
        say!(
            "core1: the first core has not exited for {} ms: lost",
            LOST * BEAT_MS
        );
        say!("{{\"report\":\"lost\",\"exits\":{alive},\"core1_beats\":{beats}}}");
        crate::power::off();
    }
}
