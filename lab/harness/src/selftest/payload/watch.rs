//! Watchdog of the soak: waits until the sidecore has slept often enough, and detects missing
//! progress.
//!
//! It runs on the caller's thread and reads data that other threads write anyway: the program's
//! status word and the sidecore's statistics. Reading them disturbs and wakes no thread. Only when
//! progress is missing does it send the sidecore a message, which wakes it in any case: if the
//! program then goes on, a wake-up had been lost; if it does not, the work itself was.
//!
//! Progress is missing if nothing has changed over as many samples as fit the patience, not over
//! that time: a machine that is paused for a while, for instance by a hypervisor, stops this thread
//! with all others, and the vCPU may be the last of them to go on.
//!
//! Meanwhile it keeps the program's delays about as long as falling asleep takes here
//! (microseconds, or 10 ms where KVM waits for a grace period), so that most stores come just
//! before or after the sidecore falls asleep.

use std::fmt::Write as _;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use guest_mem::GuestRam;
use sidecore::{CoreStats, Poller, Sidecore};
use vtd::spec::registers::{FSTS, GSTS, IQH, IQT};

use super::program;
use kvm::control::Control;
use machine::{Op, Target};

use super::unit::Request;

/// Time between two samples.
const PERIOD: Duration = Duration::from_millis(5);
/// Time limit for the sidecore to answer a message, and for the program to go on after it.
const ANSWER: Duration = Duration::from_secs(2);

/// End of a soak.
pub enum Outcome {
    /// There were as many sleeps as asked for; the program has ended, or crashed (`Control` has the
    /// result).
    Done,
    /// A wake-up was lost; with the state then.
    Lost(String),
    /// The sidecore does not answer; with the state then.
    Hung(String),
}

/// Watches until the machine ends; asks it to end after `sleeps` sleeps.
///
/// # Errors
/// The sidecore cannot sleep, or stopped sleeping.
pub fn watch<P: Poller<Message = Request>>(
    core: &Sidecore<P>,
    ram: &GuestRam,
    control: &Control,
    sleeps: u64,
    patience: Duration,
) -> Result<Outcome> {
    let mut pace = Pace::new();
    let looks = u32::try_from(patience.as_nanos() / PERIOD.as_nanos()).unwrap_or(u32::MAX);
    let mut progress = Standstill::new(looks);
    let mut sleep = Standstill::new(looks);
    while !control.is_over() {
        std::thread::sleep(PERIOD);
        let stats = core.stats();
        if stats.core.arm_failures > 0 {
            bail!(
                "the sidecore cannot sleep in this mode: {}",
                stats.last_arm_error.unwrap_or_default()
            );
        }
        let counter = program::counter(ram)?;
        pace.set(ram, &stats.core)?;
        if stats.core.sleeps >= sleeps {
            program::stop(ram)?;
        }
        if progress.is_over(counter.into()) {
            return diagnose(core, ram, counter, patience);
        }
        if sleep.is_over(stats.core.sleeps) {
            bail!("the program goes on at {counter}, but its sidecore no longer sleeps: {stats:?}");
        }
    }
    Ok(Outcome::Done)
}

/// A count that should change from one sample to a later one.
struct Standstill {
    count: u64,
    /// Consecutive samples that have found the same.
    looks: u32,
    /// Number of such samples from which on the count is considered stuck.
    most: u32,
}

impl Standstill {
    fn new(most: u32) -> Self {
        Self {
            count: 0,
            looks: 0,
            most,
        }
    }

    /// Takes a sample. Returns whether the count has not changed for too long.
    fn is_over(&mut self, count: u64) -> bool {
        self.looks = match count == self.count {
            true => self.looks + 1,
            false => 0,
        };
        self.count = count;
        self.looks >= self.most
    }
}

/// Controller of the program's delays.
struct Pace {
    /// Duration of [`SAMPLE`](Self::SAMPLE) PAUSEs, in ns; the guest executes them at the host's
    /// speed.
    sample_ns: u64,
    /// Factor on the delays that the sample gives. The sample may have been interrupted, or the
    /// guest have a faster processor: then each store would come while the sidecore still falls
    /// asleep.
    stretch: u64,
    /// Numbers of sleeps, and of refused attempts, when the stretch was last adjusted.
    seen: (u64, u64),
}

