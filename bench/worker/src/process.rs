//! The worker's process as the bench sees it: its processor time, its sleeps, its kicks.

use std::fs;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use vio::caged::{WorkerEvent, WorkerProcess};

/// Processor time of all threads of this process.
///
/// # Errors
/// The kernel's.
pub fn own_time() -> Result<Duration> {
    time_of(ClockId::CLOCK_PROCESS_CPUTIME_ID)
}

fn time_of(clock: ClockId) -> Result<Duration> {
    let time = clock_gettime(clock).context("a processor clock")?;
    Ok(Duration::from(time))
}

/// Longest time until an idle worker sleeps.
const PATIENCE: Duration = Duration::from_secs(10);

/// Counts of a worker since it was started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Processor time of all its threads.
    pub time: Duration,
    /// Times that its threads went to sleep of themselves, to be woken later.
    pub sleeps: u64,
    /// Times that the owner has written its eventfd.
    pub kicks: u64,
}

/// A worker's process, from outside.
pub struct Watched {
    pid: u32,
    clock: ClockId,
    kicks: Arc<AtomicU64>,
    /// It polls while there are requests.
    pub polls: bool,
}

impl Watched {
    /// Watches the process `pid`, whose kicks are counted in `kicks`; `polls`: while there are
    /// requests.
    ///
    /// # Errors
    /// There is none.
    pub fn new(pid: u32, kicks: Arc<AtomicU64>, polls: bool) -> Result<Self> {
        let number = i32::try_from(pid).context("the number of a process")?;
        let clock = clock_getcpuclockid(Pid::from_raw(number));
        Ok(Self {
            pid,
            clock: clock.context("the worker's processor clock")?,
            kicks,
            polls,
        })
    }

    /// Its counts. Waits until it sleeps: the kernel brings the clock of another process's running
    /// thread up to date at its next tick, which may be milliseconds away.
    ///
    /// # Errors
    /// It has ended, or does not sleep, or the host hides it.
    pub fn counts(&self) -> Result<Counts> {
        let since = Instant::now();
        while !self.is_asleep()? {
            ensure!(since.elapsed() < PATIENCE, "the worker does not sleep");
            std::thread::yield_now();
        }
        Ok(Counts {
            time: time_of(self.clock)?,
            sleeps: self.sleeps()?,
            // Relaxed: written by the thread that asks.
            kicks: self.kicks.load(Ordering::Relaxed),
        })
    }

    /// Whether the thread of its loop sleeps. (Those of the disk have nothing to do here.)
    fn is_asleep(&self) -> Result<bool> {
        let path = format!("/proc/{0}/task/{0}/stat", self.pid);
        let stat = fs::read_to_string(path).context("the worker's state")?;
        // Behind the name, which may have any characters.
        Ok(stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" S")))
    }

    /// Times that its threads went to sleep of themselves.
    fn sleeps(&self) -> Result<u64> {
        let mut sleeps = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.pid)).context("its threads")? {
            let status = fs::read_to_string(task?.path().join("status"))?;
            let line = |line: &str| line.strip_prefix("voluntary_ctxt_switches:").map(count);
            sleeps += status.lines().find_map(line).unwrap_or(0);
        }
        Ok(sleeps)
    }
}

fn count(text: &str) -> u64 {
    text.trim().parse().unwrap_or(0)
}

/// A worker's process whose kicks are counted.
pub struct Kicked {
    /// The process.
    pub below: Box<dyn WorkerProcess>,
    /// Kicks so far.
    pub kicks: Arc<AtomicU64>,
}

impl WorkerProcess for Kicked {
    fn kick(&mut self) {
        self.kicks.fetch_add(1, Ordering::Relaxed);
        self.below.kick();
    }

    fn wake_fd(&self) -> RawFd {
        self.below.wake_fd()
    }

    fn drain(&mut self) {
        self.below.drain();
    }

    fn has_events(&self) -> bool {
        self.below.has_events()
    }

    fn next_event(&mut self) -> Option<WorkerEvent> {
        self.below.next_event()
    }

    fn has_answered(&mut self) {
        self.below.has_answered();
    }

    fn end(&mut self, is_final: bool) {
        self.below.end(is_final);
    }
}
