//! Measurement of a run: counts since the start, and since the window began that the guest marks.
//!
//! ```text
//!   start ─▶ window since the start ── begin: marker 1 ─▶ window since then
//!   window ── end: marker 2, any number of times ─▶ the same window; one more has ended
//! ```
//! An [`Account`] is the content of one line of the report.

use crate::report::{Cause, Count, Counts, Kind};

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
}

/// Counts of a run.
pub struct Measurement {
    counts: Counts,
    /// They, and the time, when the window began.
    start: (Counts, Time),
    start_cycles: u64,
    /// Windows that have ended.
    windows: u32,
}

impl Measurement {
    /// Nothing counted, and a window since the start.
    pub const fn new() -> Self {
        Self {
            counts: Counts::ZERO,
            start: (Counts::ZERO, Time { ms: 0, ticks: 0 }),
            start_cycles: 0,
            windows: 0,
        }
    }

    /// Counts an exit.
    pub fn exit(&mut self, kind: Kind, cause: Cause) {
        self.counts.exit(kind, cause);
    }

    /// Adds to another count.
    pub fn add(&mut self, count: Count, by: u64) {
        self.counts.add(count, by);
    }

    /// Begins a window.
    pub fn begin(&mut self, now: Time, cycles: u64) {
        self.start = (self.counts, now);
        self.start_cycles = cycles;
    }

    /// Ends the window, and returns its account. Another one that ends has the same start.
    pub fn end(&mut self) -> Account {
        let (counts, since) = self.start;
        let account = Account {
            counts: self.counts.since(&counts),
            since,
            ..self.total()
        };
        self.windows += 1;
        account
    }

    /// Returns the account of the whole run so far.
    pub fn total(&self) -> Account {
        Account {
            counts: self.counts,
            since: Time::default(),
            windows: self.windows,
            cycles: self.start_cycles,
        }
    }
}
