//! Waits until the sidecore has slept often enough, and notices when nothing goes on.
//!
//! Runs on the caller's thread and looks at what other threads write anyway: the program's status
//! word and the sidecore's statistics. Looking disturbs nobody, and wakes nobody, until something
//! is wrong. Then the sidecore is given a message, which wakes it whatever it missed: if the
//! program goes on, a wake-up had been lost; if it does not, the work itself was.
//!
//! Nothing goes on where nothing has changed over so many looks as the patience has room for, and
//! not over so much time: a machine that stands still for a while, as one under a hypervisor does,
//! stops this thread with all others, and then the vCPU may be the last of them to go on.
//!
//! Meanwhile it keeps the program's waits about as long as falling asleep takes here (microseconds,
//! or 10 ms where KVM waits for a grace period), so that most stores come just before or after the
//! sidecore is asleep.

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

/// Between two looks.
const PERIOD: Duration = Duration::from_millis(5);
/// How long a sidecore may take to answer a message, and the program to go on after it.
const ANSWER: Duration = Duration::from_secs(2);

/// How a soak ended.
pub enum Outcome {
    /// As many sleeps as asked for; the program has ended, or crashed (`Control` knows).
    Done,
    /// A wake-up was lost; the state then.
    Lost(String),
    /// The sidecore does not answer; the state then.
    Hung(String),
}

/// Watches until the machine ends, asking it to after `sleeps` sleeps.
///
/// # Errors
/// The sidecore cannot sleep, or does not.
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

/// A count that should change, as one look after another finds it.
struct Standstill {
    count: u64,
    /// Looks in turn that have found the same.
    looks: u32,
    /// So many mean that it will not change.
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

    /// Whether the count has not changed for too long.
    fn is_over(&mut self, count: u64) -> bool {
        self.looks = match count == self.count {
            true => self.looks + 1,
            false => 0,
        };
        self.count = count;
        self.looks >= self.most
    }
}

/// Sets the program's waits.
struct Pace {
    /// How long [`SAMPLE`](Self::SAMPLE) PAUSEs take, in ns; the guest runs them at the host's
    /// speed.
    sample_ns: u64,
    /// How many times longer the waits are than the sample says. It may have been interrupted, or
    /// the guest have a faster processor: then each store would come while the sidecore still falls
    /// asleep.
    stretch: u64,
    /// Sleeps, and attempts given up, when the stretch was last looked at.
    seen: (u64, u64),
}

impl Pace {
    const SAMPLE: u32 = 20_000;
    /// So many attempts without a sleep, and the waits become longer.
    const REFUSED: u64 = 16;
    const MAX_STRETCH: u64 = 256;
    /// In ns: what going to sleep takes where nothing is armed, and a bound for what is measured.
    const FALLING_ASLEEP: std::ops::RangeInclusive<u64> = 10_000..=100_000_000;
    /// Stretched, in ns: well below the patience, also where the guest gets a third of a processor.
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

    /// From 0.8 to 1.4 times what falling asleep has taken so far, on average.
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

/// What stands still, and whether a message helps.
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
    // Read before its next sweep: what the unit knew when it went to sleep.
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

/// The value of a register, from a thread that may be left behind if no answer comes.
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
            // Nobody listens any more if it came too late.
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
