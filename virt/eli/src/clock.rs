//! Time of the host: a counter of 64 bits, and the longest time that the host went without one of
//! its ticks.
//!
//! The counter is the HPET's (HPET 1.0a, §2.3), which the guest does not reach. It is read by
//! halves, and where it has 32 bits it is extended by the previous value. [`TickGaps`] is written
//! by the guest's core, which handles ticks, and by another core, which detects overdue ones: a
//! guest that takes over the first core does not affect the measurement of the second.

use core::sync::atomic::{AtomicU64, Ordering};

/// Femtoseconds between two counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Period(u32);

impl Period {
    /// The longest that the specification allows: 100 ns.
    const MAX: u32 = 100_000_000;

    /// Creates a clock from its capability register. `None` if no clock has this value.
    #[must_use]
    pub const fn new(femtoseconds: u32) -> Option<Self> {
        match femtoseconds {
            1..=Self::MAX => Some(Self(femtoseconds)),
            _ => None,
        }
    }

    /// Microseconds of so many counts.
    #[must_use]
    pub const fn microseconds(self, counts: u64) -> u64 {
        // 128 bits: at 100 MHz the product has 64 after five hours.
        (counts as u128 * self.0 as u128 / 1_000_000_000) as u64
    }

    /// Milliseconds of so many counts.
    #[must_use]
    pub const fn milliseconds(self, counts: u64) -> u64 {
        self.microseconds(counts) / 1000
    }

    /// Counts of so many milliseconds; at least one.
    #[must_use]
    pub const fn counts(self, milliseconds: u32) -> u64 {
        let counts = milliseconds as u64 * 1_000_000_000_000 / self.0 as u64;
        if counts == 0 { 1 } else { counts }
    }
}

/// Half of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Bits 31 to 0.
    Low,
    /// Bits 63 to 32.
    High,
}

/// Reads a counter of 64 bits by its halves, while it counts.
pub fn read(mut half: impl FnMut(Half) -> u32) -> u64 {
    loop {
        let high = half(Half::High);
        let low = half(Half::Low);
        // The upper half changes every 42 s at the soonest (100 MHz): a second round is the last.
        if half(Half::High) == high {
            return (high as u64) << 32 | low as u64;
        }
    }
}

/// Extends a counter of 32 bits that reads `low` now, and was `last` less than half of its range
/// ago, or is by so much behind that: another core may have read it later, and written that down
/// sooner.
#[must_use]
pub const fn extend(last: u64, low: u32) -> u64 {
    let step = low.wrapping_sub(last as u32) as i32;
    last.saturating_add_signed(step as i64)
}

/// The longest time without a tick of the host's.
///
/// Owner: the guest's core, which [begins](Self::begin) windows and [notes](Self::taken) ticks. Any
/// core [observes](Self::observe). Times are counts of one clock.
#[derive(Debug)]
pub struct TickGaps {
    /// Windows begun; the lowest bit says which of the two below is the present one. An observer
    /// that is late by a window writes to the other one.
    windows: AtomicU64,
    starts: [AtomicU64; 2],
    longest: [AtomicU64; 2],
    /// Time at which the last tick was handled; 0: none yet.
    last: AtomicU64,
    ticks: AtomicU64,
}

impl Default for TickGaps {
    fn default() -> Self {
        Self::new()
    }
}

impl TickGaps {
    /// No window, no tick.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            windows: AtomicU64::new(0),
            starts: [const { AtomicU64::new(u64::MAX) }; 2],
            longest: [const { AtomicU64::new(0) }; 2],
            last: AtomicU64::new(0),
            ticks: AtomicU64::new(0),
        }
    }

    /// Begins a window: time before it is no part of any gap.
    pub fn begin(&self, now: u64) {
        // Relaxed: this core alone writes it.
        let windows = self.windows.load(Ordering::Relaxed) + 1;
        let at = windows as usize & 1;
        self.starts[at].store(now, Ordering::Relaxed);
        self.longest[at].store(0, Ordering::Relaxed);
        // Release: an observer that sees the window (`observe`, Acquire) sees where it starts.
        self.windows.store(windows, Ordering::Release);
    }

    /// A tick is handled.
    pub fn taken(&self, now: u64) {
        self.observe(now);
        self.ticks.fetch_add(1, Ordering::Relaxed);
        // Release: pairs with `observe`. An observer that does not see it yet has read its clock
        // before.
        self.last.store(now, Ordering::Release);
    }

    /// Notes how long no tick has been handled. `now` was read before the call. Returns that time.
    pub fn observe(&self, now: u64) -> u64 {
        let at = self.windows.load(Ordering::Acquire) as usize & 1;
        let start = self.starts[at].load(Ordering::Relaxed);
        let since = self.last.load(Ordering::Acquire).max(start);
        let gap = now.saturating_sub(since);
        self.longest[at].fetch_max(gap, Ordering::Relaxed);
        gap
    }

    /// The longest gap in the present window, so far as it was observed.
    #[must_use]
    pub fn longest(&self) -> u64 {
        let at = self.windows.load(Ordering::Acquire) as usize & 1;
        self.longest[at].load(Ordering::Relaxed)
    }

    /// Ticks handled.
    #[must_use]
    pub fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }
}