impl Pace {
    const SAMPLE: u32 = 20_000;
    /// Number of attempts without a sleep after which the delays become longer.
    const REFUSED: u64 = 16;
    const MAX_STRETCH: u64 = 256;
    /// Range of the measured time, in ns: from falling asleep with nothing armed to an upper bound.
    const FALLING_ASLEEP: std::ops::RangeInclusive<u64> = 10_000..=100_000_000;
    /// Longest stretched delay, in ns: well below the patience, also if the guest gets a third of a
    /// processor.
    const LONGEST: u64 = 1_000_000_000;

    fn new() -> Self {
        let start = Instant::now();
        program::pause(Self::SAMPLE);
        let sample = start.elapsed().as_nanos();
        Self {
            sample_ns: u64::try_from(sample).unwrap_or(u64::MAX).max(1),
            stretch: 1,
            seen: (0, 0),
        }
    }

    /// Sets delays of 0.8 to 1.4 times the average time of falling asleep so far.
    fn set(&mut self, ram: &GuestRam, core: &CoreStats) -> Result<()> {
        let (sleeps, refused) = self.seen;
        if core.sleeps_refused - refused >= Self::REFUSED {
            if core.sleeps == sleeps {
                self.stretch = (self.stretch * 2).min(Self::MAX_STRETCH);
            }
            self.seen = (core.sleeps, core.sleeps_refused);
        }
        let mean = core.arming_ns / (core.sleeps + core.sleeps_refused).max(1);
        let range = Self::FALLING_ASLEEP;
        let falling_asleep = mean.clamp(*range.start(), *range.end());
        let wait = (falling_asleep * self.stretch).min(Self::LONGEST);
        // At most 10^9 ns times 20,000: no overflow.
        let pauses = wait * u64::from(Self::SAMPLE) / self.sample_ns;
        let most = u32::MAX / 8;
        let pauses = u32::try_from(pauses / 10).map_or(most, |pauses| pauses.min(most));
        program::set_delay(ram, pauses * 8, pauses * 6)
    }
}

/// Describes the state without progress, and determines whether a message helps.
fn diagnose<P: Poller<Message = Request>>(
    core: &Sidecore<P>,
    ram: &GuestRam,
    counter: u32,
    patience: Duration,
) -> Result<Outcome> {
    let was_asleep = core.watch().is_asleep();
    let mut dump = format!(
        "submission {} of the program has not completed for {patience:?}\n  \
         sidecore {}: {:?}\n",
        u64::from(counter) + 1,
        if was_asleep { "asleep" } else { "awake" },
        core.stats().core
    );
    // Read before its next sweep: the unit's state when it went to sleep.
    for (name, offset) in [("GSTS", GSTS), ("IQH", IQH), ("IQT", IQT), ("FSTS", FSTS)] {
        let Some(value) = ask(core, offset) else {
            dump += "  the sidecore does not answer a message either";
            return Ok(Outcome::Hung(dump));
        };
        // Writing to a String cannot fail.
        let _ = write!(dump, "  {name} {value:#x}");
    }
    let since = Instant::now();
    while program::counter(ram)? == counter && since.elapsed() < ANSWER {
        std::thread::sleep(PERIOD);
    }
    dump += if program::counter(ram)? == counter {
        "\n  a message did not help: the store itself was lost, or the vCPU does not run"
    } else {
        "\n  a message made it go on: a wake-up was lost"
    };
    Ok(Outcome::Lost(dump))
}

/// Reads a register. The thread that asks is left behind if no answer comes.
fn ask<P: Poller<Message = Request>>(core: &Sidecore<P>, offset: u16) -> Option<u64> {
    let handle = core.handle(0);
    let (sender, answer) = mpsc::channel();
    let op = Op::Read {
        bar: 0,
        offset: offset.into(),
        len: 4,
    };
    let target = Target::Unit(0);
    std::thread::spawn(move || {
        if let Ok(value) = handle.call(|reply| Request::Access { target, op, reply }) {
            // If it came too late, the receiver is gone.
            let _ = sender.send(value);
        }
    });
    answer.recv_timeout(ANSWER).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_stands_still_after_so_many_looks_and_not_after_a_time() {
        let mut count = Standstill::new(3);
        assert!([1, 1, 2, 2, 2].iter().all(|seen| !count.is_over(*seen)));
        assert!(!count.is_over(3));
        assert!([3, 3].iter().all(|seen| !count.is_over(*seen)));
        assert!(count.is_over(3));
        assert!(!count.is_over(4));
    }
}
