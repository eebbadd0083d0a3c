//! Two of the HPET's timers: the watchdog's, whose message is a non-maskable interrupt, and the
//! host's own tick (HPET 1.0a, §2.3); and its counter, the host's clock.
//!
//! An interrupt that exits whatever the guest does stands in for VMX's preemption timer. The guest
//! never sees the HPET.
//!
//! Both timers are set while the counter stands at 0, and it is started once. Started again it
//! would have to arm the first timer again, at a comparator that it may have just passed: a timer
//! of 32 bits meets that when the counter has wrapped.

use core::sync::atomic::{AtomicU64, Ordering};

use bare::processor;
use eli::clock::{self, Half, Period};

use crate::memory;

const CAPABILITIES: u64 = 0;
const PERIOD: u64 = 4;
const CONFIGURATION: u64 = 0x10;
const COUNTER: u64 = 0xf0;
const SAMPLE: u64 = 0;
const WATCHDOG: u64 = 1;
const TICK: u64 = 2;

const INTERRUPTS: u32 = 0xfee0_0000;
/// The guest's processor.
pub const OWN: u8 = 0;
const DELIVERY_NMI: u32 = 0x400;

/// Time of a counter of 32 bits that was read last, by whichever core.
static LAST: AtomicU64 = AtomicU64::new(0);

/// The HPET's counter: any core may read it.
#[derive(Clone, Copy)]
pub struct Clock {
    base: u64,
    period: Period,
    is_wide: bool,
}

impl Clock {
    fn half(self, half: Half) -> u32 {
        let offset = if half == Half::Low { 0 } else { 4 };
        // SAFETY: `Hpet::new`'s caller: it is the HPET, and ours; reading its counter changes
        // nothing.
        unsafe { memory::read32(self.base + COUNTER + offset) }
    }

    /// Counts since it was started.
    pub fn now(self) -> u64 {
        if self.is_wide {
            return clock::read(|half| self.half(half));
        }
        // Relaxed: what matters is the number. Both cores read it more often than it wraps.
        let now = clock::extend(LAST.load(Ordering::Relaxed), self.half(Half::Low));
        LAST.fetch_max(now, Ordering::Relaxed);
        now
    }

    /// Returns the milliseconds since it was started.
    pub fn milliseconds(self) -> u64 {
        self.period.milliseconds(self.now())
    }

    /// Microseconds since it was started.
    pub fn microseconds(self) -> u64 {
        self.period.microseconds(self.now())
    }

    /// Returns the period between two counts.
    pub fn period(self) -> Period {
        self.period
    }
}

/// The HPET.
#[derive(Clone, Copy)]
pub struct Hpet {
    clock: Clock,
    /// Counts between ticks.
    tick: Option<u64>,
    /// Counts between the watchdog's.
    watchdog: Option<u64>,
}

/// Property that a timer lacks.
#[derive(Clone, Copy, Debug)]
pub struct Unfit(&'static str);

impl core::fmt::Display for Unfit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.0)
    }
}

impl Hpet {
    /// Takes the HPET at `base`, stopped at 0.
    ///
    /// # Safety
    /// ACPI says that one is there, and nothing else uses it.
    pub unsafe fn new(base: u64) -> Result<Self, Unfit> {
        const WIDE: u32 = 1 << 13;
        // SAFETY: the caller's.
        let (period, capabilities) = unsafe {
            (
                memory::read32(base + PERIOD),
                memory::read32(base + CAPABILITIES),
            )
        };
        let period = Period::new(period).ok_or(Unfit("it has no period"))?;
        if u64::from(capabilities >> 8 & 31) < TICK {
            return Err(Unfit("it has fewer than three timers"));
        }
        let clock = Clock {
            base,
            period,
            is_wide: capabilities & WIDE != 0,
        };
        let hpet = Self {
            clock,
            tick: None,
            watchdog: None,
        };
        hpet.write(CONFIGURATION, 0);
        hpet.write(COUNTER, 0);
        hpet.write(COUNTER + 4, 0);
        Ok(hpet)
    }

    fn write(self, register: u64, value: u32) {
        // SAFETY: `new`'s caller: it is the HPET, and ours.
        unsafe { memory::write32(self.clock.base + register, value) }
    }

    fn read(self, register: u64) -> u32 {
        // SAFETY: as above.
        unsafe { memory::read32(self.clock.base + register) }
    }

