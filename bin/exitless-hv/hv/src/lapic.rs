//! Registers of the local APIC as the guest wrote them, where the real ones differ.

use bare::apic;
use eli::Vector;
use eli::policy::{LVT_MASKED, Lvt, timer};

use crate::hpet::Clock;

/// Entries of the local vector table: their registers, and what policy calls them.
const LVTS: [(u32, Lvt); 6] = [
    (apic::LVT_TIMER, Lvt::Timer),
    (apic::LVT_THERMAL, Lvt::Thermal),
    (apic::LVT_PERFORMANCE, Lvt::Performance),
    (apic::LVT_LINT0, Lvt::Lint0),
    (apic::LVT_LINT1, Lvt::Lint1),
    (apic::LVT_ERROR, Lvt::Error),
];

/// The spurious-interrupt register's enable bit.
pub const SPURIOUS_ON: u64 = 1 << 8;
/// And its vector.
pub const SPURIOUS_VECTOR: u64 = 0xff;

/// An entry of the local vector table, by its place.
#[derive(Clone, Copy, Debug)]
pub struct LvtEntry(usize);

impl LvtEntry {
    /// Returns all of them.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..LVTS.len()).map(Self)
    }

    /// Returns that of this register.
    pub fn of(register: u32) -> Option<Self> {
        LVTS.iter().position(|lvt| lvt.0 == register).map(Self)
    }

    /// Returns its register.
    pub fn register(self) -> u32 {
        LVTS[self.0].0
    }

    /// Returns the name of the entry in policy.
    pub fn kind(self) -> Lvt {
        LVTS[self.0].1
    }
}

/// The guest's registers.
pub struct Lapic {
    id: u32,
    lvt: [u32; LVTS.len()],
    spurious: u64,
    command: u64,
    /// The timer's initial count, where its writes exit.
    initial: u32,
    /// Counts of the timer's clock in its least period, if there is one.
    least: u64,
}

impl Lapic {
    /// Creates the registers as firmware left them.
    pub fn new() -> Self {
        Self {
            id: apic::read(apic::ID) as u32,
            lvt: LVTS.map(|(register, _)| apic::read(register) as u32),
            spurious: SPURIOUS_VECTOR,
            command: 0,
            initial: 0,
            least: 0,
        }
    }

    /// Measures the timer's clock, which takes 2 ms: a periodic timer has a least period from now
    /// on.
    pub fn limit_period(&mut self, clock: Clock) {
        const MEASURED_US: u64 = 2_000;
        const DIVIDE_BY_1: u64 = 0xb;
        /// The most reads of a clock that stands.
        const READS_MAX: u32 = 10_000_000;
        // SAFETY: masked, it interrupts no processor.
        unsafe {
            apic::write(apic::LVT_TIMER, LVT_MASKED.into());
            apic::write(apic::TIMER_DIVIDE, DIVIDE_BY_1);
            apic::write(apic::TIMER_INITIAL, u32::MAX.into());
        }
        let start = clock.microseconds();
        let mut us = 0;
        for _ in 0..READS_MAX {
            us = clock.microseconds() - start;
            if us >= MEASURED_US {
                break;
            }
        }
        let counts = u64::from(u32::MAX) - apic::read(apic::TIMER_CURRENT);
        // SAFETY: as above.
        unsafe { apic::write(apic::TIMER_INITIAL, 0) }
        self.least = (counts * timer::LEAST_PERIOD_US / us.max(1)).max(1);
    }

    /// Returns its identifier.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Returns an entry of the local vector table.
    pub fn lvt(&self, entry: LvtEntry) -> u32 {
        self.lvt[entry.0]
    }

    /// Returns the spurious-interrupt register.
    pub fn spurious(&self) -> u64 {
        self.spurious
    }

    /// Returns the last interrupt command.
    pub fn command(&self) -> u64 {
        self.command
    }

    /// Returns the timer's vector, if it is not masked.
    pub fn timer_vector(&self) -> Option<Vector> {
        let entry = self.lvt[0];
        (entry & LVT_MASKED == 0 && entry as Vector >= eli::gate::FIRST_INTERRUPT)
            .then_some(entry as Vector)
    }

    /// Returns whether the timer is periodic.
    pub fn is_periodic(&self) -> bool {
        const PERIODIC: u32 = 1 << 17;
        self.lvt[0] & PERIODIC != 0
    }

    /// Returns the timer's initial count, as the guest wrote it.
    pub fn initial_count(&self) -> u32 {
        self.initial
    }

    /// Takes the guest's write of the timer's initial count.
    pub fn set_initial_count(&mut self, count: u32) {
        self.initial = count;
    }

    /// Returns the initial count for the real timer, with this divide configuration.
    pub fn real_initial_count(&self, divide: u32) -> u32 {
        timer::initial_count(self.initial, divide, self.is_periodic(), self.least)
    }

    /// Takes the guest's write of an entry.
    pub fn set_lvt(&mut self, entry: LvtEntry, value: u32) {
        self.lvt[entry.0] = value;
    }

    /// Takes the guest's write of the spurious-interrupt register.
    pub fn set_spurious(&mut self, value: u64) {
        self.spurious = value & (SPURIOUS_ON | SPURIOUS_VECTOR);
    }

    /// Takes the guest's interrupt command.
    pub fn set_command(&mut self, value: u64) {
        self.command = value;
    }
}
