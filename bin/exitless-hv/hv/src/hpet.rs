//! Two of the HPET's timers: the watchdog's, whose message is a non-maskable interrupt, and the host's own tick (HPET 1.0a, §2.3).
//!
//! An interrupt that exits whatever the guest does stands in for VMX's preemption timer. The guest never sees the HPET.

use crate::memory;

const PERIOD: u64 = 4;
const CONFIGURATION: u64 = 0x10;
const COUNTER: u64 = 0xf0;
const WATCHDOG: u64 = 1;
const TICK: u64 = 2;

const FEMTOSECONDS_PER_MS: u64 = 1_000_000_000_000;
const INTERRUPTS: u32 = 0xfee0_0000;
const DELIVERY_NMI: u32 = 0x400;

/// The HPET.
#[derive(Clone, Copy)]
pub struct Hpet {
    base: u64,
    /// Femtoseconds.
    period: u64,
    /// Counts at which the tick was started, and between ticks.
    tick: Option<(u64, u64)>,
}

/// What a timer lacks.
#[derive(Clone, Copy, Debug)]
pub struct Unfit(&'static str);

impl core::fmt::Display for Unfit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.0)
    }
}

impl Hpet {
    /// That at `base`, stopped.
    ///
    /// # Safety
    /// ACPI says that one is there, and nobody else uses it.
    pub unsafe fn new(base: u64) -> Result<Self, Unfit> {
        // SAFETY: the caller's.
        let (period, timers) = unsafe {
            (
                memory::read32(base + PERIOD),
                memory::read32(base) >> 8 & 31,
            )
        };
        if period == 0 || period > 100_000_000 {
            return Err(Unfit("it has no period"));
        }
        if u64::from(timers) < TICK {
            return Err(Unfit("it has fewer than three timers"));
        }
        let hpet = Self {
            base,
            period: u64::from(period),
            tick: None,
        };
        hpet.write(CONFIGURATION, 0);
        Ok(hpet)
    }

    fn write(self, register: u64, value: u32) {
        // SAFETY: `new`'s caller: it is the HPET, and ours.
        unsafe { memory::write32(self.base + register, value) }
    }

    fn read(self, register: u64) -> u32 {
        // SAFETY: as above.
        unsafe { memory::read32(self.base + register) }
    }

    /// A non-maskable interrupt every `ms`.
    pub fn start_watchdog(&mut self, ms: u32) -> Result<(), Unfit> {
        self.start(WATCHDOG, ms, DELIVERY_NMI).map(|_| ())
    }

    /// `vector` every `ms`.
    pub fn start_tick(&mut self, ms: u32, vector: u8) -> Result<(), Unfit> {
        let ticks = self.start(TICK, ms, u32::from(vector))?;
        self.tick = Some((u64::from(self.read(COUNTER)), ticks));
        Ok(())
    }

    /// Ticks made so far.
    pub fn ticks(&self) -> u64 {
        match self.tick {
            Some((start, ticks)) => {
                (u64::from(self.read(COUNTER)).wrapping_sub(start) & 0xffff_ffff) / ticks
            }
            None => 0,
        }
    }

    /// Milliseconds since the timers were started; wraps with the counter's 32 bits.
    pub fn milliseconds(&self) -> u64 {
        u64::from(self.read(COUNTER)) * self.period / FEMTOSECONDS_PER_MS
    }

    fn start(&mut self, timer: u64, ms: u32, data: u32) -> Result<u64, Unfit> {
        const CAN_PERIODIC: u32 = 1 << 4;
        const CAN_MESSAGE: u32 = 1 << 15;
        // Message, its comparator settable, periodic, enabled; edges; 32 bits.
        const GO: u32 = 1 << 14 | 1 << 8 | 1 << 6 | 1 << 3 | 1 << 2;
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
        let ticks = u64::from(ms) * FEMTOSECONDS_PER_MS / self.period;
        // While the counter stands still: a comparator behind it would be met when it has wrapped, after 42 s.
        self.write(CONFIGURATION, 0);
        let first = u64::from(self.read(COUNTER)) + ticks;
        self.write(registers + 0x10, data);
        self.write(registers + 0x14, INTERRUPTS);
        self.write(registers, GO);
        // The first write behind GO sets the comparator, the second the period (§2.3.9.2.2).
        self.write(registers + 8, first as u32);
        self.write(registers + 8, ticks as u32);
        self.write(CONFIGURATION, 1);
        Ok(ticks)
    }
}
