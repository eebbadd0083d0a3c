//! The core that watches, the first one on which no guest runs: parked, hidden from the guest,
//! counting its own beats.
//!
//! It shows that a guest reaches no processor that is not its own, and it watches the guest's
//! cores: no other core would report one that has not exited for two seconds, or whose watchdog has
//! not ticked for as long. And it measures how long the host, at the first core, got none of its
//! ticks.
//!
//! Every interrupt but its beat is foreign. The beat's timer is set anew at each. A beat that comes
//! before the timer has run out, by its own count or by the HPET, was sent by another processor or
//! device.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use bare::apic;
use eli::clock::{Progress, TickGaps};
use eli::policy::PROCESSORS_MAX;

use crate::cores::{self, Stack};
use crate::host;
use crate::hpet::Clock;
use crate::log::say;
use crate::memory::Page;

const BEAT: u64 = 0x40;
/// Milliseconds between beats: the resolution at which a gap between ticks is measured while it
/// lasts.
const BEAT_MS: u32 = 2;
/// Milliseconds after which a core of the guest's is lost that has not exited, or whose watchdog
/// has not ticked.
const LOST_MS: u32 = 2000;

/// Beats so far.
pub static BEATS: AtomicU64 = AtomicU64::new(0);
/// Beats that its timer did not make.
pub static BEATS_EXTRA: AtomicU64 = AtomicU64::new(0);
/// Interrupts that were not the beat, non-maskable ones included.
#[unsafe(export_name = "CORE1_FOREIGN")]
pub static FOREIGN: AtomicU64 = AtomicU64::new(0);
/// Non-maskable ones, which `run.s` counts.
#[unsafe(export_name = "CORE1_NMIS")]
pub static NMIS: AtomicU64 = AtomicU64::new(0);
/// Exits of each of the guest's cores, by which it shows that it is alive; 0: it has not entered
/// the guest yet.
pub static ALIVE: [AtomicU64; PROCESSORS_MAX] = [const { AtomicU64::new(0) }; PROCESSORS_MAX];
/// Place of each of the guest's cores, for the report of one that is lost: see [`place`].
pub static PLACES: [AtomicU8; PROCESSORS_MAX] =
    [const { AtomicU8::new(place::HOST) }; PROCESSORS_MAX];

/// Values of [`PLACES`].
pub mod place {
    /// In the host.
    pub const HOST: u8 = 0;
    /// In the guest.
    pub const GUEST: u8 = 1;
    /// It waits for the answer to its request of another.
    pub const WAITS: u8 = 2;
    /// Names for the report.
    pub const NAMES: [&str; 3] = ["host", "guest", "waits"];
}

/// The guest's cores have a watchdog, which their areas count ([`host::Area`]).
pub static IS_GUARDED: AtomicBool = AtomicBool::new(false);
/// Ticks of the host's that the first core handled, and the longest time without one.
pub static TICKS: TickGaps = TickGaps::new();

/// Ticks of the host's that this core handled, where they are its own (`critical=core`).
pub static TAKEN: AtomicU64 = AtomicU64::new(0);

/// State of this core alone.
struct Own {
    clock: Clock,
    /// Counts of the timer between beats.
    timer_counts: u64,
    /// Time at which the timer was set.
    set_at: u64,
    /// The host's ticks come here.
    has_ticks: bool,
    /// Of each of the guest's cores: its exits, and its watchdog.
    watched: [(Progress, Progress); PROCESSORS_MAX],
}

/// Written by [`start`] before the core runs, and by its interrupts since then.
static mut OWN: Option<Own> = None;
static mut TABLE: Page = Page::ZERO;
static mut STACK: Stack = Stack::EMPTY;

/// Starts it (INIT, start-up), with the host's ticks its own, or not; whether it came.
///
/// # Safety
/// `id` is another processor, which runs nothing; page 8 is free until it has come. Not called
/// again.
pub unsafe fn start(id: u32, clock: Clock, has_ticks: bool) -> bool {
    let own = Own {
        clock,
        timer_counts: timer_counts(clock),
        set_at: 0,
        has_ticks,
        watched: Default::default(),
    };
    // SAFETY: the core does not run yet; it is started by what comes behind this.
    unsafe { (&raw mut OWN).write(Some(own)) }
    // SAFETY: the caller's; the stack is its own.
    unsafe { cores::start(id, clock, core1_main, &raw mut STACK) }
}

fn wait(clock: Clock, ms: u32) {
    let (start, counts) = (clock.now(), clock.period().counts(ms));
    while clock.now() - start < counts {}
}