/// A number that another core counts up, and the time at which it was seen to change last.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    value: u64,
    since: u64,
    was_said: bool,
}

impl Progress {
    /// Records `value` at `now`. Returns whether the value has been unchanged for `limit` counts of
    /// the clock: true once, until it changes again.
    pub const fn is_overdue(&mut self, value: u64, now: u64, limit: u64) -> bool {
        if value != self.value {
            *self = Self {
                value,
                since: now,
                was_said: false,
            };
        }
        let is_overdue = !self.was_said && now.saturating_sub(self.since) >= limit;
        self.was_said |= is_overdue;
        is_overdue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// QEMU's: 100 MHz, whose 32 bits wrap after 42.9 s.
    const QEMU: Period = Period(10_000_000);
    /// 14.318 MHz.
    const CHIPSET: Period = Period(69_841_279);

    #[test]
    fn e15_times_behind_the_wrap_of_32_bits_are_right() {
        for seconds in [0, 1, 42, 43, 44, 90, 300, 3600, 86_400, 40_000_000] {
            let counts = seconds * 100_000_000;
            assert_eq!(QEMU.milliseconds(counts), seconds * 1000);
            assert_eq!(QEMU.microseconds(counts), seconds * 1_000_000);
        }
        // A window across the wrap.
        let (start, end) = (4_294_000_000, 4_295_967_296);
        assert_eq!(QEMU.milliseconds(end - start), 19);
        assert_eq!(CHIPSET.milliseconds(14_318_180 * 300), 300_000);
        assert_eq!(CHIPSET.counts(20), 286_363);
        assert_eq!(QEMU.counts(5), 500_000);
        for bad in [0, 100_000_001, u32::MAX] {
            assert_eq!(Period::new(bad), None);
        }
        assert_eq!(Period::new(100_000_000).map(|slow| slow.counts(0)), Some(1));
    }

    #[test]
    fn a_carry_between_the_halves_is_not_missed() {
        // A counter that advances by one with each read of a half.
        let at = |first: u64| {
            let mut now = first;
            let value = read(|half| {
                let word = match half {
                    Half::Low => now as u32,
                    Half::High => (now >> 32) as u32,
                };
                now += 1;
                word
            });
            (value, now)
        };
        for first in 0xffff_fff0..0x1_0000_0010_u64 {
            let (value, last) = at(first);
            assert!((first..last).contains(&value), "{value:#x} from {first:#x}");
        }
    }

    #[test]
    fn a_counter_of_32_bits_is_extended_over_every_wrap_and_goes_back_for_none() {
        let mut last = 0;
        for step in (0..400_u64).map(|step| step * 0x0765_4321) {
            let value = extend(last, step as u32);
            assert_eq!(value, step);
            // Another core, which was a little earlier.
            assert_eq!(
                extend(value, (step as u32).wrapping_sub(5)),
                step.saturating_sub(5)
            );
            last = value;
        }
    }

    #[test]
    fn the_longest_gap_is_one_of_the_window_and_an_unfinished_one_counts() {
        let gaps = TickGaps::new();
        // Before the first window nothing is a gap.
        assert_eq!(gaps.observe(1000), 0);
        gaps.taken(1000);
        gaps.begin(1500);
        assert_eq!(gaps.longest(), 0);
        // Only its part inside the window counts.
        gaps.taken(1600);
        assert_eq!(gaps.longest(), 100);
        gaps.taken(1650);
        assert_eq!(gaps.longest(), 100);
        // None comes any more: another core sees that.
        assert_eq!(gaps.observe(1800), 150);
        assert_eq!(gaps.observe(2650), 1000);
        assert_eq!(gaps.longest(), 1000);
        gaps.taken(2660);
        assert_eq!(gaps.longest(), 1010);
        // It has read its clock before a tick that it sees already.
        assert_eq!(gaps.observe(2655), 0);
        gaps.begin(2700);
        assert_eq!(gaps.longest(), 0);
        assert_eq!(gaps.ticks(), 4);
    }

    #[test]
    fn e17_a_count_that_stands_is_said_once_each_time_that_it_stands() {
        let mut nmis = Progress::default();
        // It advances, by any amount.
        for now in 0..100 {
            assert!(!nmis.is_overdue(now / 3 + 1, now * 10, 100));
        }
        let value = 99 / 3 + 1;
        assert!(!nmis.is_overdue(value, 1080, 100));
        assert!(nmis.is_overdue(value, 1090, 100));
        for now in 1100..2000 {
            assert!(!nmis.is_overdue(value, now, 100));
        }
        // Once again, and then no more.
        assert!(!nmis.is_overdue(value + 1, 2000, 100));
        assert!(!nmis.is_overdue(value + 1, 2099, 100));
        assert!(nmis.is_overdue(value + 1, 2100, 100));
        // A clock that was read before.
        assert!(!nmis.is_overdue(value + 2, 3000, 100));
        assert!(!nmis.is_overdue(value + 2, 2990, 100));
        // One that never began.
        assert!(Progress::default().is_overdue(0, 100, 100));
    }
}