    /// Returns its counter.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Sets a non-maskable interrupt every `ms`, once it is started; whether it is the host's tick
    /// as well.
    pub fn set_watchdog(&mut self, ms: u32, is_tick: bool) -> Result<(), Unfit> {
        let counts = self.set(WATCHDOG, ms, DELIVERY_NMI, OWN)?;
        self.watchdog = Some(counts);
        if is_tick {
            self.tick = Some(counts);
        }
        Ok(())
    }

    /// Sets `vector` at processor `to`, 0 to 254, every `ms`, once it is started.
    pub fn set_tick(&mut self, ms: u32, vector: u8, to: u8) -> Result<(), Unfit> {
        self.tick = Some(self.set(TICK, ms, u32::from(vector), to)?);
        Ok(())
    }

    /// Starts the counter, and sees it count.
    pub fn start(&mut self) -> Result<(), Unfit> {
        /// A second or two: what waits for this clock has no other end.
        const CYCLES_MAX: u64 = 5_000_000_000;
        self.write(CONFIGURATION, 1);
        let (first, start) = (self.clock.now(), processor::cycles());
        while self.clock.now() == first {
            if processor::cycles() - start > CYCLES_MAX {
                return Err(Unfit("its counter stands"));
            }
        }
        Ok(())
    }

    /// Ticks made so far.
    pub fn ticks(&self) -> u64 {
        self.tick.map_or(0, |counts| self.clock.now() / counts)
    }

    /// Ticks of the watchdog made so far, if there is one.
    pub fn watchdog_ticks(&self) -> Option<u64> {
        Some(self.clock.now() / self.watchdog?.max(1))
    }

    /// Returns the time between ticks, µs of the clock, which stood at 0 before the first.
    pub fn tick_us(&self) -> Option<u64> {
        Some(self.clock.period.microseconds(self.tick?))
    }

    /// Sends a non-maskable interrupt once, at this time, which is ahead. It may be lost, if the
    /// counter passes it before it is set.
    pub fn sample(&self, at_us: u64) {
        const CAN_MESSAGE: u32 = 1 << 15;
        // Message, enabled; once; edges; 32 bits.
        const ONCE: u32 = 1 << 14 | 1 << 8 | 1 << 2;
        let registers = 0x100 + SAMPLE * 0x20;
        if self.read(registers) & CAN_MESSAGE != 0 {
            let at = at_us * self.clock.period.counts(1) / 1000;
            self.write(registers + 0x10, DELIVERY_NMI);
            self.write(registers + 0x14, INTERRUPTS);
            self.write(registers + 8, at as u32);
            self.write(registers, ONCE);
        }
    }

    /// The counter stands at 0.
    fn set(&mut self, timer: u64, ms: u32, data: u32, to: u8) -> Result<u64, Unfit> {
        const CAN_PERIODIC: u32 = 1 << 4;
        const IS_WIDE: u32 = 1 << 5;
        const CAN_MESSAGE: u32 = 1 << 15;
        const NARROW: u32 = 1 << 8;
        const SETTABLE: u32 = 1 << 6;
        // Message, periodic, enabled; edges.
        const GO: u32 = 1 << 14 | 1 << 3 | 1 << 2;
        let registers = 0x100 + timer * 0x20;
        let can = self.read(registers);
        if can & CAN_MESSAGE == 0 {
            return Err(Unfit(
                "its timers send no messages (QEMU: -global hpet.msi=on)",
            ));
        }
        if can & CAN_PERIODIC == 0 {
            return Err(Unfit("its timers are not periodic"));
        }
        let counts = self.clock.period.counts(ms);
        let is_wide = self.clock.is_wide && can & IS_WIDE != 0;
        let go = if is_wide { GO } else { GO | NARROW };
        self.write(registers + 0x10, data);
        self.write(registers + 0x14, INTERRUPTS | u32::from(to) << 12);
        if is_wide {
            // Comparator and period have no upper half; each write behind SETTABLE takes it back.
            self.write(registers, go | SETTABLE);
            self.write(registers + 0xc, 0);
        }
        // The first write behind it sets the comparator, the second the period (§2.3.9.2.2).
        self.write(registers, go | SETTABLE);
        self.write(registers + 8, counts as u32);
        self.write(registers + 8, counts as u32);
        Ok(counts)
    }
}