/// Returns the counts of the local APIC's timer in a beat; all cores' count alike.
fn timer_counts(clock: Clock) -> u64 {
    const DIVIDE_BY_1: u64 = 0xb;
    /// Milliseconds of the measurement, long enough that a late reading matters little.
    const MS: u32 = 10;
    // SAFETY: masked, it interrupts no core.
    unsafe {
        apic::write(apic::LVT_TIMER, 1 << 16);
        apic::write(apic::TIMER_DIVIDE, DIVIDE_BY_1);
        apic::write(apic::TIMER_INITIAL, 0xffff_ffff);
    }
    wait(clock, MS);
    let counts = 0xffff_ffff - apic::read(apic::TIMER_CURRENT);
    // SAFETY: as above.
    unsafe { apic::write(apic::TIMER_INITIAL, 0) };
    (counts * u64::from(BEAT_MS) / u64::from(MS)).max(1)
}

/// Returns the state of this core alone.
fn own() -> Option<&'static mut Own> {
    let own = &raw mut OWN;
    // SAFETY: `start` has written it before this core ran. Since then the core's interrupts alone
    // use it, of which none comes within another, and `core1_main` before the first of them.
    unsafe { (*own).as_mut() }
}

/// Starts this core.
extern "C" fn core1_main() {
    let table = &raw mut TABLE;
    // SAFETY: only this core uses it, and only here.
    host::load_handlers_core1(unsafe { &mut *table });
    // SAFETY: its handlers are there.
    unsafe {
        apic::enable();
        apic::write(apic::SPURIOUS, 0x1ff);
        apic::write(apic::TIMER_DIVIDE, 0xb);
        apic::write(apic::LVT_TIMER, BEAT);
    }
    if let Some(own) = own() {
        own.set_timer();
    }
    cores::came();
}

/// Handles its interrupts, and exceptions of its own: number, error code and instruction.
#[unsafe(no_mangle)]
extern "C" fn core1_interrupt(vector: u64, code: u64, address: u64) {
    const TICK: u64 = eli::hosts::Source::Tick.vector() as u64;
    const PROTECTION: u64 = 13;
    const GONE: u32 = 0xffff_fffa;
    match vector {
        BEAT => {
            apic::eoi();
            if let Some(own) = own() {
                own.beat();
            }
        }
        TICK if let_tick() => apic::eoi(),
        // See `run.s`: an interrupt of QEMU's that was gone when it was taken.
        PROTECTION if code as u32 == GONE => {
            host::HOST_SPURIOUS.fetch_add(1, Ordering::Relaxed);
        }
        // A message may have an exception's vector; the local APIC has it in service then.
        0..32 if !host::in_service().contains(vector as u8) => {
            say!("core1: fault {vector}, code {code:#x}, at {address:#x}");
            crate::power::off();
        }
        _ => {
            FOREIGN.fetch_add(1, Ordering::Relaxed);
            apic::eoi();
        }
    }
}

/// Handles a tick of the host's, if they are this core's. Whether they are.
fn let_tick() -> bool {
    let Some(own) = own().filter(|own| own.has_ticks) else {
        return false;
    };
    TAKEN.fetch_add(1, Ordering::Relaxed);
    TICKS.taken(own.clock.now());
    true
}

impl Own {
    fn set_timer(&mut self) {
        self.set_at = self.clock.now();
        // SAFETY: its interrupt has a handler.
        unsafe { apic::write(apic::TIMER_INITIAL, self.timer_counts) }
    }

    fn beat(&mut self) {
        let now = self.clock.now();
        let period = self.clock.period();
        let beat = period.counts(BEAT_MS);
        // One eighth is what the two clocks may differ by: one was measured by the other, for ten
        // milliseconds.
        if apic::read(apic::TIMER_CURRENT) != 0 || now - self.set_at < beat - beat / 8 {
            BEATS_EXTRA.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.set_timer();
        BEATS.fetch_add(1, Ordering::Relaxed);
        TICKS.observe(now);
        for index in 0..PROCESSORS_MAX {
            self.watch(index, now);
        }
    }

    /// Looks at one of the guest's cores.
    fn watch(&mut self, index: usize, now: u64) {
        let period = self.clock.period();
        let (exits, watchdog) = &mut self.watched[index];
        let alive = ALIVE[index].load(Ordering::Relaxed);
        if alive == 0 {
            return;
        }
        let limit = period.counts(LOST_MS);
        if exits.is_overdue(alive, now, limit) {
            let beats = BEATS.load(Ordering::Relaxed);
            let place = place::NAMES[usize::from(PLACES[index].load(Ordering::Relaxed))];
            say!("core1: core {index} has not exited for {LOST_MS} ms: lost, in: {place}");
            say!(
                "{{\"report\":\"lost\",\"core\":{index},\"exits\":{alive},\"core1_beats\":{beats},\"tick_gap_us_max\":{}}}",
                period.microseconds(TICKS.longest())
            );
            crate::power::off();
        }
        let nmis = host::area(index).nmis();
        if IS_GUARDED.load(Ordering::Relaxed) && watchdog.is_overdue(nmis, now, limit) {
            say!("core1: the watchdog of core {index} has not ticked for {LOST_MS} ms");
            say!(
                "{{\"report\":\"watchdog_lost\",\"core\":{index},\"nmis\":{nmis},\"ms\":{}}}",
                period.milliseconds(now)
            );
        }
    }
}
