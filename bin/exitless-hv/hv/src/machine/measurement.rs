//! Measurement of a run: counts since the start, and since the window began that the guest marks.
//!
//! ```text
//!   start ─▶ window since the start ── begin: marker 1 ─▶ window since then
//!   window ── end: marker 2, any number of times ─▶ the same window; one more has ended
//! ```
//! An [`Account`] is the content of one line of the report. The longest time without a tick of the
//! host's is measured by both cores, in [`core1::TICKS`], window by window.

use crate::core1;
use crate::hpet::Clock;
use crate::report::Counts;

/// The host's time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Time {
    /// Milliseconds.
    pub ms: u64,
    /// The host's ticks made.
    pub ticks: u64,
}

/// Counts, and since when.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    /// The counts.
    pub counts: Counts,
    /// The time from which on.
    pub since: Time,
    /// Windows that had ended before.
    pub windows: u32,
    /// The time-stamp counter when the last window began; 0 before the first.
    pub cycles: u64,
    /// Times without a tick of the host's.
    pub gaps: Gaps,
}

/// Times without a tick of the host's, microseconds; of a host without ticks, since the window
/// began.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gaps {
    /// Up to now.
    pub now: u64,
    /// The longest since the window began.
    pub window: u64,
    /// The longest since the guest was entered.
    pub total: u64,
}

/// Windows of a run, and what was counted when the last began.
pub struct Measurement {
    /// Counts, and the time, when the window began.
    start: (Counts, Time),
    start_cycles: u64,
    /// Windows that have ended.
    windows: u32,
    clock: Option<Clock>,
    /// The longest gap between ticks in the windows before, counts of the clock.
    longest: u64,
}

impl Measurement {
    /// Creates an account with nothing counted, and a window since the start.
    pub const fn new() -> Self {
        Self {
            start: (Counts::ZERO, Time { ms: 0, ticks: 0 }),
            start_cycles: 0,
            windows: 0,
            clock: None,
            longest: 0,
        }
    }

    /// Sets the clock from now on.
    pub fn set_clock(&mut self, clock: Clock) {
        self.clock = Some(clock);
    }

    /// Takes notice that the guest is about to be entered.
    pub fn enter(&mut self) {
        if let Some(clock) = self.clock {
            core1::TICKS.begin(clock.now());
        }
    }

    /// Returns how many windows have ended.
    pub fn windows(&self) -> u32 {
        self.windows
    }

    /// Begins a window, with these counts so far.
    pub fn begin(&mut self, counts: Counts, now: Time, cycles: u64) {
        self.longest = self.longest.max(core1::TICKS.longest());
        self.enter();
        self.start = (counts, now);
        self.start_cycles = cycles;
    }

    /// Ends the window, with these counts so far. Returns its account. Another one that ends has
    /// the same start.
    pub fn end(&mut self, counts: Counts) -> Account {
        let (start, since) = self.start;
        let account = Account {
            counts: counts.since(&start),
            since,
            ..self.total(counts)
        };
        self.windows += 1;
        account
    }

    /// Returns the account of the whole run so far.
    pub fn total(&self, counts: Counts) -> Account {
        Account {
            counts,
            since: Time::default(),
            windows: self.windows,
            cycles: self.start_cycles,
            gaps: self.gaps(),
        }
    }

    fn gaps(&self) -> Gaps {
        let Some(clock) = self.clock else {
            return Gaps::default();
        };
        let now = core1::TICKS.observe(clock.now());
        let window = core1::TICKS.longest();
        let microseconds = |counts| clock.period().microseconds(counts);
        Gaps {
            now: microseconds(now),
            window: microseconds(window),
            total: microseconds(window.max(self.longest)),
        }
    }
}
